import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchvision.models.feature_extraction import create_feature_extractor

from polynl.blocks.poly_nl import PolyNL
from polynl.blocks.registry import BLOCKS
from polynl.models.insert import insert, inserted, remove


def from_torchvision(name):
    return lambda: torchvision.models.get_model(name, weights=None)


def from_timm(name):
    return lambda: pytest.importorskip("timm").create_model(name, pretrained=False)


IMAGE, CLIP = (2, 3, 64, 64), (2, 3, 4, 32, 32)

# How to make the host, the module to go next to, its widths there (input, output) and the input's shape.
HOSTS = {
    "resnet18": (from_torchvision("resnet18"), "layer3.1", (256, 256), IMAGE),
    "resnet50": (from_torchvision("resnet50"), "layer3.5", (1024, 1024), IMAGE),
    "convnext_tiny": (from_torchvision("convnext_tiny"), "features.3.2", (192, 192), IMAGE),
    "mobilenet_v3_small": (from_torchvision("mobilenet_v3_small"), "features.4", (24, 40), (4, 3, 64, 64)),
    "efficientnet_b0": (from_torchvision("efficientnet_b0"), "features.4.0", (40, 80), IMAGE),
    "r3d_18": (from_torchvision("r3d_18"), "layer2.1", (128, 128), CLIP),
    "timm_resnet18": (from_timm("resnet18"), "layer3.1", (256, 256), IMAGE),
    "timm_convnext": (from_timm("convnext_atto"), "stages.2.blocks.3", (160, 160), IMAGE),
    "timm_efficientnet": (from_timm("efficientnet_lite0"), "blocks.3.1", (80, 80), IMAGE),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=HOSTS)
def host(request):
    make, target, widths, shape = HOSTS[request.param]
    return make().eval(), target, widths, torch.randn(shape)


class Tiny(nn.Module):
    """A stem, a Sequential stage, a module called by keyword, and one that returns a tuple."""

    class Named(nn.Module):
        def forward(self, *, x):
            return x

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.stage = nn.Sequential(nn.Conv2d(8, 12, 1), nn.Sequential(nn.ReLU(), nn.Conv2d(12, 16, 1)))
        self.drop = nn.Dropout(0.5)
        self.named = self.Named()
        self.pair = self.Pair()
        self.unused = nn.Conv2d(1, 1, 1)
        self.empty = nn.Sequential()
        self.listed = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = self.drop(self.stage(self.norm(self.stem(x))))
        x, _ = self.pair(self.named(x=x))
        for layer in self.listed:
            x = layer(x)
        return self.fc(x.mean((2, 3)))


def randomised(model):
    """The model with every block's parameters drawn at random, matrices so that they keep the scale."""
    with torch.no_grad():
        for block in inserted(model).values():
            for parameter in block.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(
                    noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise
                )
    return model


def hooks(model):
    return [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]


def wrapped_by_hand(model, target, before, after):
    """A copy of the model whose target is replaced by a Sequential of it between the two blocks."""
    parent, _, key = target.rpartition(".")
    model = copy.deepcopy(model)
    setattr(model.get_submodule(parent), key, nn.Sequential(before, model.get_submodule(target), after))
    return model


# In real networks


def test_identity_changes_no_bit_and_no_key_and_is_undone(host):
    model, target, _, x = host
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        assert insert(model, "poly_nl", before=target, after=target, example=x) is model
        assert torch.equal(model(x), expected)
        assert list(inserted(model)) == [f"{target}.polynl_before", f"{target}.polynl_after"]
        new = [key for key in model.state_dict() if key not in weights]
        assert new
        assert all(key.startswith(tuple(inserted(model))) for key in new)
        result = model.load_state_dict(weights, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (new, [])

        assert not torch.equal(randomised(model)(x), expected)
        assert remove(model) is model
        assert torch.equal(model(x), expected)
    model.load_state_dict(weights, strict=True)
    assert inserted(model) == {}
    assert hooks(model) == []
    assert not [key for m in model.modules() for key in vars(m) if "polynl" in key]


def test_blocks_are_where_they_should_be_and_learn(host):
    model, target, widths, x = host
    original = copy.deepcopy(model)
    randomised(insert(model, "poly_nl", before=target, after=target, example=x))
    before, after = inserted(model).values()
    assert (before.channels, after.channels) == widths
    by_hand = wrapped_by_hand(original, target, copy.deepcopy(before), copy.deepcopy(after))
    with torch.no_grad():
        assert torch.equal(model(x), by_hand(x))
    model.train()(x).square().mean().backward()
    for parameter in [*before.parameters(), *after.parameters()]:
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "r3d_18"])
def test_channels_are_found_without_an_example(name):
    make, target, (width, _), _ = HOSTS[name]
    (block,) = inserted(insert(make(), "poly_nl", before=target)).values()
    assert block.channels == width


def test_guess_takes_the_size_that_a_timm_model_asks_for():
    model = pytest.importorskip("timm").create_model("resnet18", pretrained=False)
    sizes = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape))
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 96, 128)}
    insert(model, "poly_nl", before="layer1")
    assert sizes == [(1, 3, 96, 128)]


def test_backbone_inside_a_detector():
    model = torchvision.models.detection.maskrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, min_size=64, rpn_post_nms_top_n_test=5
    ).eval()
    image = [torch.rand(3, 64, 96)]
    expected = model(image)[0]
    insert(model, "poly_nl", before="backbone.body.layer3.5", example=image)
    assert inserted(model)["backbone.body.layer3.5.polynl_before"].channels == 1024
    assert all(torch.equal(value, expected[key]) for key, value in model(image)[0].items())
    with pytest.raises(ValueError, match=r'IntermediateLayerGetter.*"backbone.body.conv1"'):
        insert(model, "poly_nl", after="backbone.body", example=image)


# What a block can be, and where


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_by_name(name):
    model, x = Tiny().eval(), torch.randn(2, 3, 8, 8)
    expected = model(x)
    insert(model, name, before="stage")
    assert torch.equal(model(x), expected)
    insert(model, name, after="stage", init="random")
    assert not torch.equal(model(x), expected)


@pytest.mark.parametrize("block", [PolyNL, lambda c, **options: PolyNL(c, **options)])
def test_a_class_or_a_callable_gets_channels_and_options(block):
    model = insert(Tiny(), block, before=["stem", "stage"], after="stage", reduction=1, init="random")
    assert {name: b.channels for name, b in inserted(model).items()} == {
        "stem.polynl_before": 3,
        "stage.0.polynl_before": 8,
        "stage.1.1.polynl_after": 16,
    }
    assert all(b.init == "random" for b in inserted(model).values())


def test_the_model_itself_is_a_place():
    model = insert(nn.Conv2d(3, 5, 1), "poly_nl", before="", after="")
    assert {name: b.channels for name, b in inserted(model).items()} == {
        "polynl_before": 3,
        "polynl_after": 5,
    }


def test_other_arguments_are_passed_on():
    class Scaled(nn.Module):
        def forward(self, x, factor, *, shift):
            return x * factor + shift

    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x):
            return self.scaled(x, 2, shift=1)

    model, x = Host(), torch.randn(1, 4, 3, 3)
    insert(model, nn.BatchNorm2d, before="scaled", example=(x,), affine=False).eval()
    model.scaled.polynl_before.running_mean.fill_(1)
    torch.testing.assert_close(model(x), (x - 1) / (1 + 1e-5) ** 0.5 * 2 + 1)


def test_a_shared_module_with_one_width_runs_its_block_every_time():
    act = nn.ReLU()
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Conv2d(3, 6, 1), act, nn.Conv2d(6, 6, 1), act, nn.Flatten())}
    )["a"]
    insert(model, lambda c: nn.Conv2d(c, c, 1), before="1")
    calls = []
    model[1].polynl_before.register_forward_hook(lambda *_: calls.append(1))
    model(torch.randn(1, 3, 4, 4))
    assert len(calls) == 2


def test_block_follows_its_host_in_device_dtype_and_mode():
    model = Tiny().double().to("meta").train()
    model.stage.eval()
    model.drop.train()
    insert(model, "latent_gnn", before="stage", after="drop")
    for name, training in [("stage.0.polynl_before", False), ("drop.polynl_after", True)]:
        block = inserted(model)[name]
        assert {(p.device.type, p.dtype) for p in block.parameters()} == {("meta", torch.float64)}
        assert {m.training for m in block.modules()} == {training}


# The pass that finds the channels


def test_tracing_leaves_no_trace():
    model = Tiny()
    model.stage[1].eval()
    flags = {name: m.training for name, m in model.named_modules()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    noisy = model.drop.register_forward_hook(lambda m, args, out: out + torch.randn_like(out))
    grads = []
    watch = model.fc.register_forward_hook(lambda m, args, out: grads.append((out.requires_grad, m.training)))
    insert(model, lambda c: nn.Identity(), after="stage")
    noisy.remove()
    watch.remove()
    remove(model)
    assert {name: m.training for name, m in model.named_modules()} == flags
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert hooks(model) == []
    assert grads == [(False, False)]


def test_failures_behind_the_last_place_do_not_matter():
    model = Tiny()
    model.fc = nn.Linear(1, 1)
    assert inserted(insert(model, "poly_nl", after="stage"))["stage.1.1.polynl_after"].channels == 16


def test_channels_given_need_no_pass():
    model = Tiny()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    assert insert(model, "poly_nl", before="stage", channels=8).stage[0].polynl_before.channels == 8


# Copies, files, tracers


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_runs_its_own_block(duplicate):
    model, x = Tiny().eval(), torch.randn(2, 3, 8, 8)
    plain = model(x)
    expected = randomised(insert(model, "poly_nl", before="stage", after="stage"))(x)
    twin = duplicate(model)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for block in inserted(twin).values():
            block.beta.zero_()
            block.alpha.fill_(1)
    assert torch.equal(twin(x), plain)
    assert torch.equal(model(x), expected)
    remove(twin)
    assert hooks(twin) == []
    assert list(twin.state_dict()) == list(Tiny().state_dict())
    assert torch.equal(model(x), expected)


def test_hooks_registered_after_unpickling_do_not_replace_the_block(monkeypatch):
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    model, x = Tiny().eval(), torch.randn(2, 3, 8, 8)
    expected = randomised(insert(model, "poly_nl", after="stem", channels=8))(x)
    saved = pickle.dumps(model)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in a new process
    twin = pickle.loads(saved)
    twin.stem.register_forward_hook(lambda *_: None)
    assert torch.equal(twin(x), expected)


def test_state_dict_round_trip_with_blocks():
    x = torch.randn(2, 3, 8, 8)
    model = randomised(insert(Tiny(), "poly_nl", before="stage")).eval()
    other = insert(Tiny(), "poly_nl", before="stage").eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_compiles_as_one_graph():
    model, x = Tiny().eval(), torch.randn(2, 3, 8, 8)
    plain = model(x)
    expected = randomised(insert(model, "poly_nl", before="stage", after="stem"))(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, expected)
    assert not torch.allclose(compiled, plain)


def test_exports_with_a_dynamic_batch():
    model, x = Tiny().eval(), torch.randn(4, 3, 8, 8)
    plain = model(x)
    randomised(insert(model, "poly_nl", before="stage", after="stem"))
    program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    exported = program.module()(x)
    torch.testing.assert_close(exported, model(x))
    assert not torch.allclose(exported, plain)


def test_features_are_extracted_with_the_block_as_one_node():
    model, x = torchvision.models.resnet18().eval(), torch.randn(1, 3, 32, 32)
    randomised(insert(model, "poly_nl", before="layer3.1", after="conv1", example=x))
    seen = []
    model.layer3[1].polynl_before.register_forward_hook(lambda m, args, out: seen.append(out))
    extractor = create_feature_extractor(model, {"layer3.1.polynl_before": "block", "fc": "logits"})
    out = extractor(x)
    assert torch.equal(out["logits"], model(x))
    assert torch.equal(out["block"], seen[-1])
    assert set(extractor.state_dict()) == set(model.state_dict())


def test_import_loads_no_torchvision():
    code = "import polynl.models.insert, sys; assert 'torchvision' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Errors


def snapshot(model):
    return (
        {name: type(m) for name, m in model.named_modules()},
        {name: m.training for name, m in model.named_modules()},
        hooks(model),
        sorted(key for m in model.modules() for key in vars(m)),
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "before= or after="),
        ({"before": []}, "before= or after="),
        ({"before": "stagge"}, r"Tiny has no module 'stagge'; near it are \"stage\""),
        ({"before": "zzz"}, r"no module 'zzz'; it has \"stem\", \"norm\""),
        ({"after": "empty"}, r'after "empty" \(Sequential\): it is empty'),
        ({"after": "listed"}, r'"listed" \(ModuleList\).*choose one of "listed.0", "listed.1"'),
        ({"before": "unused"}, r'before "unused" \(Conv2d\).*does not call it'),
        ({"before": "named"}, r'before "named" \(Named\).*only keyword arguments \(x\)'),
        ({"after": "pair"}, r'after "pair" \(Pair\).*tuple of 2'),
        ({"before": "fc"}, r'before "fc" \(Linear\).*\(1, 16\)'),
        ({"after": ["stage", "stage.1.1"]}, r'already a block after "stage.1.1"'),
        ({"before": "stage", "channels": 8, "example": 1}, "channels or example, not both"),
        (
            {"before": "stem", "example": torch.zeros(1, 5, 8, 8)},
            r"example failed.*5 channels(.|\n)*channels=",
        ),
        ({"before": ["stem", "stage"], "channels": 0}, "channels=0"),
        ({"before": "stem", "init": "zero"}, "init='zero'"),
    ],
)
def test_bad_places_and_values_leave_the_model_alone(arguments, match):
    model = Tiny()
    before = snapshot(model)
    with pytest.raises(ValueError, match=match):
        insert(model, "poly_nl", **arguments)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("block", "options", "match"),
    [
        (PolyNL(8), {}, r"got PolyNL\("),
        (8, {}, "got 8"),
        (lambda c: "text", {}, "got 'text'"),
        ("poly_nl", {"redukction": 2}, "redukction"),
        (PolyNL, {"redukction": 2}, "redukction"),
    ],
)
def test_bad_blocks_and_options(block, options, match):
    model = Tiny()
    before = snapshot(model)
    with pytest.raises(TypeError, match=match):
        insert(model, block, before=["stem", "stage"], **options)
    assert snapshot(model) == before


def test_unknown_block_lists_the_choices():
    with pytest.raises(ValueError, match=r"'polynl'.*poly_nl, non_local"):
        insert(Tiny(), "polynl", before="stage")


def test_a_block_that_fails_at_the_second_place_is_not_left_at_the_first():
    model = Tiny()
    before = snapshot(model)
    with pytest.raises(ValueError, match="reduction=8"):
        insert(model, "poly_nl", before="stage", after="stage.0", reduction=8)
    assert snapshot(model) == before


def test_inserting_twice():
    model = insert(Tiny(), "poly_nl", after="stage")
    before = snapshot(model)
    with pytest.raises(ValueError, match=r'already a block after "stage.1.1" \(Conv2d\)'):
        insert(model, "conv", before="stem", after="stage.1")
    assert snapshot(model) == before
    insert(remove(model), "conv", after="stage.1")


def test_removing_nothing_is_fine():
    model = Tiny()
    assert remove(remove(model)) is model


def test_guessing_needs_a_convolution():
    with pytest.raises(ValueError, match=r"no convolution(.|\n)*example="):
        insert(nn.Sequential(nn.ReLU()), "poly_nl", before="0")


def test_a_module_called_with_different_widths():
    with pytest.raises(ValueError, match=r'"layer1.0.relu" \(ReLU\).*\[64, 256\]'):
        insert(
            torchvision.models.resnet50(), "poly_nl", after="layer1.0.relu", example=torch.zeros(1, 3, 32, 32)
        )


def test_a_sequential_that_ends_in_a_module_used_elsewhere():
    act = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 3, 1), act, nn.Sequential(nn.Conv2d(3, 3, 1), act))
    with pytest.raises(ValueError, match=r'after "2" \(Sequential\): its child \'1\' is used in 2 places'):
        insert(model, "poly_nl", after="2")


def test_a_sequential_with_a_forward_of_its_own():
    class Stack(nn.Sequential):
        def forward(self, x):
            return [layer(x) for layer in self][-1]

    with pytest.raises(ValueError, match=r'"" \(Stack\).*choose one of "0", "1"'):
        insert(Stack(nn.Conv2d(3, 3, 1), nn.ReLU()), "poly_nl", after="")


def test_a_scripted_module():
    model = Tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.stem = torch.jit.trace(model.stem, torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r'before "stem".*scripted'):
        insert(model, "poly_nl", before="stem")


@pytest.mark.parametrize(
    ("name", "target", "size"),
    [
        ("swin_t", "features.1.0", (64, 64)),
        ("swin_t", "features.3.1", (68, 100)),
        ("convnext_tiny", "features.1.0.block.2", (64, 64)),
        ("swin3d_t", "features.0.0", (4, 64, 64)),
        ("vit_b_32", "encoder.layers.encoder_layer_1", (224, 224)),
    ],
)
def test_channels_last_maps_and_tokens_are_refused(name, target, size):
    model = torchvision.models.get_model(name, weights=None)
    with pytest.raises(ValueError, match=rf'"{target}" .*seem to come last'):
        insert(model, "poly_nl", before=target, example=torch.zeros(1, 3, *size))


def test_as_many_channels_as_rows_are_not_taken_for_channels_last():
    model = insert(nn.Conv2d(3, 16, 1), "poly_nl", after="", example=torch.zeros(1, 3, 16, 16))
    assert model.polynl_after.channels == 16


def test_channels_given_are_believed_where_they_seem_to_come_last():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Flatten(2))
    x = torch.randn(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"\(2, 6, 16\) seem to come last; if they do not, pass channels="):
        insert(model, "poly_nl", after="1", example=x)
    assert insert(model, "poly_nl", after="1", channels=6)(x).shape == (2, 6, 16)


@pytest.mark.parametrize(
    ("side", "name", "match"),
    [("before", "named", "Named.* by position"), ("after", "pair", "after Pair.*tuple of 2")],
)
def test_what_no_pass_could_see_fails_when_it_runs(side, name, match):
    model = insert(Tiny(), "poly_nl", **{side: name}, channels=16)
    with pytest.raises(TypeError, match=match):
        model(torch.randn(2, 3, 8, 8))
