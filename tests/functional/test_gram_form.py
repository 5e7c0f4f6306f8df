"""The Gram form of Poly-NL as one node of the graph: its backward pass is written by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from polynl import PolyNL
from polynl.functional import mix, outer_sum, poly_nl, preferred_form
from polynl.functional.gram import LARGE
from polynl.functional.poly_nl import poly_nl_reference

layouts = pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
widths = pytest.mark.parametrize("with_value", [False, True], ids=["c", "w_value"])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def laid_out(b: int, n: int, c: int, layout: str) -> Tensor:
    return randn(b, c, n).mT if layout == "channels_first" else randn(b, n, c)


def weights_of(c: int, with_value: bool, scalar: tuple[int, ...] = ()) -> list[Tensor]:
    d = c // 2 if with_value else c
    shapes = [(d, c), (d, c), (c, d)] + [(d, c)] * with_value
    w1, w2, w3, *value = (randn(*shape, seed=i) / shape[1] ** 0.5 for i, shape in enumerate(shapes, 1))
    alpha, beta = torch.full(scalar, 0.7).double(), torch.full(scalar, -1.3).double()
    return [w1, w2, w3, alpha, beta, *value]


def formula(
    x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, alpha: Tensor, beta: Tensor, *value: Tensor
) -> Tensor:
    """Eq. 6, for autograd to differentiate."""
    pooled = ((x @ w1.T) * (x @ w2.T)).mean(dim=1, keepdim=True)
    return alpha * x + beta * (pooled * (x @ value[0].T if value else x)) @ w3.T


def gram_form(x: Tensor, *weights: Tensor) -> Tensor:
    return poly_nl(x, *weights[:5], *weights[5:] or (None,), form="gram")


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    scale = max(1.0, expected.detach().abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def assert_gradients(inputs: list[Tensor]) -> None:
    """Of all inputs that need one; the others stay without."""
    wanted = [t for t in inputs if t.requires_grad]
    actual, expected = gram_form(*inputs), formula(*inputs)
    assert type(actual.grad_fn).__name__ == "_GramFormBackward"
    assert_close(actual, expected)
    cotangent = randn(*expected.shape, seed=9)
    kept = cotangent.clone()
    ours, theirs = (torch.autograd.grad(z, wanted, cotangent) for z in (actual, expected))
    assert torch.equal(cotangent, kept)
    for found, literal in zip(ours, theirs, strict=True):
        assert found.shape == literal.shape
        assert_close(found, literal)


@pytest.mark.parametrize(("n", "c"), [(7, 4), (50, 12), (320, 300)])
@pytest.mark.parametrize("b", [1, 3])
@layouts
@widths
def test_values_and_gradients_are_those_of_the_formula(
    n: int, c: int, b: int, layout: str, with_value: bool
) -> None:
    """From 256 channels, the Gram matrix is computed by blocks."""
    inputs = [laid_out(b, n, c, layout), *weights_of(c, with_value)]
    assert_gradients([t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("scalar", [(), (1,)], ids=str)
def test_scales_may_be_scalars_or_vectors_of_one(scalar: tuple[int, ...]) -> None:
    inputs = [laid_out(2, 30, 6, "channels_first"), *weights_of(6, True, scalar)]
    assert_gradients([t.requires_grad_() for t in inputs])


@layouts
@widths
@pytest.mark.parametrize("frozen", [(0,), (1, 4), (2, 3, 5), (0, 1, 2, 3, 4), (1, 2, 3, 4, 5)], ids=str)
def test_inputs_that_need_no_gradient_are_left_out(
    frozen: tuple[int, ...], layout: str, with_value: bool
) -> None:
    inputs = [laid_out(2, 30, 6, layout), *weights_of(6, with_value)]
    assert_gradients([t.requires_grad_(i not in frozen) for i, t in enumerate(inputs)])


@layouts
@widths
def test_second_derivatives(layout: str, with_value: bool) -> None:
    inputs = [t.requires_grad_() for t in (laid_out(2, 9, 4, layout), *weights_of(4, with_value))]
    assert torch.autograd.gradgradcheck(gram_form, inputs, fast_mode=True)
    found = []
    for form in (gram_form, formula):
        first = torch.autograd.grad(form(*inputs).square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), inputs))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, 1e-11)


@widths
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own jvp warns
def test_forward_mode_and_vmap_take_the_formula_apart(with_value: bool) -> None:
    x, weights = laid_out(3, 30, 6, "channels_first"), weights_of(6, with_value)
    direction = x.roll(1, dims=-1)
    for ours, theirs in zip(
        jvp(lambda x: gram_form(x, *weights), (x,), (direction,)),
        jvp(lambda x: formula(x, *weights), (x,), (direction,)),
        strict=True,
    ):
        assert_close(ours, theirs)
    weights = [weight.requires_grad_() for weight in weights]
    with torch.autograd.forward_ad.dual_level():
        dual = gram_form(torch.autograd.forward_ad.make_dual(x, direction), *weights)
        assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, theirs)

    weights = [weight.detach() for weight in weights]

    def loss(form, w1: Tensor, sample: Tensor) -> Tensor:
        return form(sample[None], w1, *weights[1:]).square().sum()

    ours, theirs = (
        vmap(grad(lambda w1, sample, form=form: loss(form, w1, sample)), in_dims=(None, 0))(weights[0], x)
        for form in (gram_form, formula)
    )
    assert_close(ours, theirs)


def test_compiled_values_and_gradients_are_the_same() -> None:
    inputs = [t.requires_grad_() for t in (laid_out(2, 30, 6, "channels_first"), *weights_of(6, True))]
    compiled = torch.compile(gram_form, fullgraph=True, backend="aot_eager")
    try:
        ours, theirs = compiled(*inputs), formula(*inputs)
        assert_close(ours, theirs)
        for found, literal in zip(
            torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs), strict=True
        ):
            assert_close(found, literal)
    finally:
        torch.compiler.reset()


def test_parametrized_weights_get_their_gradient() -> None:
    """The block finds weights that are computed, such as by weight norm, and not stored."""
    plain = PolyNL(6, form="gram", init="random").double()
    normed = PolyNL(6, form="gram").double()
    normed.load_state_dict(plain.state_dict())
    torch.nn.utils.parametrizations.weight_norm(normed.w1)
    x = randn(2, 6, 5, 5)
    assert_close(normed(x), plain(x))
    normed(x).square().sum().backward()
    assert all(p.grad is not None for p in normed.w1.parameters())
    assert_close(functional_call(plain, {"alpha": torch.tensor(2.0).double()}, (x,)), plain(x) + x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_half_precision_on_cpus_takes_the_direct_form(dtype: torch.dtype, training: bool) -> None:
    x = torch.zeros(1, 50_000, 64, dtype=dtype)
    assert preferred_form(x, 64, training) == "direct"
    assert preferred_form(x.float(), 64, training) == "gram"
    assert preferred_form(x.to("meta"), 64, training) == "gram"


@pytest.mark.parametrize("n", [LARGE // 32 - 1, LARGE // 32], ids=["product", "convolution"])
@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_one_large_map_is_mixed_by_a_convolution_with_the_same_values(n: int, layout: str) -> None:
    x, m = laid_out(1, n, 32, layout).requires_grad_(), randn(1, 32, 5, seed=1).requires_grad_()
    with torch.profiler.profile() as profile:
        y = mix(x, m)
    convolved = any("conv" in event.key for event in profile.key_averages())
    assert convolved is (n == LARGE // 32 and layout == "channels_first")
    expected = torch.bmm(x, m)
    assert_close(y, expected)
    assert (y.mT if layout == "channels_first" else y).is_contiguous()
    cotangent = randn(*y.shape, seed=2)
    for ours, theirs in zip(
        torch.autograd.grad(y, [x, m], cotangent),
        torch.autograd.grad(expected, [x, m], cotangent),
        strict=True,
    ):
        assert_close(ours, theirs)


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("n", [LARGE // 16, LARGE // 16 + 3], ids=["in pieces", "whole"])
def test_sums_over_a_large_map_are_the_same_in_pieces(n: int, layout: str) -> None:
    x, y = laid_out(1, n, 16, layout), randn(1, n, 16, seed=3)
    with torch.profiler.profile() as profile:
        found = outer_sum(x, y)
    assert any(event.key == "aten::sum" for event in profile.key_averages()) is (n == LARGE // 16)
    assert_close(found, torch.bmm(x.mT, y))


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("form", ["direct", "gram", "auto"])
@pytest.mark.parametrize(
    ("shape", "last"),
    [
        ((4, 7), False),
        ((4, 7), True),
        ((3,), False),
        ((2, 3, 5), False),
        ((LARGE // 8, 1), False),
        ((LARGE // 16, 2), True),
        ((LARGE // 8 + 1, 1), False),
    ],
    ids=str,
)
def test_a_single_map_without_gradients_has_the_literal_values(
    shape: tuple[int, ...], last: bool, form: str, reduction: int
) -> None:
    """It takes a way of its own, whose results a batch of the same map twice is compared with as well."""
    block = PolyNL(8, form=form, reduction=reduction, init="random", dtype=torch.float64)
    torch.nn.init.constant_(block.alpha, 0.7)
    x = randn(1, 8, *shape)
    if last:
        x = x.to(memory_format=torch.channels_last)
    kept = x.clone()
    with torch.no_grad():
        z = block(x)
        twice = block(torch.cat([x, x]))
    w1, w2, w3, alpha, beta, value = block._bare_parameters()
    folded = x[0].flatten(1).T
    y = poly_nl_reference(folded, w1.T, w2.T, w3.T, None if value is None else value.T)
    assert_close(z, (alpha * folded + beta * y).T.reshape(x.shape))
    assert_close(twice[1:], z)
    assert torch.equal(x, kept)
    assert z.stride() == x.stride()


def test_what_is_no_single_map_without_gradients_takes_the_common_way() -> None:
    block = PolyNL(8, init="random")
    with torch.no_grad():
        assert block._of_one(torch.randn(1, 8, 4, 4)) is not None
        for other in (
            torch.randn(2, 8, 4, 4),
            torch.randn(1, 9, 4, 4),
            torch.randn(1, 8),
            torch.randn(1, 8, 4, 4, dtype=torch.float64),
            torch.randn(1, 8, 4, 8)[..., ::2],
            torch.randn(1, 8, 0, 4),
        ):
            assert block._of_one(other) is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert block._of_one(torch.randn(1, 8, 4, 4)) is None
        assert block.bfloat16()._of_one(torch.randn(1, 8, 4, 4).bfloat16()) is None


@pytest.mark.parametrize("form", ["direct", "gram", "auto"])
def test_batches_of_one_parameter_without_gradients(form: Any) -> None:
    block, x = PolyNL(4, form=form, init="random").double(), randn(1, 4, 3, 3)
    alphas = randn(3, 1)
    with torch.no_grad():
        found = torch.vmap(lambda alpha: functional_call(block, {"alpha": alpha}, (x,)))(alphas)
        for alpha, z in zip(alphas, found, strict=True):
            assert_close(z, block(x) + (alpha - block.alpha) * x)


def test_batches_of_gradients_of_one_map() -> None:
    block, x = PolyNL(4, form="gram", init="random").double(), randn(1, 4, 3, 3).requires_grad_()
    cotangents = randn(3, 1, 4, 3, 3)
    (batched,) = torch.autograd.grad(block(x), x, cotangents, is_grads_batched=True)
    for cotangent, gradient in zip(cotangents, batched, strict=True):
        assert_close(gradient, torch.autograd.grad(block(x), x, cotangent)[0])


def test_scales_that_are_parametrized() -> None:
    block, x = PolyNL(4, init="random").double(), randn(2, 4, 3, 3)
    expected = block(x)
    torch.nn.utils.parametrize.register_parametrization(block, "beta", torch.nn.Identity())
    assert_close(block(x), expected)
    with torch.no_grad():
        assert_close(block(x[:1]), expected[:1])
