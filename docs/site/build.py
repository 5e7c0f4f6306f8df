"""Build the static site in build/docs/site from docs/, the README and the docstrings.

Run by `make docs`. A broken link, anchor or reference is an error.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# Pages next to docs/ rather than in it, and their names on the site.
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}

TITLE = re.compile(r"# (.+)")
NAMED = re.compile(r"\[(?:docs/|\.\./)?([\w-]+\.md)\]\(")  # a link whose text is the name of a page
# What an example needs comes after its language, for the tests; in a site's Markdown, such a fence is text.
NEEDS = re.compile(r"^```python .+$", re.MULTILINE)
ELSEWHERE = re.compile(r"\]\((?:docs|\.\.)/")

# Browsers start no worker, which search needs, from a file on disk; from a string they do.
WORKER = """if (location.protocol === "file:") {{
  const source = {source};
  window.Worker = class extends Worker {{
    constructor() {{
      super(URL.createObjectURL(new Blob([source], {{ type: "text/javascript" }})));
    }}
  }};
}}
"""


def with_titles(text: str, titles: dict[str, str]) -> str:
    """A page as the site has it: all pages in one folder, titles for names of files, examples in fences."""
    text = NEEDS.sub("```python", text)
    text = NAMED.sub(lambda link: f"[{titles.get(link[1], link[1])}](", text)
    return ELSEWHERE.sub("](", text).replace("](README.md", "](index.md")


def stage(folder: Path) -> None:
    """Copy the configuration, and all pages with what they show, into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("site", "evidence", "*.py"))
    for name, page in OUTSIDE.items():
        shutil.copy(ROOT / name, pages / page)
    titles = {page.name: TITLE.match(page.read_text("utf-8"))[1] for page in pages.glob("*.md")}
    for page in pages.glob("*.md"):
        page.write_text(with_titles(page.read_text("utf-8"), titles), "utf-8")
    shutil.copy(HERE / "style.css", pages)
    for name in ("zensical.toml", "docstrings.py"):
        shutil.copy(HERE / name, folder)


def render(folder: Path) -> Path:
    """Build the site from what is staged in a folder; return its front page. Exit if a page has an error."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}  # whose docstrings are read
    ended = subprocess.run([*command, folder / "zensical.toml"], env=environment, stderr=PIPE, text=True)
    found, traceback, cause = ended.stderr.partition("Traceback")
    print(found if "--strict" in cause else found + traceback + cause, end="", file=sys.stderr)
    site = folder / "site"
    if ended.returncode != 0:
        shutil.rmtree(site, ignore_errors=True)
        raise SystemExit("docs: the site was not built; the pages named above need fixing")
    (search,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    source = json.dumps(search.read_text("utf-8"))
    (site / "iframe-worker.js").write_text(WORKER.format(source=source), "utf-8")
    return site / "index.html"


if __name__ == "__main__":
    stage(ROOT / "build" / "docs")
    print(f"The site is in {render(ROOT / 'build' / 'docs')}: open it in a browser.")
