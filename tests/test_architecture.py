"""Dependencies point one way, and importing the package loads torch and nothing heavier."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "polynl"
# What each part may import of ours; a part that is not listed here fails until it is.
MAY_IMPORT = {
    "errors": set(),
    "files": {"errors"},
    "environment": {"polynl"},
    "functional": {"functional"},
    "blocks": {"blocks", "functional", "errors"},
    "insertion": {"blocks", "errors"},
    "models": {"models", "insertion", "blocks", "functional"},
    "data": {"data", "errors", "files"},
    "tasks": {"tasks", "data", "models", "insertion", "blocks", "errors", "files"},
    "results": {"results", "tasks", "blocks", "errors", "files"},
    "train": {"train", "tasks", "models", "environment", "errors", "files"},
    "explain": {
        "explain",
        "train",
        "tasks",
        "models",
        "insertion",
        "blocks",
        "functional",
        "data",
        "errors",
        "files",
    },
    "predict": {"predict", "train", "tasks", "data", "errors", "files"},
    "bench": {
        "bench",
        "results",
        "tasks",
        "models",
        "blocks",
        "functional",
        "environment",
        "errors",
        "files",
        "polynl",
    },
    "report": {"report", "results", "explain", "train", "bench", "tasks", "blocks", "errors", "files"},
    "reproduce": {
        "reproduce",
        "report",
        "results",
        "train",
        "bench",
        "tasks",
        "blocks",
        "environment",
        "errors",
        "files",
    },
    "commands": {
        "bench",
        "data",
        "explain",
        "predict",
        "report",
        "reproduce",
        "tasks",
        "train",
        "errors",
        "files",
    },
    "cli": {"commands", "errors"},
    "__main__": {"cli"},
    "__init__": {"blocks", "insertion"},
}
THIRD_PARTY = {
    "errors": set(),
    "files": set(),
    "environment": {"torch"},
    "functional": {"torch", "jaxtyping"},
    "blocks": {"torch", "jaxtyping"},
    "insertion": {"torch"},
    "models": {"torch", "torchvision", "safetensors"},
    "data": {"torch", "torchvision", "PIL", "rich"},
    "tasks": {
        "torch",
        "torchvision",
        "numpy",
        "pydantic",
        "scipy",
        "matplotlib",
        "pycocotools",
        "faster_coco_eval",
    },
    "results": {"rich"},
    "train": {"torch", "torchvision", "pydantic", "typing_extensions", "yaml", "rich", "safetensors"},
    "explain": {"torch", "torchvision", "jaxtyping", "matplotlib", "rich", "timm"},
    "predict": {"torch", "torchvision", "matplotlib", "rich"},
    "bench": {"torch", "rich", "matplotlib", "mmcv", "timm"},
    "report": {"torch", "matplotlib", "PIL", "jinja2", "markupsafe", "rich"},
    "reproduce": {"torch", "rich"},
    "commands": {"tyro", "rich"},
    "cli": {"tyro", "rich"},
    "__main__": set(),
    "__init__": set(),
}
FILES = sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The dotted names of all modules that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides what it points to"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_dependencies_point_one_way(path: Path) -> None:
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    names = imported(path)
    ours = {([*name.split("."), "polynl"])[1] for name in names if name.split(".")[0] == "polynl"}
    theirs = {name.split(".")[0] for name in names} - {"polynl"} - sys.stdlib_module_names
    assert ours <= MAY_IMPORT[part]
    assert theirs <= THIRD_PARTY[part]
    assert "polynl.functional.reference" not in names, "the literal formulas are for tests and benchmarks"


def test_import_loads_nothing_heavier_than_torch() -> None:
    program = "import sys, polynl; print(*{name.split('.')[0] for name in sys.modules}, *sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    heavy = {"torchvision", "timm", "matplotlib", "rich", "tyro", "PIL", "safetensors"}
    assert "torch" in loaded.split()
    assert not heavy & set(loaded.split())


def test_public_names_are_there_and_listed() -> None:
    import polynl

    assert all(hasattr(polynl, name) for name in polynl.__all__)
    assert {row.block.__name__ for row in polynl.BLOCKS.values()} <= set(polynl.__all__)
