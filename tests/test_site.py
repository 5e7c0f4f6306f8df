"""`make docs`: the site has every page and every public name, loads nothing from elsewhere, and searches."""

import ast
import json
import re
import runpy
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polynl

pytest.importorskip("zensical", reason="needs the extra 'docs'")
pytest.importorskip("mkdocstrings_handlers.python", reason="needs the extra 'docs'")

ROOT = Path(__file__).parent.parent
Steps = dict[str, Callable[..., Any]]


@pytest.fixture(scope="module")
def steps() -> Steps:
    """The functions `stage` and `render`."""
    return runpy.run_path(str(ROOT / "docs" / "site" / "build.py"))


@pytest.fixture(scope="module")
def site(steps: Steps, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("docs")
    steps["stage"](folder)
    return steps["render"](folder).parent


def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text("utf-8")
    pages = [
        page.relative_to(ROOT / "docs") for part in ("", "api/") for page in ROOT.glob(f"docs/{part}*.md")
    ]
    assert len(pages) > 15
    missing = [str(page) for page in pages if f'href="./{page.with_suffix(".html")}"' not in home]
    assert missing == [], "add them to nav in docs/site/zensical.toml"


def reference(site: Path) -> set[str]:
    """The names that the site documents, as other projects can look them up."""
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}


def exported(package: Path) -> list[str]:
    """What `__all__` of a package lists; nothing if it has none."""
    for node in ast.parse((package / "__init__.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_the_reference_has_every_public_name(site: Path) -> None:
    packages = [init.parent for init in sorted(ROOT.glob("src/polynl/*/__init__.py"))]
    public = {f"polynl.{package.name}.{name}" for package in packages for name in exported(package)}
    assert public >= {"polynl.blocks.PolyNL", "polynl.functional.poly_nl", "polynl.explain.grad_cam"}
    assert public - reference(site) == set(), (
        "add the package to docs/api and to nav in docs/site/zensical.toml"
    )


def test_the_names_of_polynl_itself_are_linked(site: Path) -> None:
    page = (site / "api" / "polynl.html").read_text("utf-8")
    linked = set(re.findall(r'href="[^"]+#polynl\.[\w.]+"[^>]*><code>(\w+)</code>', page))
    assert linked == set(polynl.__all__)


def test_docstrings_read_as_text(site: Path) -> None:
    """Roles are links to what they name, and sessions of Python are code."""
    blocks, functions = (
        (site / "api" / f"{name}.html").read_text("utf-8") for name in ("blocks", "functional")
    )
    assert not re.search(r":(func|class|meth|data):", blocks + functions)
    assert re.search(r'href="functional\.html#polynl\.functional\.poly_nl"', blocks)
    assert "<blockquote>" not in blocks + functions
    assert 'class="language-pycon highlight"' in functions


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    assert {url for page in pages for url in loads.findall(page.read_text("utf-8"))} == set()
    styles = "".join(style.read_text("utf-8") for style in site.rglob("*.css"))
    assert not re.search(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", styles)


def test_names_of_files_become_titles(steps: Steps) -> None:
    titles = {"blocks.md": "The blocks"}
    text = (
        "[docs/blocks.md](docs/blocks.md#tesa), [this](../CHANGELOG.md), [that](https://a.b/docs/blocks.md)"
    )
    assert steps["with_titles"](text, titles) == (
        "[The blocks](blocks.md#tesa), [this](CHANGELOG.md), [that](https://a.b/docs/blocks.md)"
    )


def test_examples_that_need_a_library_are_examples_on_the_site(steps: Steps) -> None:
    assert steps["with_titles"]("```python timm\nx\n```\n\n## Next\n", {}) == "```python\nx\n```\n\n## Next\n"


def test_errors_in_a_page_end_the_build(
    steps: Steps, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of empty pages but one: to build all takes seconds."""
    steps["stage"](tmp_path)
    errors = "[x](nowhere.md), [x](theory.md#nowhere), [`x`][polynl.nothing]"
    for page in (tmp_path / "pages").rglob("*.md"):
        page.write_text("# A page\n\n" + (errors if page.name == "choosing.md" else ""), "utf-8")
    with pytest.raises(SystemExit, match="was not built"):
        steps["render"](tmp_path)
    said = capfd.readouterr().err
    assert said.count("choosing.md") == 3
    for what in ("page does not exist", "anchor does not exist", "unresolved autoref"):
        assert what in said
    assert not (tmp_path / "site").exists()


# The search is the only thing in a shadow root.
SEARCH = """const focused = document.activeElement;
return focused && focused.shadowRoot && focused.shadowRoot.textContent;"""


def test_search_works_from_disk(site: Path, browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get_log("performance")
    browser.get((site / "index.html").as_uri())
    wait = WebDriverWait(browser, 30)
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "html.js"))
    ActionChains(browser).key_down(Keys.CONTROL).send_keys("k").key_up(Keys.CONTROL).perform()
    wait.until(lambda _: browser.execute_script(SEARCH) is not None)
    ActionChains(browser).send_keys("influence_map").perform()
    wait.until(lambda _: "polynl.explain" in browser.execute_script(SEARCH))
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert any(url.endswith("/search.js") for url in sent)
    assert [url for url in sent if not url.startswith(("file:", "data:", "blob:", "chrome:"))] == []
