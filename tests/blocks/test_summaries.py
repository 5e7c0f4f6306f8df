"""A block is a summary, which adds up over positions, and the use of it at every position."""

import copy

import pytest
import torch
from cases import (
    CASES,
    CHANNELS,
    DEFAULTS,
    SUMMARIZING,
    Case,
    assert_all_close,
    assert_close,
    image,
    tensors_of,
    with_gradients,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import polynl
from polynl import Block, Summary
from polynl.functional import KeysAndValues

every_case = pytest.mark.parametrize("case", SUMMARIZING, ids=str)
every_pointwise_case = pytest.mark.parametrize(
    "case", [case for case in SUMMARIZING if case.pointwise], ids=str
)


def map_of(case: Case, rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A batch of two maps that can be cut along axis -2, at even rows where keys are sub-sampled by 2."""
    x = image(case, 2, CHANNELS, rows, 6, dtype=dtype)
    return x.flatten(2).unsqueeze(-1) if case.equivariant and 2 in case.axes else x


def cut(case: Case, x: Tensor, sizes: list[int]) -> list[Tensor]:
    """Parts of the sizes, in units of two rows where positions cannot be permuted; the last has the rest."""
    sizes = sizes if case.equivariant else [2 * min(size, 1) for size in sizes]
    return list(x.split([*sizes, x.shape[-2] - sum(sizes)], dim=-2))


@pytest.mark.parametrize("case", [case for case in CASES if case not in SUMMARIZING], ids=str)
def test_tesa_has_no_summary(case: Case) -> None:
    block, x, mask = case.build(), image(case, 2, CHANNELS, 5, 4), torch.ones(2, 5, 4)
    for call in (
        lambda: block.summarize(x),
        lambda: block(x, mask),
        lambda: block(x, context=x),
        lambda: block.attend(x, Summary(torch.ones(2), {})),
    ):
        with pytest.raises(ValueError, match=r"^TESA has no summary, and so no mask or context[^\n]*$"):
            call()


@every_case
@pytest.mark.parametrize("side", [(5, 3), (12, 12)], ids=str)
def test_a_block_attends_to_its_own_summary(case: Case, side: tuple[int, int]) -> None:
    """Also at the size at which blocks take their Gram forms."""
    block, x = case.build(torch.float64), image(case, 2, CHANNELS, *side, dtype=torch.float64)
    assert_all_close(
        with_gradients(block, lambda x: block.attend(x, block.summarize(x)), x),
        with_gradients(block, block, x),
    )


@every_case
@pytest.mark.parametrize("sizes", [[], [1], [5, 0, 7], [0], [1] * 23], ids=str)
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_summaries_of_parts_add_up_to_that_of_the_map(case: Case, sizes: list[int], order: int) -> None:
    if not case.equivariant:
        sizes = sizes[:3]
    block, x = case.build(torch.float64), map_of(case, 8)
    assert_all_close(
        with_gradients(
            block,
            lambda x: block.attend(x, sum(block.summarize(part) for part in cut(case, x, sizes)[::order])),
            x,
        ),
        with_gradients(block, block, x),
    )


@every_case
def test_adding_is_associative(case: Case) -> None:
    block, x = case.build(torch.float64), map_of(case, 8)
    a, b, c = (block.summarize(part) for part in cut(case, x, [5, 7]))
    left, right = (a + b) + c, a + (b + c)
    assert_all_close(tensors_of(left), tensors_of(right))


@every_case
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_part_without_positions_changes_nothing(case: Case, axis: int) -> None:
    block, x = case.build(torch.float64), image(case, 2, CHANNELS, 8, 6, dtype=torch.float64)
    whole, empty = block.summarize(x), block.summarize(x.narrow(axis, 0, 0))
    line = block.summarize(x.flatten(2)[..., :0])  # has other strides
    assert not empty.count.any()
    for both in (whole + empty, empty + whole, sum([empty, whole, line])):
        assert torch.equal(both.count, whole.count)
        for name, part in whole.parts.items():
            assert torch.equal(both.parts[name], part)


@every_case
def test_attending_to_nothing_is_finite(case: Case) -> None:
    block, x = case.build(torch.float64), map_of(case, 8)
    empty = block.summarize(x[..., :0, :])
    for found in with_gradients(block, lambda x: block.attend(x, empty), x):
        assert found.isfinite().all()


@every_case
def test_samples_do_not_see_each_other(case: Case) -> None:
    block, x = case.build(torch.float64), map_of(case, 8)
    mask = torch.rand(x[:, 0].shape, generator=torch.Generator().manual_seed(1)).double().round()
    together, masked = block.attend(x, block.summarize(x)), block(x, mask)
    for i in range(len(x)):
        one = x[i : i + 1]
        assert_close(block.attend(one, block.summarize(one)), together[i : i + 1])
        assert_close(block(one, mask[i : i + 1]), masked[i : i + 1])


@every_pointwise_case
def test_attending_tile_by_tile_gives_the_whole(case: Case) -> None:
    block, x = case.build(torch.float64), image(case, 2, CHANNELS, 8, 6, dtype=torch.float64)

    def by_tiles(x: Tensor) -> Tensor:
        summary = sum(block.summarize(tile) for tile in x.split(2, dim=-2))
        rows = [
            torch.cat([block.attend(tile, summary) for tile in row.split([1, 5], -1)], -1)
            for row in x.split([5, 3], dim=-2)
        ]
        return torch.cat(rows, dim=-2)

    assert_all_close(with_gradients(block, by_tiles, x), with_gradients(block, block, x))


# Precision


def assert_sums_are_fp32(summary: Summary, keys: torch.dtype) -> None:
    """Keys and values themselves are in the dtype in which they were computed."""
    assert summary.count.dtype == torch.float32
    for part in summary.parts.values():
        assert part.dtype == (keys if isinstance(summary, KeysAndValues) else torch.float32)
        assert part.isfinite().all()


@every_case
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_summaries_under_autocast_are_fp32_and_finite_for_large_input(case: Case, half: torch.dtype) -> None:
    block, mask = case.build(), torch.ones(image(case, 2, CHANNELS, 9, 7)[:, 0].shape, dtype=torch.bool)
    for x in (30 * image(case, 2, CHANNELS, 9, 7), (30 * image(case, 2, CHANNELS, 9, 7)).to(half)):
        with torch.autocast("cpu", dtype=half):
            summary = block.summarize(x)
            outputs = [block.attend(x, summary), block(x, mask), block(x, context=x)]
        assert_sums_are_fp32(summary, torch.float32)
        for z in outputs:
            assert z.dtype == x.dtype
            assert z.isfinite().all()


@every_case
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_summaries_of_half_precision_modules(case: Case, half: torch.dtype) -> None:
    block = case.build().to(half)
    assert_sums_are_fp32(block.summarize((300 * image(case, 2, CHANNELS, 9, 7)).to(half)), half)
    x = (0.5 * image(case, 2, CHANNELS, 5, 4)).to(half)
    mask = torch.ones_like(x[:, 0], dtype=torch.bool)
    expected = copy.deepcopy(block).float()(x.float())
    for z in (block.attend(x, block.summarize(x)), block(x, mask)):
        assert z.dtype == half
        assert_close(z.float(), expected, 40 * torch.finfo(half).eps)


# Compilers, exporters and transforms

# One of each kind of summary: compiling takes seconds.
KINDS = [case for case in SUMMARIZING if case in DEFAULTS or case.options.get("mode") == "concatenation"]


one_of_each_kind = pytest.mark.parametrize("case", KINDS, ids=str)


@one_of_each_kind
@pytest.mark.filterwarnings(
    r"ignore:The \.grad attribute of a Tensor that is not a leaf"
)  # the compiler looks
def test_one_graph_each_under_compile_with_changing_sizes(case: Case) -> None:
    block = case.build()
    options = {"fullgraph": True, "dynamic": True, "backend": "eager"}
    summarize, attend = torch.compile(block.summarize, **options), torch.compile(block.attend, **options)
    call = torch.compile(block, **options)
    try:
        for side in ((5, 4), (16, 16)):
            x = image(case, 2, CHANNELS, *side).requires_grad_()
            mask = torch.ones_like(x[:, 0], dtype=torch.bool)
            mask[..., -1] = False
            assert_close(attend(x, summarize(x)), block.attend(x, block.summarize(x)), 1e-5)
            actual, expected = call(x, mask), block(x, mask)
            assert_close(actual, expected, 1e-5)
            ours, theirs = (torch.autograd.grad(z.sum(), x)[0] for z in (actual, expected))
            assert_close(ours, theirs, 1e-5)
    finally:
        torch.compiler.reset()


class Summarizing(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Summary:
        return self.block.summarize(x)


class Attending(Summarizing):
    def forward(self, x: Tensor, summary: Summary) -> Tensor:
        return self.block.attend(x, summary)


@one_of_each_kind
def test_summaries_go_out_of_and_into_exported_programs(case: Case) -> None:
    block, x = case.build(), image(case, 2, CHANNELS, 6, 8)
    summary = block.summarize(x).detach()
    found = torch.export.export(Summarizing(block), (x,)).module()(x)
    assert type(found) is type(summary)
    assert_all_close(tensors_of(found), tensors_of(summary), 1e-5)
    program = torch.export.export(Attending(block), (x, summary))
    assert_close(program.module()(x, found), block(x), 1e-5)


@one_of_each_kind
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own jvp warns
def test_torch_func_differentiates_summaries(case: Case) -> None:
    block, x = case.build(torch.float64), image(case, 3, CHANNELS, 4, 2, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in block.named_parameters()}

    class InTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return self.block.attend(x, self.block.summarize(x))

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        named = {f"block.{name}": p for name, p in parameters.items()}
        return functional_call(InTwo(), named, (sample.unsqueeze(0),)).square().mean()

    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        expected = torch.autograd.grad(block(sample[None]).square().mean(), list(block.parameters()))
        assert_all_close([batched[name][i] for name in parameters], expected)
    direction = x.roll(1, dims=1)
    _, forward = jvp(InTwo(), (x,), (direction,))
    assert_close(forward, torch.autograd.functional.jvp(block, x, direction)[1])


# Construction


@pytest.mark.parametrize("case", CASES, ids=str)
def test_device_and_dtype_are_those_of_all_parameters(case: Case) -> None:
    plain = polynl.build_block(case.name, CHANNELS, **case.options)
    for given in ({"device": "meta"}, {"dtype": torch.float64}, {"device": "meta", "dtype": torch.float64}):
        block = polynl.build_block(case.name, CHANNELS, **case.options, **given)
        assert list(block.state_dict()) == list(plain.state_dict())
        assert block.extra_repr() == plain.extra_repr()
        for tensor in block.state_dict().values():
            assert tensor.device.type == given.get("device", "cpu")
            assert tensor.dtype == given.get("dtype", torch.float32) or not tensor.is_floating_point()
    double = polynl.build_block(case.name, CHANNELS, **case.options, dtype=torch.float64)
    x = image(case, 2, CHANNELS, 5, 4, dtype=torch.float64)
    assert torch.equal(double(x), x)
