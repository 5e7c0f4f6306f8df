"""All there is to say about a run: recipes, optimizers and schedules of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator
from torch import nn
from typing_extensions import Self

from polynl.config import Config
from polynl.errors import SettingsError
from polynl.tasks.base import Task
from polynl.tasks.config import TaskConfig
from polynl.tasks.registry import task_class


class OptimizerConfig(Config):
    """How the weights move."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Stochastic gradient descent with momentum, or Adam with decoupled weight decay."""
    lr: float = Field(0.1, gt=0)
    """The learning rate at its highest, for a batch of `lr_batch`."""
    lr_batch: int | None = Field(None, gt=0)
    """Scale the learning rate linearly with the batch: lr × batch ÷ lr_batch."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of SGD."""
    nesterov: bool = False
    """Of SGD."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Of AdamW."""
    weight_decay: float = Field(1e-4, ge=0)
    """Of matrices and kernels; `decay_norm_and_bias` is about the rest."""
    decay_norm_and_bias: bool = False
    """Whether vectors and scalars (norms, biases, a block's α and β) decay as well."""
    clip_norm: float | None = Field(None, gt=0)
    """Scale the gradient down to this norm where it is longer."""

    @model_validator(mode="after")
    def _momentum_for_nesterov(self) -> OptimizerConfig:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class ScheduleConfig(Config):
    """How the learning rate goes over a run."""

    name: Literal["constant", "steps", "cosine"] = "steps"
    """What follows the rise: nothing, a drop at each of the milestones, or half a cosine down to the end."""
    warmup_epochs: float = Field(0.0, ge=0)
    """Rise linearly to the full rate over so many epochs, step by step."""
    warmup_from: float = Field(0.0, ge=0, le=1)
    """The part of the full rate that the rise begins at."""
    milestones: tuple[int, ...] = ()
    """Of `steps`: the epochs after which the rate is multiplied by `gamma`."""
    gamma: float = Field(0.1, gt=0, le=1)
    """Of `steps`."""
    final: float = Field(0.0, ge=0, le=1)
    """Of `cosine`: the part of the full rate that the run ends at."""

    @field_validator("milestones")
    @classmethod
    def _rising(cls, milestones: tuple[int, ...]) -> tuple[int, ...]:
        if any(later <= earlier for earlier, later in zip((0, *milestones), milestones, strict=False)):
            raise ValueError(f"expected epochs above 0 in rising order; got {list(milestones)}")
        return milestones

    def factor(self, step: int, steps_per_epoch: int, epochs: int) -> float:
        """What the highest learning rate is multiplied by at a step, counted from 0.

        >>> goyal = ScheduleConfig(warmup_epochs=5, milestones=(30, 60, 80))
        >>> [round(goyal.factor(epoch, 1, 90), 6) for epoch in (0, 4, 5, 29, 30, 60, 80)]
        [0.2, 1.0, 1.0, 1.0, 0.1, 0.01, 0.001]
        """
        warmup = self.warmup_epochs * steps_per_epoch
        if step + 1 < warmup:
            return self.warmup_from + (1 - self.warmup_from) * (step + 1) / warmup
        if self.name == "steps":
            return self.gamma ** sum(step >= epoch * steps_per_epoch for epoch in self.milestones)
        if self.name == "cosine":
            # The last step of the rise is at the full rate, though it comes before the warm-up's end.
            done = min(1.0, max(0.0, step - warmup) / max(1.0, epochs * steps_per_epoch - warmup))
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        return 1.0


class Recipe(TaskConfig):
    """What every task's recipe has."""

    epochs: int = Field(gt=0)
    """How often every image is seen."""
    batch: int | None = Field(None, gt=0)
    """Images in a step, over all processes together."""
    batch_per_process: int | None = Field(None, gt=0, validate_default=True)
    """Instead of `batch`: images in a step in each process."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    seed: int = Field(0, ge=0)
    """Of the first weights, of the order of the images and of their augmentation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU for each process where there are GPUs."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the network computes in, under autocast; weights stay float32."""
    channels_last: bool = False
    """Lay images out with the channels last."""
    deterministic: bool = False
    """On a GPU, take only operators that give the same bits each time; a CPU always does."""
    threads: int | None = Field(None, gt=0)
    """CPU threads of an operator in each process; PyTorch's own choice unless given."""
    workers: int = Field(0, ge=0)
    """Processes that read images, for each process that trains."""
    val_batch: int | None = Field(None, gt=0)
    """Images in a batch of scoring, in each process; that of training unless given."""
    evaluate_every: int = Field(1, gt=0)
    """Score after so many epochs, and after the last."""
    checkpoint_every: int = Field(500, gt=0)
    """Steps between two checkpoints; there is one after every epoch as well."""

    @field_validator("batch_per_process")
    @classmethod
    def _one_batch(cls, share: int | None, others: ValidationInfo) -> int | None:
        if "batch" in others.data and (share is None) == (others.data["batch"] is None):
            raise ValueError("give one of batch (over all processes) and batch_per_process")
        return share

    @field_validator("schedule")
    @classmethod
    def _rise_fits(cls, schedule: ScheduleConfig, others: ValidationInfo) -> ScheduleConfig:
        epochs = others.data.get("epochs", schedule.warmup_epochs)
        if schedule.warmup_epochs > epochs:
            raise ValueError(
                f"a rise over warmup_epochs={schedule.warmup_epochs:g} ends after epochs={epochs}"
            )
        return schedule

    def total_batch(self, processes: int) -> int:
        """Images in a step over all processes."""
        if self.batch_per_process is not None:
            return self.batch_per_process * processes
        assert self.batch is not None
        if self.batch % processes:
            raise SettingsError(
                f"batch: {self.batch} images cannot be shared evenly by {processes} processes."
            )
        return self.batch

    def scoring_batch(self, processes: int) -> int:
        """Images in a batch of scoring, in each process; they need not share a batch evenly."""
        given = self.batch_per_process if self.val_batch is None else self.val_batch
        if given is not None:
            return given
        assert self.batch is not None
        return max(1, self.batch // processes)

    def untrained(self) -> Self:
        """The recipe without files to start from, for a model that gets all its weights elsewhere."""
        files = {name: None for name in type(self.model).model_fields if name.endswith("weights")}
        return self.model_copy(update={"model": self.model.model_copy(update=files)})

    def peak_lr(self, batch: int) -> float:
        """The highest learning rate, scaled with the batch where the recipe asks for it."""
        reference = self.optimizer.lr_batch
        return self.optimizer.lr if reference is None else self.optimizer.lr * batch / reference

    def build_task(self, labels: Mapping[int, str] | None = None) -> Task:
        """The task, with nothing built yet; `labels`: those of a trained model, in place of the data's."""
        return task_class(self.task)(self, labels)

    def __reduce__(self) -> tuple[Callable[..., Recipe], tuple[dict[str, Any]]]:
        """The class is made when it is asked for, so that pickle does not find it by its name."""
        return _validated, (self.model_dump(mode="json"),)


def _validated(content: dict[str, Any]) -> Recipe:
    return recipe_class(content["task"]).model_validate(content)


def recipe_class(task: object) -> type[Recipe]:
    """The recipe of a task: the keys that all recipes have, and the task's own."""
    return _recipe_class(task_class(task))


@cache
def _recipe_class(task: type[Task]) -> type[Recipe]:
    bases: Any = (task.config, Recipe)  # in this order the task's types of `model` and `data` hold
    named: Any = Literal[task.name]
    description = TaskConfig.model_fields["task"].description
    return create_model(
        f"{task.__name__}Recipe", __base__=bases, task=(named, Field(description=description))
    )


def build_optimizer(model: nn.Module, part: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a model's trainable parameters; its learning rate is set at every step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = [p for p in trainable if p.ndim < 2 and not part.decay_norm_and_bias]
    matrices = [p for p in trainable if p.ndim >= 2 or part.decay_norm_and_bias]
    groups = [
        {"params": matrices, "weight_decay": part.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if part.name == "adamw":
        return torch.optim.AdamW(groups, lr=part.lr, betas=part.betas)
    return torch.optim.SGD(groups, lr=part.lr, momentum=part.momentum, nesterov=part.nesterov)
