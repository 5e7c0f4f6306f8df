"""Train, score and time every variant, then write the table, the JSON, the figures and the report."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from polynl.environment import environment
from polynl.errors import existing_run_error
from polynl.files import write_atomically
from polynl.report.run import REPORT, run_report
from polynl.reproduce.costs import Cost, measured_costs
from polynl.reproduce.figures import save_figures
from polynl.reproduce.layers import measured_layers
from polynl.reproduce.results import Outcome, accuracy_table
from polynl.reproduce.settings import QUICK, ReproduceSettings
from polynl.reproduce.trainings import Training, train_all
from polynl.results.load import BENCHES, LAYERS, RESULTS
from polynl.results.tables import as_rich, counted, markdown_rows, origin
from polynl.train.recipe_file import load_recipe
from polynl.train.run_folder import RECIPE, RunFolder

NOTE = (
    "Top-1 and Top-5: percent of held-out images, after the last epoch. MACs: multiply-adds for one image. "
    "Forward, step: time of the network in inference and in training, divided by that without a block. "
    "Paper: Top-1/Top-5 of ResNet-50 on ImageNet, another task than this one."
)
QUICK_NOTE = "With --quick there is no time to learn: these accuracies mean nothing."


def run_reproduce(settings: ReproduceSettings, console: Console, keys: Sequence[str] = ()) -> list[Outcome]:
    """All of `polynl reproduce`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = settings.jobs
    if jobs is None:
        jobs = 1 if torch.cuda.is_available() else cores
    trainings = planned(settings, keys, threads=max(1, cores // jobs))
    trainings[0].recipe.build_task().check()
    _prepare(settings, trainings)
    train_all(trainings, jobs, console)
    console.print("Timing the networks, interleaved …", highlight=False)
    costs = _costs(trainings)
    outcomes = [
        Outcome(block, {t.seed: t.rows() for t in trainings if t.block == block}, costs[block])
        for block in settings.selected()
    ]
    console.print(
        f"Timing single layers, {'some seconds' if settings.quick else 'a minute'} …", highlight=False
    )
    measured_layers(settings)
    _write(settings, trainings[0], outcomes, console)
    run_report([settings.out], settings.out / REPORT, console)
    return outcomes


def planned(settings: ReproduceSettings, keys: Sequence[str], *, threads: int) -> list[Training]:
    """A training for every block and seed, seed by seed."""
    kind = "scenes" if settings.data is None else "folder"
    words = ["--threads", str(threads)]
    if settings.data is not None:
        words += ["--data.root", str(settings.data)]
    if settings.quick:
        words += QUICK if settings.data is None else ("--epochs", "1")
    return [
        Training(
            block,
            seed,
            load_recipe(kind, ["--model.block", block, *words, "--seed", str(seed), *keys]),
            settings.out / f"{block}-seed{seed}",
        )
        for seed in dict.fromkeys(settings.seeds)
        for block in settings.selected()
    ]


def _prepare(settings: ReproduceSettings, trainings: Sequence[Training]) -> None:
    """Go on with what is in the folder, or replace it, as the settings say; other files are left alone."""
    begun = [training for training in trainings if (training.folder / RECIPE).exists()]
    if settings.resume:
        for training in begun:
            RunFolder(training.folder).check_unchanged(training.recipe)
    elif settings.overwrite:
        for training in begun:
            shutil.rmtree(training.folder)
    elif begun or any((settings.out / name).exists() for name in (RESULTS, f"{LAYERS}/{BENCHES[0]}")):
        raise existing_run_error(settings.out, "results", it="them")


def _costs(trainings: Sequence[Training]) -> dict[str, Cost]:
    first = {training.block: training.recipe for training in reversed(trainings)}
    models = {block: recipe.build_task().model() for block, recipe in first.items()}
    recipe = trainings[0].recipe
    return measured_costs(models, batch=recipe.total_batch(1), size=recipe.data.size)


def _write(
    settings: ReproduceSettings, training: Training, outcomes: Sequence[Outcome], console: Console
) -> None:
    folder, recipe = settings.out, training.recipe
    where = "scenes" if settings.data is None else settings.data.name
    seeds = ", ".join(str(seed) for seed in outcomes[0].runs)
    title = f"A small ResNet on {where}, {counted(recipe.epochs, 'epoch')}, seed {seeds}"
    table = accuracy_table(title, outcomes)
    command = shlex.join(["polynl", *sys.argv[1:]])
    machine = environment("cuda" if torch.cuda.is_available() else "cpu")
    content = {
        "command": command,
        "quick": settings.quick,
        "environment": machine,
        "recipe": recipe.model_dump(mode="json"),
        "outcomes": [outcome.to_json() for outcome in outcomes],
    }
    write_atomically(folder / RESULTS, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    note = f"{NOTE} {QUICK_NOTE}" if settings.quick else NOTE
    lines = [f"# {title}", "", origin(command, machine), "", *markdown_rows(table), "", note]
    write_atomically(folder / "results.md", "\n".join(lines) + "\n")
    figures = save_figures(outcomes, title, folder)
    console.print(as_rich(table))
    console.print(note, highlight=False)
    names = ", ".join([RESULTS, "results.md", *(figure.name for figure in figures)])
    console.print(f"Written to {folder}: {names}, and a folder for every training.", highlight=False)
