"""The command line: `COMMANDS` maps every word to a command, or to the commands below it."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import tyro
from rich.console import Console
from rich.console import Group as RichGroup
from rich.markup import escape
from rich.table import Table

from polynl.commands import (
    BenchCompare,
    BenchLayers,
    BenchNets,
    DataScenes,
    Evaluate,
    EvaluateFaces,
    Explain,
    Predict,
    Report,
    Reproduce,
    Train,
)
from polynl.errors import RunStoppedError, SettingsError, chosen


class Command(Protocol):
    """A dataclass of options; its docstring is the help, and `run` does the work."""

    def run(self, console: Console) -> None:
        """Do it; a SettingsError says what is wrong with the options."""


Commands = dict[str, "type[Command] | Group"]


@dataclass(frozen=True)
class Group:
    """Commands below a word, and what they are about."""

    help: str
    commands: Commands


COMMANDS = Group(
    "Non-local layers for vision networks at the cost of a convolution.",
    {
        "reproduce": Reproduce,
        "train": Train,
        "evaluate": Evaluate,
        "evaluate-faces": EvaluateFaces,
        "predict": Predict,
        "explain": Explain,
        "report": Report,
        "bench": Group(
            "Measure what layers and networks cost on this machine.",
            {"layers": BenchLayers, "nets": BenchNets, "compare": BenchCompare},
        ),
        "data": Group("Make data sets.", {"scenes": DataScenes}),
    },
)


# What Ctrl-C does not undo; `train` says so itself.
RESUMABLE = (["bench"], ["reproduce"])


# What comes before options, since the values of keys could not be told from it.
FIRST = {"recipe": ("RECIPE.yaml", "the recipe comes"), "images": ("IMAGE…", "the images come")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; without any, print the help."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(COMMANDS, "polynl", words)
    except (SettingsError, RunStoppedError) as error:
        Console(stderr=True).print(
            f"[bold red]polynl:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        Console(stderr=True).print(
            f"[bold red]polynl:[/] {escape(f'{where}{error.strerror or error}')}.",
            highlight=False,
            soft_wrap=True,
        )
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        resumable = " What was done is kept: add --resume to go on." if words[:1] in RESUMABLE else ""
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
    first, *others = (field.name for field in dataclasses.fields(command))  # type: ignore[arg-type]
    if "keys" not in others:
        return tyro.cli(command, prog=name, args=words, config=config)
    if first in FIRST and words and words[0].startswith("--") and "--help" not in words:
        usage, said = FIRST[first]
        raise SettingsError(f"{name} {usage} [--key value …]: {said} first, not {words[0]}.")
    options, keys = tyro.cli(command, prog=name, args=words, config=config, return_unknown_args=True)
    return dataclasses.replace(options, keys=tuple(keys))  # type: ignore[type-var]


def _help(group: Group, name: str) -> RichGroup:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for word, command in group.commands.items():
        text = command.help if isinstance(command, Group) else inspect.getdoc(command) or ""
        table.add_row(f"[bold]{word}[/]", escape(text.partition("\n\n")[0]))
    usage, further = f"usage: {name} COMMAND …", f"{name} COMMAND --help tells its options."
    return RichGroup(usage, "", group.help, "", table, "", further)
