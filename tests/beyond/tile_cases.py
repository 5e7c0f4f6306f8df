"""Networks and images for the tests of tiles."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polynl.beyond.tiles import run_tiled


def randomized(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """In eval mode, with all parameters and statistics random: start values would hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif tensor.dim() < 2 and tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + 0.5)
    return model.to(dtype).eval()


class Classifier(nn.Module):
    """Strides of 4 in all, a global pooling, and room for blocks."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), norm(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), norm(8), nn.ReLU())
        self.last = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        x = x + self.last(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Skips from every level; `resize` brings the deep map to the size of the skip."""

    def __init__(self, resize: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.up1, self.up2 = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(11, 2, 3, padding=1)
        self.resize = resize

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        half = self.down1(image).relu()
        deep = self.down2(half).relu_()
        half = self.up1(torch.cat([self.resize(deep, half), half], dim=1)).relu()
        full = self.up2(torch.cat([self.resize(half, image), image], dim=1))
        return {"map": full, "score": full.mean((2, 3)), "deep": deep}


def resized(mode: str, align_corners: bool | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    def resize(x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(x, like.shape[-2:], mode=mode, align_corners=align_corners)

    return resize


def image(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def check(
    model: nn.Module, x: Tensor, tile: int | tuple[int, int], error: float = 1e-11, **options: Any
) -> None:
    """Every output in tiles equals that of the whole image, relative to its largest value."""
    with torch.no_grad():
        whole = model(x)
    tiled = run_tiled(model, x, tile, progress=False, **options)
    assert type(tiled) is type(whole)
    pairs = zip(tiled.values(), whole.values(), strict=True) if isinstance(whole, dict) else [(tiled, whole)]
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= error * theirs.abs().max()


class Fixed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.odd = nn.Conv2d(3, 4, 3, padding=1), Applied(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.conv(x))


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Reader:
    """Rows and columns of a large image, made when they are asked for."""

    shape = (3, 90, 70)
    largest = 0

    def __getitem__(self, key: Any) -> np.ndarray:
        _, rows, columns = key
        y, x = np.arange(90)[rows, None], np.arange(70)[None, columns]
        self.largest = max(self.largest, (y + x).size)
        return np.stack([y * x % 251, y + x, y - x + 90]).astype(np.uint8)
