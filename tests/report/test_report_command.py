"""`polynl report`: writes one file whole or not at all, and says what is wrong in a line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command_line import run
from finished_runs import layers, row, written


def test_a_report_of_several_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = written(tmp_path / "a [b]", [row(1, top1=1.0)])
    layers().save(tmp_path / "bench" / "layers.json")
    out = tmp_path / "new" / "folder" / "page.html"
    words = ["report", training, tmp_path / "bench", "--out", out]
    monkeypatch.setattr(sys, "argv", ["polynl", *map(str, words)])
    code, shown, err = run(capsys, *words)
    assert (code, err) == (0, "")
    said = " ".join(shown.split())
    assert f"No pictures: Poly-NL: there are no weights in {training}." in said
    text = out.read_text(encoding="utf-8")
    size = f"{len(text.encode()) / 1e6:.2f} MB"
    assert f"The report is in {out} ({size}): open it in a browser." in said
    assert f"<code>polynl report &#39;{training}&#39; {tmp_path / 'bench'} --out {out}</code>" in text
    assert "<h1>Small ResNet on easy scenes, 2 epochs</h1>" in text
    assert [file.name for file in out.parent.iterdir()] == ["page.html"], "nothing half written"


def test_the_title_names_folders_where_there_is_not_one_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        layers().save(tmp_path / f"b{number}" / "layers.json")
    monkeypatch.chdir(tmp_path)
    for count, title in ((3, "b0, b1, b2"), (5, "b0, b1, b2 and 2 more")):
        assert run(capsys, "report", *(f"b{number}" for number in range(count)))[0] == 0
        assert f"<h1>{title}</h1>" in (tmp_path / "report.html").read_text()


def test_the_old_report_stays_if_the_new_one_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers().save(tmp_path / "bench" / "layers.json")
    out = tmp_path / "report.html"
    out.write_text("old")

    def crash(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    code, _, err = run(capsys, "report", tmp_path / "bench", "--out", out)
    assert code == 1
    assert "disk full" in err
    assert out.read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} == {"bench", "report.html"}


def test_what_cannot_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers().save(tmp_path / "bench" / "layers.json")
    for words, message in (
        ([tmp_path / "bench", "--out", tmp_path], f"--out: {tmp_path} is a folder; expected a file."),
        ([tmp_path / "bench", "--out", tmp_path / "page"], f"--out: {tmp_path / 'page'} must end in .html."),
        ([tmp_path / "nowhere"], f"{tmp_path / 'nowhere'}: there is no such folder"),
        ([tmp_path / "bench", tmp_path], f"{tmp_path}: it contains no results of polynl"),
    ):
        code, out, err = run(capsys, "report", *words)
        assert (code, out) == (2, "")
        assert message in " ".join(err.split())
        assert "Traceback" not in err
    assert [file.name for file in tmp_path.iterdir()] == ["bench"]


def test_no_folder_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "report")
    assert (code, out) == (2, "")
    assert "specify the folders to report: the folder of `polynl reproduce`" in " ".join(err.split())
    assert not list(tmp_path.iterdir())
