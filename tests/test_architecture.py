"""Dependencies point one way, and importing the package loads nothing heavy; its names, torch alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polynl.tasks.registry import TASKS

SOURCE = Path(__file__).parent.parent / "src" / "polynl"
# What each part may import of ours; a part that is not listed here fails until it is.
MAY_IMPORT = {
    "errors": set(),
    "extras": set(),
    "terminal": set(),
    "files": {"errors"},
    "config": {"errors"},
    "environment": {"polynl"},
    "functional": {"functional", "files"},
    "blocks": {"blocks", "functional", "errors"},
    "insertion": {"insertion", "blocks", "errors"},
    "beyond": {"beyond", "blocks", "functional", "files"},
    "integrations": {"integrations", "blocks"},
    "models": {"models", "insertion", "blocks", "functional", "config", "errors"},
    "data": {"data", "config", "errors", "files"},
    "tasks": {"tasks", "data", "models", "insertion", "blocks", "config", "errors", "extras", "files"},
    "results": {"results", "tasks", "blocks", "config", "errors", "files"},
    "train": {
        "train",
        "results",
        "tasks",
        "models",
        "insertion",
        "blocks",
        "data",
        "config",
        "environment",
        "errors",
        "files",
    },
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
    "apply": {"apply", "predict", "explain", "beyond", "data", "errors", "files"},
    "sharing": {
        "sharing",
        "predict",
        "train",
        "results",
        "tasks",
        "models",
        "data",
        "errors",
        "extras",
        "files",
    },
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
    "compare": {"compare", "train", "results", "tasks", "errors", "files"},
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
    "export": {"export", "train", "tasks", "errors", "extras", "files"},
    "catalogue": {"blocks", "train"},
    "commands": {
        "commands",
        "apply",
        "bench",
        "catalogue",
        "compare",
        "data",
        "explain",
        "export",
        "predict",
        "report",
        "reproduce",
        "sharing",
        "tasks",
        "train",
        "errors",
        "files",
    },
    "cli": {"commands", "errors", "terminal"},
    "__main__": {"polynl", "cli", "extras", "terminal"},
    "__init__": {"beyond", "blocks", "functional", "insertion", "sharing"},
}
THIRD_PARTY = {
    "errors": set(),
    "extras": set(),
    "terminal": set(),
    "files": set(),
    "config": {"pydantic"},
    "environment": {"torch"},
    "functional": {"torch", "jaxtyping", "safetensors"},
    "blocks": {"torch", "jaxtyping"},
    "insertion": {"torch"},
    "beyond": {"torch", "numpy"},
    "integrations": {"torch", "mmengine", "ultralytics"},
    "models": {"torch", "torchvision", "safetensors", "pydantic", "timm"},
    "data": {"torch", "torchvision", "numpy", "PIL", "rich", "pydantic", "yaml", "tifffile", "zarr"},
    "tasks": {
        "torch",
        "torchvision",
        "numpy",
        "pydantic",
        "matplotlib",
        "pycocotools",
        "faster_coco_eval",
    },
    "results": {"numpy", "pydantic", "rich"},
    "train": {"torch", "torchvision", "pydantic", "typing_extensions", "yaml", "rich", "safetensors"},
    "explain": {"torch", "torchvision", "jaxtyping", "matplotlib", "rich", "timm"},
    "predict": {"torch", "torchvision", "matplotlib", "PIL", "rich"},
    "apply": {"torch", "numpy", "matplotlib", "rich"},
    "sharing": {"torch", "PIL", "huggingface_hub"},
    "bench": {"torch", "rich", "matplotlib", "mmcv", "timm"},
    "compare": {"rich"},
    "report": {"torch", "matplotlib", "PIL", "jinja2", "markupsafe", "rich"},
    "reproduce": {"torch", "rich"},
    "export": {"torch", "rich", "onnx_ir", "onnxruntime", "openvino", "executorch"},
    "catalogue": {"torch", "rich"},
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_literal_references_are_for_tests_only(path: Path) -> None:
    """Where one is defined its name is not a node of these kinds, so no file may use any."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}
    used |= {node.name for node in nodes if isinstance(node, ast.alias)}
    assert not {name for name in used if name.endswith("_reference")}


def test_class_variables_name_their_type() -> None:
    """pydantic cannot read a plain `ClassVar` on Python 3.10."""
    plain = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "ClassVar"
    ]
    assert plain == []


def task_words() -> set[str]:
    """The names and the classes of all tasks."""
    return {word for name, place in TASKS.items() for word in (name, place.partition(":")[2])}


def words_in(path: Path) -> set[str]:
    """Names, attributes, imports and string literals of a file; texts with spaces in them are prose."""
    words: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case (
                ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=str(word)) | ast.arg(arg=word)
            ):
                words.add(word)
            case ast.ImportFrom(module=str(module), names=names):
                words |= {*module.split("."), *(alias.name for alias in names)}
            case ast.Import(names=names):
                words |= {part for alias in names for part in alias.name.split(".")}
            case ast.Constant(value=str(text)) if " " not in text:
                words |= set(re.split(r"\W+", text))
    return words


@pytest.mark.parametrize("part", ["report", "explain", "train", "reproduce"])
def test_no_task_is_named_outside_of_tasks(part: str) -> None:
    named = {
        str(path.relative_to(SOURCE)): found
        for path in sorted((SOURCE / part).rglob("*.py"))
        if (found := words_in(path) & task_words())
    }
    assert named == {}


def test_a_named_task_is_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    for code in (
        'if task == "face_detection": pass',
        "from polynl.tasks.classification.task import Classification",
        "import polynl.tasks.classification.task",
        "tables[InstanceSegmentation]",
        'ORDER = ["face_detection/poly_nl"]',
    ):
        file.write_text(code)
        assert words_in(file) & task_words(), code
    file.write_text('"""Of classification."""\nraise ValueError("classification has no boxes")')
    assert not words_in(file) & task_words()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_imports_no_other_task(name: str) -> None:
    others = tuple(f"polynl.tasks.{other}" for other in TASKS if other != name)
    for path in sorted((SOURCE / "tasks" / name).rglob("*.py")):
        assert not [module for module in imported(path) if module.startswith(others)], path


def test_import_loads_nothing_heavy_and_its_names_nothing_heavier_than_torch() -> None:
    program = """import sys, polynl
print("torch" in sys.modules)
from polynl import *
print(*sys.modules)"""
    early, loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert early == "False", "Ctrl-C is to be heeded before torch is loaded"
    heavy = {"torchvision", "timm", "matplotlib", "rich", "tyro", "PIL", "safetensors"}
    assert "torch" in loaded.split()
    assert not heavy & set(loaded.split())


def test_public_names_are_there_and_listed() -> None:
    import polynl

    assert all(hasattr(polynl, name) for name in polynl.__all__)
    assert set(polynl.__all__) <= set(dir(polynl))
    assert polynl.blocks.PolyNL is polynl.PolyNL
    assert not hasattr(polynl, "PolyNl")
    assert {row.block.__name__ for row in polynl.BLOCKS.values()} <= set(polynl.__all__)
