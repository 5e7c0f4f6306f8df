"""The forms of one formula agree, in every layout and precision, and cost what they say."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from polynl import TESA, ConvBaseline, NonLocal, PolyNL
from polynl.functional import (
    gram,
    mix,
    mix_by_gram,
    poly_nl,
    preferred_form,
    project,
    unit_length,
)
from polynl.functional.poly_nl import FormCosts, poly_nl_reference


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poly_nl_arguments(c: int, d: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(d, c), (d, c), (c, d)]
    weights = [randn(*shape, seed=i, dtype=dtype) / shape[1] ** 0.5 for i, shape in enumerate(shapes, 1)]
    return [*weights, torch.tensor(0.7, dtype=dtype), torch.tensor(-1.3, dtype=dtype)]


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize(
    "product", [lambda x, m: mix(x, m), lambda x, m: project(x, m[0].T)], ids=["mix", "project"]
)
def test_products_keep_the_layout(product, layout: str) -> None:
    m = randn(1, 5, 4, seed=1).expand(3, -1, -1)
    x = randn(3, 5, 7).mT if layout == "channels_first" else randn(3, 7, 5)
    y = product(x, m)
    torch.testing.assert_close(y, x @ m, rtol=1e-12, atol=1e-12)
    assert (y.mT if layout == "channels_first" else y).is_contiguous()


def test_gram_of_half_precision_neither_overflows_nor_loses_small_terms() -> None:
    x = torch.full((1, 4096, 2), 30.0, dtype=torch.float16)
    assert torch.equal(gram(x), torch.full((1, 2, 2), 900.0))


@pytest.mark.parametrize(("n", "c", "d"), [(1, 1, 1), (3, 60, 60), (63, 17, 17), (500, 12, 4), (49, 64, 16)])
def test_poly_nl_forms_agree_in_value_and_gradients(n: int, c: int, d: int) -> None:
    x = randn(2, n, c).requires_grad_()
    arguments = [t.requires_grad_() for t in poly_nl_arguments(c, d)]
    value = None if c == d else randn(d, c, seed=9).requires_grad_()
    inputs = [x, *arguments] + ([] if value is None else [value])
    outputs = [poly_nl(x, *arguments, value, form) for form in ("direct", "gram", "auto")]
    gradients = [torch.autograd.grad(y, inputs, torch.ones_like(y)) for y in outputs]
    for y, gradient in zip(outputs[1:], gradients[1:], strict=True):
        torch.testing.assert_close(y, outputs[0], rtol=1e-12, atol=1e-12 * outputs[0].abs().max().item())
        for ours, theirs in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12 * theirs.abs().max().item())


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_good_as_the_literal_formula(form: str, dtype: torch.dtype) -> None:
    """At most twice the error of Eq. 6 written in that dtype, against fp64 on the same rounded numbers."""
    x, arguments = randn(1, 200, 16, dtype=dtype), poly_nl_arguments(16, 16, dtype)
    w1, w2, w3, alpha, beta = arguments
    exact = alpha.double() * x[0].double() + beta.double() * poly_nl_reference(x[0], w1.T, w2.T, w3.T)
    literal = alpha * x[0] + beta * (((x[0] @ w1.T) * (x[0] @ w2.T)).mean(dim=0) * x[0]) @ w3.T
    ours = poly_nl(x, *arguments, form=form)[0]
    assert ours.dtype == dtype
    assert (ours.double() - exact).abs().max() <= 2 * (literal.double() - exact).abs().max()


def multiply_adds(block: torch.nn.Module, *shape: int) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        block.eval()(torch.zeros(1, block.channels, *shape))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("shape", "inner", "form"),
    [
        ((1, 49, 2048), 2048, "direct"),
        ((64, 49, 2048), 2048, "direct"),
        ((8, 196, 1024), 1024, "direct"),
        ((1, 50_000, 64), 64, "gram"),
        ((8, 3136, 256), 256, "gram"),
        ((8, 3136, 256), 32, "direct"),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_preferred_form_where_there_is_no_doubt(shape, inner: int, form: str, training: bool) -> None:
    assert preferred_form(torch.empty(shape, device="meta"), inner, training) == form


def test_auto_runs_the_preferred_form() -> None:
    for side, form in ((3, "direct"), (64, "gram")):
        assert preferred_form(torch.empty(1, side * side, 64), 64, training=False) == form
        assert multiply_adds(PolyNL(64), side, side) == multiply_adds(PolyNL(64, form=form), side, side)


@pytest.mark.parametrize("form", ["direct", "gram"])
def test_poly_nl_costs_what_its_docstring_says(form: str) -> None:
    n, c = 32 * 32, 64
    assert (
        multiply_adds(PolyNL(c, form=form), 32, 32)
        == {"direct": 3 * n * c**2, "gram": 2 * n * c**2 + c**3}[form]
    )


def test_dot_product_is_linear_in_positions_in_gram_form_only() -> None:
    def growth(form: str) -> float:
        block = NonLocal(64, form=form)
        return multiply_adds(block, 64, 64) / multiply_adds(block, 32, 32)

    assert 3.5 < growth("gram") <= 4
    assert growth("quadratic") > 12


def test_tesa_orders_agree_and_differ_26_fold_in_cost() -> None:
    x = randn(2, 6, 5, 4)
    blocks = [TESA(6, order=order, init="random").double() for order in ("cheap", "quadratic")]
    blocks[1].load_state_dict(blocks[0].state_dict())
    torch.testing.assert_close(blocks[0](x), blocks[1](x), rtol=1e-12, atol=1e-12)
    products = {}
    for order in ("cheap", "quadratic"):
        with_embeddings = multiply_adds(TESA(256, order=order), 14, 14)
        products[order] = with_embeddings - 4 * 196 * 256**2
    assert round(products["quadratic"] / products["cheap"]) == 26


def test_gram_form_keeps_the_map_and_small_matrices_for_backward() -> None:
    """Of N×C tensors the backward pass of the Gram form holds X alone; the direct form holds four."""

    def kept(form: str) -> int:
        x = torch.randn(1, 32, 40, 40, requires_grad=True)
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            PolyNL(32, form=form, init="random")(x)
        return sum(size >= x.numel() * x.element_size() for size in sizes.values())

    assert kept("gram") == 1
    assert kept("direct") == 4


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_symmetric_gram_by_blocks(layout: str) -> None:
    """Widths at which only the blocks above the diagonal are multiplied; one is not divisible by 4."""
    for c in (256, 301):
        x = randn(2, c, 320).mT if layout == "channels_first" else randn(2, 320, c)
        m = randn(2, c, c, seed=1)
        z = mix_by_gram(x, lambda g, m=m: g @ m)
        expected = x + x @ (x.mT @ x / 320 @ m)
        torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_of_mix_by_gram(create_graph: bool) -> None:
    """Both ways of adding up the gradients of X: in place, and differentiably."""
    m, cotangent = randn(5, 5, seed=1), randn(2, 9, 5, seed=2)
    for x in (randn(2, 9, 5), randn(2, 5, 9).mT):
        x.requires_grad_()
        kept = cotangent.clone()
        ours = torch.autograd.grad(mix_by_gram(x, lambda g: g @ m), x, cotangent, create_graph=create_graph)
        expected = torch.autograd.grad(x + x @ (x.mT @ x / 9 @ m), x, cotangent)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(cotangent, kept)


def test_gram_form_compiles_as_one_graph_where_it_goes_by_blocks() -> None:
    block = PolyNL(256, form="gram", init="random")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    try:
        for side in (17, 20):
            x = randn(1, 256, side, side, dtype=torch.float32).requires_grad_()
            inputs = [x, *block.parameters()]
            ways = [torch.autograd.grad(z, inputs, torch.ones_like(z)) for z in (compiled(x), block(x))]
            torch.testing.assert_close(*ways, rtol=1e-5, atol=1e-4)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("mode", ["embedded_gaussian", "gaussian"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("inner", [4, 24])
def test_softmax_modes_never_store_the_scores(mode: str, layout: torch.memory_format, inner: int) -> None:
    """No operator of a training step returns N×N numbers: torch's fused attention is really taken."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple) else (result,):
                self.size = max(self.size, t.numel() if isinstance(t, Tensor) else 0)
            return result

    x = torch.randn(1, 16, 20, 20).to(memory_format=layout).requires_grad_()
    block = NonLocal(16, mode=mode, inner_channels=inner, init="random")
    with Largest() as largest:
        block(x).sum().backward()
    assert largest.size <= 400 * max(16, inner)


def test_preferred_form_weighs_passes_and_reduction() -> None:
    """With every multiply-add alike, the thresholds are those of the table in its docstring."""
    plain, half_price = FormCosts(1, 1, 0), FormCosts(0.5, 1, 0)
    maps = {n: torch.empty(1, n, 100, device="meta") for n in (70, 80, 90, 110)}
    assert preferred_form(maps[90], 100, False, plain) == "direct"
    assert preferred_form(maps[110], 100, False, plain) == "gram"
    assert preferred_form(maps[70], 100, True, plain) == "direct"
    assert preferred_form(maps[80], 100, True, plain) == "gram"
    assert preferred_form(maps[90], 50, False, half_price) == "direct"
    assert preferred_form(maps[110], 50, False, half_price) == "gram"
    assert preferred_form(maps[110], 100, False, FormCosts(1, 1, -100)) == "direct"


def test_dot_product_takes_the_way_with_fewer_multiply_adds() -> None:
    c, inner, block = 64, 32, NonLocal(64)
    projections, matrices = 4 * c * inner + 2 * inner**2, 2 * c**2
    assert multiply_adds(block, 4, 4) == 16 * projections
    assert multiply_adds(block, 64, 64) == 4096 * matrices + 2 * c**3 + 2 * c**2 * inner


def test_unit_length() -> None:
    short = torch.tensor([[3e-11, 4e-11]], dtype=torch.float64)
    torch.testing.assert_close(unit_length(short, -1), torch.tensor([[0.6, 0.8]], dtype=torch.float64))
    for dtype in (torch.float64, torch.float16):
        assert torch.equal(unit_length(torch.zeros(1, 2, dtype=dtype), -1), torch.zeros(1, 2, dtype=dtype))


def test_precision_of_products_does_not_touch_the_skip_connection() -> None:
    """With products allowed to round, αX is added outside of them, and the values stay the same."""
    x, block = torch.randn(1, 32, 16, 16), PolyNL(32, form="gram", init="random")
    expected, before = block(x), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        torch.testing.assert_close(block(x), expected, rtol=1e-2, atol=1e-2)
        assert torch.equal(PolyNL(32, form="gram")(x), x)
    finally:
        torch.set_float32_matmul_precision(before)


def test_initial_matrices_keep_the_variance() -> None:
    block = PolyNL(256, reduction=4, init="random")
    assert block.w1.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert block.w3.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


def test_a_convolution_stays_in_autocasts_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = ConvBaseline(16, init="random")(torch.randn(1, 16, 5, 5))
    assert torch.equal(z, z.bfloat16().float())
