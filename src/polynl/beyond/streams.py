"""Networks over the frames of a video, one after the other: blocks attend to all frames so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polynl.beyond.parts import blocks_of
from polynl.functional.summary import KINDS, Summary


class Stream:
    """Runs a model on frames; its blocks attend to the frames so far, which is causal.

    Frame t gets what the block computes on frames 1 to t as one 3-d map. With `decay` below 1 a frame counts
    that much less with every frame after it. Gradients do not reach earlier frames unless `detach` is False.

    >>> import polynl, torch
    >>> block = polynl.PolyNL(8, init="random")
    >>> frames = torch.randn(5, 1, 8, 6, 6)
    >>> with Stream(block) as stream:
    ...     last = [stream(frame) for frame in frames][-1]
    >>> whole = block(frames.permute(1, 2, 0, 3, 4))  # (b, c, t, h, w)
    >>> torch.allclose(last, whole[:, :, -1], atol=1e-5)
    True
    """

    def __init__(self, model: nn.Module, *, decay: float = 1.0, detach: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise ValueError(f"decay={decay!r}: expected a number above 0, up to 1")
        self.model, self.decay, self.detach = model, decay, detach
        self._blocks = blocks_of(model)
        for name, block in self._blocks.items():
            if block.exchange is not None:
                raise ValueError(f"{name} is already in a stream or a shard: close that first")
        self._memories = {name: _Memory(self) for name in self._blocks}
        for name, block in self._blocks.items():
            block.exchange = self._memories[name]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's output for a frame."""
        return self.model(*inputs, **named)

    def reset(self) -> None:
        """Forget all frames, for the next video."""
        for memory in self._memories.values():
            memory.total = None

    def close(self) -> None:
        """Let the blocks attend to a single map again."""
        for block in self._blocks.values():
            block.exchange = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def state_dict(self) -> dict[str, Tensor]:
        """What is kept of the frames so far, as tensors."""
        return {
            f"{name}/{memory.total.kind}/{part}": tensor
            for name, memory in self._memories.items()
            if memory.total is not None
            for part, tensor in {"count": memory.total.count, **memory.total.parts}.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue after the frames of a `state_dict`; a ValueError if it is of another model."""
        found: dict[str, dict[str, Tensor]] = {}
        kinds: dict[str, str] = {}
        for key, tensor in state.items():
            name, kind, part = key.rsplit("/", 2) if key.count("/") >= 2 else (key, "", "")
            if name not in self._blocks or kind not in KINDS:
                raise ValueError(f"the state has {key!r}, which no block of this model has")
            found.setdefault(name, {})[part], kinds[name] = tensor, kind
        self.reset()
        for name, parts in found.items():
            if "count" not in parts:
                self.reset()
                raise ValueError(f"the state of {name} is incomplete: it has no count")
            summary = KINDS[kinds[name]](parts.pop("count"), parts)
            if summary.shapes() != self._blocks[name].summary_shapes():
                self.reset()
                raise ValueError(f"the state of {name} is of another block: it has {summary.shapes()}")
            self._memories[name].total = summary


class _Memory:
    """The sum of the summaries of a block's frames."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.total: Summary | None = None

    def __call__(self, frame: Summary) -> Summary:
        total = frame
        if self.total is not None:
            before = self.total if self._stream.decay == 1 else self.total.scaled(self._stream.decay)
            if len(before.count) != len(frame.count):
                raise ValueError(
                    f"the frame is of a batch of {len(frame.count)}, and those before it of "
                    f"{len(before.count)}: call reset() for other videos"
                )
            total = before + frame
        self.total = total.detach() if self._stream.detach else total
        return total
