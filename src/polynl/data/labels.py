"""Files with the names of classes."""

from __future__ import annotations

import json
from pathlib import Path

from polynl.errors import SettingsError


def read_labels(file: Path, option: str = "") -> dict[int, str]:
    """The names of classes by number: a JSON object, or a line of text for each class, numbered from 0.

    `option` is the key or option that names the file, for errors.
    """
    named = f"{option}: {file}" if option else str(file)
    try:
        text = file.read_text("utf-8")
        if file.suffix.lower() != ".json":
            return dict(enumerate(line.strip() for line in text.splitlines() if line.strip()))
        return {int(number): str(name) for number, name in json.loads(text).items()}
    except OSError as error:
        raise SettingsError(f"{named} cannot be read: {error.strerror}.") from None
    except (ValueError, AttributeError) as error:
        what = "a JSON object of names by number" if file.suffix.lower() == ".json" else "UTF-8 text"
        raise SettingsError(f"{named} is not {what}: {error}.") from None
