"""The one training loop: steps, scores and checkpoints, on one process or many."""

from __future__ import annotations

import errno
import math
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polynl.errors import RunStoppedError, SettingsError
from polynl.tasks.base import Batch, Task
from polynl.train.checkpoint import BEST, LAST, export_weights, load_last, save_checkpoint
from polynl.train.display import Display, epoch_line, summary
from polynl.train.evaluation import autocast, evaluate
from polynl.train.interruption import Interruption, ignore_signals
from polynl.train.optimizer import build_optimizer
from polynl.train.processes import Processes, joined
from polynl.train.recipe import Recipe
from polynl.train.run_folder import RunFolder
from polynl.train.sampler import Seeded, ShuffledShare, mixed
from polynl.train.totals import Totals

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def train(
    recipe: Recipe,
    folder: Path,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Train as the recipe says; gives a row of figures an epoch. The folder has them too, and the weights.

    Under torchrun, all of its processes call this; one that died and was started again resumes by itself.
    """
    task = recipe.build_task()
    task.check()
    with ExitStack() as stack:
        processes = stack.enter_context(joined(recipe.device))
        interruption = stack.enter_context(Interruption())
        resume = resume or processes.restarted
        run = RunFolder(folder)
        if processes.first:
            stack.callback(run.close)
            run.open(recipe, resume=resume, overwrite=overwrite and not resume)
            run.write_environment(processes.device.type, processes.count, recipe.seed)
        display = Display(console if processes.first else None, quiet=quiet)
        trainer = Trainer(recipe, task, processes, interruption, run, display)
        try:
            if resume:
                trainer.load()
            return trainer.run()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            raise RunStoppedError(
                f"{folder} cannot be written to: {error.strerror}. {trainer.kept}\n"
                "Make room, then go on with --resume."
            ) from error


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
        _set_up_torch(recipe)
        self._data = task.train_set()
        self._steps = len(self._data) // self._batch
        if self._steps == 0:
            raise SettingsError(f"batch: a step takes {self._batch} images, and there are {len(self._data)}.")
        torch.manual_seed(mixed(recipe.seed))
        self._model = task.model().to(processes.device)
        if recipe.channels_last:
            self._model = self._model.to(memory_format=torch.channels_last)
        self._optimizer = build_optimizer(self._model, recipe.optimizer)
        self._scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "float16")
        # Dropout differs between processes, as their images do.
        torch.manual_seed(mixed(recipe.seed, processes.rank))
        self._wrapped = processes.wrapped(self._model)
        self._epoch, self._step, self._totals = 0, 0, Totals()
        self._rows: list[dict[str, Any]] = []
        self.kept = "There is no checkpoint yet."

    @property
    def _done(self) -> int:
        """Steps since the run began."""
        return self._epoch * self._steps + self._step

    def run(self) -> list[dict[str, Any]]:
        """Train to the end of the last epoch."""
        self._display.begin(self._recipe.epochs * self._steps, self._done)
        try:
            while self._epoch < self._recipe.epochs:
                self._train_epoch()
                self._end_epoch()
        finally:
            self._display.end()
            self._folder.close_log()
        self._display.show(summary(self._rows, self._task.best_by, str(self._folder.path)))
        return self._rows

    def _train_epoch(self) -> None:
        """The steps of the epoch that are left."""
        self._model.train()
        started = time.perf_counter()
        for batch in self._batches():
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
        with autocast(self._recipe, self._processes.device):
            batch = batch.to(self._processes.device, channels_last=self._recipe.channels_last)
            losses = self._task.losses(self._wrapped, batch)
        self._optimizer.zero_grad()
        self._scaler.scale(torch.stack(list(losses.values())).sum()).backward()
        values = {name: loss.item() for name, loss in losses.items()}
        # Before the step: weights that a NaN has touched are lost.
        (broken,) = self._processes.any(not math.isfinite(sum(values.values())))
        if broken:
            self._refuse(values)
        if self._recipe.optimizer.clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.optimizer.clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return values

    def _end_epoch(self) -> None:
        """Score, note the epoch's figures, and save."""
        due = (self._epoch + 1) % self._recipe.evaluate_every == 0 or self._epoch + 1 == self._recipe.epochs
        scores, skipped = self._scores() if due else ({}, 0)
        earlier = [row[self._task.best_by] for row in self._rows if self._task.best_by in row]
        best = bool(scores) and scores[self._task.best_by] > max(earlier, default=-math.inf)
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
        self._save(best=best)
        if self._processes.first:
            self._folder.log({f"val/{name}": score for name, score in scores.items()}, self._done)
        self._display.say(epoch_line(row, self._recipe.epochs, list(scores)))

    def _scores(self) -> tuple[dict[str, float], int]:
        scored = evaluate(
            self._task,
            self._model,
            self._recipe,
            self._processes,
            stop=lambda: self._interruption.requested,
            tick=lambda text: self._display.step(self._done, f"scoring epoch {self._epoch + 1}  {text}"),
        )
        if scored is None:
            self._save()
            self._stop()
        return scored

    def _batches(self) -> DataLoader[Batch]:
        share = ShuffledShare(
            len(self._data),
            batch=self._batch,
            rank=self._processes.rank,
            processes=self._processes.count,
            seed=self._recipe.seed,
            epoch=self._epoch,
            first_step=self._step,
        )
        return DataLoader(
            Seeded(self._data, self._recipe.seed),
            batch_sampler=share,
            collate_fn=partial(self._task.collate, training=True),
            num_workers=self._recipe.workers,
            worker_init_fn=ignore_signals,
            pin_memory=self._processes.device.type == "cuda",
            # Its own, or the seeds it draws for its workers would shift the random numbers of dropout.
            generator=torch.Generator(),
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
        if self._processes.first:
            figures = {"loss": loss, **losses, "lr": lr, "images_per_second": rate}
            self._folder.log({f"train/{name}": value for name, value in figures.items()}, self._done)

    def _refuse(self, losses: Mapping[str, float]) -> NoReturn:
        terms = ", ".join(f"{name} {value:g}" for name, value in losses.items())
        raise RunStoppedError(
            f"no finite loss at step {self._step + 1} of epoch {self._epoch + 1}: {terms}. {self.kept}\n"
            f"A lower optimizer.lr (now {self._lr(self._done):.3g}), a longer schedule.warmup_epochs or "
            "optimizer.clip_norm may help; --overwrite begins the folder anew."
        )

    def _stop(self) -> NoReturn:
        number = self._interruption.signal
        reason = "since torchrun has ended" if number is None else f"by {signal.Signals(number).name}"
        raise RunStoppedError(
            f"stopped {reason}. {self.kept} Go on with --resume.",
            exit_code=1 if number is None else 128 + number,
        )

    def _save(self, *, best: bool = False) -> None:
        """Every process gives its random state and its share of the totals; the first one writes."""
        share = {"random": _random_state(self._processes.device), "totals": asdict(self._totals)}
        shares = self._processes.gathered(share)
        if not self._processes.first:
            return
        weights, folder = self._model.state_dict(), self._folder.path
        state = {
            "batch": self._batch,
            "epoch": self._epoch,
            "step": self._step,
            "rows": self._rows,
            "model": weights,
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "shares": shares,
        }
        save_checkpoint(folder, state, best=best)
        self._note_kept()
        self._folder.write_metrics(self._rows)
        finished = self._epoch == self._recipe.epochs
        for name in [BEST] * best + [LAST] * finished:
            export_weights((folder / name).with_suffix(".safetensors"), weights)

    def load(self) -> None:
        """Go on from the last checkpoint that can be read, if there is one."""
        state, problems = load_last(self._folder.path)
        for problem in problems:
            self._display.say(f"{problem} The one before it is used.")
        if state is None:
            return
        if state["batch"] != self._batch:
            raise SettingsError(
                f"the run was begun with {state['batch']} images a step, and these {self._processes.count} "
                f"processes would take {self._batch}: start as many processes as then."
            )
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self._epoch, self._step, self._rows = state["epoch"], state["step"], state["rows"]
        rank, shares = self._processes.rank, state["shares"]
        if len(shares) == self._processes.count:
            _set_random_state(shares[rank]["random"], self._processes.device)
        # With another number of processes than then, shares are put together.
        self._totals = Totals.of(share["totals"] for share in shares[rank :: self._processes.count])
        self._note_kept()

    def _note_kept(self) -> None:
        self.kept = (
            f"The last good checkpoint is {self._folder.path / LAST}, "
            f"after step {self._step} of epoch {self._epoch + 1}."
        )


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _set_up_torch(recipe: Recipe) -> None:
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
