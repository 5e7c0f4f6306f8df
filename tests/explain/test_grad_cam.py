"""Grad-CAM against its formula written out, and against the library that most people use for it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from literal_parts import assert_close
from tiny_networks import CLASSES, PADDED, classifier, faces, images, masks, untouched, with_random_blocks
from torch import Tensor, nn
from torchvision.models import get_model, resnet18

import polynl
from polynl.explain import detection_score, grad_cam


def by_hand(model: nn.Module, given: Any, layer: str, score: Callable[[Any], Tensor]) -> Tensor:
    """ReLU(Σₖ wₖAₖ) with wₖ the mean of ∂score/∂Aₖ, channel by channel: (b, h, w)."""
    model, kept = copy.deepcopy(model).eval(), []

    def keep(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().clone().requires_grad_())
        return kept[0] * 1

    model.get_submodule(layer).register_forward_hook(keep)
    score(model(given)).sum().backward()
    (maps,) = kept
    cams = []
    for a, gradient in zip(maps.detach(), maps.grad, strict=True):
        cam = torch.zeros_like(a[0])
        for channel, slope in zip(a, gradient, strict=True):
            cam += slope.mean() * channel
        cams.append(cam.clamp(min=0))
    return torch.stack(cams)


def of_classes(classes: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda output: torch.stack([row[number] for row, number in zip(output, classes, strict=True)])


def named(value: object) -> str:
    """An id that is the same in every process: the text of a function has its address."""
    return "function" if callable(value) else str(value)


def double(model: nn.Module) -> nn.Module:
    return model.double().train()


def batch(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) - 0.3


# Classifiers


@pytest.mark.parametrize("size", [(6, 6), (7, 12), (12, 5)])
@pytest.mark.parametrize("layer", ["stem", "norm", "relu", "conv", "conv.polynl_before", "after"])
def test_maps_are_those_of_the_formula(layer: str, size: tuple[int, int]) -> None:
    """Also of layers whose output the next one overwrites."""
    model, x = double(classifier("poly_nl")), batch(2, 3, *size)
    expected = by_hand(model, x, layer, of_classes([1, 1]))
    assert expected.abs().amax(dim=(1, 2)).min() > 0, "maps of nothing prove nothing"
    with untouched(model):
        cams = grad_cam(model, x, 1, layer=layer)
    assert cams.shape == (2, *((side + 1) // 2 for side in size))
    assert_close(cams, expected, 1e-12)
    assert not cams.requires_grad


@pytest.mark.parametrize(
    ("target", "classes"),
    [
        (0, [0, 0]),
        (torch.tensor(4), [4, 4]),
        ([3, 1], [3, 1]),
        ((1, 3), [1, 3]),
        (torch.tensor([4, 2]), [4, 2]),
        (torch.tensor([4, 2], dtype=torch.int32), [4, 2]),
        (lambda output: output[:, 1] - output[:, 2], None),
    ],
    ids=named,
)
def test_targets_are_classes_for_all_or_for_each_or_functions(target: Any, classes: list[int] | None) -> None:
    model, x = double(classifier()), batch(2, 3, 8, 6)
    expected = by_hand(model, x, "after", target if classes is None else of_classes(classes))
    assert_close(grad_cam(model, x, target), expected, 1e-12)


def test_the_default_target_is_the_predicted_class() -> None:
    model, x = double(classifier()), 4 * batch(6, 3, 8, 6)
    x[:3] *= -3
    predicted = copy.deepcopy(model).eval()(x).argmax(dim=1).tolist()
    assert len(set(predicted)) > 1, "they differ"
    assert_close(grad_cam(model, x), by_hand(model, x, "after", of_classes(predicted)), 1e-12)


def test_an_image_has_a_map_and_a_list_has_a_list() -> None:
    model, x = double(classifier()), batch(2, 3, 8, 6)
    expected = grad_cam(model, x, [2, 3])
    listed = grad_cam(model, list(x), [2, 3])
    assert isinstance(listed, list)
    assert_close(torch.stack(listed), expected, 1e-12)
    assert_close(grad_cam(model, x[0], 2), expected[0], 1e-12)
    assert_close(grad_cam(model, x[1], [3]), expected[1], 1e-12)


def test_images_of_a_batch_are_independent() -> None:
    model, x = double(classifier("poly_nl")), batch(3, 3, 8, 6)
    assert_close(grad_cam(model, x, 1)[1:2], grad_cam(model, x[1:2], 1), 1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(mode: Any) -> None:
    model, x = double(classifier("poly_nl")), batch(2, 3, 8, 6)
    expected = grad_cam(model, x, 1)
    with mode():
        assert_close(grad_cam(model, x.clone(), 1), expected, 1e-12)
        assert_close(torch.stack(grad_cam(model, [image.clone() for image in x], 1)), expected, 1e-12)


def test_works_with_frozen_weights() -> None:
    model, x = double(classifier()), batch(2, 3, 8, 6)
    expected = grad_cam(model, x, 1)
    model.requires_grad_(False)
    assert torch.equal(grad_cam(model, x, 1), expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_layer_is_the_last_that_gives_several_positions() -> None:
    model = resnet18().double()
    x = batch(1, 3, 64, 96)
    assert_close(grad_cam(model, x, 7), by_hand(model, x, "layer4", of_classes([7])), 1e-12)


def test_layers_with_a_single_position_are_skipped() -> None:
    """The maps of the last stage are of one position here."""
    model = resnet18().double()
    x = batch(1, 3, 32, 32)
    assert_close(grad_cam(model, x, 7), by_hand(model, x, "layer3", of_classes([7])), 1e-12)


def test_the_output_of_a_network_is_not_its_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(4, 2, 1))).double()
    x = batch(2, 3, 4, 5)

    def score(output: Tensor) -> Tensor:
        return output[:, 1].square().mean(dim=(1, 2))

    assert_close(grad_cam(model, x, score), by_hand(model, x, "1", score), 1e-12)
    assert_close(grad_cam(model, x, score, layer="0"), by_hand(model, x, "0", score), 1e-12)


@pytest.mark.parametrize(
    ("side", "layer"),
    [
        ("before", "layer4.1"),
        ("after", "layer4.1"),
        ("after", "layer4"),
        ("before", "layer4.1.polynl_before"),
    ],
)
def test_blocks_in_a_resnet_have_an_effect(side: str, layer: str) -> None:
    torch.manual_seed(0)
    model = polynl.insert(resnet18(num_classes=6), "poly_nl", **{side: "layer4.1"}, channels=512).double()
    x = batch(2, 3, 64, 96)
    without = grad_cam(model, x, 3, layer=layer)
    block = next(iter(polynl.inserted(model).values()))
    nn.init.constant_(block.beta, 0.5)
    expected = by_hand(model, x, layer, of_classes([3, 3]))
    assert_close(grad_cam(model, x, 3, layer=layer), expected, 1e-12)
    # The block is in the layer's output, or in its input, or after it.
    assert not torch.allclose(expected, without)


def test_networks_of_timm_are_networks() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", pretrained=False, num_classes=4).double()
    x = batch(2, 3, 96, 64)
    last = "layer4"
    assert_close(grad_cam(model, x, 2), by_hand(model, x, last, of_classes([2, 2])), 1e-12)


def test_clips_have_maps_over_time() -> None:
    torch.manual_seed(0)
    model = with_random_blocks(
        polynl.insert(get_model("r3d_18", num_classes=3), "poly_nl", before="layer3.1", channels=256)
    )
    nn.init.constant_(model.layer3[1].polynl_before.beta, 1e-3)  # cubic in 256 channels
    x = batch(2, 3, 8, 32, 48).float()
    cams = grad_cam(model, x, 1, layer="layer3")
    assert cams.shape == (2, 2, 4, 6)
    assert_close(cams, by_hand(model, x, "layer3", of_classes([1, 1])), 1e-5)


# Detectors


@pytest.mark.parametrize("layer", [None, "backbone.body.layer2", "backbone.body.layer3.1.polynl_before"])
@pytest.mark.parametrize("numbers", [0, [3, 1]], ids=str)
def test_maps_of_detections_are_without_the_padding(layer: str | None, numbers: int | list[int]) -> None:
    model = with_random_blocks(masks()).train()
    nn.init.constant_(model.backbone.body.layer3[1].polynl_before.beta, 1e-3)
    given = images(*PADDED)
    named = "backbone.body.layer4" if layer is None else layer
    with untouched(model):
        cams = grad_cam(model, given, detection_score(numbers), layer=layer)
    chosen = [numbers] * 2 if isinstance(numbers, int) else numbers

    def score(found: Any) -> Tensor:
        return found[0]["scores"][chosen[0]] + found[1]["scores"][chosen[1]]

    one, other = by_hand(model, given, named, score)
    side = one.shape[-1]
    assert_close(cams[0], one[:, : side // 2], 1e-5)
    assert_close(cams[1], other[: -(-side * 40 // 64)], 1e-5)


def test_maps_of_faces() -> None:
    model, given = faces(), images(*PADDED)
    one, other = grad_cam(model, given, detection_score(1))
    whole = by_hand(
        model, given, "backbone.body.layer4", lambda found: torch.stack([f["scores"][1] for f in found])
    )
    assert whole.shape == (2, 4, 4)
    assert_close(one, whole[0, :3, :2], 1e-5)
    assert_close(other, whole[1, :2, :3], 1e-5)
    assert grad_cam(model, given[0], detection_score(0)).shape == (3, 2)
    assert grad_cam(model, torch.stack([given[0]] * 2), detection_score(0)).shape == (2, 3, 2)


# The library


@pytest.mark.parametrize("place", [{"before": "layer4.1"}, {"after": "layer3.1"}], ids=str)
@pytest.mark.parametrize("layer", ["layer4", "layer3.0"])
@pytest.mark.parametrize("classes", [None, [1, 4]], ids=str)
def test_maps_are_those_of_pytorch_grad_cam(place: dict[str, str], layer: str, classes: Any) -> None:
    library = pytest.importorskip("pytorch_grad_cam")
    from pytorch_grad_cam.utils.image import scale_cam_image
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    torch.manual_seed(0)
    model = with_random_blocks(polynl.insert(resnet18(num_classes=6), "poly_nl", **place)).eval()
    nn.init.constant_(next(iter(polynl.inserted(model).values())).beta, 1e-3)
    x = batch(2, 3, 64, 96).float()
    targets = None if classes is None else [ClassifierOutputTarget(number) for number in classes]
    with library.GradCAM(model=model, target_layers=[model.get_submodule(layer)]) as oracle:
        expected = torch.from_numpy(oracle(input_tensor=x, targets=targets))
    model.zero_grad()
    cams = grad_cam(model, x, classes, layer=layer)
    # Theirs are brought to the range from 0 to 1, to the image's size, and to that range again.
    ours = scale_cam_image(scale_cam_image(cams.numpy(), (96, 64)))
    assert_close(torch.from_numpy(ours), expected, 1e-5)


# Errors


class Branches(nn.Module):
    """One of its branches is unused, one is called twice and one returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.twice = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.ReLU()
        self.pair = nn.Module()
        self.pair.forward = lambda x: (x, x)
        self.tokens, self.head = nn.Flatten(2), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        x, _ = self.pair(self.twice(self.twice(self.used(x))))
        return self.head(self.tokens(x).mean(dim=-1))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ("nowhere", r"^Branches has no module 'nowhere'; it has used, idle, twice, pair, tokens, head$"),
        ("head", r'^layer "head" outputs \(1, 5\); expected a map \(b, c, h, w\)$'),
        ("tokens", r'^layer "tokens" outputs \(1, 4, 20\); expected a map'),
        ("pair", r'^layer "pair" outputs tuple; expected a map'),
        ("twice", r'^"twice" is called 2 times in a forward pass'),
        ("idle", r"^the score does not depend on idle; choose another layer$"),
    ],
)
def test_layers_without_a_map_are_refused(layer: str, said: str, frozen: bool) -> None:
    model = Branches().requires_grad_(not frozen)
    with untouched(model), pytest.raises(ValueError, match=said):
        grad_cam(model, batch(1, 3, 4, 5).float(), 0, layer=layer)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (CLASSES, r"^target=5: the model has classes from 0 to 4$"),
        (-1, r"^target=-1: the model has classes from 0 to 4$"),
        (1.5, r"^target=1.5: the model has classes from 0 to 4$"),
        ([0, 7], r"^target=\[0, 7\]: the model has classes from 0 to 4$"),
        ([0], r"^target has 1 classes for 2 images$"),
        (torch.tensor([0, 1, 2]), r"^target has 3 classes for 2 images$"),
        (True, r"^target=True: the model has classes from 0 to 4$"),
        ("cat", r"^target=cat: the model has classes from 0 to 4$"),
        (torch.tensor([[0, 1]]), r"^target=tensor.*: the model has classes from 0 to 4$"),
        (
            lambda output: output.detach()[:, 0],
            r"^the score does not depend on after, conv, relu and 2 more; choose another layer$",
        ),
        (lambda output: 0.5, r"^the target returns float; expected 2 scores, one for each"),
        (lambda output: output, r"^the target returns \(2, 5\); expected 2 scores"),
    ],
    ids=named,
)
def test_targets_that_do_not_fit_are_refused(target: Any, said: str) -> None:
    model = classifier().train()
    with untouched(model), pytest.raises(ValueError, match=said):
        grad_cam(model, batch(2, 3, 4, 5).float(), target)


@pytest.mark.parametrize(
    ("arch", "layer"),
    [("swin_tiny_patch4_window7_224", "patch_embed.proj"), ("mambaout_femto", "stages.3.blocks.2.conv")],
)
def test_only_maps_with_channels_first_are_used(arch: str, layer: str) -> None:
    """Tokens, heads of attention, and maps with the channels last."""
    model = timm.create_model(arch, pretrained=False)
    x = batch(1, 3, 224, 224).float()
    assert torch.equal(grad_cam(model, x, 3), grad_cam(model, x, 3, layer=layer))


class TwoHeads(nn.Module):
    """Like networks that segment with an auxiliary head, called last and without effect on the score."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.body(x)
        return {"out": self.head(maps), "aux": self.aux(maps)}


def test_maps_that_the_score_does_not_depend_on_are_skipped() -> None:
    model, x = TwoHeads(), batch(2, 3, 7, 9).float()
    found = grad_cam(model, x, lambda output: output["out"][:, 3].mean(dim=(1, 2)))
    expected = grad_cam(model, x, lambda output: output["out"][:, 3].mean(dim=(1, 2)), layer="head")
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"^the model outputs dict, not a score .* a score for each image$"):
        grad_cam(model, x)


def test_a_network_without_maps_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with (
        untouched(model),
        pytest.raises(ValueError, match="no module of Sequential outputs a map of several"),
    ):
        grad_cam(model, batch(1, 3, 2, 2).float())


def test_outputs_other_than_class_scores_need_a_function() -> None:
    model = masks()
    with (
        untouched(model),
        pytest.raises(ValueError, match=r"^the model outputs list, not a score .* such as detection_score"),
    ):
        grad_cam(model, images(*PADDED), 0)
    with pytest.raises(
        ValueError, match=r"^the model outputs \(1, 4, 4, 5\), not a score .* for each image$"
    ):
        grad_cam(nn.Sequential(nn.Conv2d(3, 4, 1)), batch(1, 3, 4, 5).float(), 0)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (5, r"^there is no detection 5 in image 0, which has 5$"),
        (-1, r"^there is no detection -1 in image 0, which has 5$"),
        ([0, 6], r"^there is no detection 6 in image 1, which has 5$"),
        ([0], r"^target has 1 detections for 2 images$"),
        ([0, 1, 2], r"^target has 3 detections for 2 images$"),
    ],
    ids=str,
)
def test_detections_that_do_not_exist_are_refused(number: Any, said: str) -> None:
    model = masks().train()
    with untouched(model), pytest.raises(ValueError, match=said):
        grad_cam(model, images(*PADDED), detection_score(number))
