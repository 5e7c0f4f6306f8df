"""What a block keeps of a map: sums over its positions, which merge into the sums over several maps.

Each kind of summary has one entry per sample in all of its tensors and its own way to merge two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from polynl.files import write_atomically
from polynl.functional.collectives import check_same, gathered, largest_over_ranks, sum_over_ranks


@dataclass(frozen=True, eq=False)
class Summary:
    """Sums over positions: `a + b` adds them, so it is the summary of the positions of both.

    >>> import polynl
    >>> block, x = polynl.PolyNL(8), torch.randn(2, 8, 6, 5)
    >>> whole, halves = block.summarize(x), [block.summarize(half) for half in x.split(3, dim=2)]
    >>> torch.allclose(sum(halves).parts["products"], whole.parts["products"], atol=1e-4)
    True
    """

    count: Float[Tensor, " b"]
    """The number of positions, or the sum of their weights."""
    parts: dict[str, Float[Tensor, "b ..."]]
    """The tensors of the block's formula, by name."""

    kind: ClassVar[str] = "sums"

    def __init_subclass__(cls) -> None:
        _register(cls)

    def __add__(self, other: Summary) -> Summary:
        if not isinstance(other, Summary):
            return NotImplemented
        self._check_alike(other)
        return type(self)(self.count + other.count, self.merged(other))

    def __radd__(self, other: Any) -> Summary:
        """So that `sum(parts)` works, which starts from 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def merged(self, other: Summary) -> dict[str, Tensor]:
        """The parts of both, merged."""
        return {name: part + other.parts[name] for name, part in self.parts.items()}

    def scaled(self, factor: float) -> Summary:
        """The summary in which every position counts `factor` times as much."""
        return self._mapped(lambda tensor: tensor * factor)

    def all_reduce(self, group: Any = None, *, check: bool = True) -> Summary:
        """The sum of the summaries of all processes of a group of torch.distributed, on each of them.

        Gradients pass through: they are those of the sum of what all processes compute from it. With `check`,
        processes with other blocks or batches raise a ValueError first; without it, they may just end.
        """
        if check:
            shapes = ", ".join(f"{name} {shape}" for name, shape in self.shapes().items())
            check_same("summaries", f"{shapes} of a batch of {len(self.count)}, {self.count.dtype}", group)
        return self._over_ranks(group)

    def _over_ranks(self, group: Any) -> Summary:
        named = sum_over_ranks(self._named(), group)
        return replace(self, count=named.pop("count"), parts=named)

    def to(self, *args: Any, **kwargs: Any) -> Summary:
        """On another device or in another dtype, as in `torch.Tensor.to`."""
        return self._mapped(lambda tensor: tensor.to(*args, **kwargs))

    def detach(self) -> Summary:
        """Cut off from the graph of the map."""
        return self._mapped(Tensor.detach)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, completely or not at all."""
        from safetensors.torch import save

        tensors = {name: tensor.detach().contiguous() for name, tensor in self._named().items()}
        write_atomically(Path(path), save(tensors, {"polynl.summary": self.kind}))

    @staticmethod
    def load(path: str | Path, device: str | torch.device = "cpu") -> Summary:
        """A summary that `save` wrote, of the same kind."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                kind = (file.metadata() or {}).get("polynl.summary")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from None
        if kind not in KINDS or "count" not in tensors:
            raise ValueError(f"{path} is not a summary: expected a file that Summary.save wrote")
        return KINDS[kind](tensors.pop("count"), tensors)

    def mean(self, name: str) -> Tensor:
        """A part divided by the count; zero where nothing was counted."""
        part = self.parts[name]
        count = self.count + (self.count == 0)
        return part / count.reshape(-1, *[1] * (part.dim() - 1))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every part for one sample."""
        return {name: tuple(part.shape[1:]) for name, part in self.parts.items()}

    def _check_alike(self, other: Summary) -> None:
        if type(self) is not type(other) or self.shapes() != other.shapes():
            raise ValueError(
                f"summaries of different blocks cannot be added: {self.kind} {self.shapes()} and "
                f"{other.kind} {other.shapes()}"
            )
        if len(self.count) != len(other.count):
            raise ValueError(
                f"summaries of {len(self.count)} and of {len(other.count)} samples cannot be added"
            )

    def _named(self) -> dict[str, Tensor]:
        return {"count": self.count, **self.parts}

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Summary:
        parts = {name: function(part) for name, part in self.parts.items()}
        return replace(self, count=function(self.count), parts=parts)


def _register(kind: type[Summary]) -> None:
    """Let torch look into summaries: as inputs and outputs of compiled and exported functions."""

    def flatten(summary: Summary) -> tuple[list[Tensor], list[str]]:
        names = sorted(summary.parts)  # files do not keep the order of tensors
        return [summary.count, *(summary.parts[name] for name in names)], names

    def flatten_with_keys(summary: Summary) -> tuple[list[tuple[Any, Tensor]], list[str]]:
        tensors, names = flatten(summary)
        return list(zip(map(pytree.MappingKey, ["count", *names]), tensors, strict=True)), names

    def unflatten(tensors: Any, names: Any) -> Summary:
        count, *parts = tensors
        return kind(count, dict(zip(names, parts, strict=True)))

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"polynl.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


_register(Summary)


@dataclass(frozen=True, eq=False)
class SoftmaxSummary(Summary):
    """Sums of exponentials (b, h, d), and of values weighted by them (b, h, d, e), with their `maximum`.

    The exponentials are of k − maximum, so that none overflows; merging brings both to the larger maximum.
    """

    kind: ClassVar[str] = "softmax"

    def merged(self, other: Summary) -> dict[str, Tensor]:
        """The log-sum-exp of both, and the values weighted alike."""
        maximum = torch.maximum(self.parts["maximum"], other.parts["maximum"])
        exponentials, values = torch.zeros_like(maximum), torch.zeros_like(self.parts["values"])
        for one in (self, other):
            factor = (one.parts["maximum"] - maximum).exp()
            exponentials = exponentials + factor * one.parts["exponentials"]
            values = values + factor.unsqueeze(-1) * one.parts["values"]
        return {"maximum": maximum, "exponentials": exponentials, "values": values}

    def scaled(self, factor: float) -> Summary:
        """With exponentials and values `factor` times as large; the maximum stays."""
        scaled = {name: part if name == "maximum" else part * factor for name, part in self.parts.items()}
        return replace(self, count=self.count * factor, parts=scaled)

    def _over_ranks(self, group: Any) -> Summary:
        """Every process gathers the summaries of all and merges them."""
        return _merged_over_ranks(self, group)

    def mean(self, name: str) -> Tensor:
        """A part divided by the sum of the exponentials; zero where that is zero."""
        total = self.parts["exponentials"]
        return self.parts[name] / (total + (total == 0)).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class KeysAndValues(Summary):
    """The keys (b, m, d) and values (b, m, e) themselves, and their weights (b, m) if there was a mask.

    Merging concatenates them: exact, but the summary grows with the number of positions.
    """

    kind: ClassVar[str] = "keys"

    def merged(self, other: Summary) -> dict[str, Tensor]:
        """Those of both, one after the other."""
        masked = "weights" in self.parts or "weights" in other.parts
        ours, theirs = (_with_weights(one.parts) if masked else one.parts for one in (self, other))
        return {name: torch.cat([part, theirs[name]], dim=1) for name, part in ours.items()}

    def scaled(self, factor: float) -> Summary:
        """With weights `factor` times as large."""
        parts = _with_weights(self.parts)
        return replace(self, count=self.count * factor, parts={**parts, "weights": parts["weights"] * factor})

    def _over_ranks(self, group: Any) -> Summary:
        """Every process gets the keys and values of all."""
        # Processes may have different numbers of keys: all add keys of weight 0, up to the largest number.
        keys = self.parts["keys"].shape[1]
        missing = largest_over_ranks(keys, group, self.count.device) - keys
        padded = {
            name: torch.cat([part, part.new_zeros(len(part), missing, *part.shape[2:])], dim=1)
            for name, part in _with_weights(self.parts).items()
        }
        return _merged_over_ranks(replace(self, parts=padded), group)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The widths of keys and values."""
        return {name: tuple(self.parts[name].shape[2:]) for name in ("keys", "values")}


def _merged_over_ranks(summary: Summary, group: Any) -> Summary:
    """The summaries of all ranks, merged in the order of the ranks."""
    merged: Any = 0
    for named in gathered(summary._named(), group):
        merged = merged + replace(summary, count=named.pop("count"), parts=named)
    return merged


def _with_weights(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    keys = parts["keys"]
    return {**parts, "weights": parts.get("weights", keys.new_ones(keys.shape[:2]))}


KINDS: dict[str, type[Summary]] = {kind.kind: kind for kind in (Summary, SoftmaxSummary, KeysAndValues)}


def counted(x: Float[Tensor, "b n c"], weights: Float[Tensor, "b n"] | None) -> Float[Tensor, " b"]:
    """The number of positions of every sample, or the sum of their weights, in fp32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if weights is None:
        return x.new_full((x.shape[0],), x.shape[1], dtype=dtype)
    return weights.sum(dim=-1, dtype=dtype)
