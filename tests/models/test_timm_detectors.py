"""Networks of timm as the backbones of detectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polynl import inserted
from polynl.config import configured
from polynl.explain import grad_cam
from polynl.explain.grad_cam import detection_score
from polynl.models.faster_rcnn import FasterRCNNConfig, faster_rcnn
from polynl.models.timm_maps import maps_by_level
from polynl.tasks.face_detection.model import face_detector

timm = pytest.importorskip("timm", reason="needs the extra 'timm'")
NARROW: dict[str, Any] = {"min_size": 64, "max_size": 64, "fpn_channels": 8}
FEW = {"box_score_thresh": 0.0, "box_detections_per_img": 3, "rpn_post_nms_top_n_test": 5}
ONE_SIZE = {"dynamic_img_size": False}  # 160 × 160
TARGET = {"boxes": torch.tensor([[5.0, 5.0, 40.0, 40.0]]), "labels": torch.tensor([1])}


def small(arch: str, **keys: Any) -> nn.Module:
    return faster_rcnn(arch, num_classes=3, box_width=8, detector_options=FEW, **NARROW, **keys)


def image() -> Tensor:
    return torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("arch", ["timm/test_convnext", "timm/test_resnet", "timm/test_efficientnet"])
def test_every_trained_parameter_gets_a_gradient(arch: str) -> None:
    # DistributedDataParallel stops at one that does not.
    model = small(arch, norm="batch").train()
    sum(model([image()], [TARGET]).values()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_the_maps_are_those_of_timm() -> None:
    model = small("timm/test_convnext").eval()
    body: Any = model.backbone.body
    plain = timm.create_model("test_convnext", features_only=True).eval()
    plain.load_state_dict(
        {
            key.replace("stem.", "stem_").replace("stages.", "stages_"): value
            for key, value in body.state_dict().items()
        }
    )
    maps = body.forward_intermediates(image()[None], indices=model.backbone.indices, intermediates_only=True)
    for mine, theirs in zip(maps, plain(image()[None]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_weights_of_a_classifier_load_without_its_head(tmp_path: Path) -> None:
    classifier = timm.create_model("test_convnext", num_classes=7)
    torch.save(classifier.state_dict(), tmp_path / "weights.pt")
    model = small("timm/test_convnext", backbone_weights=tmp_path / "weights.pt")
    for name, value in model.backbone.body.state_dict().items():
        assert torch.equal(value, classifier.state_dict()[name])
    trained = {name.split(".")[3] for name, p in model.backbone.named_parameters(prefix="backbone")
               if p.requires_grad and ".stages." in name}  # fmt: skip
    assert trained == {"1", "2", "3"}


def test_a_block_in_it_starts_as_the_identity_and_is_explained() -> None:
    torch.manual_seed(0)
    plain = small("timm/test_convnext").eval()
    model = small("timm/test_convnext", block="poly_nl", placement="backbone.body.stages.2").eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    assert list(inserted(model)) == ["backbone.body.stages.2.polynl_before"]
    (found,), (expected,) = model([image()]), plain([image()])
    assert torch.equal(found["boxes"], expected["boxes"])
    assert len(found["boxes"]) > 0
    assert grad_cam(model, [image()], detection_score(0))[0].dim() == 2


def test_a_face_detector_has_coarser_levels() -> None:
    model = face_detector("timm/test_convnext", levels=(3, 4, 5, 6), **NARROW)
    maps = model.backbone(torch.rand(1, 3, 128, 128))
    assert [values.shape[-1] for values in maps.values()] == [16, 8, 4, 2]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"arch": "torchvision/vgg11"}, r"arch: detectors are built on ResNets or on timm/NAME"),
        ({"arch": "my_nets:build"}, r"arch: detectors are built on ResNets"),
        ({"arch": "timm/vgg"}, r"model.arch: timm has no network 'vgg'"),
        ({"arch": "timm/test_vit"}, r"anchor_sizes=.*: expected 2 numbers"),
        (
            {"arch": "timm/test_vit", "anchor_sizes": (16, 32), "arch_options": ONE_SIZE},
            r"arch='timm/test_vit' does not take images of 800 × 800: Input height .*dynamic_img_size: true}",
        ),
        ({"arch": "timm/test_convnext", "block": "se"}, r"such as backbone\.body\.stages\.2"),
    ],
)
def test_what_is_wrong_is_said(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        configured(FasterRCNNConfig, **keys).build(3)


def test_a_network_of_one_size_takes_images_of_that_size() -> None:
    one_size = {**ONE_SIZE, "img_size": 64}
    model = small("timm/test_vit", arch_options=one_size, anchor_sizes=(16, 32)).eval()
    assert "boxes" in model([image()])[0]


def test_a_network_whose_maps_timm_does_not_give_is_refused() -> None:
    with pytest.raises(ValueError, match="arch='timm/dla34': timm does not give the maps of this network"):
        maps_by_level(nn.Identity(), "timm/dla34")
