"""`polynl …` in this process, for the tests of every part."""

from __future__ import annotations

import pytest

from polynl import cli


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of `polynl …`."""
    code = 0
    try:
        cli.main([str(word) for word in words])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    return code, *capsys.readouterr()
