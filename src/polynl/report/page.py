"""The page itself: everything that was gathered, in one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from polynl.bench.networks import network_table
from polynl.report.figures import Figure, against_cost, curves, efficiency
from polynl.report.images import colour_bar
from polynl.report.pictures import Pictures
from polynl.report.tables import (
    Sheet,
    absolute_sheet,
    accuracy_sheet,
    environment_sheet,
    plain_sheet,
    ratio_sheet,
)
from polynl.results.benchmark import Results
from polynl.results.load import Gathered, Study
from polynl.results.tables import counted, skipped_lines
from polynl.train.recipe_file import write_yaml

HERE = Path(__file__).parent
TEMPLATE, STYLE, SCRIPT = "template.html.j2", "report.css", "report.js"
# In the order of the page: the id that links lead to, and the heading.
SECTIONS = {
    "accuracy": "Accuracy",
    "curves": "Training curves",
    "efficiency": "Efficiency",
    "networks": "Whole networks",
    "grad-cam": "Grad-CAM",
    "xyz": "X, Y and Z",
    "influence": "Who contributes",
    "environment": "Environment and commands",
}


@dataclass(frozen=True)
class Bench:
    """A benchmark of layers: charts of ratios, their tables, and the figures themselves."""

    name: str
    about: str
    figures: Sequence[Figure]
    ratios: Sequence[Sheet]
    absolutes: Sequence[Sheet]


def page(found: Gathered, pictures: Sequence[Pictures], title: str, command: str) -> str:
    """The HTML."""
    content: dict[str, Any] = {
        "studies": found.studies,
        "accuracy": [(study, accuracy_sheet(study)) for study in found.studies],
        "curves": [curves(study) for study in found.studies],
        "costs": [figure for study in found.studies if (figure := against_cost(study))],
        "benches": [_bench(name, r) for name, r in _named(found.benches, "layers")],
        "networks": [_networks(name, r) for name, r in _named(found.benches, "nets")],
        "pictures": pictures,
        "colour_bar": colour_bar(),
        "environment": environment_sheet(found.origins),
        "commands": list(dict.fromkeys([*(origin.command for origin in found.origins), command])),
        "recipes": list(_recipes(found.studies)),
    }
    sections = {name: heading for name, heading in SECTIONS.items() if _has(name, content)}
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        **content,
        title=title,
        today=date.today().isoformat(),
        sections=sections,
        # They are ours, and hold no "</style>" or "</script>".
        style=Markup((HERE / STYLE).read_text(encoding="utf-8")),
        script=Markup((HERE / SCRIPT).read_text(encoding="utf-8")),
    )


def _has(section: str, content: dict[str, Any]) -> bool:
    """Whether there is something in a section, or something that a reader would miss."""
    pictures: Sequence[Pictures] = content["pictures"]
    return {
        "accuracy": bool(content["studies"]),
        "curves": bool(content["studies"]),
        "efficiency": bool(content["benches"]) or bool(content["costs"]),
        "networks": bool(content["networks"]),
        "grad-cam": bool(pictures),
        "xyz": any(p.norms or p.missing for p in pictures),
        "influence": any(p.influence or p.missing or p.without_influence for p in pictures),
        "environment": True,
    }[section]


def _named(benches: Sequence[tuple[str, Results]], kind: str) -> list[tuple[str, Results]]:
    """Those of a kind; one alone needs no name."""
    found = [(name, results) for name, results in benches if results.kind == kind]
    return found if len(found) > 1 else [("", results) for _, results in found]


def _bench(name: str, results: Results) -> Bench:
    s = results.settings
    runs = counted(s["runs"], "run")
    about = f"One layer, batch {s['batch']}, {s['dtype']} on {s['device'].upper()}; medians of {runs}."
    steps: tuple[Any, ...] = ("forward", "training")
    figures = [figure for step in steps if (figure := efficiency(results, step))]
    axes = ("positions", "channels")
    ratios, absolutes = (
        [sheet for axis in axes if (sheet := make(results, axis)).columns]
        for make in (ratio_sheet, absolute_sheet)
    )
    return Bench(name, about, figures, ratios, absolutes)


def _networks(name: str, results: Results) -> tuple[Sheet, list[str]]:
    """The table, and what was not measured."""
    return plain_sheet(name, network_table(results)), skipped_lines(results)


def _recipes(studies: Sequence[Study]) -> Iterator[tuple[str, str]]:
    """(whose, the YAML) of every recipe that is not there yet."""
    seen = set()
    for study in studies:
        for variant in study.variants:
            text = write_yaml(variant.recipe)
            if text not in seen:
                seen.add(text)
                whose = study.title if variant.costs else f"{variant.label}: {variant.trainings[0].folder}"
                yield whose, text
