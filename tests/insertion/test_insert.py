"""Blocks go where they should, in networks people have, and come out again."""

import copy
import io
import pickle

import pytest
import torch
import torchvision
from hosts import HOSTS, Tiny, hooks, randomised, wrapped_by_hand
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchvision.models.feature_extraction import create_feature_extractor

from polynl.blocks.poly_nl import PolyNL
from polynl.blocks.registry import BLOCKS
from polynl.insertion import insert, inserted, remove

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
    with torch.device("meta"):
        (block,) = inserted(insert(make(), "poly_nl", before=target)).values()
    assert block.channels == width


def test_guess_takes_the_size_that_a_timm_model_was_built_for():
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", img_size=64, dynamic_img_size=False)
    insert(model, "poly_nl", before="blocks.1")
    assert inserted(model)["blocks.1.polynl_before"].channels == model.embed_dim


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
    with pytest.raises(ValueError, match=r"IntermediateLayerGetter.*choose one of backbone.body.conv1"):
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


def test_compiled_beside_the_same_network_without_blocks():
    """torch.compile reuses graphs, and does not look at hooks when it decides whether one fits."""
    x, plain = torch.randn(1, 3, 8, 8), nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()).eval()
    model = insert(copy.deepcopy(plain), "poly_nl", after="0", init="random")
    try:
        for _ in range(2):
            for net in (plain, model):
                assert torch.allclose(torch.compile(net, backend="eager")(x), net(x), atol=1e-6)
    finally:
        torch.compiler.reset()
    assert "forward" in vars(model[0])
    assert "forward" not in vars(remove(model)[0])
