"""Options that are declared once: a config class checks them, describes them and builds from them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from polynl.errors import SettingsError, near_matches, shown

# The key that chooses among several configs, such as those of data sets.
CHOICE = "source"
# Marks keys that do not affect what a run learns, such as where its data is; they may change when it resumes.
NEUTRAL: Any = {"affects_results": False}

# The limits are far above what anybody trains with: a number with some digits too many is an error, and not a
# process that runs out of memory or time.
Side = Annotated[int, Field(gt=0, le=16_384)]
"""The side of an image in pixels."""
Width = Annotated[int, Field(gt=0, le=4_096)]
"""The number of channels of a layer."""
MOST_OF_A_BLOCK = 4_096
Probability = Annotated[float, Field(ge=0, le=1)]


class Config(BaseModel):
    """A part of a recipe: an unknown key is an error, and the docstring below a key is its description.

    A key that a subclass declares again, with another default, keeps its description.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        for key, field in cls.model_fields.items():
            for base in cls.__mro__[1:]:
                if field.description is None and issubclass(base, Config) and key in base.model_fields:
                    field.description = base.model_fields[key].description


C = TypeVar("C", bound=Config)


def configured(config: type[C], **keys: Any) -> C:
    """A config from keyword arguments; a ValueError has a line for each mistake."""
    try:
        return config(**keys)
    except ValidationError as error:
        raise ValueError(mistakes(error, config.model_fields)) from None


def mistakes(error: ValidationError, keys: Iterable[str], named: Callable[[str], str] = str) -> str:
    """A line for each mistake in a config: the key, as `named`, the value, what was expected."""
    lines = []
    for problem in error.errors():
        key = str(next(iter(problem["loc"]), ""))
        if problem["type"] == "extra_forbidden":
            lines.append(f"{named(key)}: there is no such option.{near_matches(key, keys)}")
        else:
            lines.append(explained(named(key), problem))
    return "\n".join(dict.fromkeys(lines))


def explained(key: str, problem: Mapping[str, Any]) -> str:
    """One mistake as pydantic reports it: the key, what was expected, the value."""
    kind, given, about = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "missing":
        return f"{key}: is missing."
    if kind == "union_tag_not_found":
        return f"{key}.{CHOICE}: is missing."
    if kind == "union_tag_invalid":
        choices, tag = about["expected_tags"].replace("'", "").split(", "), about["tag"]
        hint = near_matches(tag, choices)
        return f"{key}.{CHOICE}: must be one of {', '.join(choices)}; got {tag!r}.{hint}"
    if kind == "value_error":  # raised by one of our validators, which names the value
        return f"{key}: {about['error']}" if key else str(about["error"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}: expected keys and values (got {shown(given)})"
    if kind in ("tuple_type", "list_type"):
        return f"{key}: expected a list, as in [1, 2] (got {shown(given)})"
    got = "" if isinstance(given, Mapping | BaseModel) else f" (got {shown(given)})"
    return f"{key}: {problem['msg'].replace('Input should be', 'expected')}{got}"


def _in_order(values: tuple[float, float]) -> tuple[float, float]:
    if not 0 < values[0] <= values[1] <= 1:
        raise ValueError(f"expected [from, to] with 0 < from <= to <= 1; got {list(values)}")
    return values


# A range [from, to].
Fractions = Annotated[tuple[float, float], AfterValidator(_in_order)]


_TOO_LARGE = re.compile("allocate memory|out of memory|overflow")


@contextmanager
def errors_at(key: str) -> Iterator[None]:
    """Turn a ValueError, a TypeError or a lack of memory into a SettingsError that names the recipe's key."""
    try:
        yield
    except SettingsError:
        raise
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{key}: {error}") from error
    except (RuntimeError, MemoryError) as error:
        # PyTorch has no type of its own for a tensor that is too large.
        if not _TOO_LARGE.search(str(error)):
            raise
        raise SettingsError(f"{key}: it is too large for the memory of this machine.") from error


def check_arguments(
    options: Mapping[str, Any],
    function: Callable[..., Any],
    name: str,
    *,
    hidden: Collection[str] = (),
    own: Mapping[str, str | None] | None = None,
) -> None:
    """Raise a ValueError for an option that `function` does not take, or that has the wrong type.

    `hidden` arguments count as unknown. `own` are those that polynl sets itself, with the key to use instead
    or None.
    """
    parameters = inspect.signature(function).parameters
    own = {} if own is None else own
    known = sorted(set(parameters) - {*hidden, *own, "self", "kwargs"})
    for option, value in options.items():
        if option in own:
            remedy = "leave it out" if own[option] is None else f"use {own[option]} instead"
            raise ValueError(f"polynl sets {option} of {name} itself; {remedy}")
        if option not in known:
            hint = near_matches(option, known)
            raise ValueError(f"{name} has no option {option!r}.{hint} The options are {', '.join(known)}.")
        default = parameters[option].default
        # In Python, True is an int.
        if type(default) is int and (type(value) is not int or value < 1):
            raise ValueError(f"{option} of {name}: expected a whole number above 0, got {value!r}")
        if isinstance(default, float) and not isinstance(value, int | float):
            raise ValueError(f"{option} of {name}: expected a number, got {value!r}")
        if option.endswith("head") and not callable(value):
            raise ValueError(f"{option} of {name}: expected a module, got {value!r}")
        parts = [isinstance(part, int | float) for part in value] if isinstance(value, list | tuple) else []
        if option in ("image_mean", "image_std") and parts != [True] * 3:
            raise ValueError(f"{option} of {name}: expected three numbers, got {value!r}")
