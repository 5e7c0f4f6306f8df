"""Settings for all tests."""

import gc
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# The tensors are tiny: synchronising a second thread costs more than it saves.
torch.set_num_threads(1)

DOCS = Path(__file__).parents[1] / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless=new",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
)


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

    def run(package, page="insertion.md"):
        text = (DOCS / page).read_text()
        (match,) = re.finditer(rf"^```python {package}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        line = text[: match.start(1)].count("\n")
        names = {"__name__": __name__}
        exec(compile("\n" * line + match.group(1), page, "exec"), names)
        return names

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    return run


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One for all tests of a file; each opens its page anew."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        missing = "no Chromium" if binary is None else "no chromedriver"
        pytest.skip(f"{missing} is installed: on Debian, apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium, or polynl[test]")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    # Chromium has no sandbox for root.
    flags = [*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    for flag in [*flags, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With a path of its own selenium looks for no driver to download.
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield started
    finally:
        started.quit()
