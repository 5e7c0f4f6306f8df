"""The file of a run: its schema, that it is written whole, and what is said of files that do not fit."""

import json
import os
from pathlib import Path

import pytest

from polynl.bench.settings import LayerSettings, NetSettings
from polynl.environment import commit, environment
from polynl.errors import SettingsError
from polynl.files import write_atomically
from polynl.results.benchmark import MEMORY, NO_RATIOS, Measurement, Point, Results, differences
from polynl.results.charts import efficiency
from polynl.results.tables import layer_tables, network_table, ratio_table

SWEEP = {"at_side": 2, "channels": [8], "at_channels": 8, "sides": [2, 4]}


def small_results() -> Results:
    points = [Point("forward", 1, side, 8) for side in (2, 4)]
    measurements = [
        Measurement("conv1x1", points[0], (1.0, 2.0, 3.0), 100),
        Measurement("poly_nl", points[0], (4.0, 4.0, 5.0), 150),
        Measurement("conv1x1", points[1], (4.0, 4.0, 4.0), 400),
        Measurement("poly_nl", points[1], skipped="too large"),
    ]
    methods = {"conv1x1": {"label": "1×1"}, "poly_nl": {"label": "Poly-NL"}}
    settings = {"runs": 3, "batch": 1, "dtype": "float32", "device": "cpu", **SWEEP}
    return Results("layers", "polynl bench layers", settings, {"cpu": "x"}, methods, "conv1x1", measurements)


def test_schema(tmp_path: Path) -> None:
    path = tmp_path / "a" / "layers.json"
    small_results().save(path)
    content = json.loads(path.read_text())
    assert list(content) == [
        "schema",
        "kind",
        "command",
        "settings",
        "environment",
        "methods",
        "reference",
        "measurements",
    ]
    assert content["schema"] == 1
    assert content["measurements"][1] == {
        "method": "poly_nl",
        "step": "forward",
        "batch": 1,
        "side": 2,
        "channels": 8,
        "width": None,
        "seconds": [4.0, 4.0, 5.0],
        "median_seconds": 4.0,
        "peak_bytes": 150,
        "skipped": None,
    }
    assert content["measurements"][3]["skipped"] == "too large"
    assert Results.load(path) == small_results()


def test_ratios() -> None:
    results = small_results()
    poly_nl = results.measurements[1]
    assert results.ratio(poly_nl) == 2.0
    assert results.ratio(poly_nl, MEMORY) == 1.5
    assert results.ratio(results.measurements[3]) is None


@pytest.mark.parametrize(
    ("device", "dtype", "compared"),
    [
        ("cpu", "float16", False),
        ("cpu", "bfloat16", True),
        ("cpu", "float32", True),
        ("cuda", "float16", True),
    ],
)
def test_only_float16_on_cpus_has_no_ratios(device: str, dtype: str, compared: bool) -> None:
    results = small_results()
    results.settings |= {"device": device, "dtype": dtype}
    assert (results.ratio(results.measurements[1]) == 2.0) is compared
    assert (results.ratio(results.measurements[1], MEMORY) is not None) is compared
    table = ratio_table(results, "positions")
    assert {row.label: row.cells[0] for row in table.rows} == (
        {"1×1": "1.00", "Poly-NL": "2.00"} if compared else {"1×1": "–", "Poly-NL": "–"}
    )
    titles = [table.title, *(table.title for table in layer_tables(results))]
    assert all((NO_RATIOS in title) is not compared for title in titles)
    assert (efficiency(results, "forward", {}) is not None) is compared, "a chart of ratios"
    assert efficiency(results, "forward", {}, absolute=True) is not None
    assert bool(results.notes()) is not compared


def test_networks_in_float16_on_cpus_have_ratios_of_what_is_counted_only() -> None:
    settings = {"side": 32, "batch": 1, "runs": 1, "training": False, "device": "cpu", "dtype": "float16"}
    counts = {"parameters": 10**6, "multiply_adds": 10**9}
    methods = {"plain": {"label": "ResNet", **counts}, "poly_nl": {"label": "Poly-NL", **counts}}
    results = Results("nets", "", settings, {}, methods, "plain")
    results.measurements += [Measurement(name, Point("forward", 1, 32), (0.01,), 2**20) for name in methods]
    table = network_table(results)
    assert list(table.rows[1].cells) == ["1.00 M (1.00)", "1.00 G (1.00)", "10.0 ms", "100.0", "1.0 MiB"]
    assert table.title.endswith(NO_RATIOS)


def test_a_file_that_does_not_say_whether_the_allocator_was_primed_has_no_note() -> None:
    assert small_results().notes() == []


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def crash(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_the_content_is_on_the_disk_before_it_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a)))
    write_atomically(tmp_path / "file", "text")
    assert calls[:2] == ["fsync", "replace"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not valid JSON, or is truncated"),
        ("[]", "schema None"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1}', r"kind: expected layers or nets \(got None\)"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        Results.load(path)


def test_differences_name_what_changed() -> None:
    assert differences({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 3], "c": "x"}) == [
        "b: 1 2 → 1 3",
        "c: None → x",
    ]


def test_environment_names_no_owner() -> None:
    text = json.dumps(environment("cpu"))
    assert {"torch", "cpu", "cores", "threads", "commit", "python"} <= json.loads(text).keys()
    assert os.uname().nodename not in text
    assert str(Path.cwd()) not in text
    assert str(Path.home()) + "/" not in text


def test_commit_is_none_or_a_hash() -> None:
    found = commit()
    assert found is None or set(found.removesuffix("+")) <= set("0123456789abcdef")


def test_command_repeats_the_settings_and_no_path(tmp_path: Path) -> None:
    settings = LayerSettings(sides=(7, 14), compile=True, dtype="bfloat16", out=tmp_path)
    assert (
        settings.command("bench", "layers") == "polynl bench layers --dtype bfloat16 --compile --sides 7 14"
    )
    assert NetSettings(out=tmp_path).command("bench", "nets") == "polynl bench nets"
    assert str(tmp_path) not in json.dumps(settings.measured())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": 0}, "--runs 0"),
        ({"sides": (14, -1)}, "--sides -1"),
        ({"channels": ()}, "--channels needs"),
        ({"blocks": ("poly_nll",)}, "Did you mean poly_nl"),
        ({"resume": True, "overwrite": True}, "one of them"),
    ],
)
def test_settings_that_cannot_run(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        LayerSettings(**options)  # type: ignore[arg-type]
