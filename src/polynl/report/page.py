"""The page: all results in one HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from polynl.bench.cases import LOOKS
from polynl.errors import shortened
from polynl.report.chart import svg
from polynl.report.images import colour_bar
from polynl.report.load import LoadedRuns
from polynl.report.pictures import Pictures
from polynl.results.benchmark import BUSY_NOTE, STEPS, Axis, Results
from polynl.results.charts import accuracy_and_cost, block_charts, efficiency, training_curves
from polynl.results.formats import plural
from polynl.results.study import Study
from polynl.results.tables import (
    Table,
    absolute_table,
    accuracy_table,
    environment_table,
    network_table,
    ratio_table,
    shape_tables,
)
from polynl.results.verdicts import conclusion, evidence_tables, verdicts
from polynl.train.recipe_file import write_yaml

HERE = Path(__file__).parent
TEMPLATE, STYLE, SCRIPT = "template.html.j2", "report.css", "report.js"
# In the order of the page: the id for links, and the heading.
SECTIONS = {
    "accuracy": "Accuracy",
    "curves": "Training curves",
    "blocks": "What the blocks do",
    "efficiency": "Efficiency",
    "networks": "Whole networks",
    "grad-cam": "Grad-CAM",
    "xyz": "X, Y and Z",
    "influence": "Influence maps",
    "environment": "Environment and commands",
}


def render_page(runs: LoadedRuns, pictures: Sequence[Pictures], title: str, command: str) -> str:
    """The HTML."""
    content: dict[str, Any] = {
        "papers": any(study.paper for study in runs.studies),
        "summaries": [(study, conclusion(study)) for study in runs.studies],
        "accuracy": [
            (study, accuracy_table(study), evidence_tables(study), verdicts(study)) for study in runs.studies
        ],
        "blocks": [figure for study in runs.studies if (figure := block_charts(study))],
        "curves": [training_curves(study) for study in runs.studies],
        "costs": [figure for study in runs.studies if (figure := accuracy_and_cost(study))],
        "layers": [_layer_section(name, r) for name, r in _of_kind(runs.benchmarks, "layers")],
        "networks": [_network_section(name, r) for name, r in _of_kind(runs.benchmarks, "nets")],
        "pictures": pictures,
        "colour_bar": colour_bar(),
        "environment": environment_table(runs.origins),
        "unrecorded": shortened(runs.unrecorded),
        "commands": list(dict.fromkeys([*(origin.command for origin in runs.origins), command])),
        "recipes": list(_recipes(runs.studies)),
    }
    # Why there are no pictures is said once, under Grad-CAM.
    filled: dict[str, Any] = {
        "accuracy": runs.studies,
        "curves": runs.studies,
        "blocks": content["blocks"],
        "efficiency": content["layers"] or content["costs"],
        "networks": content["networks"],
        "grad-cam": pictures,
        "xyz": any(p.norms for p in pictures),
        "influence": any(p.influence or p.without_influence for p in pictures),
        "environment": True,
    }
    trim: Any = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, **trim
    )
    environment.globals.update(svg=svg)
    return environment.get_template(TEMPLATE).render(
        **content,
        title=title,
        today=date.today().isoformat(),
        sections={name: heading for name, heading in SECTIONS.items() if filled[name]},
        # They are ours, and contain no "</style>" or "</script>".
        style=Markup((HERE / STYLE).read_text(encoding="utf-8")),
        script=Markup((HERE / SCRIPT).read_text(encoding="utf-8")),
    )


def _of_kind(benchmarks: Sequence[tuple[str, Results]], kind: str) -> list[tuple[str, Results]]:
    """The benchmarks of a kind; a single one needs no name."""
    found = [(name, results) for name, results in benchmarks if results.kind == kind]
    return found if len(found) > 1 else [("", results) for _, results in found]


def _layer_section(name: str, results: Results) -> dict[str, Any]:
    """Charts of ratios, their tables, and the absolute values."""
    s = results.settings
    runs = plural(s["runs"], "run")
    batch = "" if results.shapes() else f", batch {s['batch']}"
    about = f"One layer{batch}, {s['dtype']} on {s['device'].upper()}; medians of {runs}."
    figures = [figure for step in STEPS if (figure := efficiency(results, step, LOOKS))]
    axes: tuple[Axis, ...] = ("positions", "channels")
    ratios, absolutes = (
        [table for axis in axes if (table := make(results, axis)).columns]
        for make in (ratio_table, absolute_table)
    )
    return {
        "name": name,
        "about": about,
        "figures": figures,
        "ratios": ratios,
        "absolutes": absolutes,
        "shapes": shape_tables(results),
        "notes": [note for note in results.notes() if note == BUSY_NOTE],
    }


def _network_section(name: str, results: Results) -> tuple[Table, list[str]]:
    """The table, and what was not measured."""
    table = network_table(results)
    return replace(table, title=f"{name}: {table.title}") if name else table, results.skipped_lines()


def _recipes(studies: Sequence[Study]) -> Iterator[tuple[str, str]]:
    """(whose, YAML) of every different recipe; the variants of a reproduction differ only in the block."""
    seen = set()
    for study in studies:
        reproduced = study.variants[0].costs is not None
        for variant in study.variants[:1] if reproduced else study.variants:
            text = write_yaml(variant.recipe)
            if text not in seen:
                seen.add(text)
                yield study.title if reproduced else f"{variant.label}: {variant.trainings[0].folder}", text
