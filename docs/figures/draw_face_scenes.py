"""Draw face_scenes.png: a portrait, a group and two crowds, and below them four more scenes with boxes."""

from pathlib import Path

import torch
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import draw_bounding_boxes, make_grid

from polynl.tasks.face_detection.scenes import FaceScenes

SIZE = 224
scenes = FaceScenes(40, size=SIZE, split="val", seed=3, training=True)
kinds = {
    kind: [number for number, name in enumerate(scenes.names) if name.startswith(kind)]
    for kind in ("0--Portrait", "1--Group", "2--Crowd")
}
portraits, groups, crowds = kinds.values()
plain = [scenes[number][0] for number in (portraits[0], groups[0], *crowds[:2])]
boxed = []
for number in (portraits[1], groups[1], *crowds[2:4]):
    image, target = scenes[number]
    # Just outside the faces: the outline would hide tiny ones.
    low, high = target["boxes"].split(2, 1)
    around = torch.cat([low.floor() - 1, high.ceil()], 1)
    boxed.append(draw_bounding_boxes(image, around.clamp(0, SIZE - 1), colors="yellow", width=1))
picture = to_pil_image(make_grid(torch.stack([*plain, *boxed]), nrow=4, padding=6, pad_value=255))
# A palette: in full colour the noise would take four times as many bytes.
picture.quantize(256, kmeans=2).save(Path(__file__).parent / "face_scenes.png", optimize=True)
