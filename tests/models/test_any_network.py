"""Networks of timm, of torchvision and of one's own in place of a ResNet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from polynl import inserted
from polynl.config import configured
from polynl.errors import SettingsError
from polynl.models.libraries import without_memory
from polynl.models.norms import freeze_norms, synchronised
from polynl.models.resnet import ClassifierConfig

SIDE = 64
MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=4)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.body(self.stem(x).relu()).mean((2, 3)))

def build(num_classes, **options):
    return Net(num_classes, **options)

def values(num_classes):
    net = Net(num_classes)
    torch.linspace(0, 1, 3).tolist()  # not on the meta device
    return net

def layers(num_classes):
    parts = [nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8, num_classes))

def not_a_network(num_classes): return "net"
def no_classes(): return Net(3)
def ten_classes(num_classes): return Net(10)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `my_nets` in the current folder, which the search path does not have."""
    (tmp_path / "my_nets.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    sys.modules.pop("my_nets", None)


def config(arch: str, **keys: Any) -> ClassifierConfig:
    if arch.startswith("timm/"):
        pytest.importorskip("timm", reason="needs the extra 'timm'")
    return configured(ClassifierConfig, arch=arch, **keys)


def trained_parts(model: nn.Module, depth: int = 1) -> set[str]:
    return {".".join(n.split(".")[:depth]) for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("arch", "placement"),
    [
        ("timm/test_convnext", "stages.2"),
        ("timm/test_resnet", "res4"),
        ("torchvision/squeezenet1_1", "features.9"),
        ("my_nets:build", "body"),
        ("my_nets:values", "body"),
    ],
)
def test_a_block_goes_into_any_network_and_starts_as_the_identity(
    arch: str, placement: str, mine: Path
) -> None:
    torch.manual_seed(0)
    plain = config(arch).build(5, SIDE).eval()
    chosen = config(arch, block="poly_nl", placement=placement)
    assert chosen.check(5, SIDE) == []
    model = chosen.build(5, SIDE).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 3, SIDE, SIDE)
    assert len(inserted(model)) == 1
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize(("given", "places"), [(2, ["2"]), ([1, "2"], ["1", "2"])])
def test_layers_that_are_called_by_numbers_are_places(given: Any, places: list[str], mine: Path) -> None:
    model = config("my_nets:layers", block="poly_nl", placement=given, weights_without=[5]).build(5, SIDE)
    assert list(inserted(model)) == [f"{place}.polynl_before" for place in places]


@pytest.mark.usefixtures("mine")
def test_a_place_that_is_read_as_a_number_is_to_be_quoted() -> None:
    with pytest.raises(ValueError, match=r"YAML reads 2\.1 as a number; quote the name"):
        config("my_nets:layers", block="poly_nl", placement=2.1)


def test_a_resnet_of_torchvision_has_one_name() -> None:
    assert config("torchvision/resnet18").arch == "resnet18"


@pytest.mark.parametrize(
    ("arch", "head"),
    [
        ("timm/test_vit", "head"),
        ("torchvision/squeezenet1_1", "classifier.1"),
        ("my_nets:values", "head"),
    ],
)
def test_a_classifier_of_other_classes_stays_new_wherever_it_is(arch: str, head: str, mine: Path) -> None:
    options = {"img_size": SIDE} if arch == "timm/test_vit" else {}
    source = config(arch, arch_options=options).build(4, SIDE)
    torch.save(source.state_dict(), "weights.pt")
    chosen = config(arch, arch_options=options, weights="weights.pt")
    assert chosen.heads() == [head]
    assert chosen.check(3, SIDE) == [head]
    model = chosen.build(3, SIDE)
    for name, value in model.state_dict().items():
        assert name.startswith(head) or torch.equal(value, source.state_dict()[name])


# Stages


@pytest.mark.parametrize(
    ("arch", "stages", "trained"),
    [
        ("timm/test_convnext", 0, {"head.norm", "head.fc"}),
        ("timm/test_convnext", 2, {"stages.2", "stages.3", "head.norm", "head.fc"}),
        ("timm/test_vit", 1, {"blocks.5", "norm.weight", "norm.bias", "head.weight", "head.bias"}),
        ("my_nets:build", 0, {"head.weight", "head.bias"}),
    ],
)
def test_only_the_last_stages_are_trained(arch: str, stages: int, trained: set[str], mine: Path) -> None:
    options = {"img_size": SIDE} if arch == "timm/test_vit" else {}
    model = config(arch, arch_options=options, trainable_stages=stages).build(3, SIDE)
    assert trained_parts(model, 2) == trained


def test_all_parts_can_be_counted() -> None:
    model = config("timm/test_convnext", trainable_stages=5).build(3, SIDE)
    assert all(parameter.requires_grad for parameter in model.parameters())


# Norms of timm have the activation in them


def norms_with_activation() -> nn.Module:
    model = config("timm/test_efficientnet").build(3, SIDE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.weight)
    return model


def test_frozen_norms_of_timm_keep_their_activation() -> None:
    torch.manual_seed(0)
    model, x = norms_with_activation().eval(), torch.randn(1, 3, SIDE, SIDE)
    before = model(x)
    freeze_norms(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    torch.testing.assert_close(model.train()(x), before)


def test_synchronised_norms_of_timm_keep_their_activation() -> None:
    torch.manual_seed(0)
    model, x = norms_with_activation().eval(), torch.randn(1, 3, SIDE, SIDE)
    before = model(x)
    torch.testing.assert_close(synchronised(model)(x), before)


def test_a_norm_that_cannot_be_frozen_is_refused() -> None:
    class Odd(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    with pytest.raises(ValueError, match="Odd cannot be frozen"):
        freeze_norms(nn.Sequential(Odd(3)))
    plain = nn.Sequential(nn.BatchNorm2d(3))
    freeze_norms(plain)
    assert isinstance(plain[0], FrozenBatchNorm2d)


def test_what_needs_values_is_computed_on_the_cpu() -> None:
    assert without_memory(lambda: torch.ones(2)).is_meta
    assert without_memory(lambda: torch.ones(2).tolist()) == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="something else"):
        without_memory(fails)


def fails() -> None:
    raise RuntimeError("something else")


# Errors


@pytest.mark.parametrize(
    ("arch", "keys", "expected"),
    [
        ("timm/test_convnex", {}, "model.arch: timm has no network 'test_convnex'. Did you mean"),
        ("timm/test_convnext.a1", {}, "model.arch: timm has no network 'test_convnext.a1'. Did you mean"),
        ("timm/test_vit", {}, "timm/test_vit cannot classify images of 40 × 40: Input height (40)"),
        ("timm/test_convnext", {"block": "se"}, "to put the block before, such as stages.2"),
        ("timm/test_convnext", {"block": "se", "placement": "stages.7"}, "got 'stages.7'. Did you mean"),
        ("timm/test_convnext", {"arch_options": {"dpths": 3}}, "model.arch_options: timm/test_convnext "
         "cannot be built with {'dpths': 3}: ConvNeXt.__init__() got an unexpected keyword argument 'dpths'"),
        ("timm/test_convnext", {"trainable_stages": 6}, "trainable_stages=6: expected a number from 0 to 5"),
        ("timm/test_convnext", {"zero_init_residual": True}, "zero_init_residual is for ResNets"),
        ("timm/test_convnext", {"stride_in_1x1": True}, "stride_in_1x1 needs bottleneck blocks"),
        ("torchvision/vgg", {}, "model.arch: torchvision has no network 'vgg'. Did you mean"),
        ("torchvision/deeplabv3_mobilenet_v3_large", {}, "for 2 images it returns OrderedDict in training"),
        ("my_nets:bild", {}, "model.arch: my_nets has no function or class 'bild'. Did you mean build?"),
        ("your_nets:build", {}, "model.arch: there is no module 'your_nets', neither installed nor in the"),
        ("my_nets.deep:build", {}, "model.arch: there is no module 'my_nets.deep'"),
        ("my_nets:no_classes", {}, "model.arch: my_nets:no_classes must take num_classes"),
        ("my_nets:ten_classes", {}, "is not a classifier of 3 classes: for 2 images it returns (2, 10)"),
        ("my_nets:not_a_network", {}, "model.arch: my_nets:not_a_network returns 'net'; expected"),
        ("my_nets:build", {"trainable_stages": 1}, "trainable_stages=1: Net has no stages called layer1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(arch: str, keys: dict[str, Any], expected: str, mine: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        config(arch, **keys).check(3, 40)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"arch": "vgg11"}, "no network is called 'vgg11'. Did you mean torchvision/vgg11?"),
        ({"arch": "tim/vgg11"}, "Other networks are torchvision/NAME, timm/NAME and package.module:function"),
        (
            {"arch": "timm/vgg11", "arch_options": {"pretrained": True}},
            "polynl sets pretrained of timm/vgg11",
        ),
    ],
)
def test_what_the_keys_alone_say_is_said_first(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=r"\Aarch") as caught:
        configured(ClassifierConfig, **keys)
    assert expected in str(caught.value)


# From training to pictures


def test_a_network_of_ones_own_is_trained_resumed_scored_and_explained(mine: Path, capsys: Any) -> None:
    words = ["--model.arch", "my_nets:build", "--model.arch-options", "{}", "--model.placement", "body"]
    small = ["--data.images", 12, "--data.val-images", 4, "--data.size", 32, "--batch", 6, "--val-batch", 4]
    assert run(capsys, "train", "scenes", *words, *small, "--epochs", 1, "--out", "run")[0] == 0
    assert "body.polynl_before.w1.weight" in load_file("run/best.safetensors")
    assert run(capsys, "train", "run/recipe.yaml", "--out", "run", "--resume")[0] == 0
    code, out, _ = run(capsys, "evaluate", "run")
    assert (code, "top1" in out) == (0, True)
    picture = Path("picture.png")
    Image.new("RGB", (40, 40), "red").save(picture)
    assert run(capsys, "predict", picture, "--checkpoint", "run", "--out", "predicted")[0] == 0
    assert run(capsys, "explain", picture, "--checkpoint", "run", "--out", "explained")[0] == 0
    assert list(Path("explained").glob("*influence.png"))
