"""Each extra brings what its commands need, in real environments that hold nothing else.

Nothing is downloaded: an environment links the distributions that pip would install, as they are here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import polynl
from polynl import extras
from polynl.__main__ import main
from polynl.tasks.registry import task_class

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CLASSES = str(ROOT / "tests" / "train" / "tiny.yaml")
INSTANCES, FACES = (str(ROOT / "tests" / f"tiny_{kind}.yaml") for kind in ("instances", "faces"))


@cache
def requirements(name: str) -> list[Requirement]:
    """What a distribution requires; of polynl as pyproject.toml says it: the installed one may be older."""
    if name != "polynl":
        return [Requirement(text) for text in metadata.requires(name) or []]
    optional = [
        f'{text}; extra == "{extra}"'
        for extra, texts in PROJECT["optional-dependencies"].items()
        for text in texts
    ]
    return [Requirement(text) for text in [*PROJECT["dependencies"], *optional]]


def closure(requirement: str) -> set[str]:
    """The names of all distributions that pip would install for a requirement."""
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(requirement)]
    while waiting:
        wanted = waiting.pop()
        for extra in {"", *wanted.extras}:
            if (wanted.name, extra) not in seen:
                seen.add((wanted.name, extra))
                waiting += [
                    further
                    for further in requirements(wanted.name)
                    if further.marker is None or further.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in seen}


def link(name: str, site: Path) -> None:
    """Link every top-level file and folder of an installed distribution."""
    distribution = metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        source, target = Path(str(distribution.locate_file(top))), site / top
        if source.exists() and not target.exists():
            target.symlink_to(source)


def make_environment(folder: Path, requirement: str) -> Path:
    """A virtual environment as `pip install REQUIREMENT` would set it up; returns its site-packages."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in closure(requirement) - {"polynl"}:
        link(name, site)
    (site / "polynl.pth").write_text(str(ROOT / "src"))
    described = site / f"polynl-{polynl.__version__}.dist-info"
    described.mkdir()
    lines = [f"Requires-Dist: {line}" for line in requirements("polynl")]
    (described / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", "Name: polynl", *lines, ""]))
    return site


CORE = """
import warnings
warnings.simplefilter("error")
import torch, polynl
from torch import nn
for name in polynl.BLOCKS:
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    polynl.build_block(name, 8, init="random")(x).sum().backward()
    assert x.grad.abs().sum() > 0
model = polynl.insert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), "poly_nl", after="0")
assert list(polynl.inserted(model)) == ["0.polynl_after"]
assert model(torch.randn(1, 3, 9, 9)).shape == (1, 8, 7, 7)
layers = {"t": (2, 4), "p": (2, 4), "g": (2, 4), "z": (4, 2)}
peer = {f"{name}.weight": torch.randn(*shape, 1, 1) for name, shape in layers.items()}
peer |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in layers.items()}
peer |= {f"norm.{name}": torch.ones(4) for name in ("weight", "bias", "running_mean", "running_var")}
assert polynl.load_peer(peer, "timm").channels == 4
try:
    import torchvision
except ModuleNotFoundError:
    print("works")
"""

# Modules, slow to import, that the programs of an extra share; and these: `polynl …`, or Python's -c.
PROGRAMS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "": (["polynl"], {"blocks": ["-c", CORE], "train": ["train", "scenes"], "version": ["--version"]}),
    "[train]": (
        ["polynl.cli", "polynl.train.loop"],
        {
            "list": ["train", CLASSES, "--list-keys"],
            "detector": ["train", INSTANCES],
            "report": ["report", "runs"],
            "export": ["export", "runs", "--to", "onnx"],
        },
    ),
    "[detect]": (
        [],
        {"instances": ["train", INSTANCES, "--list-keys"], "faces": ["train", FACES, "--list-keys"]},
    ),
    "[report]": (
        [],
        {"report": ["report", "none"], "compare": ["bench", "compare", "none", "none"]},
    ),
}

# Started in the first environment: each of the others has what the one before has loaded.
FORKS = """
import gc, importlib, json, os, runpy, sys, warnings
site, *environments = json.loads(sys.argv[1])
for folder, modules, programs in environments:
    sys.path[sys.path.index(site)] = folder
    site = folder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(map(importlib.import_module, modules))
    gc.freeze()
    for name, words in programs.items():
        child = os.fork()
        if child == 0:
            for stream, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{name}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
            code = 0
            try:
                if words[0] == "-c":
                    exec(words[1], {"__name__": "__main__"})
                else:
                    sys.argv = ["polynl", *words]
                    runpy.run_module("polynl", run_name="__main__")
            except SystemExit as end:
                code = end.code
            sys.stdout.flush()
            os._exit(code)  # without the slow end of Python
        print(folder, name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Ended = tuple[int, str, str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Ended]:
    """Exit code, output and errors of every program, by its extra and its name.

    Each runs in its own process, forked from one that has loaded torch: that takes seconds.
    """
    core, *larger = map(closure, (f"polynl{extra}" for extra in PROGRAMS))
    train = larger[0]
    assert core < train, "else they cannot share what is loaded"
    assert all(train <= names for names in larger)
    folder = tmp_path_factory.mktemp("environments")
    sites = {extra: make_environment(folder / f"polynl{extra}", f"polynl{extra}") for extra in PROGRAMS}
    jobs = [str(sites[""]), *((str(sites[extra]), *PROGRAMS[extra]) for extra in PROGRAMS)]
    # Nothing of the environment that the tests run in.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [folder / "polynl" / "bin" / "python", "-c", FORKS, json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=folder)
    assert done.returncode == 0, done.stderr
    extra_of = {str(site): extra for extra, site in sites.items()}
    results = {}
    for site, name, code in map(str.split, done.stdout.splitlines()):
        out, err = ((Path(site) / f"{name}.{kind}").read_text("utf-8") for kind in ("out", "err"))
        results[extra_of[site], name] = (int(code), out, err)
    return results


def line(package: str, extra: str) -> str:
    return f'polynl: this needs {package}, which is not installed: pip install "polynl[{extra}]"\n'


def test_blocks_insertion_and_peers_work_with_the_core_alone(ended: dict[tuple[str, str], Ended]) -> None:
    assert ended["", "blocks"] == (0, "works\n", "")


def test_the_command_tells_the_version_with_the_core_alone(ended: dict[tuple[str, str], Ended]) -> None:
    assert ended["", "version"] == (0, f"polynl {polynl.__version__}\n", "")


def test_a_command_without_its_extra_ends_with_one_line(ended: dict[tuple[str, str], Ended]) -> None:
    assert ended["", "train"] == (2, "", line("tyro", "train"))


def test_training_needs_less_than_detectors_and_reports(ended: dict[tuple[str, str], Ended]) -> None:
    code, _, errors = ended["[train]", "list"]
    assert (code, errors) == (0, "")
    code, _, errors = ended["[train]", "detector"]
    assert (code, errors) == (2, line("pycocotools", "detect"))
    code, _, errors = ended["[train]", "report"]
    assert code == 2
    assert errors in [line(package, "report") for package in ("jinja2", "matplotlib", "markupsafe")]
    assert ended["[train]", "export"] == (2, "", line("onnx", "export"))


@pytest.mark.parametrize("task", ["instances", "faces"])
def test_detectors_need_no_more_than_their_extra(ended: dict[tuple[str, str], Ended], task: str) -> None:
    code, _, errors = ended["[detect]", task]
    assert (code, errors) == (0, "")


@pytest.mark.parametrize("command", ["report", "compare"])
def test_reports_need_no_more_than_their_extra(ended: dict[tuple[str, str], Ended], command: str) -> None:
    _, _, errors = ended["[report]", command]
    assert "none" in errors
    assert "install" not in errors


@pytest.mark.parametrize("task", ["instance_segmentation", "face_detection"])
def test_a_package_that_is_imported_late_is_missed_at_the_start(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As faster-coco-eval would be, which computes the scores after the first epoch."""
    monkeypatch.setattr(extras, "extras", lambda: {"torch": "detect", "not_installed": "detect"})
    with pytest.raises(ModuleNotFoundError, match="not_installed") as caught:
        task_class(task)
    assert extras.install_hint(caught.value) in line("not_installed", "detect")
    assert task_class("classification").name == "classification"


def test_a_module_that_no_extra_brings_is_no_matter_of_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polynl.cli", None)
    monkeypatch.delattr("polynl.cli", raising=False)
    for name in ("end_on_signals", "set_up_streams"):  # the signals and streams of these tests
        monkeypatch.setattr(f"polynl.__main__.{name}", lambda: None)
    with pytest.raises(ModuleNotFoundError, match=r"polynl\.cli"):
        main()


def test_every_package_that_is_imported_is_declared() -> None:
    from test_architecture import FILES, imported

    declared = {extras.IMPORT_NAMES.get(r.name, r.name.replace("-", "_")) for r in requirements("polynl")}
    used = {name.split(".")[0] for path in FILES for name in imported(path)} - sys.stdlib_module_names
    assert used - {"polynl", "mmcv"} <= declared  # mmcv is mmcv-lite's
