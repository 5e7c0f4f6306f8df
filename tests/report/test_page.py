"""The page: a section for all that there is, nothing loaded, and no word of a run taken for markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from finished_runs import MACHINE, layers, networks, outcome, reproduced, row, written

from polynl.bench.cases import LOOKS
from polynl.report.chart import svg
from polynl.report.load import LoadedRuns, load_runs
from polynl.report.page import SECTIONS, render_page
from polynl.report.pictures import Picture, PictureGrid, Pictures
from polynl.results.benchmark import Results
from polynl.results.charts import accuracy_and_cost, efficiency, training_curves
from polynl.results.study import Origin, Study

EVIL = """</script><script>alert("1")</script><img src=x onerror='x'>&amp;"""
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Sections with their words, every tag with its attributes; checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, str] = {}
        self.head = ""
        self.islands: list[str] = []
        self._open: list[str] = []
        self._section = ""
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
            self.words[self._section] = ""
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.islands.append(data)
        elif self._section:
            self.words[self._section] += f"{data} "
        elif "header" in self._open:
            self.head += data

    @property
    def summary(self) -> str:
        """What stands above all sections."""
        return " ".join(self.head.split())

    def said(self, section: str) -> str:
        return " ".join(self.words[section].split())


def paged(
    found: LoadedRuns, *pictures: Pictures, title: str = "title", command: str = "polynl report x"
) -> Page:
    return Page(render_page(found, pictures, title, command))


def bench(*results: Results) -> LoadedRuns:
    runs = LoadedRuns()
    for place, one in enumerate(results):
        runs.add_benchmark(f"folder{place}", one)
    return runs


@pytest.fixture(scope="module")
def whole(report: Path) -> Page:
    return Page(report.read_text())


def test_all_sections_are_there_and_linked(whole: Page) -> None:
    assert list(whole.words) == list(SECTIONS)
    links = [attributes["href"] for tag, attributes in whole.tags if tag == "a"]
    assert links == [f"#{name}" for name in SECTIONS]
    for name, heading in SECTIONS.items():
        assert whole.said(name).startswith(heading)


def test_nothing_is_loaded(report: Path, whole: Page) -> None:
    text = report.read_text()
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*|\"shares\": \"[^\"]*", "", text)
    )
    for tag, attributes in whole.tags:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, value)
    assert len(text.encode()) < 3e6


def test_pictures_say_what_they_show(whole: Page) -> None:
    alts = [attributes.get("alt") for tag, attributes in whole.tags if tag == "img"]
    assert len(alts) > 50
    assert all(alts)


def test_figures_commands_and_recipes_are_in_it(whole: Page, reproduction: Path) -> None:
    content = json.loads((reproduction / "results.json").read_text())
    top1 = content["outcomes"][-1]["epochs"]["0"][-1]["top1"]
    assert f"Poly-NL {top1:.1f} " in whole.said("accuracy")
    assert "Made with --quick" in whole.said("accuracy")
    assert "76.30" not in whole.said("accuracy"), "the paper has other data"
    assert "minus no block" in whole.said("accuracy")
    assert "Intervals are of 95 %" in whole.said("accuracy")
    assert "Share of the branch" in whole.said("blocks")
    assert "Time against positions, 16 channels" in whole.said("efficiency")
    assert "TESA, forward, 16 channels: not measured at N = 64: too slow" in whole.said("efficiency")
    assert "In the trained network" in whole.said("efficiency")
    assert "Poly-NL at res4 1.50 M (1.50)" in whole.said("networks")
    assert "not measured at N = 1,024: too slow" in whole.said("networks")
    assert "TESA has no influence maps" in whole.said("influence")
    for words in (
        "polynl reproduce --out results",
        "polynl bench layers",
        "a processor",
        "arch: small_resnet",
    ):
        assert words in whole.said("environment")


def test_the_page_begins_with_what_was_found_and_on_which_images(whole: Page) -> None:
    assert "Made with --quick: the networks had no time to learn" in whole.summary
    assert "The label is the shape of the figure that has the colour of the cue" in whole.summary
    assert "Scored on 11 images of 5 classes." in whole.summary
    assert "Each of them is to be found, with its shape, box and mask. Scored on 3 images." in whole.summary


def test_both_kinds_of_networks_are_explained(whole: Page) -> None:
    assert "right (✓) or wrong (✗)" in whole.said("grad-cam")
    assert "whose box is drawn" in whole.said("grad-cam")
    assert "padding" in whole.said("influence")


def test_only_what_there_is_has_a_section(tmp_path: Path) -> None:
    found = load_runs([written(tmp_path / "a", [row(1, top1=1.0)])])
    assert list(paged(found).words) == ["accuracy", "curves", "environment"]
    assert list(paged(bench(networks())).words) == ["networks", "environment"]
    only_layers = paged(bench(layers()))
    assert list(only_layers.words) == ["efficiency", "environment"]
    assert "batch 1, float32 on CPU; medians of 1 run." in only_layers.said("efficiency")
    assert "cross" not in only_layers.said("efficiency")
    grid = PictureGrid("t", ["image"], [[Picture("data:,", "said", "alt")]])
    plain = paged(found, Pictures("t", grad_cam=grid))
    assert list(plain.words) == ["accuracy", "curves", "grad-cam", "environment"]
    assert "box" not in plain.said("grad-cam")


def test_what_could_not_be_made_is_said_once(tmp_path: Path) -> None:
    found = load_runs([written(tmp_path / "a", [row(1, top1=1.0)])])
    told = paged(found, Pictures("t", missing=["Poly-NL: the weights are gone."]))
    assert list(told.words) == ["accuracy", "curves", "grad-cam", "environment"]
    assert told.said("grad-cam") == "Grad-CAM No pictures of Poly-NL: the weights are gone."


def test_scores_are_of_the_epochs_that_were_scored(tmp_path: Path) -> None:
    """With `evaluate_every` 2, in the fifth epoch of a training that goes on."""
    rows = [row(epoch) | ({} if epoch % 2 else {"top1": 10.0 * epoch}) for epoch in range(1, 6)]
    found = load_runs([written(tmp_path / "a", rows, "--evaluate-every", "2", "--epochs", "9")])
    told = paged(found)
    assert "Scores of the evaluated epochs, and the training loss of every epoch" in told.said("curves")
    assert "after the last evaluated epoch" in told.said("accuracy")
    assert "Poly-NL 40.0" in told.said("accuracy")


def test_two_benchmarks_are_told_apart() -> None:
    told = paged(bench(layers(), layers(), networks(), networks()))
    for name, section in (("folder0", "efficiency"), ("folder1", "efficiency"), ("folder3", "networks")):
        assert name in told.said(section)
    alone = paged(bench(layers(), networks()))
    assert "folder" not in alone.said("efficiency") + alone.said("networks")


def test_a_benchmark_that_has_just_begun() -> None:
    told = paged(bench(layers(until=0)))
    assert "No measurements yet." in told.said("efficiency")
    half = paged(bench(layers(until=3))).said("efficiency")
    assert "Forward + backward" not in half
    assert "Ratios to the convolution" in half


def test_costs_without_a_benchmark(tmp_path: Path) -> None:
    found = load_runs([reproduced(tmp_path / "a", [outcome("none", [row(1, top1=1.0)])])])
    said = paged(found).said("efficiency")
    assert "These runs have no benchmark of layers" in said
    assert "In the trained network: Small ResNet on easy scenes" in said


def test_commands_are_listed_once() -> None:
    found = LoadedRuns(origins=[Origin("a", "polynl one", MACHINE), Origin("b", "polynl one", MACHINE)])
    assert paged(found, command="polynl report a").said("environment").count("polynl one") == 1
    again = paged(found, command="polynl one").said("environment")
    assert again.count("polynl one") == 1


def test_many_commands_are_folded() -> None:
    few, many = (
        paged(LoadedRuns(origins=[Origin("a", f"polynl train {k}", MACHINE) for k in range(count)]))
        for count in (7, 8)
    )
    assert "8 commands" not in few.said("environment")
    assert "9 commands polynl train 0 polynl train 1 " in many.said("environment")


def test_trainings_without_an_environment_are_named(tmp_path: Path) -> None:
    folders = [written(tmp_path / f"seed{k}", [row(1, top1=1.0)], "--seed", str(k)) for k in (0, 1)]
    assert "not recorded" not in paged(load_runs(folders)).said("environment")
    (folders[1] / "environment.json").unlink()
    said = paged(load_runs(folders)).said("environment")
    assert f"Trainings whose command and machine are not recorded: {folders[1]}." in said


def test_words_of_runs_stay_words(tmp_path: Path) -> None:
    """Folders, labels, commands, titles, notes: in markup, in attributes and in the JSON."""
    found = load_runs([written(tmp_path / "a", [row(1, top1=1.0)])])
    study = found.studies[0]
    variant = study.variants[0]
    training = variant.trainings[0]
    training = replace(training, recipe={**training.recipe, "note": EVIL})
    evil = replace(variant, row=EVIL, label=EVIL, trainings=[training])
    results = layers(skipped=EVIL)
    results.methods = {**results.methods, "poly_nl": {"label": EVIL}}
    content = LoadedRuns(
        [Study(EVIL, study.task, [evil, evil])],
        [(EVIL, results), (EVIL, results)],
        [Origin(EVIL, EVIL, {"cpu": EVIL, "variables": {EVIL: EVIL}})],
    )
    grid = PictureGrid(EVIL, [EVIL], [[Picture("data:,", EVIL, EVIL)]])
    maps = {"grid": [1, 1], "sources": [1, 1], "scales": [0.0], "shares": "", "found": EVIL}
    influence = {
        "images": [{"uri": "data:,", "label": EVIL, "size": [1, 1]}],
        "blocks": [{"label": EVIL, "maps": [maps]}],
    }
    pictures = Pictures(EVIL, False, grid, [grid], influence, [EVIL], [EVIL])
    told = paged(content, pictures, title=EVIL, command=EVIL)
    scripts = [attributes for tag, attributes in told.tags if tag == "script"]
    assert scripts == [{"type": "application/json"}, {}], "a script too many"
    assert {attributes.get("src") for tag, attributes in told.tags if tag == "img"} == {"data:,"}
    assert not any(name.startswith("on") for _, attributes in told.tags for name in attributes)
    assert json.loads(told.islands[0]) == influence
    for section in ("accuracy", "curves", "efficiency", "grad-cam", "xyz", "influence", "environment"):
        assert EVIL in told.words[section], section
    alts = {attributes["alt"] for tag, attributes in told.tags if tag == "img"}
    assert alts == {EVIL}


# Which charts there are


def study_of(tmp_path: Path, *outcomes: dict[str, object]) -> Study:
    return load_runs([reproduced(tmp_path / "results", outcomes)]).studies[0]


def test_curves_are_of_scores_and_loss(tmp_path: Path) -> None:
    rows = [row(1, top1=10.0, top5=50.0), row(2, top1=20.0, top5=60.0)]
    figure = training_curves(study_of(tmp_path, outcome("none", rows), outcome("poly_nl", rows, rows)))
    assert [chart.title for chart in figure.charts] == ["Top-1", "Top-5", "Training loss"]
    assert [series.label for series in figure.legend] == ["no block", "Poly-NL"]
    assert "Poly-NL: 20 at 2" in svg(figure.charts[0])
    assert "no block: 1 at 2" in svg(figure.charts[2])


def test_curves_of_a_detector_are_its_main_scores(tmp_path: Path) -> None:
    figures = {f"{kind}_{name}": 1.0 for kind in ("box", "mask") for name in ("ap", "ap50", "ap75")}
    run = written(tmp_path / "a", [row(1, **figures)], task="instance_segmentation")
    assert [chart.title for chart in training_curves(load_runs([run]).studies[0]).charts] == [
        "Box AP",
        "Mask AP",
        "Training loss",
    ]


def test_curves_without_a_single_number(tmp_path: Path) -> None:
    run = written(tmp_path / "a", [row(1) | {"loss": float("nan")}])
    assert not training_curves(load_runs([run]).studies[0]).charts


def test_variants_of_one_block_are_drawn_differently(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / f"{lr}", [row(1, top1=1.0)], "--optimizer.lr", f"{lr}") for lr in (0.1, 0.2, 0.3)
    ]
    looks = [series.style for series in training_curves(load_runs(runs).studies[0]).legend]
    assert len(set(looks)) == 3
    assert {style.colour for style in looks} == {"#D55E00"}


def test_accuracy_accuracy_and_cost(tmp_path: Path) -> None:
    rows = [row(1, top1=10.0)]
    study = study_of(tmp_path, outcome("none", rows), outcome("poly_nl", rows, forward_seconds=1.25))
    figure = accuracy_and_cost(study)
    assert figure is not None
    assert [chart.title for chart in figure.charts] == [
        "Top-1 against the forward pass",
        "Top-1 against the training step",
    ]
    assert "Poly-NL: 10 at 1.25" in svg(figure.charts[0])
    assert "Poly-NL: 10 at 1<" in svg(figure.charts[1])


def test_no_accuracy_against_cost_without_scores_or_the_plain_network(tmp_path: Path) -> None:
    assert accuracy_and_cost(study_of(tmp_path, outcome("poly_nl", [row(1, top1=1.0)]))) is None
    assert accuracy_and_cost(study_of(tmp_path, outcome("none", [row(1)]))) is None
    unscored = study_of(tmp_path, outcome("none", [row(1, top1=1.0)]), outcome("tesa", [row(1)]))
    figure = accuracy_and_cost(unscored)
    assert figure is not None
    assert "TESA:" not in svg(figure.charts[0])


def test_efficiency_charts_have_the_ratios() -> None:
    figure = efficiency(layers(skipped="too slow"), "training", LOOKS)
    assert figure is not None
    assert figure.title == "Forward + backward"
    assert [chart.title for chart in figure.charts] == [
        "Time against channels, 4×4 positions",
        "Time against positions, 16 channels",
        "Memory against positions, 16 channels",
    ]
    _, time, memory = map(svg, figure.charts)
    assert [f"Poly-NL: 2 at {size}<" in time for size in (4, 16, 64)] == [True] * 3
    assert "Poly-NL: 3 at 64<" in memory
    assert [f"TESA: 250 at {size}<" in time for size in (4, 16, 64)] == [True, True, False]
    assert list(figure.notes) == ["TESA, forward + backward, 16 channels: not measured at N = 64: too slow"]
    assert efficiency(layers(until=3), "training", LOOKS) is None


def test_a_layer_without_memory_has_no_place_on_a_logarithmic_axis() -> None:
    results = layers()
    results.measurements = [
        replace(m, peak_bytes=0) if m.method == "poly_nl" else m for m in results.measurements
    ]
    figure = efficiency(results, "forward", LOOKS)
    assert figure is not None
    _, time, memory = map(svg, figure.charts)
    assert "Poly-NL:" in time
    assert "Poly-NL:" not in memory
