"""`python -m build` gives a wheel and an sdist that install, and work outside of the repository."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import polynl

pytest.importorskip("build", reason="needs the extra 'test'")

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "polynl"
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
# Nothing of the environment that the tests run in; torch and the rest are those installed here.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def run(*words: str | Path, folder: Path, path: Path | None = None) -> str:
    """The output of a Python program that runs in a folder and finds what is installed in `path` first."""
    environment = CLEAN if path is None else {**CLEAN, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both files. They are built from a copy: a build writes into its source."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    run("-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source", folder=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (file,) = built.glob("*.tar.gz")
    return file


def installed(file: Path, folder: Path) -> Path:
    """Where pip has installed a file without its dependencies."""
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    run("-m", "pip", "install", *options, "--target", folder / "target", file, folder=folder)
    return folder / "target"


def test_the_wheel_has_all_of_the_package_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = {f"polynl/{path.relative_to(SOURCE)}" for path in SOURCE.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert wanted >= {"polynl/py.typed", "polynl/recipes/scenes.yaml", "polynl/report/template.html.j2"}
    described = f"polynl-{polynl.__version__}.dist-info"
    assert {name for name in names if not name.startswith(described)} == wanted
    assert f"{described}/licenses/LICENSE" in names


def test_the_sdist_is_the_whole_project(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt"}
    assert names >= {"hubconf.py", "CONTRIBUTING.md", "pyproject.toml", "MANIFEST.in"}
    assert names >= {"docs/site/build.py", "tests/test_package.py", "tests/train/tiny.yaml"}
    assert names >= {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


def test_the_wheel_reproduces_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    target = installed(wheel, tmp_path)
    place = run("-c", "import polynl; print(polynl.__file__)", folder=tmp_path, path=target)
    assert Path(place.strip()) == target / "polynl" / "__init__.py"
    quick = ("reproduce", "--quick", "--no-timings", "--blocks", "poly_nl", "--jobs", "1", "--out", "out")
    run(target / "bin" / "polynl", *quick, folder=tmp_path, path=target)
    assert {"report.html", "results.json", "results.md"} <= set(os.listdir(tmp_path / "out"))
    assert "Poly-NL" in (tmp_path / "out" / "results.md").read_text("utf-8")


def test_the_sdist_installs(sdist: Path, tmp_path: Path) -> None:
    target = installed(sdist, tmp_path)
    version = run(target / "bin" / "polynl", "--version", folder=tmp_path, path=target)
    assert version == f"polynl {polynl.__version__}\n"
    assert (target / "polynl" / "recipes" / "scenes.yaml").exists()


def test_the_version_is_written_once(wheel: Path) -> None:
    assert f"-{polynl.__version__}-" in wheel.name
    assert not re.search(r"^version *[:=] *[\"'\d]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_citation_names_the_software_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", "MIT")
    assert "version" not in citation, "src/polynl/__init__.py has it"
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == [
        "Babiloni",
        "Marras",
        "Kokkinos",
        "Deng",
        "Chrysos",
        "Zafeiriou",
    ]
