"""Trained networks for others: load a run in one call, save it with a model card, upload it to the Hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polynl.extras import missing_extra_named

if TYPE_CHECKING:
    from polynl.sharing.run import LoadedRun

__all__ = ["from_pretrained", "load_run"]


def load_run(
    path: str | os.PathLike[str],
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    labels: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    allow_import: bool = False,
) -> LoadedRun:
    """A trained network with its labels and preprocessing, in eval mode.

    `path` is the folder of a run, of which the best checkpoint is loaded, a checkpoint or file of weights in
    it, or a folder that `save_pretrained` wrote. For other weights, name the `recipe` that they were trained
    with, with keys to override, such as `["--model.block", "none"]`, and a file of `labels`.

    If the recipe comes from the file of weights itself and its `model.arch` is a function of your own,
    `allow_import=True` allows it to be imported.
    """
    with missing_extra_named():
        from polynl.sharing.run import load

        return load(
            path, recipe=recipe, overrides=overrides, labels=labels, device=device, allow_import=allow_import
        )


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    device: str = "cpu",
    allow_import: bool = False,
) -> LoadedRun:
    """A network from the Hugging Face Hub, such as "user/name", or from a local folder; see `load_run`."""
    if os.path.isdir(name):
        return load_run(name, device=device, allow_import=allow_import)
    with missing_extra_named():
        from polynl.sharing.hub import download

    folder = download(
        os.fspath(name),
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
    return load_run(folder, device=device, allow_import=allow_import)
