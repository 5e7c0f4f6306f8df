"""Networks that `polynl explain` takes by name, from torchvision and timm."""

from pathlib import Path
from typing import Any

import torch
import torchvision
from explaining import KINDS, drawn, explain, stir
from PIL import Image
from safetensors.torch import save_file
from torchvision.models import resnet18

from polynl import insert
from polynl.data.images import read_image
from polynl.explain.networks import network_by_name, networks_by_name

# A step of a uint8 image, normalised by the smallest of ImageNet's deviations, and rounding.
GREY_LEVEL = 1 / 255 / 0.224 + 1e-4


def test_weights_from_a_file_and_views_as_published(images: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = stir(insert(resnet18(), "poly_nl", before="layer3.1")).eval()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    network = network_by_name("torchvision/resnet18", tmp_path / "weights.safetensors", ["poly_nl@layer3.1"])
    image = read_image(images / "b.jpg")
    published = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    x = network.inputs(network.view(image))
    assert (x[0] - published(image)).abs().max() < GREY_LEVEL
    with torch.no_grad():
        assert torch.equal(network.model(x), model(x))
    assert network.labels[281] == "tabby"
    assert network.block == "layer3.1.polynl_before"


def test_timm_by_name(images: Path) -> None:
    import timm

    network = network_by_name("timm/resnet18", None, ["poly_nl@layer3.1"])
    config = timm.data.resolve_model_data_config(network.model)
    transform = timm.data.create_transform(**config, is_training=False)
    with Image.open(images / "b.jpg") as image:
        expected = transform(image)
    x = network.inputs(network.view(read_image(images / "b.jpg")))[0]
    assert (x - expected).abs().mean() < GREY_LEVEL / 10, "here and there a grey level, by PIL and by torch"
    assert network.labels[281].startswith("tabby")


def test_images_are_resized_as_published(images: Path) -> None:
    """A network whose preset is bicubic."""
    network, image = network_by_name("torchvision/efficientnet_b0", None), read_image(images / "b.jpg")
    published = torchvision.models.EfficientNet_B0_Weights.DEFAULT.transforms()
    assert (network.inputs(network.view(image))[0] - published(image)).abs().mean() < GREY_LEVEL / 2


def test_torchvisions_detectors_by_name(images: Path) -> None:
    network = network_by_name("torchvision/retinanet_resnet50_fpn", None, ["poly_nl@backbone.body.layer4.2"])
    assert network.detects
    assert network.block == "backbone.body.layer4.2.polynl_before"
    assert network.labels[1] == "person"


def test_networks_by_name_side_by_side(images: Path, tmp_path: Path, capsys: Any) -> None:
    """Blocks go into the networks that have their modules, and weights are given in the networks' order."""
    torch.manual_seed(1)
    save_file(stir(resnet18()).state_dict(), tmp_path / "mine.safetensors")
    words = ["--model", "torchvision/resnet18", "--model", "torchvision/mobilenet_v3_small"]
    words += ["--model", "torchvision/resnet18", "--insert", "poly_nl@layer3.1"]
    words += ["--weights", tmp_path / "mine.safetensors", "--weights", "none", "--weights", "none"]
    code, out, err = explain(capsys, images / "a.png", *words, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "resnet18 + poly_nl@layer3.1, mine.safetensors: " in out
    assert "resnet18 + poly_nl@layer3.1 (random weights): load others with --weights FILE." in out
    assert "mobilenet_v3_small (random weights): " in out
    assert drawn(tmp_path / "out") == {f"a-{kind}.png" for kind in KINDS}


def test_networks_of_one_name_from_two_libraries_are_told_apart() -> None:
    networks = networks_by_name(["torchvision/resnet18", "timm/resnet18", "timm/resnet10t", "timm/resnet10t"])
    assert [network.name.removesuffix(" (random weights)") for network in networks] == [
        "torchvision/resnet18",
        "timm/resnet18",
        "resnet10t",
        "resnet10t",
    ]


def test_strides_in_the_1x1_convolution() -> None:
    model: Any = network_by_name("torchvision/resnet50", None, stride_in_1x1=True).model
    assert model.layer2[0].conv1.stride == (2, 2)
