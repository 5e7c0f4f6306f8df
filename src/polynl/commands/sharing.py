"""Commands that give trained networks to others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional, arg

from polynl.commands.options import DIR
from polynl.errors import SettingsError


@dataclass(frozen=True)
class Share:
    """Save a trained network with a model card, or upload it to the Hugging Face Hub.

    Both have the weights, which say what they are of, a config and a card filled in from the run:
      polynl share runs/scenes/poly_nl-res4 --out shared --license mit
      polynl share runs/scenes/poly_nl-res4 --push user/name --license mit
    """

    checkpoint: Annotated[Positional[Path], arg(metavar="RUN|FILE")]
    """Folder of a run, or a checkpoint or weights in it."""
    out: Annotated[Path | None, DIR] = None
    """Folder to write model.safetensors, config.json and README.md to."""
    push: Annotated[str | None, arg(metavar="USER/NAME")] = None
    """Repository on the Hub to upload to; log in first with hf auth login."""
    private: bool = False
    """With --push: create the repository as a private one, if it does not exist."""
    license: Annotated[str | None, arg(metavar="NAME")] = None
    """Licence of the network for its card, such as mit (default: the card says that it was not stated)."""

    def run(self, console: Console) -> None:
        """See :meth:`polynl.sharing.run.LoadedRun.save_pretrained` and `push_to_hub`."""
        from polynl.sharing import load_run

        if self.out is None and self.push is None:
            raise SettingsError("specify where to: --out DIR, or --push USER/NAME for the Hub.")
        if self.private and self.push is None:
            raise SettingsError("--private needs --push.")
        run = load_run(self.checkpoint)
        if self.out is not None:
            folder = run.save_pretrained(self.out, license=self.license)
            said = f'Load it with polynl.from_pretrained("{folder}").'
            console.print(escape(said), highlight=False, soft_wrap=True)
        if self.push is not None:
            private = True if self.private else None  # None: as the user's settings on the Hub say
            url = run.push_to_hub(self.push, license=self.license, private=private)
            console.print(escape(f"Uploaded to {url}."), highlight=False, soft_wrap=True)
