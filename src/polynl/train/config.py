"""Recipes: the keys of a training run, with its optimizer and learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationInfo, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo
from torch import nn
from typing_extensions import Self

from polynl.blocks.base import Block
from polynl.config import NEUTRAL, Config
from polynl.errors import SettingsError
from polynl.tasks.base import Task
from polynl.tasks.config import TaskConfig
from polynl.tasks.registry import task_class

# The key of a parameter group whose learning rate is a multiple of the schedule's.
LR_SCALE = "lr_scale"


class OptimizerConfig(Config):
    """The optimizer and its parameters."""

    name: Literal["sgd", "adamw"] = "sgd"
    """sgd: stochastic gradient descent with momentum; adamw: Adam with decoupled weight decay."""
    lr: float = Field(0.1, gt=0)
    """Peak learning rate, for a batch of `lr_batch` images."""
    lr_batch: int | None = Field(None, gt=0)
    """Scale the learning rate linearly with the batch, lr × batch ÷ lr_batch (default: do not scale)."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum; SGD only."""
    nesterov: bool = False
    """Use Nesterov momentum; SGD only."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of the running averages; AdamW only."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay of matrices and kernels."""
    decay_norm_and_bias: bool = False
    """Decay vectors and scalars too: norms, biases, a block's α and β."""
    block_lr_scale: float = Field(1.0, gt=0)
    """Learning rate of the blocks, as a multiple of that of the network around them."""
    clip_norm: float | None = Field(None, gt=0)
    """Clip the norm of the gradient to this value (default: no clipping)."""

    @model_validator(mode="after")
    def _momentum_for_nesterov(self) -> OptimizerConfig:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class ScheduleConfig(Config):
    """The learning rate schedule."""

    name: Literal["constant", "steps", "cosine"] = "steps"
    """Schedule after warm-up: constant; steps, a drop at each milestone; or cosine, down to the end."""
    warmup_epochs: float = Field(0.0, ge=0)
    """Epochs over which the rate rises linearly, step by step, to its peak."""
    warmup_from: float = Field(0.0, ge=0, le=1)
    """Fraction of the peak rate at which warm-up starts."""
    milestones: tuple[int, ...] = ()
    """For `steps`: epochs after which the rate is multiplied by `gamma`."""
    gamma: float = Field(0.1, gt=0, le=1)
    """For `steps`: factor applied at each milestone."""
    final: float = Field(0.0, ge=0, le=1)
    """For `cosine`: fraction of the peak rate at the end of the run."""

    @field_validator("milestones")
    @classmethod
    def _increasing(cls, milestones: tuple[int, ...]) -> tuple[int, ...]:
        if any(later <= earlier for earlier, later in zip((0, *milestones), milestones, strict=False)):
            raise ValueError(f"expected epochs above 0 in increasing order; got {list(milestones)}")
        return milestones

    def factor(self, step: int, steps_per_epoch: int, epochs: int) -> float:
        """The factor applied to the peak learning rate at a step, counted from 0.

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
            # The last warm-up step is at the peak rate already, though it comes before the warm-up's end.
            done = min(1.0, max(0.0, step - warmup) / max(1.0, epochs * steps_per_epoch - warmup))
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        return 1.0


class Recipe(TaskConfig):
    """The keys that all recipes have, whatever the task."""

    epochs: int = Field(gt=0, le=1_000_000)
    """Passes over the training images."""
    batch: int | None = Field(None, gt=0)
    """Images per step, over all processes."""
    batch_per_process: int | None = Field(None, gt=0, validate_default=True)
    """Images per step and process; replaces `batch`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    seed: int = Field(0, ge=0)
    """Random seed of initial weights, image order and augmentation."""
    device: Literal["auto", "cpu", "cuda"] = Field("auto", json_schema_extra=NEUTRAL)
    """Device to train on; auto: one GPU per process if there are GPUs, else the CPU."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the network, by autocast; weights stay float32."""
    channels_last: bool = False
    """Use the channels-last memory format."""
    deterministic: bool = False
    """Use only deterministic operators on a GPU; the CPU is always deterministic."""
    threads: int | None = Field(None, gt=0, le=1024, json_schema_extra=NEUTRAL)
    """CPU threads per process (default: PyTorch's choice)."""
    workers: int = Field(0, ge=0, le=256, json_schema_extra=NEUTRAL)
    """Data loading workers per process; 0: load in the process itself."""
    val_batch: int | None = Field(None, gt=0, le=10**6, json_schema_extra=NEUTRAL)
    """Images per evaluation batch and process (default: as in training)."""
    evaluate_every: int = Field(1, gt=0)
    """Epochs between evaluations; the last epoch is always evaluated."""
    checkpoint_every: int = Field(500, gt=0, json_schema_extra=NEUTRAL)
    """Steps between checkpoints; one is also written after every epoch."""
    keep_checkpoints: Literal["all", "last"] = Field("all", json_schema_extra=NEUTRAL)
    """all: the last, the one before it and the best; last: only that. The best weights are always kept."""

    @field_validator("batch_per_process")
    @classmethod
    def _one_batch(cls, share: int | None, others: ValidationInfo) -> int | None:
        if "batch" in others.data and (share is None) == (others.data["batch"] is None):
            raise ValueError("give either batch (over all processes) or batch_per_process")
        return share

    @field_validator("schedule")
    @classmethod
    def _warmup_fits(cls, schedule: ScheduleConfig, others: ValidationInfo) -> ScheduleConfig:
        epochs = others.data.get("epochs", schedule.warmup_epochs)
        if schedule.warmup_epochs > epochs:
            raise ValueError(f"warmup_epochs={schedule.warmup_epochs:g} is more than epochs={epochs}")
        return schedule

    def total_batch(self, processes: int) -> int:
        """Images per step over all processes."""
        if self.batch_per_process is not None:
            return self.batch_per_process * processes
        assert self.batch is not None
        if self.batch % processes:
            raise SettingsError(
                f"batch: {self.batch} images cannot be split evenly over {processes} processes."
            )
        return self.batch

    def scoring_batch(self, processes: int) -> int:
        """Images per evaluation batch and process; here a batch need not split evenly."""
        given = self.batch_per_process if self.val_batch is None else self.val_batch
        if given is not None:
            return given
        assert self.batch is not None
        return max(1, self.batch // processes)

    def without_weights(self) -> Self:
        """The recipe without pretrained weights, for a model whose weights come from a checkpoint."""
        files = {name: None for name in type(self.model).model_fields if name.endswith("weights")}
        return self.model_copy(update={"model": self.model.model_copy(update=files)})

    def peak_lr(self, batch: int) -> float:
        """The peak learning rate, scaled with the batch if `lr_batch` is set."""
        reference = self.optimizer.lr_batch
        return self.optimizer.lr if reference is None else self.optimizer.lr * batch / reference

    def build_task(self, labels: Mapping[int, str] | None = None) -> Task:
        """The task, with nothing built yet; `labels` of a trained model replace those of the data."""
        return task_class(self.task)(self, labels)

    def __reduce__(self) -> tuple[Callable[..., Recipe], tuple[dict[str, Any]]]:
        """The class is created on demand, so pickle cannot find it by name."""
        return _unpickle, (self.model_dump(mode="json"),)


def _unpickle(content: dict[str, Any]) -> Recipe:
    return recipe_class(content["task"]).model_validate(content)


def recipe_class(task: object) -> type[Recipe]:
    """The recipe class of a task: the keys of all recipes and those of the task."""
    return _recipe_class(task_class(task))


@cache
def _recipe_class(task: type[Task]) -> type[Recipe]:
    bases: Any = (task.config, Recipe)  # in this order, the task's types of `model` and `data` win
    named: Any = Literal[task.name]
    return create_model(f"{task.__name__}Recipe", __base__=bases, task=(named, ...))


def neutral_fields(config: type[BaseModel]) -> set[str]:
    """The fields that do not affect what a run learns, such as `workers`."""
    return {name for name, field in config.model_fields.items() if field.json_schema_extra == NEUTRAL}


def neutral_keys(recipe: Recipe) -> set[str]:
    """The neutral keys of a recipe and its parts, such as "data.root"."""
    return {key for key, _, field in list_keys(recipe) if field.json_schema_extra == NEUTRAL}


def list_keys(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """Every key of a recipe and its parts, its value, and its field, which has the description."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from list_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, field


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a model's trainable parameters; the loop sets its learning rate at every step."""
    in_blocks = {p for m in model.modules() if isinstance(m, Block) for p in m.parameters()}

    def kind(parameter: nn.Parameter) -> tuple[float, bool]:
        scale = config.block_lr_scale if parameter in in_blocks else 1.0
        return scale, parameter.ndim >= 2 or config.decay_norm_and_bias

    trainable = [(kind(parameter), parameter) for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for found, parameter in trainable if found == (scale, decays)],
            "weight_decay": config.weight_decay if decays else 0.0,
            LR_SCALE: scale,
        }
        for scale in dict.fromkeys((1.0, config.block_lr_scale))
        for decays in (True, False)
    ]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
