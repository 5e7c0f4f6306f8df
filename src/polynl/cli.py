"""The command line: `COMMANDS` maps every word to a command, or to the commands below it."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tyro
from rich.console import Console
from rich.console import Group as RichGroup
from rich.markup import escape
from rich.table import Table

from polynl.bench.settings import LayerSettings, NetSettings
from polynl.errors import RunStoppedError, SettingsError, chosen


class Command(Protocol):
    """A dataclass of options; its docstring is the help, and `run` does the work."""

    def run(self, console: Console) -> None:
        """Do it; a SettingsError says what is wrong with the options."""


# What a command needs beyond its options is imported when it runs: `polynl --help` need not load matplotlib.


class BenchLayers(LayerSettings):  # noqa: D101
    __doc__ = LayerSettings.__doc__

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.layers.run_layers`."""
        from polynl.bench.layers import run_layers

        run_layers(self, console)


class BenchNets(NetSettings):  # noqa: D101
    __doc__ = NetSettings.__doc__

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.networks.run_networks`."""
        from polynl.bench.networks import run_networks

        run_networks(self, console)


@dataclass(frozen=True)
class BenchCompare:
    """What changed between two runs of `polynl bench layers` or of `polynl bench nets`.

    A change is marked where it is outside the spread: the middle halves of the two runs do not touch.
    """

    first: tyro.conf.Positional[Path]
    """JSON of the earlier run."""
    second: tyro.conf.Positional[Path]
    """JSON of the later run."""
    all: bool = False
    """Show every point, not only those outside the spread."""

    def run(self, console: Console) -> None:
        """See :func:`polynl.bench.compare.run_compare`."""
        from polynl.bench.compare import run_compare

        run_compare(self.first, self.second, console, everything=self.all)


@dataclass(frozen=True)
class Train:
    """Train as a recipe says, in one process or in those that torchrun starts.

    polynl train RECIPE.yaml [--key value …]: every key of the recipe can be given anew, as in
    --optimizer.lr 0.2; --list-keys shows them all. The recipes that come with polynl are known by name:
    scenes/poly_nl is one.
    """

    recipe: tyro.conf.Positional[str]
    """The file; it comes before the options."""
    out: Path | None = None
    """Folder of the run; runs/FOLDER/NAME of the recipe's file unless given."""
    resume: bool = False
    """Go on from the last checkpoint in --out, if there is one."""
    overwrite: bool = False
    """Replace the run in --out."""
    list_keys: bool = False
    """Show the recipe's keys, their values and what they mean, and train nothing."""
    keys: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.train.loop.train`."""
        from polynl.train.loop import train
        from polynl.train.recipe_file import find_recipe, keys_table, load_recipe

        if self.resume and self.overwrite:
            raise SettingsError(
                "--resume keeps the run in --out and --overwrite replaces it: give one of them."
            )
        recipe, file = load_recipe(self.recipe, self.keys), find_recipe(self.recipe)
        if self.list_keys:
            console.print(keys_table(recipe))
            return
        out = Path("runs", file.resolve().parent.name, file.stem) if self.out is None else self.out
        train(recipe, out, console, resume=self.resume, overwrite=self.overwrite)


@dataclass(frozen=True)
class Evaluate:
    """Score a checkpoint on the images that a recipe names, in one process or those that torchrun starts."""

    recipe: tyro.conf.Positional[str]
    """The file, as for `polynl train`; a run's folder has one."""
    checkpoint: Path
    """A checkpoint of `polynl train`, or weights: safetensors, or a state dict."""
    out: Path | None = None
    """A file to write the scores to, as JSON."""
    keys: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self, console: Console) -> None:
        """See :func:`polynl.train.evaluation.evaluate_checkpoint`."""
        from polynl.train.evaluation import evaluate_checkpoint
        from polynl.train.recipe_file import load_recipe

        evaluate_checkpoint(load_recipe(self.recipe, self.keys), self.checkpoint, self.out, console)


Commands = dict[str, "type[Command] | Group"]


@dataclass(frozen=True)
class Group:
    """Commands below a word, and what they are about."""

    help: str
    commands: Commands


COMMANDS = Group(
    "Non-local layers for vision networks at the cost of a convolution.",
    {
        "train": Train,
        "evaluate": Evaluate,
        "bench": Group(
            "Measure what layers and networks cost on this machine.",
            {"layers": BenchLayers, "nets": BenchNets, "compare": BenchCompare},
        ),
    },
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; without any, print the help."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(COMMANDS, "polynl", words)
    except SettingsError as error:
        Console(stderr=True).print(
            f"[bold red]polynl:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        raise SystemExit(2) from None
    except RunStoppedError as error:
        Console(stderr=True).print(
            f"[bold red]polynl:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        resumable = " What was measured is kept: add --resume to go on." if words[:1] == ["bench"] else ""
        Console(stderr=True).print(f"polynl: interrupted.{resumable}")
        raise SystemExit(130) from None


def _run(command: type[Command] | Group, name: str, words: list[str]) -> None:
    if not isinstance(command, Group):
        _parsed(command, name, words).run(Console())
    elif not words or words[0] in ("-h", "--help"):
        Console(highlight=False).print(_help(command, name))
    else:
        (word,) = chosen(words[:1], list(command.commands), "command")
        _run(command.commands[word], f"{name} {word}", words[1:])


def _parsed(command: type[Command], name: str, words: list[str]) -> Command:
    config = (tyro.conf.FlagCreatePairsOff,)
    if "keys" not in {field.name for field in dataclasses.fields(command)}:  # type: ignore[arg-type]
        return tyro.cli(command, prog=name, args=words, config=config)
    if words and words[0].startswith("--") and "--help" not in words:
        raise SettingsError(f"{name} RECIPE.yaml [--key value …]: the recipe comes first, not {words[0]}.")
    options, keys = tyro.cli(command, prog=name, args=words, config=config, return_unknown_args=True)
    return dataclasses.replace(options, keys=tuple(keys))  # type: ignore[type-var]


def _help(group: Group, name: str) -> RichGroup:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for word, command in group.commands.items():
        text = command.help if isinstance(command, Group) else inspect.getdoc(command) or ""
        table.add_row(f"[bold]{word}[/]", escape(text.partition("\n\n")[0]))
    usage = f"usage: {name} {{{','.join(group.commands)}}} …"
    return RichGroup(
        escape(usage), "", group.help, "", table, "", f"{name} COMMAND --help tells its options."
    )
