"""The one training loop: steps, scores and checkpoints, on one process or many."""

from __future__ import annotations

import errno
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch import Tensor, nn

from polynl.errors import RunStoppedError, SettingsError
from polynl.tasks.base import Batch, Task
from polynl.train.checkpoint import (
    BEST_WEIGHTS,
    LAST,
    LAST_WEIGHTS,
    export_weights,
    load_last,
    put_aside,
    save_checkpoint,
)
from polynl.train.config import Recipe, build_optimizer
from polynl.train.evaluation import evaluate, val_reader
from polynl.train.loading import Reader, Seeded, ShuffledShare, hash_seed
from polynl.train.processes import (
    Interruption,
    Processes,
    autocast,
    joined,
    random_state,
    set_random_state,
    set_up_torch,
    to_device,
    without_trace,
)
from polynl.train.progress import Display, Totals, epoch_line, summary
from polynl.train.run_folder import RunFolder

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def train(
    recipe: Recipe,
    folder: Path,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    display: Display | None = None,
) -> list[dict[str, Any]]:
    """Train as the recipe says; gives a row of figures an epoch. The folder has them too, and the weights.

    Under torchrun, all of its processes call this; one that died and was started again resumes by itself.
    """
    with ExitStack() as stack:
        processes = stack.enter_context(joined(recipe.device))
        interruption = stack.enter_context(Interruption())
        set_up_torch(recipe)
        run = RunFolder(folder)
        stack.callback(run.close)
        if display is None:
            display = Display(console if processes.first else None)
        with processes.together():
            task = recipe.build_task()
            task.check()
            if processes.first:
                again = processes.restarted and run.begun_by(processes.launch)
                run.open(recipe, resume=resume or again, overwrite=overwrite)
            trainer = Trainer(recipe, task, processes, interruption, run, display)
        trainer.begin()
        return trainer.run()


class Trainer:
    """The state of a run, and the loop that moves it."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        processes: Processes,
        interruption: Interruption,
        folder: RunFolder,
        display: Display,
    ) -> None:
        self._recipe, self._task, self._processes = recipe, task, processes
        self._interruption, self._folder, self._display = interruption, folder, display
        self._batch = recipe.total_batch(processes.count)
        self._data, self._groups = task.train_set(), task.groups()
        self._steps = len(self._data) // self._batch
        if self._steps == 0:
            raise SettingsError(f"batch: a step takes {self._batch} images, and there are {len(self._data)}.")
        torch.manual_seed(hash_seed(recipe.seed))
        self._model = to_device(task.model(), recipe, processes.device)
        processes.check(self._model)
        self._optimizer = build_optimizer(self._model, recipe.optimizer)
        self._scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "float16")
        # Dropout differs between processes, as their images do.
        torch.manual_seed(hash_seed(recipe.seed, processes.rank))
        self._wrapped, self._settled = self._model, False
        self._reader = Reader(
            Seeded(self._data, recipe.seed),
            partial(task.collate, training=True),
            workers=recipe.workers,
            device=processes.device,
        )
        self._val_reader = val_reader(task, recipe, processes)
        self._epoch, self._step, self._totals = 0, 0, Totals()
        self._rows: list[dict[str, Any]] = []
        self._kept = "There is no checkpoint yet."

    @property
    def _done(self) -> int:
        """Steps since the run began."""
        return self._epoch * self._steps + self._step

    def begin(self) -> None:
        """Begin the run in its folder, or go on from the last checkpoint in it that can be read."""
        state: dict[str, Any] | None = None
        problems: list[str] = []
        with self._processes.together():
            if self._folder.resumed:
                state, problems = load_last(self._folder.path)
        # The other processes may be on machines that do not have the file.
        state = self._processes.from_first(state)
        with self._processes.together(), self._writing():
            if state is not None:
                self._load(state)
            if self._processes.first:
                for problem in problems:
                    self._display.say(f"{problem} The one before it is used.")
                    put_aside(self._folder.path)
                self._folder.begin(self._recipe, self._processes, self._task.labels())
                self._folder.write_metrics(self._rows)
        self._wrapped = self._processes.wrapped(self._model)

    def run(self) -> list[dict[str, Any]]:
        """Train to the end of the last epoch."""
        self._display.begin(self._recipe.epochs * self._steps, self._done)
        try:
            while self._epoch < self._recipe.epochs:
                self._train_epoch()
                self._end_epoch()
        finally:
            self._display.end()
            self._reader.close()
            self._val_reader.close()
        self._display.show(summary(self._rows, self._task.best_by, str(self._folder.path)))
        return self._rows

    def _train_epoch(self) -> None:
        """The steps of the epoch that are left."""
        self._model.train()
        started = time.perf_counter()
        for batch in self._reader.batches(self._share()):
            losses = self._train_step(batch)
            self._step += 1
            now = time.perf_counter()
            self._totals.add(losses, len(batch), len(batch.bad), now - started)
            started = now
            self._tell(losses, batch)
            (stop,) = self._processes.any(self._interruption.requested)
            if stop or self._step % self._recipe.checkpoint_every == 0:
                self._save()
            if stop:
                self._stop()

    def _train_step(self, batch: Batch) -> dict[str, float]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr(self._done)
        if self._processes.count > 1 and not self._settled:
            self._settle(batch)
        losses = self._losses(batch)
        self._optimizer.zero_grad()
        self._scaler.scale(torch.stack(list(losses.values())).sum()).backward()
        values = {name: loss.item() for name, loss in losses.items()}
        # Before the step: weights that a NaN has touched are lost.
        (broken,) = self._processes.any(not math.isfinite(sum(values.values())))
        if broken:
            terms = ", ".join(f"{name} {value:g}" for name, value in values.items())
            self._refuse(f"no finite loss at step {self._step + 1} of epoch {self._epoch + 1}: {terms}")
        if self._recipe.optimizer.clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.optimizer.clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return values

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        with autocast(self._recipe, self._processes.device):
            batch = batch.to(self._processes.device, channels_last=self._recipe.channels_last)
            return self._task.losses(self._wrapped, batch)

    def _settle(self, batch: Batch) -> None:
        """Take a step for nothing: in its first one, DDP finds out in which order to add gradients up.

        A run that goes on would else add them up in another order than one that was never stopped.
        """
        with without_trace(self._model, self._processes.device):
            torch.stack(list(self._losses(batch).values())).sum().backward()
        self._settled = True

    def _end_epoch(self) -> None:
        """Score, note the epoch's figures, and save."""
        due = (self._epoch + 1) % self._recipe.evaluate_every == 0 or self._epoch + 1 == self._recipe.epochs
        scores, skipped = self._scores() if due else ({}, 0)
        totals = self._totals.over(self._processes)
        row = {
            "epoch": self._epoch + 1,
            "step": self._done,
            "lr": self._lr(self._done - 1),
            **totals.losses_per_image(),
            **scores,
            "images": totals.images,
            "skipped": totals.skipped + skipped,
            "seconds": round(totals.seconds, 3),
            "images_per_second": round(totals.rate, 1),
        }
        self._rows.append(row)
        self._epoch, self._step, self._totals = self._epoch + 1, 0, Totals()
        self._save()
        self._log({f"val/{name}": score for name, score in scores.items()})
        self._display.say(
            epoch_line(row, self._recipe.epochs, [name for name in self._task.headline if name in scores])
        )

    def _scores(self) -> tuple[dict[str, float], int]:
        self._processes.share_buffers(self._model)
        scored = evaluate(
            self._task,
            self._model,
            self._recipe,
            self._processes,
            reader=self._val_reader,
            stop=lambda: self._interruption.requested,
            tick=lambda text: self._display.step(self._done, f"scoring epoch {self._epoch + 1}  {text}"),
        )
        if scored is None:
            self._save()
            self._stop()
        return scored

    def _share(self) -> ShuffledShare:
        return ShuffledShare(
            len(self._data),
            batch=self._batch,
            rank=self._processes.rank,
            processes=self._processes.count,
            seed=self._recipe.seed,
            epoch=self._epoch,
            first_step=self._step,
            groups=self._groups,
        )

    def _lr(self, step: int) -> float:
        factor = self._recipe.schedule.factor(step, self._steps, self._recipe.epochs)
        return self._recipe.peak_lr(self._batch) * factor

    def _tell(self, losses: Mapping[str, float], batch: Batch) -> None:
        for reason in batch.bad:
            self._display.say(f"skipped: {reason}")
        loss, lr = sum(losses.values()), self._lr(self._done - 1)
        rate = self._totals.rate * self._processes.count
        text = f"epoch {self._epoch + 1}  loss {loss:.4f}  lr {lr:.2g}  {rate:.0f} images/s"
        self._display.step(self._done, text)
        figures = {"loss": loss, **losses, "lr": lr, "images_per_second": rate}
        self._log({f"train/{name}": value for name, value in figures.items()})

    def _log(self, figures: Mapping[str, float]) -> None:
        problem = self._folder.log(figures, self._done) if self._processes.first else None
        if problem is not None:
            self._display.say(problem)

    def _refuse(self, what: str) -> NoReturn:
        self._processes.end(
            RunStoppedError(
                f"{what}. {self._kept}\n"
                f"A lower optimizer.lr (now {self._lr(self._done):.3g}), a longer schedule.warmup_epochs or "
                "optimizer.clip_norm may help; --overwrite begins the folder anew."
            )
        )

    def _stop(self) -> NoReturn:
        """All processes come here at the same step, whichever of them was told to stop."""
        signals = [number for number in self._processes.gathered(self._interruption.signal) if number]
        reason = f"by {signal.Signals(signals[0]).name}" if signals else "since torchrun has ended"
        self._processes.end(
            RunStoppedError(
                f"stopped {reason}. {self._kept} Go on with --resume.",
                exit_code=128 + signals[0] if signals else 1,
            )
        )

    def _save(self) -> None:
        """Every process gives its random state and its share of the totals; the first one writes."""
        # What the last step has made of the weights, only the next loss would tell.
        (broken,) = self._processes.any(not _finite(self._model))
        if broken:
            self._refuse(f"weights that are not finite after step {self._step} of epoch {self._epoch + 1}")
        share = {"random": random_state(self._processes.device), "totals": asdict(self._totals)}
        shares = self._processes.gathered(share)
        with self._processes.together(), self._writing():
            if self._processes.first:
                self._write(shares)

    def _write(self, shares: Sequence[Mapping[str, Any]]) -> None:
        """What follows from the checkpoint comes before it, so that a killed run writes it again."""
        folder, weights = self._folder.path, self._model.state_dict()
        if self._best:
            export_weights(folder / BEST_WEIGHTS, weights)
        if self._epoch == self._recipe.epochs:
            export_weights(folder / LAST_WEIGHTS, weights)
        state = {
            "images": len(self._data),
            "batch": self._batch,
            "epoch": self._epoch,
            "step": self._step,
            "rows": self._rows,
            "model": weights,
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "shares": shares,
        }
        save_checkpoint(folder, state, best=self._best)
        self._note_kept()
        self._folder.write_metrics(self._rows)

    @property
    def _best(self) -> bool:
        """Whether an epoch has just ended whose score is higher than all before."""
        scores = [row.get(self._task.best_by, -math.inf) for row in self._rows]
        return self._step == 0 and scores[-1] > max(scores[:-1], default=-math.inf)

    def _load(self, state: Mapping[str, Any]) -> None:
        if state["images"] != len(self._data):
            raise SettingsError(
                f"the run was begun with {state['images']} images to train on, and now there are "
                f"{len(self._data)}: give it those of then."
            )
        if state["batch"] != self._batch:
            raise SettingsError(
                f"the run was begun with {state['batch']} images a step, and these {self._processes.count} "
                f"processes would take {self._batch}: start as many processes as then."
            )
        try:
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise SettingsError(f"the checkpoint does not fit the recipe: {error}") from error
        self._scaler.load_state_dict(state["scaler"])
        self._epoch, self._step, self._rows = state["epoch"], state["step"], state["rows"]
        rank, shares = self._processes.rank, state["shares"]
        if len(shares) == self._processes.count:
            set_random_state(shares[rank]["random"], self._processes.device)
        # With another number of processes than then, shares are put together.
        self._totals = Totals.of(share["totals"] for share in shares[rank :: self._processes.count])
        self._note_kept()

    def _note_kept(self) -> None:
        epoch, step = self._epoch, self._step
        moment = f"step {step} of epoch {epoch + 1}" if step else f"epoch {epoch}"
        self._kept = f"The last good checkpoint is {self._folder.path / LAST}, after {moment}."

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Say in words that the folder cannot be written to."""
        try:
            yield
        except OSError as error:
            remedy = "Make room" if error.errno in FULL_DISK else "Mend that"
            raise RunStoppedError(
                f"{self._folder.path} cannot be written to: {error.strerror}. {self._kept}\n"
                f"{remedy}, then go on with --resume."
            ) from error


def _finite(model: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in chain(model.parameters(), model.buffers()))
