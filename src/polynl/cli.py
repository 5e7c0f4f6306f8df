"""The command line: `COMMANDS` maps every word to a command or to a group of commands."""

from __future__ import annotations

import dataclasses
import inspect
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Protocol, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.console import Group as RichGroup
from rich.markup import escape
from rich.table import Table

from polynl.commands.bench import BenchCompare, BenchLayers, BenchNets
from polynl.commands.data import DataScenes, DataYolo
from polynl.commands.export import Export
from polynl.commands.images import Apply, Explain, Predict
from polynl.commands.lists import Blocks, Recipes
from polynl.commands.results import Compare, Report
from polynl.commands.sharing import Share
from polynl.commands.training import Evaluate, EvaluateFaces, Reproduce, Train
from polynl.errors import (
    RunStoppedError,
    SettingsError,
    check_choices,
    is_out_of_files,
    is_out_of_memory,
    open_files_remedy,
)
from polynl.terminal import CleaningUp, Interrupted


class Command(Protocol):
    """A dataclass of options; its docstring is the help text."""

    def run(self, console: Console) -> None:
        """Run the command; a SettingsError says what is wrong with the options."""


@dataclass(frozen=True)
class Group:
    """A group of commands."""

    help: str
    commands: dict[str, type[Command] | Group]


COMMANDS = Group(
    "Non-local layers for vision networks at the cost of a convolution.",
    {
        "reproduce": Reproduce,
        "train": Train,
        "evaluate": Evaluate,
        "evaluate-faces": EvaluateFaces,
        "predict": Predict,
        "apply": Apply,
        "explain": Explain,
        "compare": Compare,
        "export": Export,
        "report": Report,
        "share": Share,
        "bench": Group(
            "Measure the cost of layers and networks on this machine.",
            {"layers": BenchLayers, "nets": BenchNets, "compare": BenchCompare},
        ),
        "blocks": Blocks,
        "recipes": Recipes,
        "data": Group("Create and convert data sets.", {"scenes": DataScenes, "yolo": DataYolo}),
    },
)


# Commands to continue with --resume; `train` prints its own message.
RESUMABLE = (["bench"], ["reproduce"])

# What to change if memory runs out, by command; `train` prints its own message.
LESS_MEMORY = {
    "train": "Lower batch or workers, or use smaller images.",
    "evaluate": "Lower val_batch or workers.",
    "predict": "Use smaller images, or the CPU with --device cpu.",
    "apply": "Use a smaller --tile, or the CPU with --device cpu.",
    "explain": "Use smaller images or fewer checkpoints at a time, or the CPU with --device cpu.",
    "export": "Use smaller images with --size.",
    "compare": "Lower val_batch in the recipe, or workers.",
    "report": "Pass fewer runs at a time.",
    "bench": "Lower --batch, or measure smaller sizes or fewer methods at a time.",
    "reproduce": "Lower --jobs.",
}

# Arguments that must precede the options, since they could not be told from the values of recipe keys.
FIRST = {
    "recipe": ("RECIPE", "the recipe"),
    "images": ("IMAGE …", "the images"),
    "checkpoint": ("RUN", "the run"),
    "first": ("RUN_A RUN_B", "the runs"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command given by the arguments; without any, print the help."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    kept = " Finished work is kept; add --resume to continue." if words[:1] in RESUMABLE else ""
    try:
        with CleaningUp():
            _run(COMMANDS, "polynl", words)
    except (SettingsError, RunStoppedError) as error:
        _print_error(str(error))
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as error:
        ended = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        Console(stderr=True).print(f"polynl: {ended.message}.{kept}", soft_wrap=True)
        raise SystemExit(ended.exit_code) from None
    except Exception as error:
        message = _shortage(error, words)
        if message is None:
            raise
        _print_error(message + kept)
        raise SystemExit(1) from None


def _shortage(error: Exception, words: Sequence[str]) -> str | None:
    """What this machine lacked or refused, and what to do; None if something else is wrong."""
    if is_out_of_memory(error):
        return f"out of memory. {LESS_MEMORY.get(words[0], '')}".rstrip()
    if is_out_of_files(error):
        return f"too many files are open: {open_files_remedy()}."
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}."
    if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
        what, names = ascii(error.object[error.start : error.end]), sys.getfilesystemencoding()
        return f"the file names of this locale are {names}, which lacks {what}. Set PYTHONUTF8=1."
    return None


def _print_error(text: str) -> None:
    Console(stderr=True).print(f"[bold red]polynl:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _run(command: type[Command] | Group, name: str, words: list[str]) -> None:
    if not isinstance(command, Group):
        _parse(command, name, words).run(Console())
    elif not words or words[0] in ("-h", "--help"):
        Console(highlight=False).print(_help(command, name))
    else:
        (word,) = check_choices(words[:1], list(command.commands), "command")
        _run(command.commands[word], f"{name} {word}", words[1:])


def _parse(command: type[Command], name: str, words: list[str]) -> Command:
    fields = [field.name for field in dataclasses.fields(command)]  # type: ignore[arg-type]
    first = next(iter(fields), "")
    if first in FIRST and "keys" in fields and words and words[0].startswith("--") and "--help" not in words:
        usage, argument = FIRST[first]
        raise SettingsError(f"{argument} must come first, not {words[0]}: {name} {usage} [--key value …]")
    hints = get_type_hints(command, include_extras=True)
    shown = {field: Annotated[hints[field], _shown(hints[field])] for field in fields}
    members = {"__annotations__": shown, "__doc__": command.__doc__}
    annotated: type[Command] = type(command.__name__, (command,), members)
    config = (tyro.conf.FlagCreatePairsOff,)
    if "keys" not in fields:
        return tyro.cli(annotated, prog=name, args=words, config=config)
    options, keys = tyro.cli(annotated, prog=name, args=words, config=config, return_unknown_args=True)
    return dataclasses.replace(options, keys=tuple(keys))  # type: ignore[type-var]


def _shown(hint: Any) -> Any:
    """How help shows an option; tyro would show {None}|PATH, [INT [INT ...]] and (default: None)."""
    metavar = None
    match get_args(hint):
        case (kind, rest) if rest in (NoneType, ...):
            parts = get_args(kind) or (kind,)
            metavar = "NAME" if kind is str else " ".join(part.__name__.upper() for part in parts)
            metavar += " …" if rest is ... else ""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=_default_hint)


def _default_hint(default: str) -> str:
    return "" if default in ("None", "False", "") else f"(default: {default})"


def _help(group: Group, name: str) -> RichGroup:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for word, command in group.commands.items():
        text = command.help if isinstance(command, Group) else inspect.getdoc(command) or ""
        table.add_row(f"[bold]{word}[/]", escape(text.partition("\n\n")[0]))
    usage, further = f"usage: {name} COMMAND …", f"{name} COMMAND --help shows its options."
    if group is COMMANDS:
        further += f" {name} --version shows the version."
    return RichGroup(usage, "", group.help, "", table, "", further)
