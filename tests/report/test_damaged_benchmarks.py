"""A benchmark's file of any content is read right, or refused in one line that names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from finished_runs import layers, networks
from rich.console import Console

from polynl.bench.compare import run_compare
from polynl.errors import SettingsError
from polynl.report.load import load_runs
from polynl.report.page import render_page
from polynl.results.benchmark import Results

QUIET = Console(file=StringIO())
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
WRONG: tuple[Any, ...] = (0, 1.5, 10**400, float("nan"), "\ud800", None, [], {}, DEEP)
# What the commands do only shows damage that reading has overlooked: some of the mutations will do.
USED_EVERY = 20


def nodes(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value; of a list, to the first and the last."""
    keys = (
        list(content) if isinstance(content, dict) else sorted({0, len(content) - 1} & {*range(len(content))})
    )
    for key in keys:
        yield (*path, key)
        if isinstance(content[key], dict | list):
            yield from nodes(content[key], (*path, key))


def mutations(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every value deleted, and replaced by every wrong one."""
    for path in nodes(content):
        for wrong in (..., *WRONG):
            changed = deepcopy(content)
            part: Any = changed
            for key in path[:-1]:
                part = part[key]
            if wrong is ...:
                del part[path[-1]]
            else:
                part[path[-1]] = wrong
            yield changed


def problem(path: Path) -> str | None:
    try:
        Results.load(path)
    except SettingsError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("make", "name"), [(layers, "layers.json"), (networks, "nets.json")])
def test_any_content_is_read_or_refused(tmp_path: Path, make: Callable[[], Results], name: str) -> None:
    path = tmp_path / name
    make().save(path)
    read = refused = 0
    for content in mutations(json.loads(path.read_text())):
        path.write_text(json.dumps(content))
        message = problem(path)
        if message is not None:
            refused += 1
            assert message.startswith(f"{path} ")
            assert "\n" not in message
            assert len(message) < len(str(path)) + 300
            continue
        read += 1
        if read % USED_EVERY == 0:
            render_page(load_runs([tmp_path]), [], "title", "command")
            try:
                run_compare(path, path, QUIET, everything=True)
            except SettingsError as error:
                assert "no method timed at the same size" in str(error)  # noqa: PT017
    assert refused > 300
    assert read > USED_EVERY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": 5}, "settings: expected keys and values (got 5)."),
        ({"measurements": [3]}, "measurements.0: expected keys and values (got 3)."),
        ({"methods": {}}, "reference: 'conv1x1' is not one of its methods."),
        (
            {"environment": {"cpu": [[1]]}},
            "environment.cpu: expected a text, a number or a list of them (got ",
        ),
        ({"kind": "nets"}, "settings.side: is missing."),
    ],
)
def test_what_is_wrong_is_said_by_every_command(
    tmp_path: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layers.json"
    layers().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for words in (
        ["bench", "compare", path, path],
        ["report", tmp_path, "--out", tmp_path / "report.html"],
        ["bench", "layers", "--out", tmp_path, "--resume"],
    ):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "")
        assert f"{path} is not the JSON of a benchmark: {message}" in err
        assert len(err.splitlines()) == 1
