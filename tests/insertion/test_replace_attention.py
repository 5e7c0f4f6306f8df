"""Poly-SA: the literal formula, positions on other grids, and ViTs of timm."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polynl
from polynl import PolySA
from polynl.functional.poly_sa import poly_sa_reference


def random_layer(**options: Any) -> PolySA:
    torch.manual_seed(0)
    layer = PolySA(12, **{"num_heads": 3, "grid": (2, 3), "prefix_tokens": 1, **options}).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def literal(layer: PolySA, x: Tensor, p1: Tensor, p2: Tensor) -> Tensor:
    """The reference, sample by sample and head by head."""
    norm, results = layer.pooled_norm, []
    for sample in x:
        q, k, v = (part.split(4, dim=1) for part in layer.qkv(sample).split(12, dim=1))
        heads = [
            poly_sa_reference(q[h], k[h], v[h], p1[h], p2[h], norm.weight, norm.bias, norm.eps)
            for h in range(3)
        ]
        results.append(layer.proj(torch.cat(heads, dim=1)))
    return torch.stack(results)


def test_values_and_gradients_are_those_of_the_formula() -> None:
    layer, x = random_layer(), torch.randn(2, 7, 12, dtype=torch.float64)
    found, expected = layer(x), literal(layer, x, layer.p1, layer.p2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(found)
    parameters = list(layer.parameters())
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), parameters),
        torch.autograd.grad((expected * weights).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("grid", "given"), [((4, 6), None), ((3, 2), (3, 2)), ((5, 4), (5, 4))])
def test_weights_of_positions_are_interpolated(grid: tuple[int, int], given: tuple[int, int] | None) -> None:
    layer, x = random_layer().float(), torch.randn(2, 1 + grid[0] * grid[1], 12)
    layer.input_grid = given
    maps = (p[None, :, 1:].view(1, 3, 2, 3) for p in (layer.p1, layer.p2))
    resized = (F.interpolate(learned, grid, mode="bicubic").flatten(2)[0] for learned in maps)
    p1, p2 = (torch.cat([p[:, :1], new], 1) for p, new in zip((layer.p1, layer.p2), resized, strict=True))
    torch.testing.assert_close(
        layer(x).double(), literal(layer.double(), x.double(), p1, p2), rtol=1e-4, atol=1e-4
    )


def test_positions_matter_and_the_prefix_has_its_own() -> None:
    layer, x = random_layer(), torch.randn(1, 7, 12, dtype=torch.float64)
    assert not torch.allclose(layer(x).flip(1), layer(x.flip(1)))
    nn.init.ones_(layer.p1)
    nn.init.ones_(layer.p2)
    torch.testing.assert_close(layer(x).flip(1), layer(x.flip(1)))


def test_half_precision_does_not_overflow() -> None:
    layer = PolySA(32, num_heads=2, grid=(8, 8)).half()
    assert layer(300 * torch.randn(1, 64, 32).half()).isfinite().all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_heads": 5}, "num_heads=5: expected a divisor of channels=12"),
        ({"grid": 3}, "grid=3: expected a height and a width"),
        ({"grid": (2, 0)}, "grid=0: expected a whole number above 0"),
        ({"prefix_tokens": -1}, "prefix_tokens=-1: expected a whole number, 0 or above"),
        ({"prefix_tokens": True}, "prefix_tokens=True: expected"),
    ],
)
def test_options_are_checked(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        random_layer(**options)


def test_what_it_cannot_take_is_said() -> None:
    layer = random_layer()
    with pytest.raises(ValueError, match=r"10 patches do not have .* \(2, 3\): .* prefix_tokens .*now 1"):
        layer(torch.randn(1, 11, 12, dtype=torch.float64))
    for shape in [(7, 12), (1, 7, 13), (1, 1, 12), (1, 0, 12)]:
        expected = f"got a tensor of shape {shape}; expected tokens (b, n, c) with c = 12 and n above 1, "
        with pytest.raises(ValueError, match=re.escape(expected)):
            layer(torch.randn(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="it takes neither attn_mask nor is_causal"):
        layer(torch.randn(1, 7, 12, dtype=torch.float64), is_causal=True)


# In timm's ViTs


def vit(name: str = "test_vit", **options: Any) -> nn.Module:
    timm = pytest.importorskip("timm", reason="needs the extra 'timm'")
    return timm.create_model(name, img_size=64, num_classes=5, **options)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_vit_of_timm_is_trained_and_takes_other_sizes(qk_norm: bool) -> None:
    model = vit(dynamic_img_size=True, qk_norm=qk_norm)
    before = model.state_dict()
    polynl.replace_attention(model, "poly_sa")
    after = model.state_dict()
    assert sum(isinstance(module, PolySA) for module in model.modules()) == 6
    assert all(torch.equal(after[key], value) for key, value in before.items())
    added = {key.rpartition("attn.")[2] for key in after.keys() - before.keys()}
    assert added == {"p1", "p2", "pooled_norm.weight", "pooled_norm.bias"}
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model(torch.randn(2, 3, 96, 96)).shape == (2, 5)


@pytest.mark.parametrize("names", ["blocks.5.attn", ["blocks.5.attn"]])
def test_some_of_its_layers_are_replaced(names: str | list[str]) -> None:
    model = polynl.replace_attention(vit(), "poly_sa", names=names)
    assert [name for name, module in model.named_modules() if isinstance(module, PolySA)] == ["blocks.5.attn"]


@pytest.mark.parametrize(
    ("name", "options", "keys", "expected"),
    [
        ("test_vit", {}, {"attention": "poly_nl"}, "attention='poly_nl': expected one of poly_sa"),
        ("test_vit", {}, {"names": ["blocks.0"]}, "'blocks.0' is not an Attention of timm"),
        ("test_vit", {}, {"names": []}, "names is empty: name an Attention of timm"),
        ("test_vit", {"scale_attn_norm": True}, {}, "blocks.0.attn: an attention with a norm cannot"),
    ],
)
def test_what_cannot_be_replaced_is_said_and_left(
    name: str, options: dict[str, Any], keys: dict[str, Any], expected: str
) -> None:
    model = vit(name, **options)
    with pytest.raises(ValueError, match=expected):
        polynl.replace_attention(model, **{"attention": "poly_sa", **keys})
    assert not any(isinstance(module, PolySA) for module in model.modules())


def test_a_model_without_attention_or_grid() -> None:
    with pytest.raises(ValueError, match="Linear has no Attention of timm"):
        polynl.replace_attention(nn.Linear(2, 2), "poly_sa")
    with pytest.raises(ValueError, match=r"Sequential does not say its grid of patches: pass grid="):
        polynl.replace_attention(nn.Sequential(vit()), "poly_sa")


def test_the_example_in_the_docs_runs(run_example: Any) -> None:
    pytest.importorskip("timm", reason="needs the extra 'timm'")
    names = run_example("timm", "blocks.md")
    assert names["logits"].shape == names["larger"].shape
