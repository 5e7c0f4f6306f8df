"""The options of `polynl reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polynl.errors import SettingsError, check_choices, check_resume_or_overwrite
from polynl.results.paper import PAPER

# The blocks that the paper compares on ImageNet, the plain network first.
BLOCKS = tuple(PAPER["classification"].rows)
# Enough to see that everything works, too little to learn anything.
QUICK = ("--epochs", "2", "--data.images", "640", "--data.val_images", "250")


@dataclass(frozen=True, kw_only=True)
class ReproduceSettings:
    """The paper in miniature: a small ResNet with no block and with each of five, trained, scored and timed.

    Trains on scenes that polynl draws, or on the images of --data. Writes report.html, a page with everything
    in it, and a table, JSON and figures to --out.
    Keys of the recipes (recipes/scenes, recipes/folder) can be given as for `polynl train`: --epochs 8.
    """

    data: Path | None = None
    """An ImageFolder, with train/<class>/ and val/<class>/, instead of the scenes."""
    quick: bool = False
    """A minute's check that everything works: too short to learn, so its accuracies mean nothing."""
    blocks: tuple[str, ...] = BLOCKS
    """Which of them; the network without a block is always there, since the others are compared with it."""
    seeds: tuple[int, ...] = (0,)
    """Train with each of these seeds, and show the mean and the spread."""
    jobs: int | None = None
    """Trainings side by side; one for each CPU core unless given, and one on a GPU."""
    out: Path = Path("runs/reproduce")
    """Folder for the results and for every training."""
    resume: bool = False
    """Go on with what is in --out: trainings that have ended are kept."""
    overwrite: bool = False
    """Replace what is in --out."""

    def __post_init__(self) -> None:
        check_choices(self.blocks, BLOCKS, "block")
        if not self.seeds or min(self.seeds) < 0:
            raise SettingsError(f"--seeds {' '.join(map(str, self.seeds))}: expected numbers from 0 on.")
        if self.jobs is not None and self.jobs < 1:
            raise SettingsError(f"--jobs {self.jobs}: expected a number above 0.")
        check_resume_or_overwrite(resume=self.resume, overwrite=self.overwrite, kept="what is in --out")

    def selected(self) -> list[str]:
        """The blocks to train, the plain network first."""
        return [name for name in BLOCKS if name == "none" or name in self.blocks]
