"""Every block in every installed runtime: the largest differences from PyTorch, as a table in Markdown.

    python benchmarks/export_matrix.py [RUNTIME …]

Each block has 64 channels and random weights, and batch, height and width are open; see docs/deploy.md.
"""

import sys
import tempfile
from pathlib import Path

import torch

import polynl
from polynl.export import RUNTIMES, ExportError, export

CHANNELS, SIDE = 64, 28
ROWS = [
    *((name, {}) for name in polynl.BLOCKS),
    ("non_local", {"mode": "embedded_gaussian"}),
    ("non_local", {"mode": "gaussian"}),
    ("non_local", {"mode": "concatenation"}),
]


def difference(name: str, options: dict[str, str], runtime: str, folder: Path) -> str:
    """The largest at three sizes, or why there is none."""
    torch.manual_seed(0)
    block = polynl.build_block(name, CHANNELS, init="random", **options)
    example = torch.randn(2, CHANNELS, SIDE, SIDE)
    try:
        done = export(
            block,
            folder / f"block{RUNTIMES[runtime].suffix}",
            example,
            to=runtime,
            dynamic=("batch", "height", "width"),
        )
    except ExportError as error:
        return str(error)
    except ModuleNotFoundError:
        return "not installed"
    return f"{done.difference:.1e}"


def main() -> None:
    """Print a row per block as soon as it is measured."""
    runtimes = sys.argv[1:] or list(RUNTIMES)
    print("| block |", " | ".join(RUNTIMES[runtime].label for runtime in runtimes), "|")
    print("|---" * (len(runtimes) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in ROWS:
            row = [f"`{name}`" + "".join(f", {value.replace('_', ' ')}" for value in options.values())]
            row += [difference(name, options, runtime, Path(folder)) for runtime in runtimes]
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
