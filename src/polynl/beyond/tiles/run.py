"""Run a network on an image tile by tile, with the result of the whole image."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polynl.beyond.tiles.calls import Axis, Call
from polynl.beyond.tiles.features import Kept, Replay, Steps, Uses, fake_uses
from polynl.beyond.tiles.grid import Tile
from polynl.beyond.tiles.image import Image, Prepare
from polynl.beyond.tiles.outputs import Out, Outputs, check_out
from polynl.beyond.tiles.plan import Pair, TilePlan, make_plan
from polynl.beyond.tiles.running import run_on_tile
from polynl.beyond.tiles.sites import Site
from polynl.beyond.tiles.until import Until
from polynl.files import temporary_folder


def run_tiled(
    model: nn.Module,
    image: Any,
    tile: Pair = 1024,
    *,
    out: Out = None,
    prepare: Prepare | None = None,
    until: str | None = None,
    keep: str | Path | None = None,
    halo: Pair | None = None,
    stride: Pair | None = None,
    progress: bool = True,
) -> Any:
    """The model's output for an image that is larger than memory, exactly, up to rounding.

    `image` has the shape (c, h, w) or (b, c, h, w): a tensor, an array such as a NumPy memmap, or any reader
    with a shape and slices `[..., y0:y1, x0:x1]`. `prepare` turns what was read into what the model takes,
    pixel by pixel. `tile` are the pixels on a side, or of rows and columns; each is read with a halo.

    Calls that need the whole map (blocks, global pooling, group and instance norms) are summed up over the
    tiles, one pass for each; a last pass gives the output. With `keep`, a folder, features are kept there
    between passes, so that nothing is computed twice.

    Vectors are returned. Maps are returned as tensors or, if `out` is the name of a .npy file, as arrays in
    that file; if `out` is a function, it is called with (name, rows, columns, tensor) for each tile. With
    `until`, the name of a module, they are what that module returns, and nothing after it is computed.

    `halo` and `stride`, in pixels, are found by default, by running the model on strips of noise. A network
    that mixes positions in other ways raises an error that names the module.

    >>> import polynl, torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), polynl.PolyNL(8, init="random")).eval()
    >>> image = torch.rand(3, 50, 70)
    >>> tiled = run_tiled(model, image, tile=32, progress=False)
    >>> torch.allclose(tiled, model(image[None]), atol=1e-5)
    True
    """
    check_out(out)
    if keep is not None and not Path(keep).is_dir():
        raise FileNotFoundError(f"keep={str(keep)!r}: there is no such folder")
    like = _like(model, image)
    source = Image(image, prepare, like)
    plan = plan_tiles(model, image, tile, prepare=prepare, until=until, halo=halo, stride=stride)
    if progress:
        print(plan.describe(keep=keep is not None), file=sys.stderr)
    with Outputs(plan.network.outputs, out) as outputs, _folder(keep) as folder:
        _Passes(plan, source, outputs, None if folder is None else Kept(folder, like.device), progress).run()
        return outputs.result()


def plan_tiles(
    model: nn.Module,
    image: Any,
    tile: Pair = 1024,
    *,
    prepare: Prepare | None = None,
    until: str | None = None,
    halo: Pair | None = None,
    stride: Pair | None = None,
) -> TilePlan:
    """What :func:`run_tiled` will do: print it to see the tiles, the passes and what they cost."""
    like = _like(model, image)
    source = Image(image, prepare, like)
    model = model if until is None else Until(model, until)
    return make_plan(model, (source.shape[0], source.channels(), *source.size), like, tile, halo, stride)


def _like(model: nn.Module, image: Any) -> Tensor:
    """An empty tensor with the dtype and device of the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    floating = isinstance(image, Tensor) and image.is_floating_point()
    return torch.empty(0, dtype=image.dtype, device=image.device) if floating else torch.empty(0)


@contextmanager
def _folder(keep: str | Path | None) -> Iterator[Path | None]:
    """A temporary folder within the one that was given."""
    if keep is None:
        yield None
        return
    with temporary_folder("polynl-features", Path(keep)) as folder:
        yield folder


class _Stop(BaseException):  # not an Exception, which a model may catch
    """Ends a pass at the call that it was for."""


class _Passes:
    """The passes over the tiles, and the sums that are known so far."""

    def __init__(
        self, plan: TilePlan, image: Image, outputs: Outputs, kept: Kept | None, progress: bool
    ) -> None:
        self._plan, self._image, self._outputs, self._kept = plan, image, outputs, kept
        self._known: dict[int, Any] = {}
        self._uses: dict[tuple[int, ...], Uses] = {}
        self._bar = _Bar(plan.runs(), shown=progress)

    def run(self) -> None:
        """All passes; where the image is one tile, the model as it is."""
        if len(self._plan.grid) == 1:
            tile = next(iter(self._plan.grid))
            with torch.no_grad():
                self._outputs.add(tile, self._plan.network.model(self._image.read(tile)))
            return
        reducing = [n for n, site in enumerate(self._plan.network.sites) if site.reduces()]
        for number in reducing:
            for index, tile in enumerate(self._plan.grid):
                self._run(index, tile, stop=number)
        for index, tile in enumerate(self._plan.grid):
            self._outputs.add(tile, self._run(index, tile, stop=None))
            if not self._outputs.dense:
                break
        self._bar.end()

    def _run(self, index: int, tile: Tile, stop: int | None) -> Any:
        """Run the network on a tile, to its end or to the site `stop`, whose summary is added."""
        x = self._image.read(tile)
        steps = None if self._kept is None else self._replay(self._kept, index, tile, x, stop)
        try:
            output = self._from(x, tile, stop, steps)
            output = output if steps is None else steps.output(output)
        except _Stop:
            output = None
            if steps is not None and self._kept is not None:
                self._kept.save(index, steps.live())
        self._bar.step()
        return output

    def _from(self, x: Tensor, tile: Tile, stop: int | None, steps: Steps | None) -> Any:
        def answer(site: Site, call: Call, axes: Sequence[Axis]) -> Tensor:
            number = numbers[id(site)]
            if number == stop:
                stepped(call, lambda call: self._add(number, call.summary(axes)))
            return stepped(call, lambda call: call.apply(self._known.get(number), axes))

        def stepped(call: Call, make: Callable[[Call], Any]) -> Any:
            return make(call) if steps is None else steps.answered(call, make)

        network = self._plan.network
        numbers = {id(site): number for number, site in enumerate(network.sites)}
        if steps is None:
            return run_on_tile(network.model, x, network.sites, tile, answer)
        with steps:
            return run_on_tile(network.model, x, network.sites, tile, answer)

    def _add(self, number: int, summary: Any) -> None:
        self._known[number] = self._known[number] + summary if number in self._known else summary
        raise _Stop

    def _replay(self, kept: Kept, index: int, tile: Tile, x: Tensor, stop: int | None) -> Replay:
        """From where the last pass stopped, to where this one stops."""
        uses = self._uses_of(tile, x)
        reducing = [n for n, site in enumerate(self._plan.network.sites) if site.reduces()]
        last = len(reducing) if stop is None else reducing.index(stop)
        start = 0 if last == 0 else uses.stops[last - 1]
        live = set() if stop is None else uses.live_at(uses.stops[last])
        return Replay(uses.names, start, kept.load(index) if last else {}, live)

    def _uses_of(self, tile: Tile, x: Tensor) -> Uses:
        shape = tuple(x.shape)
        if shape not in self._uses:
            network = self._plan.network

            def run(image: Tensor, uses: Any) -> Any:
                def answer(site: Site, call: Call, axes: Sequence[Axis]) -> Tensor:
                    if site.reduces():
                        uses.stops.append(len(uses.names))
                    return uses.answered(call, lambda call: call.neutral())

                return run_on_tile(network.model, image, network.sites, tile, answer)

            self._uses[shape] = fake_uses(run, shape, x)
        return self._uses[shape]


class _Bar:
    """A line on a terminal: how many of the runs are done, and how long the others will take."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total, self._done, self._shown = total, 0, shown and sys.stderr.isatty()
        self._began = time.monotonic()

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        if self._shown:
            left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            filled = 20 * self._done // self._total
            bar = "━" * filled + " " * (20 - filled)
            print(
                f"\r{bar} {self._done}/{self._total} tiles, {left:.0f} s left ",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        """Go to the next line."""
        if self._shown:
            print(file=sys.stderr)
