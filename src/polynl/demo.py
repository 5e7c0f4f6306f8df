"""The main job: every block in a small network, trained for a few steps, and what each of them costs.

`make demo`, or `python -m polynl.demo`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import polynl

CHANNELS, SIDE = 128, 32
STEPS, BATCH, RUNS = 30, 32, 20

# Each block as the paper compares it, and beside it the form that costs the other way of computing it.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("conv", {}),
    ("conv", {"kernel_size": 3}),
    ("poly_nl", {}),
    ("poly_nl", {"form": "direct"}),
    ("poly_nl", {"form": "gram"}),
    ("non_local", {}),
    ("non_local", {"form": "quadratic"}),
    ("non_local", {"mode": "embedded_gaussian"}),
    ("efficient_nl", {}),
    ("latent_gnn", {}),
    ("tesa", {}),
    ("tesa", {"order": "quadratic"}),
    ("polynomial", {}),
]


@dataclass(frozen=True)
class Cost:
    """What one call of a block takes."""

    parameters: int
    multiply_adds: int
    seconds: float


class SmallNet(nn.Sequential):
    """A stem and three residual blocks: large enough to train, small enough to watch."""

    def __init__(self, channels: int = 24, classes: int = 4) -> None:
        stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.ReLU())
        residuals = [Residual(channels) for _ in range(3)]
        super().__init__(
            stem, *residuals, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )


class Residual(nn.Module):
    """X + conv(ReLU(norm(conv(X))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The residual sum."""
        return F.relu(x + self.branch(x))


def corner_scenes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise with a bright patch in one corner; the label is the corner."""
    images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    labels = torch.randint(4, (count,), generator=generator)
    patch, far = 8, SIDE - 8
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = far * (label // 2), far * (label % 2)
        image[:, top : top + patch, left : left + patch] += 1.5
    return images, labels


def trained_losses(name: str | None, options: dict[str, Any]) -> list[float]:
    """The loss at every step of training `SmallNet` with the block before its last residual block."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = SmallNet()
    if name is not None:
        polynl.insert(model, name, before="3", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        images, labels = corner_scenes(BATCH, generator)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measured_costs(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[Cost]:
    """The cost of every row on one map; the runs are interleaved, so that noise falls on all alike."""
    x = torch.randn(1, CHANNELS, SIDE, SIDE)
    blocks = [polynl.build_block(name, CHANNELS, **options).eval() for name, options in rows]
    with torch.no_grad():
        calls: list[Callable[[], Tensor]] = [lambda block=block: block(x) for block in blocks]  # type: ignore[misc]
        counts = [_multiply_adds(call) for call in calls]
        times: list[list[float]] = [[] for _ in blocks]
        for _ in range(RUNS):
            for call, taken in zip(calls, times, strict=True):
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
    return [
        Cost(sum(p.numel() for p in block.parameters()), count, statistics.median(taken))
        for block, count, taken in zip(blocks, counts, times, strict=True)
    ]


def _multiply_adds(call: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() // 2


def _label(name: str, options: dict[str, Any]) -> str:
    words = (value if isinstance(value, str) else f"{key}={value}" for key, value in options.items())
    return ", ".join([name, *words])


def main() -> None:
    """Train, measure, and print both tables."""
    console = Console()
    losses = Table(title=f"A small network, {STEPS} steps of batch {BATCH} on generated scenes")
    for heading in ("block before the last residual block", "first loss", "last loss"):
        losses.add_column(heading, justify="left" if heading.startswith("block") else "right")
    names: list[str | None] = [None, *polynl.BLOCKS]
    for name in track(names, "Training", console=console):
        curve = trained_losses(name, {})
        losses.add_row(name if name is not None else "none", f"{curve[0]:.3f}", f"{curve[-1]:.3f}")
    console.print(losses)

    costs = Table(
        title=f"One call on a map of {CHANNELS} × {SIDE} × {SIDE}, median of {RUNS} interleaved runs"
    )
    for heading in ("block", "parameters", "multiply-adds", "ms", "time ÷ 1×1 conv"):
        costs.add_column(heading, justify="left" if heading == "block" else "right")
    results = measured_costs(ROWS)
    for (name, options), cost in zip(ROWS, results, strict=True):
        costs.add_row(
            _label(name, options),
            f"{cost.parameters:,}",
            f"{cost.multiply_adds / 1e6:,.1f} M",
            f"{cost.seconds * 1e3:.2f}",
            f"{cost.seconds / results[0].seconds:.1f}",
        )
    console.print(costs)


if __name__ == "__main__":
    main()
