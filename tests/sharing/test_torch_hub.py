"""hubconf.py: what `torch.hub` lists and loads from a clone, also where polynl is not installed."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polynl

ROOT = Path(__file__).parents[2]


def load(name, *arguments, **options):
    return torch.hub.load(str(ROOT), name, *arguments, source="local", **options)


def test_the_entry_points_are_explained():
    """What torch.hub lists: whatever can be called and has no underscore in front."""
    names = runpy.run_path(str(ROOT / "hubconf.py"))
    entries = {name: value for name, value in names.items() if callable(value) and name[0] != "_"}
    # A class or module that is imported there would be listed too.
    assert set(entries) == {
        *("block", "poly_nl", "resnet", "resnet18", "resnet50", "load_run", "from_pretrained")
    }
    assert all(entry.__doc__ for entry in entries.values())


def test_blocks_and_networks():
    assert load("poly_nl", 16, reduction=2).reduction == 2
    assert type(load("block", "tesa", 16)) is polynl.TESA
    model = load("resnet18", num_classes=3, placement="res345")
    assert len(polynl.inserted(model)) == 3
    assert polynl.inserted(load("resnet18", block=None)) == {}
    with pytest.raises(ValueError, match="no block is called 'polynl'"):
        load("resnet50", block="polynl")


def test_a_trained_network(classifier, photo):
    assert load("load_run", classifier).predict(photo) == polynl.load_run(classifier).predict(photo)


def test_where_polynl_is_not_installed(tmp_path):
    """The package is found in the clone, and the path for it does not stay."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'polynl' and not any(p.endswith('/src') for p in sys.path[:1]):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    program = (
        "import sys, torch\n"
        "before = list(sys.path)\n"
        f"block = torch.hub.load({str(ROOT)!r}, 'poly_nl', 8, source='local')\n"
        "print(type(block).__module__, block(torch.zeros(1, 8, 2, 2)).shape)\n"
        "assert sys.path == before\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("polynl.blocks.poly_nl torch.Size([1, 8, 2, 2])")
