"""The docstrings as Markdown: roles become links, and Python sessions become code.

An extension of griffe, which reads the docstrings from the source without importing it.
"""

import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|data):`([^`]+)`")
SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites the docstrings of a package once all of it has been read."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Link what the package's `__all__` lists, and leave other names as code."""
        loader.resolve_aliases(implicit=True)
        modules = [pkg, *submodules(pkg)]
        for module in modules:
            prefer_functions(module)
        # The shortest path first: the page of a name is that of the package it is imported from.
        public = {
            module[name].canonical_path: f"{module.path}.{name}"
            for module in sorted(modules, key=lambda module: -module.path.count("."))
            for name in map(str, module.exports or ())
            if module is not pkg
        }
        for module in modules:
            for documented in list(objects(module)):
                if isinstance(documented, griffe.Class):
                    drop_overrides(documented)
                if documented.docstring is not None:
                    documented.docstring.value = as_markdown(documented, public)


def submodules(module: griffe.Module) -> Iterator[griffe.Module]:
    """All modules below a module."""
    for below in module.modules.values():
        if not below.is_alias:
            yield below
            yield from submodules(below)


def prefer_functions(module: griffe.Module) -> None:
    """Let `polynl.functional.poly_nl` be the function, as in Python, and not the file it comes from."""
    for name in map(str, module.exports or ()):
        member = module.members.get(name)
        if isinstance(member, griffe.Module) and name in member.members:
            module.members[name] = griffe.Alias(name, member.members[name], parent=module)


def objects(around: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    """A module or class with all that is defined in it, without the modules below."""
    yield around
    for member in around.members.values():
        if isinstance(member, griffe.Class):
            yield from objects(member)
        elif isinstance(member, griffe.Function | griffe.Attribute):
            yield member


def drop_overrides(documented: griffe.Class) -> None:
    """Leave out what a class overrides: the class that introduces it describes it."""
    for name in {name for base in documented.mro() for name in base.members} & set(documented.members):
        del documented.members[name]


def as_markdown(documented: griffe.Object, public: dict[str, str]) -> str:
    """The docstring of an object."""

    def link(role: re.Match[str]) -> str:
        first, dot, rest = role[1].partition(".")
        try:
            path = documented.resolve(first) + dot + rest
        except griffe.NameResolutionError:
            path = role[1]
        target = public.get(path, path if path in public.values() else None)
        return f"`{role[1]}`" if target is None else f"[`{role[1]}`][{target}]"

    text = ROLE.sub(link, documented.docstring.value)
    return SESSION.sub(lambda session: f"```pycon\n{session[0]}\n```", text)
