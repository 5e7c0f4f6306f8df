"""Draw scenes.png: sixteen scenes of each difficulty, three times their size."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torchvision.utils import make_grid, save_image

from polynl.data.scenes import DIFFICULTIES, Scenes

rows = []
for difficulty in DIFFICULTIES:
    scenes = Scenes(16, size=40, difficulty=difficulty, split="val", seed=0)
    large = F.interpolate(scenes.images / 255, scale_factor=3, mode="nearest")
    rows.append(make_grid(large, nrow=8, padding=6, pad_value=1.0))
gap = torch.ones(3, 12, rows[0].shape[2])
picture = torch.cat([rows[0], gap, rows[1], gap, rows[2]], dim=1)
save_image(picture, Path(__file__).parent / "scenes.png")
