"""Model cards: what a network is, how to load it, how it was trained and how well it does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polynl.errors import shortened
from polynl.files import read_json
from polynl.results.evidence import CONFIDENCE, Evidence, load_outcomes
from polynl.results.formats import Interval, plural
from polynl.results.study import epoch_rows, network_name, row_label, row_name
from polynl.tasks.base import DetectionTask, Task
from polynl.tasks.outcomes import OUTCOMES, Outcomes
from polynl.train.about import NOWHERE
from polynl.train.checkpoint import BEST, BEST_WEIGHTS
from polynl.train.config import Recipe
from polynl.train.recipe_file import write_yaml
from polynl.train.run_folder import METRICS

if TYPE_CHECKING:
    from polynl.sharing.run import LoadedRun

MOST_LABELS = 20
NOT_STATED = "The licence was not stated: ask whoever published the network."


def recorded_scores(checkpoint: Path, task: Task) -> dict[str, Any]:
    """`scores` and `epoch` of weights that do not have them, from the metrics next to them."""
    file = checkpoint.parent / f"{METRICS}.json"
    rows = [row for row in epoch_rows(read_json(file)) if task.best_by in row] if file.is_file() else []
    if not rows:
        return {}
    best = checkpoint.name in (BEST, BEST_WEIGHTS)
    row = max(rows, key=lambda row: float(row[task.best_by])) if best else rows[-1]
    return {"scores": {name: row[name] for name in task.scores if name in row}, "epoch": row["epoch"]}


def model_card(run: LoadedRun, name: str, license: str | None) -> str:
    """The card as Markdown, with YAML that the Hub reads; `name` is what to load."""
    parts = (_front(run, name, license), _what(run), _use(run, name), _scores(run), _training(run))
    return "\n".join([*chain.from_iterable(parts), "## Licence", "", license or NOT_STATED]) + "\n"


def _front(run: LoadedRun, name: str, license: str | None) -> Iterator[str]:
    task = run.task
    metrics = [
        {"type": score, "name": task.scores[score], "value": round(value, 3)}
        for score, value in run.about.scores.items()
        if score in task.scores
    ]
    data = {"name": _data_name(run.recipe), "type": str(run.recipe.data.source)}
    result = {"task": {"type": task.hub_task}, "dataset": data, "metrics": metrics}
    content: dict[str, Any] = {
        "library_name": "polynl",
        "pipeline_tag": task.hub_task,
        "tags": ["polynl", "vision", *([run.recipe.model.block] if run.recipe.model.block else [])],
        **({} if license is None else {"license": license}),
        **({"model-index": [{"name": name, "results": [result]}]} if metrics else {}),
    }
    yield from ("---", write_yaml(content).rstrip(), "---", "")


def _title(run: LoadedRun) -> str:
    """The network with its block."""
    model = run.recipe.model
    network = run.task.network.format(arch=network_name(model.arch)).rstrip(",")
    network = f"{network[0].upper()}{network[1:]}"
    if model.block is None:
        return network
    return f"{network} with {row_label(row_name(model.block, model.placement, model.options))}"


def _what(run: LoadedRun) -> Iterator[str]:
    recipe, count = run.recipe, sum(parameter.numel() for parameter in run.model.parameters())
    about = run.task.about_images(recipe.data.source)
    one, several = ("category", "categories") if isinstance(run.task, DetectionTask) else ("class", "classes")
    names = list(run.labels.values())
    yield from (f"# {_title(run)}, trained on {_data_name(recipe)}", "")
    task = recipe.task.replace("_", " ")
    yield f"A network of {count:,} parameters for {task}, trained with polynl. {about}".rstrip()
    yield f"It has {len(names)} {one if len(names) == 1 else several}: {shortened(names, MOST_LABELS)}."
    yield ""


def _use(run: LoadedRun, name: str) -> Iterator[str]:
    extra = "hub,detect" if isinstance(run.task, DetectionTask) else "hub,train"
    if run.recipe.model.arch.startswith("timm/"):
        extra += ",timm"
    yield from (
        "## Use",
        "",
        f"Install polynl with its extras `polynl[{extra}]`, then:",
        "",
        "```python",
        "import polynl",
        "",
        f'run = polynl.from_pretrained("{name}")  # or a folder with these files',
    )
    if isinstance(run.task, DetectionTask):
        yield 'found = run.predict("photo.jpg", threshold=0.5)  # boxes, scores, labels, and masks if any'
        yield "names = [run.labels[number] for number in found.labels.tolist()]"
    else:
        yield 'print(*run.predict("photo.jpg", top=5), sep="\\n")'
    yield 'output = run.model(run.preprocess("photo.jpg"))  # run.model is a torch.nn.Module in eval mode'
    yield from ("```", "")


def _scores(run: LoadedRun) -> Iterator[str]:
    """A table of the scores of these weights, and of the last epoch's with intervals if they are there."""
    about, task = run.about, run.task
    yield from ("## Scores", "")
    if not about.scores:
        yield from ("No scores are known for these weights.", "")
        return
    outcomes = _outcomes(run)
    known = {} if outcomes is None else _intervals(outcomes, type(task))
    last = about.epoch == run.recipe.epochs
    images = "its validation images" if outcomes is None else f"its {task.counted(outcomes)} for validation"
    yield f"On {images}, in percent; the epoch with the best {task.scores[task.best_by]} was chosen on them."
    yield ""
    columns = ["score", f"epoch {about.epoch}"]
    with_interval = f"{CONFIDENCE} % interval"
    if known:
        columns[-1:] = [f"{columns[1]}, {with_interval}"] if last else [columns[1], f"last, {with_interval}"]
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for score, value in about.scores.items():
        cells = [f"{value:.1f}"]
        if score in known:
            cells = [str(known[score])] if last else [*cells, str(known[score])]
        yield f"| {score} ({task.scores[score]}) | {' | '.join(cells)} |"
    if known:
        yield ""
        yield "The intervals draw the images anew. They leave out how much trainings with other seeds differ."
    yield ""


def _outcomes(run: LoadedRun) -> Outcomes | None:
    file = run.checkpoint.parent / OUTCOMES
    return load_outcomes(file, type(run.task)) if file.is_file() else None


def _intervals(outcomes: Outcomes, task: type[Task]) -> dict[str, Interval]:
    evidence = Evidence(task, {"": {0: outcomes}})
    return {score: evidence.interval("", score) for score in evidence.scores()}


def _training(run: LoadedRun) -> Iterator[str]:
    recipe, optimizer, model = run.recipe, run.recipe.optimizer, run.recipe.model
    batch = f"{recipe.batch} images" if recipe.batch else f"{recipe.batch_per_process} images per process"
    start = [Path(getattr(model, key)).name for key in _weight_keys(model) if getattr(model, key)]
    yield from (
        "## Training",
        "",
        f"- data: {_data_name(recipe)} (`{recipe.data.source}`)",
        f"- started from: {', '.join(start) or 'random weights'}",
        f"- {plural(recipe.epochs, 'epoch')}, batches of {batch}, seed {recipe.seed}, {recipe.precision}",
        f"- {optimizer.name}, learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, "
        f"schedule `{recipe.schedule.name}`",
        "",
        "<details><summary>All keys of the recipe that affect the result</summary>",
        "",
        "```yaml",
        write_yaml(dict(run.about.recipe)).rstrip(),
        "```",
        "",
        "</details>",
        "",
    )


def _weight_keys(model: Any) -> list[str]:
    return [key for key in type(model).model_fields if key.endswith("weights")]


def _data_name(recipe: Recipe) -> str:
    """The name of the data set's folder, or the source of the data."""
    root = getattr(recipe.data, "root", None)
    if root is None or str(root) == NOWHERE:  # as it is in weights without a run
        return str(recipe.data.source)
    return Path(root).resolve().name
