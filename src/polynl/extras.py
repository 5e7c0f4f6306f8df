"""The optional dependencies: which extra of polynl installs a package.

Read from the metadata of the installed polynl, so that pyproject.toml alone declares them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# The packages whose import name is not their distribution's name with underscores.
IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml"}


@cache
def extras() -> dict[str, str]:
    """Import name → extra, for the packages that an extra itself lists; empty if polynl is not installed."""
    try:
        requirements = importlib.metadata.requires("polynl") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]", requirement)
        if match is not None and match[1] != "polynl":
            name = match[1].lower().replace("-", "_")
            found.setdefault(IMPORT_NAMES.get(match[1].lower(), name), match[2])
    return found


def check_extra(extra: str) -> None:
    """Raise a ModuleNotFoundError for a package of the extra that is not installed.

    For packages that are imported only when they are needed, which may be after hours of training.
    """
    for package, its_extra in extras().items():
        if its_extra == extra and importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def check_package(package: str) -> None:
    """Raise a ModuleNotFoundError that says which extra brings the package, if it is not installed."""
    if importlib.util.find_spec(package) is None:
        error = ModuleNotFoundError(f"No module named {package!r}", name=package)
        raise ModuleNotFoundError(install_hint(error) or str(error), name=package)


def install_hint(error: ModuleNotFoundError) -> str | None:
    """What to install, if an extra of polynl brings the module that was not found; otherwise None."""
    package = (error.name or "").partition(".")[0]
    if package not in extras():
        return None
    return f'this needs {package}, which is not installed: pip install "polynl[{extras()[package]}]"'


@contextmanager
def missing_extra_named() -> Iterator[None]:
    """A package that is not installed is an error that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (hint := install_hint(error)) is None:
            raise
        raise ModuleNotFoundError(hint, name=error.name) from error
