"""Image classification: cross entropy, Top-1 and Top-5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2 import Transform

from polynl.config import errors_at
from polynl.tasks.base import Batch, PaperTable, Scorer, Task, readable
from polynl.tasks.classification.config import ClassificationConfig
from polynl.tasks.classification.data import FolderImages
from polynl.tasks.classification.imagenet import with_imagenet_names
from polynl.tasks.classification.metric import TopK, score_top_k
from polynl.tasks.outcomes import Array, Outcomes


class Classification(Task):
    """Scored by `top1` and, with ten classes or more, `top5`, in percent."""

    name = "classification"
    config = ClassificationConfig
    scores = {"top1": "Top-1", "top5": "Top-5"}  # noqa: RUF012
    best_by = "top1"
    headline = ("top1", "top5")
    paper = PaperTable(
        "ResNet-50 on ImageNet",
        ("top1", "top5"),
        source="image_folder",
        images=50_000,
        rows={
            "none": (75.62, 92.68),
            "non_local": (76.09, 93.00),
            "tesa": (76.49, 93.05),
            "latent_gnn": (75.28, 92.33),
            "efficient_nl": (75.86, 93.02),
            "poly_nl": (76.30, 93.06),
        },
    )

    def __init__(self, config: ClassificationConfig, labels: Mapping[int, str] | None = None) -> None:
        super().__init__(config, labels)
        self._loss = config.loss

    def check(self, *, training: bool = True) -> None:
        """Raise a SettingsError if data or weights are missing, or if the network cannot be built."""
        self._data.check(training=training)
        if training:
            self._model.check(len(self.labels()), self._data.size)

    def notes(self) -> list[str]:
        """Which files are no images, and that the classifier is new if the weights have other classes."""
        count = len(self.labels())
        replaced = [
            f"{self._model.weights} has {layer} for other classes: a new one for {count} classes is trained."
            for layer in self._model.check(count, self._data.size)
        ]
        images = self._load("train")
        return [*replaced, *(images.notes() if isinstance(images, FolderImages) else [])]

    def labels(self) -> dict[int, str]:
        """The names of the classes."""
        return dict(enumerate(self._data.classes())) if self._labels is None else self._labels

    def output_labels(self) -> dict[int, str]:
        """The names of the classes, in words if they are ImageNet's folders."""
        return with_imagenet_names(self.labels())

    def collate(self, samples: Sequence[Any], *, training: bool) -> Batch:
        """Stack the readable images; in training they also replace the unreadable ones."""
        good, bad = readable(samples, training=training)
        if not good:
            return Batch(torch.empty(0, 3, 1, 1), torch.empty(0, dtype=torch.long), bad)
        return Batch(
            torch.stack([image for image, _ in good]), torch.tensor([label for _, label in good]), bad
        )

    def model(self) -> nn.Module:
        """The network, with an output for every class."""
        with errors_at("model"):
            return self._model.build(len(self.labels()), self._data.size)

    def view(self) -> Transform:
        """Resize and crop a uint8 image as in scoring."""
        return self._data.view()

    def inputs(self, image: Tensor) -> Tensor:
        """A batch of one image, normalised."""
        return self._normalised(image.unsqueeze(0))

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """The logits of uint8 images."""
        return model(self._normalised(images))

    def _normalised(self, images: Tensor) -> Tensor:
        """Normalised uint8 images."""
        mean, std = (
            torch.tensor(values, device=images.device).mul(255)[:, None, None]
            for values in (self._data.mean, self._data.std)
        )
        return (images.float() - mean) / std

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The cross entropy; with `mixup`, of images mixed with their neighbours in the batch."""
        images, targets, mixup = self._normalised(batch.images), batch.targets, self._loss.mixup
        loss = partial(F.cross_entropy, label_smoothing=self._loss.label_smoothing)
        if mixup == 0:
            return {"cross_entropy": loss(model(images).float(), targets)}
        # Drawn from the CPU's global generator, whose state checkpoints keep.
        share = float(torch.distributions.Beta(mixup, mixup).sample())
        logits = model(share * images + (1 - share) * images.roll(1, 0)).float()
        return {"cross_entropy": share * loss(logits, targets) + (1 - share) * loss(logits, targets.roll(1))}

    def scorer(self) -> Scorer:
        """Top-1 and Top-5."""
        return TopK(self.logits, len(self.labels()), self._load("val").name)

    @classmethod
    def counted(cls, outcomes: Outcomes) -> str:
        """How many images of how many classes were scored."""
        classes = len(np.unique(outcomes.truth))
        return f"{super().counted(outcomes)} of {classes} {'class' if classes == 1 else 'classes'}"

    @classmethod
    def score_outcomes(cls, outcomes: Outcomes, weights: Array) -> dict[str, Array]:
        """Top-1 and Top-5."""
        return score_top_k(outcomes, weights)
