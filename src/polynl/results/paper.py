"""The paper's own results, each figure written here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What the paper calls the blocks that it compares; the plain network first.
LABELS = {
    "none": "no block",
    "non_local": "Non-local",
    "tesa": "TESA",
    "latent_gnn": "Latent-GNN",
    "efficient_nl": "Efficient-NL",
    "poly_nl": "Poly-NL",
}
# Where a block stands unless its row says otherwise.
PLACEMENT = "res4"


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables: what was trained on what, the scores, and a row for each block."""

    setting: str
    headings: Mapping[str, str]
    """Of the scores by their names in polynl."""
    deciding: str
    """The score that tells which block is better."""
    rows: Mapping[str, tuple[float, ...]]
    """By block, or by block@placement."""

    def figures(self, row: str) -> dict[str, float]:
        """A row's figures by score; empty where the paper has no such row."""
        return dict(zip(self.headings, self.rows[row], strict=True)) if row in self.rows else {}


def row_name(block: str, placement: str | list[str]) -> str:
    """The name of a variant's row.

    >>> row_name("poly_nl", "res4"), row_name("poly_nl", "res3"), row_name("none", "res3")
    ('poly_nl', 'poly_nl@res3', 'none')
    """
    if block == "none" or placement == PLACEMENT:
        return block
    return f"{block}@{placement if isinstance(placement, str) else '+'.join(placement)}"


def row_label(row: str) -> str:
    """What readers call it.

    >>> row_label("poly_nl"), row_label("poly_nl@res3"), row_label("polynomial")
    ('Poly-NL', 'Poly-NL at res3', 'polynomial')
    """
    block, _, placement = row.partition("@")
    label = LABELS.get(block, block)
    return f"{label} at {placement}" if placement else label


PAPER = {
    "classification": PaperTable(
        "ResNet-50 on ImageNet",
        {"top1": "Top-1", "top5": "Top-5"},
        "top1",
        {
            "none": (75.62, 92.68),
            "non_local": (76.09, 93.00),
            "tesa": (76.49, 93.05),
            "latent_gnn": (75.28, 92.33),
            "efficient_nl": (75.86, 93.02),
            "poly_nl": (76.30, 93.06),
        },
    ),
    "instance_segmentation": PaperTable(
        "Mask R-CNN, ResNet-50, on COCO",
        {
            "box_ap": "box AP",
            "box_ap50": "AP50",
            "box_ap75": "AP75",
            "mask_ap": "mask AP",
            "mask_ap50": "AP50",
            "mask_ap75": "AP75",
        },
        "mask_ap",
        {
            "none": (37.9, 59.2, 41.0, 34.6, 56.0, 36.9),
            "non_local": (38.8, 60.6, 42.0, 35.4, 57.3, 37.7),
            "tesa": (39.5, 60.9, 43.1, 35.4, 57.2, 37.5),
            "latent_gnn": (38.9, 60.4, 42.4, 35.3, 57.3, 37.4),
            "efficient_nl": (38.9, 60.3, 42.2, 35.4, 57.2, 37.7),
            "poly_nl": (39.2, 60.8, 42.2, 35.4, 57.4, 37.6),
            "poly_nl@res3": (38.6, 60.1, 41.5, 35.2, 56.9, 37.4),
            "poly_nl@res5": (38.7, 60.6, 41.9, 35.2, 57.2, 37.3),
            "poly_nl@res345": (39.8, 61.7, 43.2, 36.0, 58.4, 38.3),
        },
    ),
    "face_detection": PaperTable(
        "ResNet-50 on WIDER FACE",
        {"easy_ap": "Easy AP", "medium_ap": "Medium AP", "hard_ap": "Hard AP"},
        "hard_ap",
        {
            "none": (95.49, 94.85, 89.87),
            "non_local": (95.88, 95.14, 91.94),
            "tesa": (96.22, 95.61, 92.58),
            "latent_gnn": (96.00, 95.31, 92.49),
            "efficient_nl": (96.06, 95.42, 92.55),
            "poly_nl": (96.37, 95.71, 92.76),
        },
    ),
}
