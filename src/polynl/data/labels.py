"""Files with the names of classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polynl.data.annotation_files import is_count
from polynl.errors import SettingsError, shown


def read_labels(file: Path, option: str = "") -> dict[int, str]:
    """The names of classes in order of their numbers: a JSON object, or a line of text for each, from 0 on.

    `option` is the key or option that names the file, for errors.
    """
    named = f"{option}: {file}" if option else str(file)
    is_json = file.suffix.lower() == ".json"
    try:
        # Some editors begin UTF-8 text with a byte order mark.
        text = file.read_text("utf-8-sig")
        if not is_json:
            return dict(enumerate(line.strip() for line in text.splitlines() if line.strip()))
        return _names_by_number(json.loads(text))
    except OSError as error:
        raise SettingsError(f"{named} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        what = "a JSON object of names by number" if is_json else "UTF-8 text"
        raise SettingsError(f"{named} is not {what}: {error}.") from None


def _names_by_number(content: Any) -> dict[int, str]:
    if not isinstance(content, dict):
        raise ValueError(f'expected {{"0": "ant", "1": "bee"}} and so on, got {shown(content)}')
    for number, name in content.items():
        if not is_count(number):
            raise ValueError(f"{number!r} is not the number of a class")
        if not isinstance(name, str):
            raise ValueError(f"the name of class {number} is {shown(name)}")
    return {int(number): name for number, name in sorted(content.items(), key=lambda item: int(item[0]))}
