"""Attending to other maps, of any size and rank, and summaries as values that are kept, moved and added."""

from pathlib import Path

import pytest
import torch
from cases import (
    CHANNELS,
    SUMMARIZING,
    Case,
    assert_all_close,
    assert_close,
    image,
    tensors_of,
    with_gradients,
)
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

import polynl
from polynl import EfficientNL, LatentGNN, NonLocal, PolyNL, Summary
from polynl.functional import KeysAndValues, SoftmaxSummary

every_case = pytest.mark.parametrize("case", SUMMARIZING, ids=str)
LOCAL = ("conv", "polynomial")
KINDS = [
    (PolyNL(8), Summary),
    (NonLocal(8), Summary),
    (EfficientNL(8, heads=2), SoftmaxSummary),
    (LatentGNN(8, latent_dims=(3, 4)).eval(), Summary),
    (NonLocal(8, mode="gaussian"), KeysAndValues),
    (polynl.ConvBaseline(8), Summary),
]
every_kind = pytest.mark.parametrize(
    ("block", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", type(value).__name__)
)


def double(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_equal(one: Summary, other: Summary) -> None:
    assert type(one) is type(other)
    assert pytree.tree_structure(one) == pytree.tree_structure(other)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


@every_case
@pytest.mark.parametrize("spatial", [(7, 4), (11,), (2, 3, 5), (12, 12), (2, 2)], ids=str)
def test_attending_to_another_map_is_the_literal_formula(case: Case, spatial: tuple[int, ...]) -> None:
    block, x = case.build(torch.float64), image(case, 2, CHANNELS, 5, 3, dtype=torch.float64)
    y = double(2, CHANNELS, *spatial).requires_grad_()
    inputs = [x.requires_grad_(), y, *block.parameters()]
    actual, expected = block(x, context=y), case.expected(block, x, y)
    assert_close(actual, expected)
    assert torch.allclose(actual, block(x)) is (case.name in LOCAL), "the context should matter"
    cotangent = torch.randn_like(x)
    ours, theirs = (
        torch.autograd.grad(z, inputs, cotangent, materialize_grads=True) for z in (actual, expected)
    )
    assert_all_close(ours, theirs)


@every_case
def test_a_mask_with_a_context_is_the_mask_of_the_context(case: Case) -> None:
    block, x, y = (
        case.build(torch.float64),
        image(case, 2, CHANNELS, 5, 3, dtype=torch.float64),
        double(2, 8, 14),
    )
    mask = torch.arange(14).remainder(3).ne(1).expand(2, -1)
    if not case.equivariant:  # whole windows of the pool
        mask = torch.arange(14).lt(6).expand(2, -1)
    expected = with_gradients(block, lambda x: block(x, context=y[..., mask[0]]), x)
    dirty = y.masked_fill(~mask.unsqueeze(1), float("nan"))
    assert_all_close(with_gradients(block, lambda x: block(x, mask, context=dirty), x), expected)


def test_a_context_of_another_batch_size_is_refused() -> None:
    for block, _ in KINDS:
        name = type(block).__name__
        with pytest.raises(ValueError, match=rf"^{name}: the summary is of a batch of 3; x has 2$"):
            block(torch.zeros(2, 8, 4), context=torch.zeros(3, 8, 4))


# Summaries as values


def test_each_block_has_the_kind_of_its_formula() -> None:
    for block, kind in KINDS:
        summary = block.summarize(torch.randn(2, 8, 6))
        assert type(summary) is kind
        assert summary.shapes() == block.summary_shapes()
        assert torch.equal(summary.count, torch.full((2,), 6.0))


@every_kind
def test_saved_summaries_come_back_to_the_bit(block: polynl.Block, kind: type, tmp_path: Path) -> None:
    x, mask = torch.randn(2, 8, 6), torch.tensor([1.0, 0.5, 0, 1, 1, 0.25]).expand(2, -1)
    for summary in (block.summarize(x), block.summarize(x, mask), block.summarize(x.mT[:, :0].mT)):
        summary.save(tmp_path / "s.safetensors")
        loaded = Summary.load(str(tmp_path / "s.safetensors"))
        assert_equal(loaded, summary.detach())
        assert not any(tensor.requires_grad for tensor in tensors_of(loaded))
    assert torch.equal(block.attend(x, loaded), block.attend(x, summary))


def test_a_file_that_is_no_summary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(dict(PolyNL(8).state_dict()), path)
    with pytest.raises(ValueError, match=r"weights\.safetensors is not a summary: expected a file that"):
        Summary.load(path)
    save_file({"count": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"weights\.safetensors is not a summary"):
        Summary.load(path)
    PolyNL(8).summarize(torch.randn(1, 8, 5)).save(path)
    whole = path.read_bytes()
    for broken in (whole[:-3], whole[:20], b"", b"not a tensor"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"weights\.safetensors is not a safetensors file"):
            Summary.load(path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        Summary.load(tmp_path / "nowhere.safetensors")


@every_kind
def test_torch_looks_into_summaries(block: polynl.Block, kind: type) -> None:
    summary = block.summarize(torch.randn(2, 8, 6)).detach()
    leaves, spec = pytree.tree_flatten(summary)
    assert_equal(pytree.tree_unflatten(leaves, spec), summary)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(summary)[0]]
    assert paths == [f"['{name}']" for name in ("count", *sorted(summary.parts))]
    doubled = pytree.tree_map(lambda tensor: 2 * tensor, summary)
    assert torch.equal(doubled.count, 2 * summary.count)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@every_kind
def test_moving_and_detaching(block: polynl.Block, kind: type) -> None:
    summary = block.summarize(torch.randn(2, 8, 6, requires_grad=True))
    assert all(tensor.dtype == torch.float64 for tensor in tensors_of(summary.to(torch.float64)))
    assert all(tensor.device.type == "meta" for tensor in tensors_of(summary.to("meta")))
    assert type(summary.to("meta")) is kind
    assert any(tensor.requires_grad for tensor in tensors_of(summary)) or not summary.parts
    assert not any(tensor.requires_grad for tensor in tensors_of(summary.detach()))
    x = torch.randn(2, 8, 5)
    assert_close(block.attend(x, summary.to(torch.float64)), block.attend(x, summary), 1e-5)


def test_only_summaries_that_are_alike_can_be_added() -> None:
    x = torch.randn(2, 8, 6)
    one = PolyNL(8).summarize(x)
    for other in (PolyNL(8, reduction=2), NonLocal(8), EfficientNL(8), NonLocal(8, mode="gaussian")):
        with pytest.raises(
            ValueError, match=r"^summaries of different blocks cannot be added: sums .*'products'"
        ):
            one + other.summarize(x)
    for block, _ in KINDS:
        summary = block.summarize(x)
        with pytest.raises(ValueError, match=r"^summaries of 2 and of 1 samples cannot be added$"):
            summary + block.summarize(x[:1])
        for other in (1, 0.5, None, x):
            with pytest.raises(TypeError):
                other + summary
            with pytest.raises(TypeError):
                summary + other


def test_keys_with_and_without_weights_can_be_added() -> None:
    block, x = NonLocal(8, mode="embedded_gaussian", init="random").double(), double(2, 8, 9)
    mask = torch.tensor([True, False, True, True]).expand(2, -1)
    expected = block(x, context=torch.cat([x[..., [0, 2, 3]], x[..., 4:]], dim=-1))
    masked, plain = block.summarize(x[..., :4], mask), block.summarize(x[..., 4:])
    for both in (masked + plain, plain + masked):
        assert_close(block.attend(x, both), expected)


def test_a_summary_that_does_not_fit_is_refused() -> None:
    x = torch.randn(2, 8, 6)
    for block, _ in KINDS[:-1]:
        name = type(block).__name__
        other = PolyNL(8, reduction=2).summarize(x)
        with pytest.raises(
            ValueError, match=rf"^{name}: the summary is of another block: it has .*products.*; expected "
        ):
            block.attend(x, other)
        with pytest.raises(ValueError, match=rf"^{name}: the summary is of a batch of 2; x has 1$"):
            block.attend(x[:1], block.summarize(x))
        with pytest.raises(TypeError, match=rf"^{name}: summary is a Tensor; expected a polynl.Summary$"):
            block.attend(x, x)
        with pytest.raises(ValueError, match=rf"^{name}: x has shape \(2, 7, 6\); expected a batch of maps"):
            block.summarize(x[:, :7])
        with pytest.raises(TypeError, match=rf"^{name}: x has dtype torch.float64; expected torch.float32"):
            block.attend(x.double(), block.summarize(x))
