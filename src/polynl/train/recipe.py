"""All there is to say about a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from polynl.errors import SettingsError
from polynl.tasks.base import Part, Task
from polynl.tasks.classification import Classification, ClassificationData, ClassifierPart, LossPart
from polynl.tasks.face_detection import FaceData, FaceDetection, FaceDetectorPart
from polynl.tasks.instance_segmentation import InstanceData, InstanceSegmentation, MaskRCNNPart
from polynl.tasks.network import NetworkPart
from polynl.train.schedule import SchedulePart


class OptimizerPart(Part):
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
    def _momentum_for_nesterov(self) -> OptimizerPart:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class Recipe(Part):
    """What every task's recipe has."""

    task: str
    """What is learned."""
    epochs: int = Field(gt=0)
    """How often every image is seen."""
    batch: int | None = Field(None, gt=0)
    """Images in a step, over all processes together."""
    batch_per_process: int | None = Field(None, gt=0, validate_default=True)
    """Instead of `batch`: images in a step in each process."""
    optimizer: OptimizerPart = OptimizerPart()
    schedule: SchedulePart = SchedulePart()
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
    model: NetworkPart

    @field_validator("batch_per_process")
    @classmethod
    def _one_batch(cls, share: int | None, others: ValidationInfo) -> int | None:
        if "batch" in others.data and (share is None) == (others.data["batch"] is None):
            raise ValueError("give one of batch (over all processes) and batch_per_process")
        return share

    @field_validator("schedule")
    @classmethod
    def _rise_fits(cls, schedule: SchedulePart, others: ValidationInfo) -> SchedulePart:
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

    @abstractmethod
    def build_task(self, labels: Mapping[int, str] | None = None) -> Task:
        """The task, with nothing built yet; `labels`: those of a trained model, in place of the data's."""


class ClassificationRecipe(Recipe):
    """Images of one class each."""

    task: Literal["classification"]
    """What is learned."""
    model: ClassifierPart = ClassifierPart()
    data: ClassificationData
    loss: LossPart = LossPart()

    def build_task(self, labels: Mapping[int, str] | None = None) -> Classification:
        """See :class:`polynl.tasks.classification.Classification`."""
        return Classification(self.model, self.data, self.loss, labels)


class InstanceSegmentationRecipe(Recipe):
    """Images with things in them, each with a box and a mask."""

    task: Literal["instance_segmentation"]
    """What is learned."""
    model: MaskRCNNPart = MaskRCNNPart()
    data: InstanceData

    def build_task(self, labels: Mapping[int, str] | None = None) -> InstanceSegmentation:
        """See :class:`polynl.tasks.instance_segmentation.InstanceSegmentation`."""
        return InstanceSegmentation(self.model, self.data, labels)


class FaceDetectionRecipe(Recipe):
    """Images with faces in them."""

    task: Literal["face_detection"]
    """What is learned."""
    model: FaceDetectorPart = FaceDetectorPart()
    data: FaceData

    def build_task(self, labels: Mapping[int, str] | None = None) -> FaceDetection:
        """See :class:`polynl.tasks.face_detection.FaceDetection`."""
        return FaceDetection(self.model, self.data, labels)


RECIPES: dict[str, type[Recipe]] = {
    "classification": ClassificationRecipe,
    "instance_segmentation": InstanceSegmentationRecipe,
    "face_detection": FaceDetectionRecipe,
}
