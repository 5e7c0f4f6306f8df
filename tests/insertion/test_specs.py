"""A model that was built anew gets its blocks back, from a spec or from the keys of a state dict."""

import copy
import json
import pickle
import re
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
import torchvision
from hosts import Tiny, randomised
from safetensors.torch import load_file, save_file
from torch import nn

import polynl
from polynl.blocks.poly_nl import PolyNL
from polynl.blocks.registry import BLOCKS
from polynl.insertion import insert, inserted, remove, restore, spec

# No option has its default.
OPTIONS = {
    "poly_nl": {"form": "gram", "reduction": 2, "init": "random", "window": 4},
    "non_local": {
        "mode": "embedded_gaussian",
        "inner_channels": 3,
        "scale": "inner",
        "sub_sample": "after",
        "pool_size": (2, 1),
        "norm": "batch",
        "bias": True,
        "out_bias": False,
        "init": "random",
    },
    "efficient_nl": {
        "heads": 2,
        "normalization": "none",
        "key_channels": 6,
        "value_channels": 2,
        "bias": False,
        "init": "random",
    },
    "latent_gnn": {
        # With ten or more, the order of their names is not that of the kernels.
        "latent_dims": tuple(range(2, 14)),
        "inner_channels": 3,
        "mode": "symmetric",
        "graph_conv": True,
        "init": "random",
    },
    "tesa": {
        "order": "quadratic",
        "embedding": "none",
        "normalization": "none",
        "fusion": "concat",
        "init": "random",
    },
    "xca": {"heads": 2, "bias": True, "residual": False, "init": "random"},
    "relu_linear": {
        "heads": 2,
        "inner_channels": 6,
        "norm": "batch",
        "bias": True,
        "residual": False,
        "init": "random",
    },
    "separable": {"inner_channels": 3, "bias": False, "residual": False, "init": "random"},
    "hydra": {
        "inner_channels": 3,
        "normalization": "none",
        "bias": False,
        "residual": False,
        "init": "random",
    },
    "se": {"inner_channels": 3, "activation": "silu", "gate": "sigmoid", "init": "random"},
    "global_context": {
        "fusion": "both",
        "pooling": "mean",
        "inner_channels": 3,
        "gate": "sigmoid",
        "init": "random",
    },
    "grn": {"init": "random"},
    "polynomial": {"order": 2, "rank": 5, "bias": False, "init": "random"},
    "conv": {"kernel_size": 3, "bias": True, "residual": True, "init": "random"},
}
HIDDEN = [
    "non_local",
    "efficient_nl",
    "tesa",
    "xca",
    "relu_linear",
    "separable",
    "hydra",
    "se",
    "global_context",
    "conv",
]
TOLD = [name for name in BLOCKS if name not in HIDDEN]


class Doubled(nn.Module):
    def __init__(self, channels, factor=2):
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1, 1), float(factor)))

    def forward(self, x):
        return self.scale * x


class MyPolyNL(PolyNL):
    pass


def through_json(value):
    return json.loads(json.dumps(value))


def assert_same_blocks(model, twin):
    """Same places, classes and options, and after loading the weights the same values."""
    assert str(inserted(twin)) == str(inserted(model))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(twin.eval()(x), model.eval()(x))


# A spec


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["defaults", "options"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_spec_survives_json_and_brings_every_block_back(name, options):
    model = insert(Tiny(), name, before="stage", after="stage.1.1", **options.get(name, {}))
    twin = restore(Tiny(), through_json(spec(randomised(model))))
    assert_same_blocks(model, twin)
    assert spec(twin) == spec(model)


def test_the_options_above_are_all_there_are():
    """Except what the rest does not leave free: the axes of the host, and the form of one mode."""
    assert OPTIONS.keys() == BLOCKS.keys()
    for name, row in BLOCKS.items():
        defaults = {key: p.default for key, p in signature(row.block).parameters.items()}
        assert defaults.keys() - OPTIONS[name].keys() <= {
            "channels",
            "device",
            "dtype",
            "spatial_axes",
            "form",
        }
        assert all(defaults[option] != value for option, value in OPTIONS[name].items())


def test_what_a_spec_looks_like():
    assert spec(insert(nn.Conv2d(3, 6, 1), "poly_nl", after="", reduction=2)) == {
        "format": "polynl spec 1",
        "blocks": [
            {
                "place": "",
                "side": "after",
                "block": "poly_nl",
                "channels": 6,
                "options": {"form": "auto", "reduction": 2, "init": "identity", "window": None},
            }
        ],
    }


def test_the_model_itself_and_a_block_inside_a_block_are_places():
    def host():
        return nn.Conv2d(3, 8, 1)

    model = insert(host(), "poly_nl", before="", after="")
    insert(model, Doubled, after="polynl_after.w1", channels=1)
    twin = restore(host(), through_json(spec(model)), blocks={f"{__name__}:Doubled": Doubled})
    assert list(inserted(twin)) == ["polynl_before", "polynl_after", "polynl_after.w1.polynl_after"]
    twin.load_state_dict(model.state_dict())


def test_a_model_without_blocks():
    assert spec(Tiny()) == {"format": "polynl spec 1", "blocks": []}
    assert inserted(restore(Tiny(), spec(Tiny()))) == {}
    assert inserted(restore(Tiny(), Tiny().state_dict())) == {}


def test_restored_blocks_follow_their_host_in_device_dtype_and_mode():
    source = spec(insert(Tiny(), "latent_gnn", before="stage"))
    block = restore(Tiny().double().to("meta").eval(), source).stage[0].polynl_before
    assert {(p.device.type, p.dtype) for p in block.parameters()} == {("meta", torch.float64)}
    assert not block.training


# Blocks of one's own


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(
    ("maker", "options"), [(Doubled, {"factor": 3}), (MyPolyNL, {"reduction": 2}), (nn.BatchNorm2d, {})]
)
def test_a_block_of_ones_own_is_named_and_passed_again(maker, options, duplicate):
    model = duplicate(insert(Tiny(), maker, before="stage", **options))
    name = f"{maker.__module__}:{maker.__name__}"
    source = through_json(spec(model))
    assert source["blocks"][0]["block"] == name
    with pytest.raises(
        ValueError, match=rf"'{name}' is not a block of polynl\. Pass it as blocks=\{{'{name}'"
    ):
        restore(Tiny(), source)
    assert_same_blocks(model, restore(Tiny(), source, blocks={name: maker}))
    assert spec(restore(Tiny(), source, blocks={name: maker})) == source


def test_numbers_of_numpy_become_numbers_of_json():
    model = insert(Tiny(), "poly_nl", before="stage", reduction=np.int64(2))
    insert(model, Doubled, after="stem", channels=np.int64(8), factor=np.float64(2))
    assert [entry["channels"] for entry in through_json(spec(model))["blocks"]] == [8, 8]


def test_a_callable_that_makes_a_block_of_polynl_needs_no_name():
    model = insert(Tiny(), lambda c: PolyNL(c, reduction=4), before="stage")
    assert_same_blocks(model, restore(Tiny(), spec(model)))


@pytest.mark.parametrize(
    ("maker", "options", "match"),
    [
        (lambda c: Doubled(c), {}, r'before "stage.0" \(Conv2d\).*<lambda>.*insert a class or a function'),
        (partial(Doubled, factor=2), {}, r"functools.partial.*no name"),
        (
            nn.Conv2d,
            {"out_channels": 8, "kernel_size": 1, "dtype": torch.float32},
            "dtype=torch.float32 .*JSON",
        ),
    ],
)
def test_what_has_no_name_or_is_no_json_cannot_be_described(maker, options, match):
    model = insert(Tiny(), maker, before="stage", **options)
    with pytest.raises(ValueError, match=match):
        spec(model)
    assert spec(remove(model))["blocks"] == []
    assert not [key for m in model.modules() for key in vars(m) if "polynl" in key]


# A state dict


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["defaults", "options"])
@pytest.mark.parametrize("name", TOLD)
def test_keys_and_shapes_bring_back_what_they_show(name, options, tmp_path):
    """From a file, where keys are sorted. A window is chosen for inference, and is not in the weights."""
    shown = {option: value for option, value in options.get(name, {}).items() if option != "window"}
    model = randomised(insert(Tiny(), name, before="stage", after="stem", **shown))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    twin = restore(Tiny(), state).eval()
    twin.load_state_dict(state)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(twin(x), model.eval()(x))


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["defaults", "options"])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_keys_do_not_show_is_asked_for_and_never_guessed(name, options):
    """The call that the error advises works, with the options that it asks for."""
    options = options.get(name, {})
    model = randomised(insert(Tiny(), name, before="stage", **options))
    with pytest.raises(ValueError, match=rf'before "stage.0" is a {name}, and .* pass the spec') as error:
        restore(Tiny(), model.state_dict())
    call, hidden = re.search(r"call (polynl\.insert\(.*)\) with them$", str(error.value))[1], {}
    for option in re.search(r"does not show its ([\w, ]+):", str(error.value))[1].split(", "):
        hidden |= {option: getattr(model.stage[0].polynl_before, option)}
    twin = eval(f"{call}, **hidden)", {"polynl": polynl, "model": Tiny(), "hidden": hidden})
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(twin.eval()(x), model.eval()(x))


def test_a_block_inside_a_block_comes_back_after_it():
    model = insert(Tiny(), "poly_nl", after="stem")
    insert(model, "polynomial", after="stem.polynl_after.w1", channels=8)
    inner_first = sorted(model.state_dict().items(), key=lambda item: -item[0].count("polynl_"))
    state = dict(inner_first)
    restore(Tiny(), state).load_state_dict(state)


@pytest.mark.parametrize("linear", ["", "linear."])
def test_keys_of_all_versions_of_polynl_are_recognised(linear):
    """Linear maps were layers of their own, and factors were several tensors."""
    state = insert(Tiny(), "latent_gnn", before="stage", latent_dims=[2, 3]).state_dict()
    state |= insert(Tiny(), "polynomial", after="stem", order=2).state_dict()
    old = re.compile(r"((?:to_latent|from_latent|out)\.)(?:linear\.)?(weight)$")
    renamed = {old.sub(rf"\g<1>{linear}\2", key): value for key, value in state.items()}
    factors = {key: renamed.pop(key) for key in list(renamed) if ".factors" in key}
    name = "stem.polynl_after.factors"
    stacked = factors[name] if name in factors else torch.stack(list(factors.values()))
    renamed |= {f"{name}.{i}": factor for i, factor in enumerate(stacked)} if linear else {name: stacked}
    model = restore(Tiny(), renamed)
    assert model.stage[0].polynl_before.latent_dims == (2, 3)
    assert model.stem.polynl_after.order == 2


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scalars_are_recognised_with_and_without_an_axis(shape):
    state = insert(Tiny(), "poly_nl", before="stage").state_dict()
    for name in ("alpha", "beta"):
        state[f"stage.0.polynl_before.{name}"] = torch.ones(shape)
    assert isinstance(restore(Tiny(), state).stage[0].polynl_before, PolyNL)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda state, at: state.pop(f"{at}.w2.weight"),
            r'before "stage.0" cannot be told from its keys alpha',
        ),
        (lambda state, at: state.update({f"{at}.extra": torch.ones(1)}), "cannot be told from its keys"),
        (
            lambda state, at: state.update({f"{at}.w3.weight": torch.ones(3, 5)}),
            "cannot be told from its keys",
        ),
        (
            lambda state, at: state.update({f"{at}.w1.weight": torch.ones(0, 8)}),
            "cannot be told from its keys",
        ),
    ],
)
def test_keys_or_shapes_that_fit_no_block_are_refused(change, match):
    state = insert(Tiny(), "poly_nl", before="stage").state_dict()
    change(state, "stage.0.polynl_before")
    with pytest.raises(ValueError, match=match):
        restore(Tiny(), state)


def test_other_keys_do_not_matter():
    state = insert(torchvision.models.resnet18(), "poly_nl", before="layer3.1", channels=256).state_dict()
    state["extra._extra_state"] = {"anything": 1}
    model = restore(torchvision.models.resnet18(), state)
    assert list(inserted(model)) == ["layer3.1.polynl_before"]


# Errors


ENTRY = {"place": "stem", "side": "after", "block": "poly_nl", "channels": 8, "options": {}}


def of_entries(*changes):
    return {"format": "polynl spec 1", "blocks": [ENTRY | change for change in changes]}


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            {"format": "polynl spec 2", "blocks": []},
            "unknown format 'polynl spec 2': .* reads 'polynl spec 1'",
        ),
        ({"format": "polynl spec 1"}, "blocks=None: expected a list"),
        (
            {"format": "polynl spec 1", "blocks": [{"place": "stem"}]},
            "block 0 .*expected a dict of place, side",
        ),
        (of_entries({}, {"side": "left"}), "block 1 of the spec: side='left': expected 'before' or 'after'"),
        (of_entries({"channels": "8"}), "block 0 of the spec: channels='8': expected int"),
        (of_entries({"place": "stm"}), r"Tiny has no module 'stm'\. Did you mean stem"),
        (of_entries({"block": "poly_ml"}), r"no block 'poly_ml'\. Did you mean poly_nl"),
        (of_entries({"options": {"reductoin": 2}}), r"no option 'reductoin'.*Did you mean reduction"),
        (of_entries({"options": {"reduction": 3}}), 'after "stem" cannot be restored: reduction=3'),
        (of_entries({"channels": 0}), "channels=0"),
        (of_entries({"options": {"before": "stage"}}), "poly_nl has no option 'before'"),
        (of_entries({}, {}), 'already a block after "stem"'),
        (
            {"model": {"stem.weight": torch.ones(1)}, "epoch": 3},
            "neither .* keys are 'model', 'epoch'.*pass that",
        ),
        (
            {"x": torch.ones(1), "stem.polynl_after.weight": "x"},
            "a str as 'stem.polynl_after.weight', not a ten",
        ),
        (
            {f"x.polynl_after.{k}": v for k, v in polynl.build_block("polynomial", 4).state_dict().items()},
            "Tiny has no module 'x'",
        ),
    ],
)
def test_a_source_that_does_not_fit_leaves_the_model_alone(source, match):
    model = Tiny()
    with pytest.raises(ValueError, match=match):
        restore(model, source)
    assert inserted(model) == {}


def test_blocks_that_were_there_before_an_error_stay():
    model = insert(Tiny(), "conv", before="stage")
    with pytest.raises(ValueError, match="no module 'stm'"):
        restore(model, of_entries({}, {"place": "stm"}))
    assert list(inserted(model)) == ["stage.0.polynl_before"]


@pytest.mark.parametrize("source", ["model.json", None, Tiny()])
def test_a_source_that_is_no_mapping(source):
    with pytest.raises(TypeError, match="expected a spec or a state dict"):
        restore(Tiny(), source)


def test_channels_that_do_not_fit_are_refused_when_the_model_runs():
    source = spec(insert(torchvision.models.resnet18(), "conv", before="layer3.1", channels=64))
    model = restore(torchvision.models.resnet18(), source)
    with pytest.raises(ValueError, match="before BasicBlock was made for 64 channels, got 256"):
        model(torch.zeros(2, 3, 32, 32))


class Mixin:
    pass


class Mixed(Mixin, polynl.EfficientNL):
    def __init__(self, channels: int, **options: object) -> None:
        super().__init__(channels, **options)


def test_options_that_a_subclass_passes_on_are_in_the_spec() -> None:
    model = polynl.insert(nn.Sequential(nn.Conv2d(3, 8, 1)), Mixed, after="0", heads=4)
    (entry,) = polynl.spec(model)["blocks"]
    assert entry["options"]["heads"] == 4


def test_the_spec_of_a_sharded_block_is_that_of_the_block(tmp_path) -> None:
    model = polynl.insert(nn.Sequential(nn.Conv2d(3, 8, 1)), "efficient_nl", after="0", heads=4)
    expected = polynl.spec(model)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        torch.distributed.fsdp.fully_shard(model[0].polynl_after)
        assert polynl.spec(model) == expected
        assert "heads=4" in repr(model)
    finally:
        torch.distributed.destroy_process_group()
