"""Recipes as files: YAML that may build on other YAML, with keys overridden on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from rich.markup import escape
from rich.table import Table

from polynl.config import CHOICE, explained
from polynl.errors import SettingsError, near_matches
from polynl.train.config import Recipe, recipe_class

BUILT_IN = Path(__file__).parent.parent / "recipes"


def load_recipe(path: str | Path, overrides: Sequence[str] = (), options: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with `["--optimizer.lr", "0.2", …]` in place of what it says.

    A path that is not there is looked for among the recipes that come with polynl. `options` are words that
    may be meant by what is no key.
    """
    content = _with_bases(find_recipe(path), ())
    # Another source drops the keys of the one before, and so goes first.
    for key, value in sorted(_parsed(overrides, options), key=lambda given: given[0][-1] != CHOICE):
        _set(content, key, value)
    return recipe_of(content, str(path), options)


def recipe_of(content: Any, name: str, options: Sequence[str] = ()) -> Recipe:
    """The recipe of nested dicts; `name` is what an error calls them."""
    if not isinstance(content, Mapping):
        raise SettingsError(f"{name} is no recipe: expected keys and values, got {_kind(content)}.")
    try:
        recipe = recipe_class(content.get("task"))
    except SettingsError as error:
        raise SettingsError(f"{name}: {error}") from None
    try:
        return recipe.model_validate(content)
    except ValidationError as error:
        raise SettingsError(_explained(error, recipe, name, options)) from None


def to_yaml(recipe: Recipe) -> str:
    """The recipe with every key, as a file that gives the same recipe."""
    return write_yaml(recipe.model_dump(mode="json"))


def find_recipe(path: str | Path) -> Path:
    """The file itself, or the one that polynl brings along under that name."""
    name = str(path).removeprefix("recipes/")
    places = (Path(path), BUILT_IN / name)
    for place in places:
        for candidate in (place, Path(f"{place}.yaml")):
            if candidate.is_file():
                return candidate
    for place in places:
        if place.is_dir():
            there = sorted(str(file.relative_to(place)) for file in place.glob("[!_.]*.yaml"))
            inside = f" Recipes in it: {', '.join(there)}." if there else " There is no recipe in it."
            raise SettingsError(f"{path or place} is a folder.{inside}")
    known = [str(file.relative_to(BUILT_IN)) for file in sorted(BUILT_IN.rglob("[!_]*.yaml"))]
    raise SettingsError(
        f"there is no recipe {path}.{near_matches(name, known)}\npolynl comes with: {', '.join(known)}."
    )


def keys_table(recipe: Recipe) -> Table:
    """What `polynl train RECIPE --list-keys` shows."""
    table = Table(box=None)
    # A key is to be copied, so it stays in one piece.
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("meaning", overflow="fold")
    for key, value, meaning in keys_of(recipe):
        table.add_row(f"--{key}", escape(write_yaml(_plain(value), flow=True)), escape(meaning))
    return table


def keys_of(recipe: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every key that may be given, its value in this recipe, and what it means."""
    for name, field in type(recipe).model_fields.items():
        value = getattr(recipe, name)
        if isinstance(value, BaseModel):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, field.description or ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def _kind(content: Any) -> str:
    return "nothing" if content is None else type(content).__name__


def _with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The content of a file laid over that of the file its key `base` names."""
    if path.resolve() in seen:
        raise SettingsError(f"{path}: its bases lead back to itself.")
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}.") from None
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path} cannot be read as YAML: {said}.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path} is no recipe: expected keys and values, got {_kind(content)}.")
    base = content.pop("base", None)
    if base is None:
        return content
    below = path.parent / str(base)
    if not below.is_file():
        raise SettingsError(f"{path}: there is no base {below}.")
    return _merged(_with_bases(below, (*seen, path.resolve())), content)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, part by part; another source or `{}` replaces a part as a whole."""
    if over.get(CHOICE, base.get(CHOICE)) != base.get(CHOICE):
        return dict(over)
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and value and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _parsed(words: Sequence[str], options: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """`--a.b value` and `--a.b=value` as a path of keys and a value as YAML has it; `-` is as good as `_`."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not all(key.split(".")):
            raise SettingsError(
                f"what is {word!r}? Keys of a recipe are given as --key value, lists as --key [a,b]."
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise SettingsError(f"--{key} needs a value.{near_matches(key, options)}")
            value = rest.pop(0)
        try:
            read = read_yaml(value)
        except ValueError as error:
            raise SettingsError(f"--{key} {value}: {error}.") from None
        # A file's name may have a # in it, at which YAML would stop.
        bare = isinstance(read, str) and value[0] not in "'\"!&|>"
        yield key.replace("-", "_").split("."), value if bare else read


def _set(content: dict[str, Any], key: Sequence[str], value: Any) -> None:
    *folders, last = key
    for number, folder in enumerate(folders):
        inner = content.setdefault(folder, {})
        if not isinstance(inner, dict):
            name = ".".join(key[: number + 1])
            raise SettingsError(f"--{'.'.join(key)}: {name} is {inner!r} and has no keys below it.")
        content = inner
    if last == CHOICE and content.get(last) != value:
        content.clear()
    content[last] = value


def _explained(error: ValidationError, recipe: type[Recipe], name: str, options: Sequence[str]) -> str:
    """All that is wrong, a line each: where, what was given, what was expected."""
    lines, listed = [f"{name}:"], set[str]()
    for problem in error.errors():
        key, siblings = _place(recipe, [str(part) for part in problem["loc"]])
        folder, _, last = key.rpartition(".")
        if problem["type"] == "extra_forbidden":
            others = options if not folder else ()
            lines.append(f"  {key}: there is no such key.{near_matches(last, [*siblings, *others])}")
            keys = f"    Keys here: {', '.join(siblings)}."
            if keys not in listed:
                lines.append(keys)
                listed.add(keys)
        else:
            lines.append(f"  {explained(key, problem)}")
    return "\n".join(lines)


def _place(recipe: type[BaseModel], path: Sequence[str]) -> tuple[str, list[str]]:
    """The dotted key that pydantic's path means, and the keys that exist beside it.

    Where one of several parts was chosen by its source, the path has that word in it, which is no key.
    """
    keys: list[str] = []
    siblings: list[str] = []
    parts = [recipe]
    for word in path:
        tagged = [part for part in parts if word in get_args(_annotation(part, CHOICE))]
        if len(parts) > 1 and tagged:
            parts = tagged
            continue
        if not parts and not word.isdigit():  # which type of several was tried on a value
            continue
        keys.append(word)
        siblings = list(dict.fromkeys(name for part in parts for name in part.model_fields))
        parts = [inner for part in parts for inner in _parts_in(_annotation(part, word))]
    return ".".join(keys), siblings


def _annotation(part: type[BaseModel], key: str) -> Any:
    field = part.model_fields.get(key)
    return None if field is None else field.annotation


def _parts_in(annotation: Any) -> list[type[BaseModel]]:
    found = [annotation, *get_args(annotation)]
    return [part for part in found if isinstance(part, type) and issubclass(part, BaseModel)]


_FLOAT = "tag:yaml.org,2002:float"
# YAML 1.1, which PyYAML reads, wants 1.0e-4.
_WITH_EXPONENT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """PyYAML would take the last of several values without a word."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        """What occurs twice is written twice: a recipe is for people to read."""
        return True


# The dumper too, so that it quotes a string that would be read as a number.
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(_FLOAT, _WITH_EXPONENT, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """What the text says; a ValueError of one line tells where it is no YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{place}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).split("\n")[0]) from None


def write_yaml(content: Any, *, flow: bool = False) -> str:
    """The content as text; `flow`: in one line, as a value on the command line has it.

    >>> write_yaml([0.9, 1e-05], flow=True)
    '[0.9, 1.0e-05]'
    """
    if not flow:
        return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    # A plain scalar alone ends with a line of dots.
    text = yaml.dump(content, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()
