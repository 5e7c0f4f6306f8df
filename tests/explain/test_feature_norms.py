"""‖X‖, ‖Y‖ and ‖Z‖ of blocks, by hand from their inputs and outputs."""

from typing import Any

import pytest
import torch
from literal_parts import assert_close, randomised
from tiny_networks import (
    PADDED,
    WIDTH,
    activation_by_hand,
    classifier,
    faces,
    images,
    masks,
    untouched,
    with_random_blocks,
)
from torch import Tensor, nn
from torchvision.models import get_model, resnet18

import polynl
from polynl import PolyNL
from polynl.explain import FeatureNorms, feature_norms

BLOCK = "conv.polynl_before"


def lengths(maps: Tensor) -> Tensor:
    """(b, c, *spatial) → (b, *spatial): the root of the sum of squares, channel by channel."""
    total = torch.zeros_like(maps[:, 0])
    for channel in maps.unbind(1):
        total = total + channel * channel
    return total.sqrt()


def assert_norms(norms: FeatureNorms, x: Tensor, y: Tensor, z: Tensor) -> None:
    for found, maps in zip(norms, (x, y, z), strict=True):
        assert maps.abs().max() > 0, "norms of nothing prove nothing"
        # Y is a difference, which rounds as its terms do.
        torch.testing.assert_close(found, lengths(maps), rtol=0, atol=1e-5 * lengths(z).max().item())


@pytest.mark.parametrize("reduction", [1, 2])
def test_of_poly_nl_they_are_those_of_the_paper(reduction: int) -> None:
    model, batch = classifier("poly_nl", reduction=reduction), torch.stack(images((6, 8), (6, 8)))
    block = model.conv.polynl_before
    assert {block.alpha.item(), block.beta.item()}.isdisjoint({0.0, 1.0})
    x, z = activation_by_hand(model, batch, BLOCK)
    folded = x.flatten(2).mT
    left, right = folded @ block.w1.weight.T, folded @ block.w2.weight.T
    value = folded if block.w_value is None else folded @ block.w_value.weight.T
    y = block.beta * (((left * right).mean(dim=1, keepdim=True) * value) @ block.w3.weight.T)
    with untouched(model):
        norms = feature_norms(model, batch)
    assert norms.x.shape == norms.y.shape == norms.z.shape == (2, 3, 4)
    assert_norms(norms, x, y.detach().mT.reshape(x.shape), z)
    assert not any(maps.requires_grad for maps in norms)


@pytest.mark.parametrize("name", list(polynl.BLOCKS))
def test_every_block_has_norms(name: str) -> None:
    options = {"latent_dims": 3} if name == "latent_gnn" else {}
    model, batch = classifier(name, **options).train(), torch.stack(images((6, 8), (6, 8)))
    x, z = activation_by_hand(model, batch, BLOCK)
    alpha = model.conv.polynl_before.alpha if name == "poly_nl" else 1.0
    with untouched(model):
        norms = feature_norms(model, batch)
    assert_norms(norms, x, (z - alpha * x).detach(), z)


@pytest.mark.parametrize("side", ["before", "after"])
def test_any_module_that_was_inserted_has_norms(side: str) -> None:
    model = polynl.insert(
        classifier(), lambda channels: nn.Conv2d(channels, channels, 1), **{side: "norm"}, channels=WIDTH
    )
    batch = torch.stack(images((6, 8)))
    x, z = activation_by_hand(model, batch, f"norm.polynl_{side}")
    assert_norms(feature_norms(model, batch), x, z - x, z)
    assert_norms(feature_norms(model, batch, block="norm"), x, z - x, z)


def test_a_block_is_chosen_by_its_name() -> None:
    model = polynl.insert(classifier("poly_nl"), "conv", after="pool", channels=WIDTH)
    batch = torch.stack(images((6, 8)))
    assert feature_norms(model, batch).x.shape == (1, 3, 4)
    assert feature_norms(model, batch, block="pool").x.shape == (1, 1, 1)
    with pytest.raises(ValueError, match=r"no block is called 'poll'. Did you mean pool"):
        feature_norms(model, batch, block="poll")


def test_the_next_layer_does_not_write_into_what_is_measured() -> None:
    model = polynl.insert(classifier(), lambda _: nn.Identity(), before="after", channels=WIDTH)
    batch = torch.stack(images((6, 8)))
    with torch.no_grad():
        x = model.eval()[:5](batch)
    assert (x < 0).any(), "the ReLU in place would have cut something off"
    norms = feature_norms(model, batch)
    assert_close(norms.x, lengths(x), 1e-6)
    assert_close(norms.z, lengths(x), 1e-6)
    assert not norms.y.any()


def test_an_image_has_maps_and_a_list_has_lists() -> None:
    model, (one, other) = classifier("poly_nl"), images((6, 8), (6, 8))
    batch = feature_norms(model, torch.stack([one, other]))
    for found, maps in zip(feature_norms(model, [one, other]), batch, strict=True):
        assert isinstance(found, list)
        assert torch.equal(torch.stack(found), maps)
    for found, maps in zip(feature_norms(model, one), batch, strict=True):
        assert_close(found, maps[0], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_norms_are_of_fp32_and_do_not_overflow(dtype: torch.dtype) -> None:
    block = randomised(PolyNL(3)).to(dtype)
    x = torch.full((1, 3, 2, 2), 300.0, dtype=dtype)
    nn.init.zeros_(block.beta)
    norms = feature_norms(block, x)
    assert norms.x.dtype == torch.float32
    assert_close(norms.x, torch.full((1, 2, 2), 300 * 3**0.5), 1e-6)
    assert norms.z.isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(mode: Any) -> None:
    model, batch = classifier("poly_nl"), torch.stack(images((6, 8)))
    expected = feature_norms(model, batch)
    with mode():
        found = feature_norms(model, batch.clone())
    assert all(torch.equal(maps, wanted) for maps, wanted in zip(found, expected, strict=True))


def test_maps_of_a_detector_are_without_the_padding() -> None:
    model, given, name = (
        with_random_blocks(masks()).train(),
        images(*PADDED),
        "backbone.body.layer3.1.polynl_before",
    )
    block = model.get_submodule(name)
    nn.init.constant_(block.beta, 1e-3)
    x, z = activation_by_hand(model, given, name)
    assert x.shape[-2:] == (4, 4)
    with untouched(model):
        norms = feature_norms(model, given)
    y = (z - block.alpha * x).detach()
    assert_norms(
        FeatureNorms(*(maps[0][None] for maps in norms)), *(maps[:1, :, :, :2] for maps in (x, y, z))
    )
    assert_norms(FeatureNorms(*(maps[1][None] for maps in norms)), *(maps[1:, :, :3] for maps in (x, y, z)))
    assert feature_norms(model, given[0]).z.shape == (4, 2)


def test_maps_of_a_face_detector() -> None:
    one, other = feature_norms(faces(), images(*PADDED)).z
    assert one.shape == (6, 3)  # of 8×8, since 96×48 of 128×128 are not padding
    assert other.shape == (4, 6)


def test_blocks_in_a_resnet_and_in_a_network_of_timm() -> None:
    timm = pytest.importorskip("timm")
    for model in (resnet18(), timm.create_model("test_resnet", pretrained=False)):
        polynl.insert(model, "poly_nl", before="layer3.0", init="random")
        batch = torch.stack(images((64, 96)))
        x, z = activation_by_hand(model, batch, "layer3.0.polynl_before")
        assert_norms(feature_norms(model, batch), x, z - x, z)


def test_clips_have_norms_over_time() -> None:
    model = polynl.insert(get_model("r3d_18"), "poly_nl", before="layer3.1", channels=256, init="random")
    batch = torch.rand(1, 3, 8, 32, 48, generator=torch.Generator().manual_seed(1))
    x, z = activation_by_hand(model, batch, "layer3.1.polynl_before")
    norms = feature_norms(model, batch)
    assert norms.x.shape == (1, 2, 4, 6)
    assert_norms(norms, x, z - x, z)


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Sequential has no block"):
        feature_norms(classifier(), torch.zeros(1, 3, 6, 8))
