"""Recipe files: YAML that can build on other YAML, with keys overridden on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from rich.markup import escape
from rich.table import Column, Table

from polynl.blocks.registry import BLOCKS, NO_BLOCK
from polynl.config import CHOICE, explained
from polynl.errors import SettingsError, near_matches, shortened
from polynl.train.config import Recipe, list_keys, recipe_class

# Far beyond what recipes have.
DEEPEST, MOST_VALUES, MOST_BASES = 20, 100_000, 20
BUILT_IN = Path(__file__).parent.parent / "recipes"


def load_recipe(path: str | Path, overrides: Sequence[str] = (), options: Sequence[str] = ()) -> Recipe:
    """Load a recipe, with `["--optimizer.lr", "0.2", …]` replacing keys of the file.

    If the path does not exist, polynl's own recipes are searched for the name: `load_recipe("scenes")`.
    `options` are names of a command's options, suggested if an unknown key looks like one of them.
    """
    return parse_recipe(_read_with_bases(find_recipe(path), ()), str(path), options, overrides)


def parse_recipe(
    content: Any, name: str, options: Sequence[str] = (), overrides: Sequence[str] = ()
) -> Recipe:
    """Validate nested dicts as a recipe; `name` is what errors call them. See `load_recipe` for the rest."""
    content = deepcopy(_mapping(content, name))
    # A change of source drops the keys of the previous one, so it is applied first.
    for key, value in sorted(_parse_overrides(overrides, options), key=lambda given: given[0][-1] != CHOICE):
        _set_key(content, key, value)
    try:
        recipe = recipe_class(content.get("task"))
        return recipe.model_validate(content)
    except ValidationError as error:
        raise SettingsError(_error_message(error, recipe, name, options)) from None
    except SettingsError as error:
        raise SettingsError(f"{name}: {error}") from None


def to_yaml(recipe: Recipe) -> str:
    """The recipe with every key, as YAML that loads as the same recipe."""
    return write_yaml(recipe.model_dump(mode="json"))


def find_recipe(path: str | Path) -> Path:
    """The file at the path, or polynl's own recipe of that name."""
    name = str(path).removeprefix("recipes/")
    for place in (Path(path), BUILT_IN / name):
        for candidate in (place, Path(f"{place}.yaml")):
            if candidate.is_file():
                return candidate
    if Path(path).is_dir():
        there = sorted(file.name for file in Path(path).glob("[!_.]*.yaml"))
        inside = f"Recipes in it: {', '.join(there)}." if there else "There is no recipe in it."
        raise SettingsError(f"{Path(path)} is a folder. {inside}{runs_in(Path(path))}")
    known = sorted(file.stem for file in BUILT_IN.glob("*.yaml"))
    raise SettingsError(
        f"there is no recipe {path}.{_suggestion(name, known)}\npolynl comes with: {', '.join(known)}."
    )


def runs_in(folder: Path) -> str:
    """A sentence that names the runs in a folder, for errors that expected one of them; empty without any."""
    runs = sorted(str(file.parent) for file in folder.glob("*/recipe.yaml"))
    return f" Runs in it: {shortened(runs)}." if runs else ""


def _suggestion(name: str, known: Sequence[str]) -> str:
    """The recipe and keys that replace a name such as scenes/poly_nl, or else names like this one."""
    recipe, _, variant = name.removesuffix(".yaml").partition("/")
    if recipe not in known or not variant:
        return near_matches(recipe, known)
    variant = variant.removeprefix("resnet50_")
    blocks = [block for block in (NO_BLOCK, *BLOCKS) if f"{variant}_".startswith(f"{block}_")]
    block = max(blocks, key=len, default="NAME")
    placement = variant.removeprefix(block).removeprefix("_") if blocks else ""
    keys = f"--model.block {block}" + (f" --model.placement {placement}" if placement else "")
    return f" Use: {recipe} {keys}"


def keys_table(recipe: Recipe) -> Table:
    """The table that `polynl train RECIPE --list-keys` prints."""
    # Keys are there to be copied, so they are not wrapped.
    columns = (Column(heading, overflow="fold") for heading in ("value", "meaning"))
    table = Table(Column("key", no_wrap=True), *columns, box=None)
    for key, value, field in list_keys(recipe):
        plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
        table.add_row(f"--{key}", escape(write_yaml(plain, flow=True)), escape(field.description or ""))
    return table


def _mapping(content: Any, name: str | Path) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        found = "nothing" if content is None else type(content).__name__
        raise SettingsError(f"{name} is not a recipe: expected keys and values, got {found}.")
    _check_extent(content, name)
    return dict(content)


def _check_extent(content: Any, name: str | Path) -> None:
    """Raise a SettingsError for nested content that would take long or exceed the stack.

    A few anchors and aliases of YAML can stand for any number of values, or contain themselves.
    """
    parts, seen = [(content, 0)], 0
    while parts:
        part, depth = parts.pop()
        seen += 1
        if depth > DEEPEST or seen > MOST_VALUES:
            raise SettingsError(
                f"{name} is not a recipe: it is nested more than {DEEPEST} levels deep, or has more than "
                f"{MOST_VALUES:,} values."
            )
        inner = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
        parts += [(value, depth + 1) for value in inner]


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The content of a file, merged over that of the file named by its key `base`."""
    if path.resolve() in seen:
        raise SettingsError(f"{path}: its bases lead back to itself.")
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path} cannot be read as YAML: {reason}.") from None
    content = _mapping(content, path)
    if len(seen) == MOST_BASES:
        raise SettingsError(f"{seen[0]}: its base has a base, and so on, more than {MOST_BASES} times.")
    base = content.pop("base", None)
    if base is None:
        return content
    file = path.parent / str(base)
    if not file.is_file():
        raise SettingsError(f"{path}: there is no base {file}.")
    return _merge(_read_with_bases(file, (*seen, path.resolve())), content)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base` recursively; another source, or `{}`, replaces a part as a whole."""
    if over.get(CHOICE, base.get(CHOICE)) != base.get(CHOICE):
        return dict(over)
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and value and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _parse_overrides(words: Sequence[str], options: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """Parse `--a.b value` and `--a.b=value` into a path of keys and a YAML value; `-` stands for `_`."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not all(key.split(".")):
            raise SettingsError(
                f"unexpected argument {word!r}. Override keys of the recipe with --key value or --key [a,b]."
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise SettingsError(f"--{key} needs a value.{near_matches(key, options)}")
            value = rest.pop(0)
        try:
            read = read_yaml(value)
        except ValueError as error:
            raise SettingsError(f"--{key} {value}: {error}.") from None
        # A file name may contain a #, where YAML would start a comment.
        bare = isinstance(read, str) and value[0] not in "'\"!&|>"
        yield key.replace("-", "_").split("."), value if bare else read


def _set_key(content: dict[str, Any], key: Sequence[str], value: Any) -> None:
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


def _error_message(error: ValidationError, recipe: type[Recipe], name: str, options: Sequence[str]) -> str:
    """All problems, one per line: the key, the value and what was expected."""
    lines = [f"{name}:"]
    for problem in error.errors():
        key, siblings = _locate(recipe, [str(part) for part in problem["loc"]])
        folder, _, last = key.rpartition(".")
        if problem["type"] == "extra_forbidden":
            others = options if not folder else ()
            lines.append(f"  {key}: there is no such key.{near_matches(last, [*siblings, *others])}")
            lines.append(f"    Keys here: {', '.join(siblings)}.")
        else:
            lines.append(f"  {explained(key, problem)}")
    return "\n".join(dict.fromkeys(lines))


def _locate(recipe: type[BaseModel], path: Sequence[str]) -> tuple[str, list[str]]:
    """The dotted key for pydantic's path, and the keys that exist next to it.

    If a part was selected by its source, pydantic's path contains the source, which is not a key.
    """
    keys: list[str] = []
    siblings: list[str] = []
    parts = [recipe]
    for word in path:
        tagged = [part for part in parts if word in _types(part, CHOICE)]
        if len(parts) > 1 and tagged:
            parts = tagged
            continue
        if not parts and not word.isdigit():  # the type pydantic tried for a value
            continue
        keys.append(word)
        siblings = list(dict.fromkeys(name for part in parts for name in part.model_fields))
        found = [inner for part in parts for inner in _types(part, word)]
        parts = [inner for inner in found if isinstance(inner, type) and issubclass(inner, BaseModel)]
    return ".".join(keys), siblings


def _types(part: type[BaseModel], key: str) -> tuple[Any, ...]:
    """The type of a key, and the members of a union or Literal."""
    field = part.model_fields.get(key)
    return () if field is None else (field.annotation, *get_args(field.annotation))


# PyYAML follows YAML 1.1, where 1e-4 is a string and only 1.0e-4 a number.
_WITH_EXPONENT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def flatten_mapping(self, node: Any) -> None:
        """Refuse merge keys, which a few lines can make endless; recipes have `base`."""
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, "<< cannot be used in recipes; use base", key.start_mark
                )

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse duplicate keys; PyYAML silently keeps the last."""
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
        """Write repeated values out in full: recipes are read by people."""
        return True


# The dumper needs it too, to quote strings that would be read as numbers.
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _WITH_EXPONENT, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """Parse YAML; a one-line ValueError says where it is invalid."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{place}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).split("\n")[0]) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_yaml(content: Any, *, flow: bool = False) -> str:
    """The content as YAML; `flow`: on one line, as for a value on the command line.

    >>> write_yaml([0.9, 1e-05], flow=True)
    '[0.9, 1.0e-05]'
    """
    if not flow:
        return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    # PyYAML ends a lone scalar with a line of dots.
    text = yaml.dump(content, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()
