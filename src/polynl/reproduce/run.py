"""Train, score and time every variant, then write the table, the JSON, the figures and the report."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from polynl.bench import plots
from polynl.environment import environment
from polynl.errors import SettingsError, existing_run_error, shortened
from polynl.files import write_atomically
from polynl.report.load import BENCHMARKS, LAYERS, STUDY, LoadedRuns
from polynl.report.run import REPORT, write_report
from polynl.reproduce.settings import OWN_KEYS, QUICK, QUICK_SCENES, VARIANTS, ReproduceSettings
from polynl.reproduce.timing import measure_costs, measure_layers
from polynl.reproduce.trainings import recipe_in, train_all
from polynl.results.charts import accuracy_and_cost, training_curves
from polynl.results.study import Costs, Origin, Study, Training, study_title, variant_of
from polynl.results.tables import accuracy_table, as_markdown, as_rich
from polynl.results.verdicts import conclusion, evidence_tables, verdicts
from polynl.train.processes import to_device
from polynl.train.recipe_file import load_recipe
from polynl.train.run_folder import RECIPE, RunFolder

NOTE = (
    "Scores: percent on held-out images after the last epoch; ±: standard deviation over seeds. "
    "MACs: multiply-adds per image."
)
TIMES_NOTE = "Forward, step: time of a forward pass and of a training step, divided by that without a block."

CPU = torch.device("cpu")


def run_reproduce(settings: ReproduceSettings, console: Console, keys: Sequence[str] = ()) -> Study:
    """All of `polynl reproduce`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = settings.jobs
    if jobs is None:
        jobs = 1 if torch.cuda.is_available() else cores
    trainings = plan_trainings(settings, keys, threads=max(1, cores // jobs))
    recipe_in(trainings[0]).build_task().check()
    _prepare_folder(settings, trainings, console)
    trainings = train_all(trainings, jobs, console)
    timed = not settings.no_timings
    console.print("Timing the networks …" if timed else "Counting parameters …", highlight=False)
    costs = _network_costs(trainings, timed=timed)
    variants = [variant_of([t for t in trainings if t.row == row], cost) for row, cost in costs.items()]
    recipe = trainings[0].recipe
    study = Study(study_title([recipe]), recipe["task"], variants, [settings.out], settings.quick)
    machine = environment("cuda" if torch.cuda.is_available() else "cpu")
    origin = Origin("polynl reproduce", shlex.join(["polynl", *sys.argv[1:]]), machine)
    write_results(settings, study, origin, console)
    found = LoadedRuns([study], origins=[origin])
    if timed:
        how_long = "a few seconds" if settings.quick else "about a minute"
        console.print(f"Timing single layers, {how_long} …", highlight=False)
        found.add_benchmark(str(settings.out / LAYERS), measure_layers(settings))
    write_report(found, settings.out / REPORT, console)
    return study


def plan_trainings(settings: ReproduceSettings, keys: Sequence[str], *, threads: int) -> list[Training]:
    """A training per block and seed, seed by seed."""
    name = settings.recipe
    if name is None:
        name = "scenes" if settings.data is None else "folder"
    words = ["--threads", str(threads)]
    if settings.data is not None:
        words += ["--data.root", str(settings.data)]
    if settings.quick:
        drawn = hasattr(load_recipe(name, [*words, *keys]).data, "val_images")
        words += QUICK_SCENES if drawn else QUICK
    for key in keys:
        own = next((k for k in OWN_KEYS if key.split("=")[0] == k or key.startswith(f"{k}.")), None)
        if own is not None:
            raise SettingsError(f"{key}: trainings differ in this key; choose them with {OWN_KEYS[own]}.")
    trainings = []
    for seed in settings.seeds:
        for variant in settings.selected():
            block, options = VARIANTS[variant]
            chosen = ["--model.block", block, "--model.options", json.dumps(options)]
            recipe = load_recipe(name, [*chosen, *words, "--seed", str(seed), *keys])
            folder = settings.out / f"{variant}-seed{seed}"
            trainings.append(Training(folder, recipe.model_dump(mode="json"), seed))
    return trainings


def _prepare_folder(settings: ReproduceSettings, trainings: Sequence[Training], console: Console) -> None:
    """Keep the trainings in --out or delete them, as the settings say; other files are left alone."""
    RunFolder(trainings[0].folder).check_place(recipe_in(trainings[0]))
    started = [training for training in trainings if (training.folder / RECIPE).exists()]
    if settings.resume:
        for training in started:
            folder, recipe = RunFolder(training.folder), recipe_in(training)
            folder.check_unchanged(recipe)
            folder.check_data(recipe)
        _name_others(settings.out, trainings, console)
    elif settings.overwrite:
        for training in started:
            shutil.rmtree(training.folder)
    elif started or any((settings.out / name).exists() for name in (STUDY, f"{LAYERS}/{BENCHMARKS[0]}")):
        raise existing_run_error(settings.out, "results", it="them")


def _name_others(out: Path, trainings: Sequence[Training], console: Console) -> None:
    """Say which trainings in the folder are not among these, and so not in the results."""
    chosen = {training.folder.name for training in trainings}
    others = sorted(file.parent.name for file in out.glob(f"*-seed*/{RECIPE}"))
    others = [name for name in others if name not in chosen]
    if others:
        line = f"Kept in {out}, but not chosen by --blocks and --seeds: {shortened(others)}."
        console.print(escape(line), highlight=False, soft_wrap=True)


def _network_costs(trainings: Sequence[Training], *, timed: bool) -> dict[str, Costs]:
    """The costs of each variant, by row."""
    recipe = recipe_in(trainings[0])
    first = {t.row: recipe_in(t) for t in trainings if t.seed == trainings[0].seed}
    models = {row: to_device(found.build_task().model(), found, CPU) for row, found in first.items()}
    return measure_costs(models, recipe, timed=timed)


def write_results(settings: ReproduceSettings, study: Study, origin: Origin, console: Console) -> None:
    """Print the table; save it, the study and the figures."""
    folder, paper = settings.out, study.paper
    table = accuracy_table(study, compact=True)
    seeds = [str(training.seed) for training in study.variants[0].trainings]
    title = f"{study.title}, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}"
    console.print("Computing intervals …", highlight=False)
    study.save(folder / STUDY, origin)
    headings = "/".join(study.task_class.scores[score] for score in paper.scores) if paper else ""
    compared = f"Paper: {headings} of {paper.setting}." if paper else ""
    note = " ".join(filter(None, (NOTE, "" if settings.no_timings else TIMES_NOTE, compared)))
    evidence, said = evidence_tables(study), verdicts(study)
    short = f"{conclusion(study)} {study.about}"
    parts = [f"# {title}", short, str(origin), as_markdown(table), note]
    parts += [part for one in evidence for part in (f"**{one.title}**", as_markdown(one))] + said
    write_atomically(folder / "results.md", "\n\n".join(parts) + "\n")
    figures = {"curves": training_curves(study), "accuracy_and_cost": accuracy_and_cost(study)}
    files = [
        file
        for name, figure in figures.items()
        if figure is not None
        for file in plots.save(plots.drawn(figure, title), folder / name)
    ]
    console.print(as_rich(table, console.width))
    console.print(note, highlight=False)
    for part in evidence:
        console.print(as_rich(part, console.width))
    for line in (*said, short):
        console.print(line, highlight=False, markup=False)
    names = ", ".join([STUDY, "results.md", *(file.name for file in files)])
    console.print(
        f"Written to {folder}: {names}, and a folder for every training.", highlight=False, markup=False
    )
