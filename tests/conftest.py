"""Settings for all tests."""

import gc
import re
from pathlib import Path

import pytest
import torch

# The tensors are tiny: synchronising a second thread costs more than it saves.
torch.set_num_threads(1)

INSERTION = Path(__file__).parents[1] / "docs" / "insertion.md"


def pytest_collection_finish() -> None:
    """Exempt all modules, loaded by now, from garbage collection: each pass over them takes a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let extension modules free what they have, or they report it as leaked."""
    gc.unfreeze()


@pytest.fixture
def run_example(monkeypatch, tmp_path):
    """Run the code that the page marks with the name of a package, in `tmp_path`; return its names."""

    def run(package):
        text = INSERTION.read_text()
        (match,) = re.finditer(rf"^```python {package}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        line = text[: match.start(1)].count("\n")
        names = {"__name__": __name__}
        exec(compile("\n" * line + match.group(1), str(INSERTION), "exec"), names)
        return names

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    return run
