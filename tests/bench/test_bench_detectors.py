"""`polynl bench nets` with detectors: whole steps, and the same boxes for every variant."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from polynl.bench import runner
from polynl.bench.cases import BY_NAME
from polynl.bench.detectors import (
    OBJECTS,
    Detector,
    NetworkAlone,
    face_detector_of_side,
    mask_rcnn_detector,
    objects,
)
from polynl.bench.measure import task
from polynl.bench.networks import NETWORKS, run_networks
from polynl.bench.settings import NetSettings
from polynl.errors import SettingsError
from polynl.models.faster_rcnn import faster_rcnn
from polynl.models.resnet import PLACEMENTS
from polynl.results.benchmark import Point
from polynl.tasks.instance_segmentation.model import mask_rcnn

NAME = "mask_rcnn_resnet18"
NARROW = partial(mask_rcnn_detector, "resnet18", fpn_channels=16, box_width=16, mask_widths=(8,))
TINY = NetSettings(network=NAME, blocks=("poly_nl",), side=64, batch=1, runs=1, training=True)


def narrow(block: str | None = None, placement: str = "res4", side: int = 64) -> Detector:
    torch.manual_seed(0)
    return NARROW(None if block is None else BY_NAME[block].build, placement, side)


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 64, 64)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, NAME, replace(NETWORKS[NAME], make=NARROW))
    monkeypatch.setattr(runner, "WARMUP", 0)


@pytest.mark.usefixtures("_quick")
def test_a_run_counts_and_measures(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=160)
    results = run_networks(replace(TINY, out=tmp_path), console)
    plain, variant = results.methods["plain"], results.methods["poly_nl@res4"]
    assert variant["parameters"] - plain["parameters"] == 3 * 256**2 + 2
    # 256 channels before layer3.1, which has 4 × 4 positions: three convolutions and no less.
    assert variant["multiply_adds"] - plain["multiply_adds"] >= 3 * 256**2 * 4**2
    points = {m.point for m in results.measurements}
    assert points == {Point("forward", 1, 64), Point("training", 1, 64)}
    assert all(len(m.seconds) == 1 and m.peak_bytes for m in results.measurements)
    assert "Mask R-CNN, ResNet-18 at 64×64" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("build", [mask_rcnn, faster_rcnn])
@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_a_network_of_that_name_is_the_detector(arch: str, build: Callable[..., nn.Module]) -> None:
    with torch.device("meta"):
        model = NETWORKS[f"{build.__name__}_{arch}"].build(None, "res4", 64)
        parameters = [p.shape for p in build(arch).parameters()]
    assert [p.shape for p in model.parameters()] == parameters


def test_every_variant_has_the_same_boxes_and_all_of_them(images: Tensor) -> None:
    with torch.no_grad():
        plain = narrow().eval()(images)
        assert plain.shape == (2 * 100, 4)
        for placement in PLACEMENTS:
            assert torch.equal(narrow("tesa", placement).eval()(images), plain)


def test_training_goes_through_the_whole_detector_at_the_size_asked_for(images: Tensor) -> None:
    model = narrow("poly_nl")
    seen: dict[str, torch.Size] = {}
    model.model.get_submodule("backbone").register_forward_pre_hook(
        lambda _, inputs: seen.update(image=inputs[0].shape)
    )
    model.model.get_submodule("roi_heads.mask_head").register_forward_pre_hook(
        lambda _, inputs: seen.update(masks=inputs[0].shape)
    )
    step = task(model, images, "training")
    step.reset()
    loss = step.run()
    assert loss.shape == ()
    assert loss.isfinite()
    assert seen["image"] == images.shape
    assert seen["masks"][0] > 2 * OBJECTS, "proposals are found beside the objects themselves"
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, images: Tensor) -> None:
    # The third degree three times in a row, which leaves the range of float16 unless images are small.
    model, x = narrow("poly_nl", "res345").to(dtype), images[:1].to(dtype)
    with torch.no_grad():
        assert model.eval()(x).shape == (100, 4)
        assert model.train()(x).isfinite()


def test_only_the_backbone_is_compiled() -> None:
    compiled: list[tuple[str, bool]] = []

    class Config(nn.Module):
        def compile(self, *, dynamic: bool) -> None:
            compiled.append((self.name, dynamic))

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    model = Config("detector")
    model.backbone = Config("backbone")
    Detector(model).compile(dynamic=False)
    assert compiled == [("backbone", False)]


def test_objects_are_in_the_image_and_fill_their_boxes() -> None:
    first = objects(2, 64, torch.device("cpu"))
    objects(1, 96, torch.device("cpu"))
    again = objects(2, 64, torch.device("cpu"))
    assert [len(image["boxes"]) for image in first] == [OBJECTS, OBJECTS]
    for image, same in zip(first, again, strict=True):
        assert all(torch.equal(image[key], same[key]) for key in ("boxes", "labels", "masks"))
        boxes, masks = image["boxes"], image["masks"]
        assert boxes.min() >= 0
        assert boxes.max() <= 64
        assert masks.shape == (OBJECTS, 64, 64)
        # By columns and by rows, a mask begins and ends where its box does.
        for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
            columns, rows = mask.any(0).nonzero(), mask.any(1).nonzero()
            assert abs(columns.min() - left) <= 1
            assert abs(columns.max() + 1 - right) <= 1
            assert abs(rows.min() - top) <= 1
            assert abs(rows.max() + 1 - bottom) <= 1


@pytest.mark.usefixtures("_quick")
def test_images_that_are_too_small(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--side 63: Mask R-CNN, ResNet-18 needs .* at least 64"):
        run_networks(replace(TINY, side=63, out=tmp_path), Console(file=StringIO()))
    assert list(tmp_path.iterdir()) == []


# Faces


def faces(block: str | None = None, side: int = 64) -> Detector:
    torch.manual_seed(0)
    made = None if block is None else BY_NAME[block].build
    return face_detector_of_side("resnet18", made, "res4", side, fpn_channels=8)


def test_faces_have_the_same_boxes_and_as_many_as_may_be(images: Tensor) -> None:
    plain, variant = faces().eval(), faces("tesa").eval()
    with torch.no_grad():
        found = plain(images)
        assert torch.equal(found, variant(images))
    assert len(found) > 50


def test_faces_are_trained_on_and_the_network_is_measured_alone(images: Tensor) -> None:
    detector = faces()
    loss = detector.train()(images)
    assert loss.ndim == 0
    loss.backward()
    alone = NetworkAlone(detector).eval()
    with torch.no_grad():
        heads = alone(images)
    # Three anchors at each position of the maps with strides 4 to 64.
    assert heads.shape == (2, 3 * (16**2 + 8**2 + 4**2 + 2**2 + 1), 5)


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_face_detectors_are_there(arch: str) -> None:
    network = NETWORKS[f"faces_{arch}"]
    assert network.alone is NetworkAlone
    with torch.device("meta"):
        detector = network.build(None, "res4", 64)
    assert detector.model.topk_candidates == 5000


@pytest.mark.usefixtures("_quick")
def test_a_run_tells_what_post_processing_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(face_detector_of_side, "resnet18", fpn_channels=8)
    monkeypatch.setitem(NETWORKS, "faces_resnet18", replace(NETWORKS["faces_resnet18"], make=make))
    console = Console(file=StringIO(), width=160)
    settings = replace(TINY, network="faces_resnet18", training=False, out=tmp_path)
    results = run_networks(settings, console)
    assert list(results.methods) == ["plain", "poly_nl@res4", "alone"]
    assert results.methods["alone"]["parameters"] == results.methods["plain"]["parameters"]
    assert "without post-processing" in console.file.getvalue()  # type: ignore[attr-defined]
