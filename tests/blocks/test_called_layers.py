"""Layers that are hooked, wrapped, parametrized or sharded are called; only bare ones are read."""

import copy
from typing import Any

import pytest
import torch
from cases import CASES, CHANNELS, Case, assert_close, image
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from polynl import PolyNL

# Small and large maps are computed in different ways, and single ones without gradients in a third.
SIZES = [(2, CHANNELS, 4, 4), (2, CHANNELS, 24, 24), (1, CHANNELS, 24, 24)]
WITH_LAYERS = [case for case in CASES if case.name not in ("polynomial", "conv", "grn")]
every_case_with_layers = pytest.mark.parametrize("case", WITH_LAYERS, ids=str)


def layers_of(block: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in block.named_modules() if name and [*m.parameters(recurse=False)]}


@every_case_with_layers
@pytest.mark.parametrize("training", [True, False])
def test_a_hook_on_any_layer_sees_what_passes(case: Case, training: bool) -> None:
    block = case.build(torch.float64)
    expected = copy.deepcopy(block)
    called: list[str] = []
    for name, layer in layers_of(block).items():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    for shape in SIZES:
        x = image(case, *shape, dtype=torch.float64)
        called.clear()
        with torch.set_grad_enabled(training):
            assert_close(block(x), expected(x))
        assert set(called) == set(layers_of(block))


def changed(layer: nn.Module, args: Any, y: Tensor) -> Tensor:
    """A change that neither a softmax over positions nor a norm over channels undoes."""
    return 2 * y + torch.linspace(1, 3, y.shape[-1], dtype=y.dtype)


@every_case_with_layers
def test_a_hook_that_changes_an_output_changes_the_block(case: Case) -> None:
    for name in layers_of(case.build()):
        block = case.build(torch.float64)
        hooked = copy.deepcopy(block)
        hooked.get_submodule(name).register_forward_hook(changed)
        for shape in SIZES:
            x = image(case, *shape, dtype=torch.float64)
            assert (hooked(x) - block(x)).abs().max() > 1e-6, (name, shape)


class Twice(nn.Module):
    """As an adapter wraps a layer; it has no weight of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Tensor:
        return 2 * self.layer(*args)


@pytest.mark.parametrize("form", ["direct", "gram", "auto"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_a_wrapped_layer_in_every_form_and_size(form: Any, shape: tuple[int, ...]) -> None:
    block = PolyNL(CHANNELS, form=form, init="random").double()
    x = torch.randn(shape, dtype=torch.float64)
    doubled = block(x) + (block(x) - x)  # Y is linear in W₂
    block.w2 = Twice(block.w2)  # type: ignore[assignment]
    with torch.set_grad_enabled(shape[0] > 1):
        assert_close(block(x), doubled)
        assert_close(block.attend(x, block.summarize(x)), doubled)


def test_a_layer_whose_forward_was_replaced_is_called() -> None:
    block = PolyNL(CHANNELS, init="random").double().requires_grad_(False)
    x = torch.randn(1, CHANNELS, 16, 16, dtype=torch.float64)
    block.w3.forward = lambda x: torch.zeros_like(x)  # type: ignore[method-assign]
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("change", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_parametrized_layers(change: Any) -> None:
    plain = PolyNL(CHANNELS, form="gram", init="random").double().eval()
    block = copy.deepcopy(plain)
    change(block.w1)
    plain.w1.weight.data.copy_(block.w1.weight)
    x = torch.randn(2, CHANNELS, 16, 16, dtype=torch.float64)
    assert_close(block(x), plain(x))
    block(x).sum().backward()
    assert all(p.grad is not None for p in block.w1.parameters())


def test_pruned_layers() -> None:
    block = PolyNL(CHANNELS, init="random").double()
    prune.l1_unstructured(block.w1, "weight", amount=0.5)
    x = torch.randn(2, CHANNELS, 16, 16, dtype=torch.float64)
    block(x).sum().backward()
    gradient = block.w1.weight_orig.grad
    assert isinstance(gradient, Tensor)
    assert gradient.count_nonzero() == gradient.numel() // 2
