"""What a network attends to: Grad-CAM, norms of features, and exact influence maps of blocks."""

from polynl.explain.feature_norms import FeatureNorms, feature_norms
from polynl.explain.grad_cam import detection_score, grad_cam
from polynl.explain.influence import Contributions, contributions, influence, influence_map, influence_maps

__all__ = [
    "Contributions",
    "FeatureNorms",
    "contributions",
    "detection_score",
    "feature_norms",
    "grad_cam",
    "influence",
    "influence_map",
    "influence_maps",
]
