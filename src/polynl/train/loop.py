"""The training loop of all tasks: steps, evaluation and checkpoints, in one process or many."""

from __future__ import annotations

import errno
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch import Tensor, nn

from polynl.errors import RunStoppedError, SettingsError
from polynl.models.about import ENTRY, About
from polynl.results.block_figures import idle_blocks, idle_sentence
from polynl.results.formats import digits
from polynl.tasks.base import Batch, Task
from polynl.tasks.outcomes import OUTCOMES
from polynl.train.about import about_run
from polynl.train.block_figures import BlockWatch
from polynl.train.checkpoint import (
    BEST_WEIGHTS,
    LAST,
    LAST_WEIGHTS,
    export_weights,
    load_last,
    save_checkpoint,
    set_aside_damaged,
)
from polynl.train.config import LR_SCALE, Recipe, build_optimizer
from polynl.train.evaluation import evaluate, val_reader
from polynl.train.failures import NO_CHECKPOINT, failures_explained
from polynl.train.loading import Reader, SeededDataset, TrainSampler, hash_seed
from polynl.train.processes import (
    Processes,
    StopRequest,
    autocast,
    join_processes,
    preserve_state,
    random_state,
    set_random_state,
    set_up_torch,
    to_device,
)
from polynl.train.progress import Display, Totals, epoch_line, left_out_note, summary
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
    """Train from a recipe and return a row of metrics per epoch; the folder gets these and the weights.

    Under torchrun, all processes call this; after a restart they resume by themselves.
    """
    with join_processes(recipe.device) as processes, StopRequest() as stop, closing(RunFolder(folder)) as run:
        set_up_torch(recipe)
        if display is None:
            display = Display(console if processes.is_main else None)
        with processes.fail_together():
            task = recipe.build_task()
            task.check()
            if processes.is_main:
                again = processes.restarted and run.started_by(processes.launch)
                run.open(recipe, resume=resume or again, overwrite=overwrite)
            trainer = Trainer(recipe, task, processes, stop, run, display)
        with trainer.explained():
            trainer.start()
            return trainer.run()


class Trainer:
    """The state of a run and its loop."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        processes: Processes,
        stop: StopRequest,
        folder: RunFolder,
        display: Display,
    ) -> None:
        self._recipe, self._task, self._processes = recipe, task, processes
        self._stop_request, self._folder, self._display = stop, folder, display
        self._batch = recipe.total_batch(processes.count)
        self._data, self._groups = task.train_set(), task.groups()
        self._steps = len(self._data) // self._batch
        if self._steps == 0:
            raise SettingsError(
                f"batch: a step needs {self._batch} images, but there are only {len(self._data)}: set "
                "--batch to that number or a smaller one."
            )
        torch.manual_seed(hash_seed(recipe.seed))
        self._model = to_device(task.model(), recipe, processes.device)
        processes.check_model(self._model)
        self._optimizer = build_optimizer(self._model, recipe.optimizer)
        self._scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "float16")
        # Dropout must differ between processes, as their images do.
        torch.manual_seed(hash_seed(recipe.seed, processes.rank))
        self._wrapped, self._ddp_ready = self._model, False
        self._reader = Reader(
            SeededDataset(self._data, recipe.seed),
            partial(task.collate, training=True),
            workers=recipe.workers,
            device=processes.device,
        )
        self._val_reader = val_reader(task, recipe, processes)
        self._readers = (self._reader, self._val_reader)
        self._blocks = BlockWatch(task, self._model, recipe, processes.device)
        self._scorer = task.scorer()
        self._epoch, self._step, self._totals = 0, 0, Totals()
        self._rows: list[dict[str, Any]] = []
        self._kept = NO_CHECKPOINT

    @property
    def _done(self) -> int:
        """Steps since the start of the run."""
        return self._epoch * self._steps + self._step

    def start(self) -> None:
        """Start the run in its folder, or resume from the last readable checkpoint."""
        state: dict[str, Any] | None = None
        problems: list[str] = []
        with self._processes.fail_together():
            if self._folder.resumed:
                state, problems = load_last(self._folder.path)
        # Other processes may be on machines without the file.
        state = self._processes.broadcast(state)
        with self._processes.fail_together(), self._writing():
            if state is not None:
                self._load(state)
            if self._processes.is_main:
                for problem in problems:
                    self._display.say(f"{problem} Using the previous checkpoint.")
                    set_aside_damaged(self._folder.path)
                self._folder.start(self._recipe, self._processes, self._task.labels())
                self._folder.write_metrics(self._rows)
                for note in self._notes():
                    self._display.say(note)
        self._wrapped = self._processes.wrap(self._model)

    def _notes(self) -> list[str]:
        """What a new run says at its start."""
        if self._folder.resumed:
            return []
        return [*self._task.notes(), *left_out_note(len(self._data), self._batch)]

    def explained(self) -> AbstractContextManager[None]:
        """Within it, a failure of the machine is a message that says what is kept and how to continue."""
        return failures_explained(
            self._recipe, self._processes, self._readers, kept=lambda: self._kept, stop=self._stop_request
        )

    def run(self) -> list[dict[str, Any]]:
        """Train until the last epoch is done."""
        self._display.begin(self._recipe.epochs * self._steps, self._done)
        try:
            while self._epoch < self._recipe.epochs:
                self._train_epoch()
                self._end_epoch()
            for reader in self._readers:
                reader.close()
        finally:
            self._display.end()
        self._display.show(summary(self._rows, self._task.best_by))
        for block, largest in idle_blocks(self._rows).items():
            self._display.say(idle_sentence(block, largest))
        self._display.say(f"The run is in {self._folder.path}.")
        return self._rows

    def _train_epoch(self) -> None:
        """Train on the remaining steps of the epoch."""
        self._model.train()
        started = time.perf_counter()
        sampler = TrainSampler(
            len(self._data),
            batch=self._batch,
            rank=self._processes.rank,
            processes=self._processes.count,
            seed=self._recipe.seed,
            epoch=self._epoch,
            first_step=self._step,
            groups=self._groups,
        )
        for batch in self._reader.batches(sampler):
            losses = self._train_step(batch)
            self._step += 1
            now = time.perf_counter()
            sums = {name: loss * len(batch) for name, loss in losses.items()}
            self._totals.add(Totals(sums, len(batch), len(batch.bad), now - started))
            started = now
            self._report_step(losses, batch)
            (stop,) = self._processes.any(self._stop_request.requested)
            if stop or self._step % self._recipe.checkpoint_every == 0:
                self._save()
            if stop:
                self._stop()

    def _train_step(self, batch: Batch) -> dict[str, float]:
        for group in self._optimizer.param_groups:
            # Runs of older versions have groups without a scale.
            group["lr"] = self._lr(self._done) * group.get(LR_SCALE, 1.0)
        if self._processes.count > 1 and not self._ddp_ready:
            self._prepare_ddp(batch)
        losses = self._losses(batch)
        self._optimizer.zero_grad()
        self._scaler.scale(torch.stack(list(losses.values())).sum()).backward()
        values = {name: loss.item() for name, loss in losses.items()}
        # Checked before the step, which would spread a NaN to the weights.
        (broken,) = self._processes.any(not math.isfinite(sum(values.values())))
        if broken:
            terms = ", ".join(f"{name} {value:g}" for name, value in values.items())
            self._diverged(
                f"the loss is not finite at step {self._step + 1} of epoch {self._epoch + 1}: {terms}"
            )
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

    def _prepare_ddp(self, batch: Batch) -> None:
        """Run a step and discard it: in its first step, DDP fixes the order in which it sums gradients.

        Otherwise a resumed run would sum them in another order than one that was never stopped.
        """
        with preserve_state(self._model, self._processes.device):
            torch.stack(list(self._losses(batch).values())).sum().backward()
        self._ddp_ready = True

    def _end_epoch(self) -> None:
        """Evaluate, add the epoch's row of metrics, and save."""
        due = (self._epoch + 1) % self._recipe.evaluate_every == 0 or self._epoch + 1 == self._recipe.epochs
        scores, skipped = self._scores() if due else ({}, 0)
        totals, blocks = self._totals.reduced(self._processes), self._blocks.figures()
        row = {
            "epoch": self._epoch + 1,
            "step": self._done,
            "lr": self._lr(self._done - 1),
            **totals.losses_per_image(),
            **scores,
            **blocks,
            "images": totals.images,
            "skipped": totals.skipped + skipped,
            "seconds": round(totals.seconds, 3),
            "images_per_second": float(digits(totals.rate)),
        }
        self._rows.append(row)
        self._epoch, self._step, self._totals = self._epoch + 1, 0, Totals()
        self._save()
        self._log({f"val/{name}": score for name, score in scores.items()})
        self._log({f"block/{name}": figure for name, figure in blocks.items()})
        self._display.say(
            epoch_line(row, self._recipe.epochs, [name for name in self._task.headline if name in scores])
        )

    def _scores(self) -> tuple[dict[str, float], int]:
        self._processes.sync_buffers(self._model)
        self._scorer = self._task.scorer()
        scored = evaluate(
            self._task,
            self._model,
            self._recipe,
            self._processes,
            reader=self._val_reader,
            scorer=self._scorer,
            stop=lambda: self._stop_request.requested,
            tick=lambda text: self._display.step(self._done, f"scoring epoch {self._epoch + 1}  {text}"),
        )
        if scored is None:
            self._save()
            self._stop()
        return scored

    def _lr(self, step: int) -> float:
        factor = self._recipe.schedule.factor(step, self._steps, self._recipe.epochs)
        return self._recipe.peak_lr(self._batch) * factor

    def _report_step(self, losses: Mapping[str, float], batch: Batch) -> None:
        for reason in batch.bad:
            self._display.say(f"skipped: {reason}")
        loss, lr = sum(losses.values()), self._lr(self._done - 1)
        rate = self._totals.rate * self._processes.count
        text = f"epoch {self._epoch + 1}  loss {loss:.4f}  lr {lr:.2g}  {digits(rate)} images/s"
        self._display.step(self._done, text)
        figures = {"loss": loss, **losses, "lr": lr, "images_per_second": rate}
        self._log({f"train/{name}": value for name, value in figures.items()})

    def _log(self, figures: Mapping[str, float]) -> None:
        problem = self._folder.curves.add(figures, self._done) if self._processes.is_main else None
        if problem is not None:
            self._display.say(problem)

    def _diverged(self, what: str) -> NoReturn:
        self._processes.exit_all(
            RunStoppedError(
                f"{what}. {self._kept}\n"
                f"A lower optimizer.lr (now {self._lr(self._done):.3g}), a longer schedule.warmup_epochs or "
                "optimizer.clip_norm may help; --overwrite starts again in the same folder."
            )
        )

    def _stop(self) -> NoReturn:
        """All processes get here at the same step, whichever of them received the signal."""
        signals = [number for number in self._processes.all_gather(self._stop_request.signal) if number]
        reason = f"by {signal.Signals(signals[0]).name}" if signals else "because torchrun ended"
        self._processes.exit_all(
            RunStoppedError(
                f"stopped {reason}. {self._kept} Continue with --resume.",
                exit_code=128 + signals[0] if signals else 1,
            )
        )

    def _save(self) -> None:
        """Collect random state and totals from all processes; the main one writes the checkpoint."""
        # The loss was checked before the step; only the next one would show what the step did.
        values = chain(self._model.parameters(), self._model.buffers())
        (broken,) = self._processes.any(not all(bool(value.isfinite().all()) for value in values))
        if broken:
            self._diverged(f"the weights are not finite after step {self._step} of epoch {self._epoch + 1}")
        share = {"random": random_state(self._processes.device), "totals": asdict(self._totals)}
        shares = self._processes.all_gather(share)
        with self._processes.fail_together(), self._writing():
            if self._processes.is_main:
                self._write(shares)
        self._note_kept()

    def _write(self, shares: Sequence[Mapping[str, Any]]) -> None:
        """Write everything else before last.pt, so that a run killed in between writes it again."""
        folder, weights = self._folder.path, self._model.state_dict()
        about = about_run(self._recipe, self._task, self._model, self._rows)
        if self._best:
            export_weights(folder / BEST_WEIGHTS, weights, about)
        if self._epoch == self._recipe.epochs:
            export_weights(folder / LAST_WEIGHTS, weights, about)
            self._scorer.outcomes().save(folder / OUTCOMES)
        state = {
            ENTRY: About(about.structure).to_json(),
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
        save_checkpoint(folder, state, best=self._best, keep=self._recipe.keep_checkpoints)
        self._note_kept()  # also if the next file cannot be written
        self._folder.write_metrics(self._rows)

    @property
    def _best(self) -> bool:
        """Whether an epoch just ended with the highest score so far."""
        scores = [row.get(self._task.best_by, -math.inf) for row in self._rows]
        return self._step == 0 and scores[-1] > max(scores[:-1], default=-math.inf)

    def _load(self, state: Mapping[str, Any]) -> None:
        if state["images"] != len(self._data):
            raise SettingsError(
                f"the run was started with {state['images']} training images, and now there are "
                f"{len(self._data)}: restore the original data."
            )
        if state["batch"] != self._batch:
            raise SettingsError(
                f"the run was started with {state['batch']} images per step, but these "
                f"{self._processes.count} processes would take {self._batch}: keep the number of processes."
            )
        try:
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            _add_missing_axes(self._optimizer)
        except (RuntimeError, ValueError) as error:
            raise SettingsError(f"the checkpoint does not match the recipe: {error}") from error
        self._scaler.load_state_dict(state["scaler"])
        self._epoch, self._step, self._rows = state["epoch"], state["step"], state["rows"]
        rank, shares = self._processes.rank, state["shares"]
        if len(shares) == self._processes.count:
            set_random_state(shares[rank]["random"], self._processes.device)
        # If the number of processes has changed, the totals are redistributed.
        for share in shares[rank :: self._processes.count]:
            self._totals.add(Totals(**share["totals"]))
        self._note_kept()

    def _note_kept(self) -> None:
        epoch, step = self._epoch, self._step
        moment = f"step {step} of epoch {epoch + 1}" if step else f"epoch {epoch}"
        self._kept = f"The last good checkpoint is {self._folder.path / LAST}, after {moment}."

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError into a message about the folder."""
        try:
            yield
        except OSError as error:
            remedy = "Make room" if error.errno in FULL_DISK else "Fix it"
            raise RunStoppedError(
                f"{self._folder.path} cannot be written to: {error.strerror}. {self._kept}\n"
                f"{remedy}, then continue with --resume."
            ) from error


def _add_missing_axes(optimizer: torch.optim.Optimizer) -> None:
    """Give moments of α, β and γ, which had no axis in older versions, the shape of their parameter."""
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            if name != "step" and isinstance(moment, Tensor) and moment.dim() < parameter.dim():
                moments[name] = moment.reshape(parameter.shape)
