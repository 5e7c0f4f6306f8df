"""The docs hold: examples run page by page, links and commands lead somewhere, lines keep one width."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from polynl.cli import main

ROOT = Path(__file__).parent.parent
WIDTH = 100
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
TEXTS = [*PAGES, *REFERENCE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ANY_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
LINK_TARGET = re.compile(r"\]\([^)]*\)")
INDENTED = " " * 4
every_text = pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for match in FENCE.finditer(text):
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match.group(1), str(page), "exec"), namespace)


def test_readme_has_examples() -> None:
    assert FENCE.search((ROOT / "README.md").read_text())


@every_text
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


@every_text
def test_prose_keeps_one_width(page: Path) -> None:
    """Tables and code may be wider, and the target of a link does not count."""
    lines = ANY_FENCE.sub("", page.read_text()).splitlines()
    prose = [LINK_TARGET.sub("]", line) for line in lines if not line.startswith(("|", INDENTED))]
    assert [line for line in prose if len(line) > WIDTH] == []


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `polynl` of every command in an indented block."""
    for line in page.read_text().replace("\\\n", "").splitlines():
        if line.startswith(INDENTED) and "polynl " in line:
            words = shlex.split(line.replace("$block", "poly_nl"), comments=True)
            if "polynl" in words:
                yield words[words.index("polynl") + 1 :]


COMMANDS = [(page.name, words) for page in TEXTS for words in commands(page)]
NAMES = [f"{name}: {' '.join(words[:2])}" for name, words in COMMANDS]


def test_the_readme_shows_the_main_commands() -> None:
    shown = {words[0] for name, words in COMMANDS if name == "README.md"}
    assert shown >= {"train", "evaluate", "explain", "report"}


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=NAMES)
def test_commands_exist(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A recipe is there, or is that of a run in `runs/<recipe>/`; keys of `polynl train` exist."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0, capsys.readouterr().err
    if words[0] == "train":
        main([*words, "--list-keys"])
    elif words[0] == "evaluate":
        recipe = Path(words[1])
        main(["train", recipe.parts[1] if recipe.parts[0] == "runs" else words[1], "--list-keys"])
