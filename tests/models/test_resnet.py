from functools import partial

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from polynl.insertion import inserted, remove
from polynl.models.resnet import resnet, resnet18, resnet50
from polynl.models.weights import load_weights


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def image():
    return torch.randn(2, 3, 32, 32)


@pytest.fixture
def weights(tmp_path):
    """A file with the weights of torchvision's own resnet18, whose norms have seen data."""
    model = torchvision.models.resnet18(num_classes=5)
    model(torch.randn(4, 3, 32, 32))
    torch.save(model.state_dict(), tmp_path / "resnet18.pth")
    return tmp_path / "resnet18.pth"


def reference(path):
    model = torchvision.models.resnet18(num_classes=5)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("res3", {"layer2.3": 512}),
        ("res4", {"layer3.5": 1024}),
        ("res5", {"layer4.2": 2048}),
        ("res345", {"layer2.3": 512, "layer3.5": 1024, "layer4.2": 2048}),
        ("layer3.0", {"layer3.0": 512}),
        ("layer1", {"layer1.0": 64}),
        (("res5", "bn1"), {"bn1": 64, "layer4.2": 2048}),
    ],
)
def test_the_papers_placements(placement, expected):
    with torch.device("meta"):
        model = resnet50(block="conv", placement=placement)
    found = {name: block.channels for name, block in inserted(model).items()}
    assert found == {f"{name}.polynl_before": width for name, width in expected.items()}


def test_res4_of_resnet50_is_between_the_last_two_blocks_of_layer3(image):
    model = resnet50(block="poly_nl", options={"init": "random"}).eval()
    with torch.no_grad():
        x = model.maxpool(model.relu(model.bn1(model.conv1(image))))
        x = model.layer3[:5](model.layer2(model.layer1(x)))
        x = model.layer3[5].forward(model.layer3[5].polynl_before(x))
        expected = model.fc(model.avgpool(model.layer4(x)).flatten(1))
        assert torch.equal(model(image), expected)
        assert not torch.equal(remove(model)(image), expected)


@pytest.mark.parametrize("arch", ["resnet34", "resnext50_32x4d"])
def test_any_resnet_of_torchvision(arch, image):
    plain = resnet(arch, num_classes=7)
    assert inserted(plain) == {}
    model = resnet(arch, block="non_local", num_classes=7, options={"mode": "dot_product"})
    assert set(plain.state_dict()) < set(model.state_dict())
    model.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(model.eval()(image), plain.eval()(image))


def test_options_reach_host_and_block():
    model = resnet18(block="poly_nl", zero_init_residual=True, options={"reduction": 4})
    assert inserted(model)["layer3.1.polynl_before"].reduction == 4
    assert not model.layer1[0].bn2.weight.any()


def test_stride_in_1x1(image):
    model, moved = resnet50().eval(), resnet50(stride_in_1x1=True).eval()
    for stage in (moved.layer2, moved.layer3, moved.layer4):
        assert (stage[0].conv1.stride, stage[0].conv2.stride) == ((2, 2), (1, 1))
    moved.load_state_dict(model.state_dict())
    assert moved(image).shape == (2, 1000)
    assert not torch.equal(moved(image), model(image))


# Weights


def test_weights_without_block_keys(weights, image):
    model = resnet18(block="poly_nl", placement="res345", weights=weights, num_classes=5).eval()
    assert torch.equal(model(image), reference(weights)(image))


def test_weights_in_half_precision(weights, tmp_path, image):
    state = torch.load(weights, weights_only=True)
    halves = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    torch.save(halves, tmp_path / "half.pth")
    model = resnet18(weights=tmp_path / "half.pth", num_classes=5).eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(value, halves[key].to(value.dtype)) for key, value in model.state_dict().items())
    assert model(image).isfinite().all()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_with_block_keys(tmp_path, suffix, image):
    trained = resnet18(block="poly_nl", num_classes=5, options={"init": "random"}).eval()
    save = save_file if suffix == ".safetensors" else torch.save
    save(trained.state_dict(), tmp_path / f"trained{suffix}")
    model = resnet18(block="poly_nl", weights=str(tmp_path / f"trained{suffix}"), num_classes=5).eval()
    assert torch.equal(model(image), trained(image))


def test_weights_older_than_num_batches_tracked(weights, tmp_path, image):
    state = torch.load(weights, weights_only=True)
    old = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "old.pth")
    model = resnet18(weights=tmp_path / "old.pth", num_classes=5).eval()
    assert torch.equal(model(image), reference(weights)(image))


def saved(tmp_path, state):
    torch.save(state, tmp_path / "bad.pth")
    return tmp_path / "bad.pth"


def without(state, *keys):
    return {key: value for key, value in state.items() if key not in keys}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda s: without(s, "conv1.weight"),
            r"bad\.pth' does not fit the ResNet, missing: conv1\.weight$",
        ),
        (lambda s: without(s, *list(s)[:20:2]), r"missing: .* and \d+ more$"),
        (lambda s: {**s, "extra": torch.zeros(1)}, r"unexpected: extra$"),
        (
            lambda s: {**s, "fc.bias": torch.zeros(9)},
            r"these shapes differ: fc\.bias is \(9,\), expected \(5,\)$",
        ),
        (
            lambda s: {**s, "layer3.1.polynl_before.alpha": torch.ones(())},
            r"missing: layer3\.1\.polynl_before",
        ),
        (lambda s: {"net": s, "epoch": 3}, r"must contain a state dict.*dict of net, epoch"),
        (lambda s: [1], r"must contain a state dict.*got list"),
    ],
)
def test_weights_that_do_not_fit(weights, tmp_path, change, match):
    path = saved(tmp_path, change(torch.load(weights, weights_only=True)))
    model = resnet18(block="poly_nl", num_classes=5)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match) as caught:
        load_weights(model, path)
    assert str(caught.value).count("\n") <= 3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


small = partial(resnet, "small_resnet", arch_options={"width": 4}, block="poly_nl")


def test_a_classifier_of_other_classes_stays_new(tmp_path):
    given = small(num_classes=5).state_dict()
    torch.manual_seed(0)
    state = small(weights=saved(tmp_path, given), num_classes=3).state_dict()
    assert all(torch.equal(state[key], value) for key, value in given.items() if not key.startswith("fc."))
    torch.manual_seed(0)
    assert torch.equal(state["fc.weight"], small(num_classes=3).fc.weight)
    assert state["fc.bias"].shape == (3,)


def test_weights_without_a_classifier_say_how_to_train_one(tmp_path):
    state = small(num_classes=5).state_dict()
    path = saved(tmp_path, without(state, "fc.weight", "fc.bias"))
    with pytest.raises(ValueError, match=r"missing: fc\.bias, fc\.weight\. To .* weights_without to \[fc\]$"):
        small(weights=path, num_classes=5)
    small(weights=path, num_classes=5, weights_without=["fc"])
    with pytest.raises(ValueError, match=r"missing: conv1\.weight, fc\.bias$"):
        small(weights=saved(tmp_path, without(state, "conv1.weight", "fc.bias")), num_classes=5)


def test_weights_with_a_block_do_not_fit_a_plain_network(tmp_path):
    path = saved(tmp_path, resnet18(block="poly_nl").state_dict())
    with pytest.raises(ValueError, match=r"unexpected: layer3\.1\.polynl_before\.alpha"):
        resnet18(weights=path)


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"arch": "resnet51"}, ValueError, r"^arch: no network is called 'resnet51'\. Did you mean resnet50"),
        ({"arch": "fcn_resnet50"}, ValueError, "arch: no network is called 'fcn_resnet50'"),
        ({"block": "poly_nl", "placement": "res6"}, ValueError, "res3, res4, res5, res345.* got 'res6'"),
        ({"block": "poly_nl", "placement": ("res4", "layer3.1")}, ValueError, "already a block"),
        ({"block": "polynl"}, ValueError, "'polynl'.*poly_nl"),
        ({"block": "poly_nl", "options": {"reductoin": 2}}, ValueError, "^options: .*Did you mean reduction"),
        ({"options": {"reduction": 2}}, ValueError, "^options: options without a block: reduction$"),
        ({"reduction": 2}, ValueError, "^reduction: there is no such option"),
        ({"blok": "poly_nl"}, ValueError, r"^blok: there is no such option\. Did you mean block\?"),
        ({"weights_without": "fc"}, ValueError, r"^weights_without: expected a list.*\(got 'fc'\)$"),
        ({"stride_in_1x1": True}, ValueError, "stride_in_1x1 needs bottleneck blocks, and resnet18 has none"),
        ({"weights": "nowhere.pth"}, FileNotFoundError, "nowhere.pth"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        resnet(**{"arch": "resnet18", **arguments})


@pytest.mark.parametrize("stages", range(6))
def test_the_last_stages_the_block_and_the_classifier_are_trained(stages: int) -> None:
    model = resnet("resnet18", block="poly_nl", placement="res3", trainable_stages=stages, num_classes=4)
    parts = ["stem", "layer1", "layer2", "layer3", "layer4"]
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        part = part if part in (*parts, "fc") else "stem"
        trained = "polynl_before" in name or part == "fc" or part in parts[5 - stages :]
        assert parameter.requires_grad == trained, name


def test_norms_of_untrained_stages_keep_their_statistics() -> None:
    model = resnet("resnet18", trainable_stages=1, num_classes=4).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.randn(2, 3, 64, 64))
    changed = {
        name.partition(".")[0] for name, value in model.named_buffers() if not value.equal(before[name])
    }
    assert changed == {"layer4"}


def test_more_stages_than_there_are_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="trainable_stages=5: expected a number from 0 to 4"):
        resnet("small_resnet", trainable_stages=5)
