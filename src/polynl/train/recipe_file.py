"""Recipes as files: YAML that may build on other YAML, with keys replaced on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from rich.markup import escape
from rich.table import Table

from polynl.errors import SettingsError, near_matches
from polynl.train.recipe import RECIPES, Recipe

BUILT_IN = Path(__file__).parent.parent / "recipes"


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with `["--optimizer.lr", "0.2", …]` in place of what it says.

    A path that is not there is looked for among the recipes that come with polynl.
    """
    file = find_recipe(path)
    content = _with_bases(file, ())
    for key, value in _parsed(overrides):
        _set(content, key, value)
    return recipe_of(content, str(path))


def recipe_of(content: Mapping[str, Any], name: str) -> Recipe:
    """The recipe of nested dicts; `name` is what an error calls them."""
    task = content.get("task")
    if task not in RECIPES:
        hint = near_matches(str(task), RECIPES)
        raise SettingsError(f"{name}: task must be one of {', '.join(RECIPES)}; got {task!r}.{hint}")
    try:
        return RECIPES[task].model_validate(content)
    except ValidationError as error:
        raise SettingsError(_explained(error, RECIPES[task], name)) from None


def to_yaml(recipe: Recipe) -> str:
    """The recipe with every key, as a file that gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def find_recipe(path: str | Path) -> Path:
    """The file itself, or the one that polynl brings along under that name."""
    for file in (Path(path), BUILT_IN / str(path).removeprefix("recipes/")):
        for candidate in (file, file.with_name(f"{file.name}.yaml")):
            if candidate.is_file():
                return candidate
    known = [str(file.relative_to(BUILT_IN)) for file in sorted(BUILT_IN.rglob("[!_]*.yaml"))]
    raise SettingsError(
        f"there is no recipe {path}.{near_matches(str(path).removeprefix('recipes/'), known)}\n"
        f"polynl comes with: {', '.join(known)}."
    )


def keys_table(recipe: Recipe) -> Table:
    """What `polynl train RECIPE --list-keys` shows."""
    table = Table(box=None)
    for heading in ("key", "value", "meaning"):
        table.add_column(heading, overflow="fold")
    for key, value, meaning in keys_of(recipe):
        shown = yaml.safe_dump(_plain(value)).removesuffix("...\n").strip()
        table.add_row(f"--{key}", escape(shown), escape(meaning))
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


def _with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The content of a file laid over that of the file its key `base` names."""
    if path.resolve() in seen:
        raise SettingsError(f"{path}: its bases lead back to itself.")
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"{seen[-1]}: there is no base {path}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path} is no recipe: expected keys and values, got {type(content).__name__}.")
    base = content.pop("base", None)
    if base is None:
        return content
    return _merged(_with_bases(path.parent / str(base), (*seen, path.resolve())), content)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _parsed(words: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """`--a.b value` and `--a.b=value` as a path of keys and a value as YAML has it; `-` is as good as `_`."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise SettingsError(f"what is {word!r}? Keys of a recipe are given as --key value.")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise SettingsError(f"--{key} needs a value.")
            value = rest.pop(0)
        try:
            yield key.replace("-", "_").split("."), yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SettingsError(f"--{key} {value}: {error}") from None


def _set(content: dict[str, Any], key: Sequence[str], value: Any) -> None:
    *folders, last = key
    for number, folder in enumerate(folders):
        inner = content.setdefault(folder, {})
        if not isinstance(inner, dict):
            name = ".".join(key[: number + 1])
            raise SettingsError(f"--{'.'.join(key)}: {name} is {inner!r} and has no keys below it.")
        content = inner
    content[last] = value


def _explained(error: ValidationError, recipe: type[Recipe], name: str) -> str:
    """All that is wrong, a line each: where, what was given, what was expected."""
    lines = [f"{name}:"]
    for problem in error.errors():
        key, siblings = _place(recipe, [str(part) for part in problem["loc"]])
        if problem["type"] == "extra_forbidden":
            lines.append(f"  {key}: there is no such key.{near_matches(key.split('.')[-1], siblings)}")
            lines.append(f"    Keys here: {', '.join(siblings)}.")
        elif problem["type"] == "missing":
            lines.append(f"  {key}: is missing.")
        else:
            said = problem["msg"].removeprefix("Value error, ")
            given = (
                "" if isinstance(problem["input"], Mapping | BaseModel) else f" (got {problem['input']!r})"
            )
            lines.append(f"  {key + ': ' if key else ''}{said}{given}")
    return "\n".join(lines)


def _place(recipe: type[BaseModel], path: Sequence[str]) -> tuple[str, list[str]]:
    """The dotted key that pydantic's path means, and the keys that exist beside it.

    Where one of several parts was chosen by its `source`, the path has that word in it, which is no key.
    """
    keys: list[str] = []
    parts = [recipe]
    for word in path:
        tagged = [part for part in parts if word in get_args(_annotation(part, "source"))]
        if len(parts) > 1 and tagged:
            parts = tagged
            continue
        keys.append(word)
        siblings = list(dict.fromkeys(name for part in parts for name in part.model_fields))
        parts = [inner for part in parts for inner in _parts_in(_annotation(part, word))]
    return ".".join(keys), siblings if keys else []


def _annotation(part: type[BaseModel], key: str) -> Any:
    field = part.model_fields.get(key)
    return None if field is None else field.annotation


def _parts_in(annotation: Any) -> list[type[BaseModel]]:
    found = [annotation, *get_args(annotation)]
    return [part for part in found if isinstance(part, type) and issubclass(part, BaseModel)]
