"""Each extra brings what its commands need, in real environments that hold nothing else.

Nothing is downloaded: an environment links the distributions that pip would install, as they are here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from polynl import extras
from polynl.__main__ import main
from polynl.tasks.registry import task_class

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CLASSES = str(ROOT / "tests" / "train" / "tiny.yaml")
INSTANCES, FACES = (str(ROOT / "tests" / f"tiny_{kind}.yaml") for kind in ("instances", "faces"))


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


class Environment:
    """A virtual environment with polynl as `pip install REQUIREMENT` would set it up."""

    def __init__(self, folder: Path, requirement: str) -> None:
        venv.create(folder, symlinks=True)
        self.folder = folder
        site = next(folder.glob("lib/python*/site-packages"))
        for name in closure(requirement) - {"polynl"}:
            link(name, site)
        (site / "polynl.pth").write_text(str(ROOT / "src"))
        described = site / f"polynl-{PROJECT['version']}.dist-info"
        described.mkdir()
        lines = [f"Requires-Dist: {line}" for line in requirements("polynl")]
        (described / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", "Name: polynl", *lines, ""]))

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments, and with nothing of the environment that the tests run in."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [self.folder / "bin" / "python", *words]
        return subprocess.run(command, capture_output=True, text=True, env=clean, cwd=self.folder)

    def commands(self, *commands: list[str]) -> list[str]:
        """The errors of each `polynl …`, run one after the other in one process, since torch loads slowly."""
        program = (
            "import io, sys\nfrom contextlib import redirect_stderr, redirect_stdout\n"
            "from polynl.__main__ import main\n"
            f"for words in {commands!r}:\n"
            "    sys.argv, errors, code = ['polynl', *words], io.StringIO(), 0\n"
            "    try:\n"
            "        with redirect_stderr(errors), redirect_stdout(io.StringIO()):\n"
            "            main()\n"
            "    except SystemExit as end:\n        code = end.code\n"
            "    print(f'{code} {errors.getvalue()!r}')\n"
        )
        done = self.python("-c", program)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("core"), "polynl")


def line(package: str, extra: str) -> str:
    return f'polynl: this needs {package}, which is not installed: pip install "polynl[{extra}]"\n'


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


def test_blocks_insertion_and_peers_work_with_the_core_alone(core: Environment) -> None:
    done = core.python("-c", CORE)
    assert (done.stdout, done.stderr) == ("works\n", "")


def test_a_command_without_its_extra_ends_with_one_line(core: Environment) -> None:
    done = core.python("-m", "polynl", "train", "scenes")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line("tyro", "train"))


def test_training_needs_less_than_detectors_and_reports(tmp_path: Path) -> None:
    training = Environment(tmp_path, "polynl[train]")
    listed, detector, report = training.commands(
        ["train", CLASSES, "--list-keys"], ["train", INSTANCES], ["report", "runs"]
    )
    assert listed == "0 ''"
    assert detector == f"2 {line('pycocotools', 'detect')!r}"
    assert report in [f"2 {line(package, 'report')!r}" for package in ("jinja2", "matplotlib", "markupsafe")]


def test_detectors_need_no_more_than_their_extra(tmp_path: Path) -> None:
    words = [["train", recipe, "--list-keys"] for recipe in (INSTANCES, FACES)]
    assert Environment(tmp_path, "polynl[detect]").commands(*words) == ["0 ''", "0 ''"]


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


def test_reports_need_no_more_than_their_extra(tmp_path: Path) -> None:
    reports = Environment(tmp_path, "polynl[report]")
    for said in reports.commands(["report", "none"], ["bench", "compare", "none", "none"]):
        assert "none" in said
        assert "install" not in said


def test_a_module_that_no_extra_brings_is_no_matter_of_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polynl.cli", None)
    monkeypatch.delattr("polynl.cli", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"polynl\.cli"):
        main()


def test_every_package_that_is_imported_is_declared() -> None:
    from test_architecture import FILES, imported

    declared = {extras.IMPORT_NAMES.get(r.name, r.name.replace("-", "_")) for r in requirements("polynl")}
    used = {name.split(".")[0] for path in FILES for name in imported(path)} - sys.stdlib_module_names
    assert used - {"polynl", "mmcv"} <= declared  # mmcv is mmcv-lite's
