"""The options of `polynl reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polynl.blocks.registry import BLOCKS, NO_BLOCK
from polynl.errors import SettingsError, check_choices, check_resume_or_overwrite

PAPER = tuple(name for name, entry in BLOCKS.items() if entry.in_paper)
# What can be compared: a name for the command line, the block and its options, in the order of tables. The
# network without a block comes first, then the paper's blocks and softmax attention, then the wider family.
# The last two are controls, which tell what a block does from what more parameters do.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    NO_BLOCK: (NO_BLOCK, {}),
    **{name: (name, {}) for name in PAPER},
    "non_local_softmax": ("non_local", {"mode": "embedded_gaussian", "scale": "inner"}),
    **{name: (name, {}) for name in BLOCKS if name not in (*PAPER, "conv")},
    "poly_nl_reduced": ("poly_nl", {"reduction": 4}),
    "conv": ("conv", {"residual": True}),
}
# What is compared unless --blocks says otherwise.
DEFAULT = (NO_BLOCK, *PAPER, "poly_nl_reduced", "conv")
ALL = "all"
# Enough to see that everything works, too little to learn anything; scenes can be few as well.
QUICK, QUICK_SCENES = ("--epochs", "1"), ("--epochs", "2", "--data.images", "640", "--data.val_images", "250")
# Keys that tell the trainings apart, with the option that sets them.
OWN_KEYS = {"--seed": "--seeds", "--model.block": "--blocks", "--model.options": "--blocks"}


@dataclass(frozen=True, kw_only=True)
class ReproduceSettings:
    """Reproduce the paper in miniature: train, score and time a small ResNet without and with each block.

    Trains on scenes that polynl draws, on the images of --data, or from any --recipe.

    Writes report.html, a table, JSON and figures to --out.

    Keys of the recipe can be overridden as for `polynl train`: --epochs 8.
    """

    data: Path | None = None
    """Data set of the recipe, by default a folder with train/<class>/ and val/<class>/."""
    recipe: str | None = None
    """Recipe file or name, of any task (default: scenes, or folder with --data)."""
    quick: bool = False
    """Check in a minute that everything works; this is too short to learn, so the scores mean nothing."""
    blocks: tuple[str, ...] = DEFAULT
    """Blocks to train, any that `polynl blocks` lists, or all; the network without a block is always included
    for comparison. Two are controls: poly_nl_reduced, with a fourth of the width, and conv, a 1×1 convolution
    with a residual. non_local_softmax is softmax attention, the quadratic baseline."""
    seeds: tuple[int, ...] = (0,)
    """Random seeds; with several, trainings are paired by seed and the intervals include their spread."""
    jobs: int | None = None
    """Number of trainings to run in parallel (default: one per CPU core, or one on a GPU)."""
    no_timings: bool = False
    """Measure no times of networks and layers; parameters and multiply-adds are counted all the same."""
    out: Path = Path("runs/reproduce")
    """Folder for the results and for every training."""
    resume: bool = False
    """Resume the trainings in --out; finished ones are kept."""
    overwrite: bool = False
    """Replace the results in --out."""

    def __post_init__(self) -> None:
        for option, given in (("--blocks", self.blocks), ("--seeds", self.seeds)):
            if not given:
                raise SettingsError(f"{option}: expected at least one.")
            twice = [str(value) for value in dict.fromkeys(given) if given.count(value) > 1]
            if twice:
                raise SettingsError(f"{option}: {', '.join(twice)} is given more than once.")
        check_choices(self.blocks, [*VARIANTS, ALL], "block")
        if min(self.seeds) < 0:
            raise SettingsError(f"--seeds {' '.join(map(str, self.seeds))}: expected numbers of at least 0.")
        if self.jobs is not None and self.jobs < 1:
            raise SettingsError(f"--jobs {self.jobs}: expected a number above 0.")
        check_resume_or_overwrite(resume=self.resume, overwrite=self.overwrite, kept="what is in --out")

    def selected(self) -> list[str]:
        """The blocks to train, the network without a block first."""
        return [name for name in VARIANTS if name == NO_BLOCK or name in self.blocks or ALL in self.blocks]
