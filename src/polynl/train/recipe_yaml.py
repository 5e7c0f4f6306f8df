"""YAML as recipes have it: 1e-4 is a number, and a key is given once."""

from __future__ import annotations

import re
from typing import Any

import yaml

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
