"""Networks on tiles: how far they are from the whole image, and how much memory they need.

    python benchmarks/tiles.py exact                            # a table of differences, some minutes
    python benchmarks/tiles.py memory --megapixels 1 4 16 64    # a process for each size
    python benchmarks/tiles.py memory --network small_resnet    # up to 256, in minutes instead of hours

`exact` compares `polynl.run_tiled` with the model on the whole image, for odd sizes. `memory` runs a
network with a Poly-NL on an image that is made tile by tile, in a process of its own, and prints by how much
that process's resident memory rises at most. Beside it, the same for the plain network on the whole image, up
to --whole megapixels; and counted on tensors without data, the most bytes that are held at once.

Memory that is freed goes back to the system at once (MALLOC_MMAP_THRESHOLD_), or glibc would keep some of it.
"""

import argparse
import multiprocessing
import os
import resource
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import polynl
from polynl.models.small_resnet import SmallResNet

BLOCKS: dict[str, dict[str, Any]] = {
    "poly_nl": {"reduction": 2},
    "non_local": {"mode": "dot_product"},
    "efficient_nl": {},
    "latent_gnn": {},
    "xca": {},
    "relu_linear": {},
    "separable": {},
    "hydra": {},
    "se": {},
    "global_context": {},
    "grn": {},
}


def resnet(depth: int, *blocks: str) -> nn.Module:
    """A classifier with blocks before the last residual blocks of its second and third stage, in turn."""
    model = getattr(torchvision.models, f"resnet{depth}")(num_classes=10)
    for stage, name in zip(("layer2", "layer3"), blocks, strict=False):
        last = len(getattr(model, stage)) - 1
        polynl.insert(model, name, before=f"{stage}.{last}", init="random", **BLOCKS[name])
    return model


def segmentation(name: str) -> nn.Module:
    """A network of torchvision with maps as output, and a block in its ResNet."""
    build = getattr(torchvision.models.segmentation, name)
    model = build(weights=None, weights_backbone=None, num_classes=3, aux_loss=False)
    return polynl.insert(model, "poly_nl", before="backbone.layer3.5", init="random", reduction=4)


def unet() -> nn.Module:
    """A U-Net of segmentation_models.pytorch with a block in its encoder."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=2)
    return polynl.insert(model, "poly_nl", before="encoder.layer3.1", init="random", reduction=4)


# Name, network, image, tile.
CASES: list[tuple[str, Callable[[], nn.Module], tuple[int, int], int]] = [
    *(
        (f"ResNet-18, two {name}", lambda name=name: resnet(18, name, name), (501, 467), 256)  # type: ignore[misc]
        for name in BLOCKS
    ),
    ("ResNet-50, poly_nl and non_local", lambda: resnet(50, "poly_nl", "non_local"), (601, 555), 352),
    ("FCN-ResNet-50, poly_nl", lambda: segmentation("fcn_resnet50"), (801, 433), 448),
    ("DeepLabV3-ResNet-50, poly_nl", lambda: segmentation("deeplabv3_resnet50"), (1201, 433), 704),
    ("U-Net on ResNet-18, poly_nl", unet, (608, 544), 320),
]


def randomized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """In eval mode, with statistics and scales that are not those of the start."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() < 2 and tensor.is_floating_point():
                tensor.normal_(0.5, 0.2)
    return model.to(dtype).eval()


def compare(build: Callable[[], nn.Module], size: tuple[int, int], tile: int, dtype: torch.dtype) -> float:
    """The largest difference, relative to the largest value."""
    model = randomized(build(), dtype)
    image = torch.rand(1, 3, *size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(image)
    tiled = polynl.run_tiled(model, image, tile, progress=False)
    pairs = [(tiled[key], whole[key]) for key in whole] if isinstance(whole, dict) else [(tiled, whole)]
    return max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)


def exact(only: str) -> None:
    """Print the table of differences."""
    print("| network | image | tile | fp32 | fp64 |\n|---|---|---|---|---|")
    for name, build, size, tile in CASES:
        if only in name:
            errors = [compare(build, size, tile, dtype) for dtype in (torch.float32, torch.float64)]
            cells = " | ".join(f"{error:.0e}" for error in errors)
            print(f"| {name} | {size[0]} × {size[1]} | {tile} | {cells} |", flush=True)


class Made:
    """An image of noise, made when it is asked for."""

    def __init__(self, side: int) -> None:
        self.shape = (3, side, side)

    def __getitem__(self, key: Any) -> Tensor:
        rows, columns = (torch.arange(self.shape[1])[part] for part in key[1:])
        return ((rows[:, None] * 7919 + columns * 104729) % 251).expand(3, -1, -1).to(torch.uint8)


def peak() -> float:
    """The most resident memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# A network, and where the Poly-NL goes.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10).eval(), "layer3.1"),
    "small_resnet": (lambda: SmallResNet(width=8).eval(), "layer3.0"),
}


def tiled_memory(name: str, side: int, tile: int) -> tuple[float, float]:
    """MB by which the memory of this process rises in tiles, and the seconds that the run took."""
    build, place = NETWORKS[name]
    model = polynl.insert(build(), "poly_nl", before=place, init="random")
    start, begun = peak(), time.perf_counter()
    polynl.run_tiled(model, Made(side), tile, prepare=lambda x: x / 255, progress=False)
    return peak() - start, time.perf_counter() - begun


def plain_memory(name: str, side: int) -> float:
    """MB by which the memory of this process rises for the plain network on the whole image."""
    model, start = NETWORKS[name][0](), peak()
    with torch.no_grad():
        model(torch.rand(1, 3, side, side))
    return peak() - start


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def whole_memory(name: str, side: int) -> float:
    """MB of the plain network on the whole image, counted without computing it."""
    model = NETWORKS[name][0]()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), Held() as held:
        model(torch.empty(1, 3, side, side))
    return held.peak / 1e6


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def memory(name: str, megapixels: list[int], tile: int, whole: int) -> None:
    """Print the table of memory."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    print("| image | whole image, counted | whole image, measured | tiles, measured | time |")
    print("|---|---|---|---|---|")
    for size in megapixels:
        side = round((size * 2**20) ** 0.5)
        plain = f"{in_a_process(plain_memory, name, side):,.0f} MB" if size <= whole else "not run"
        tiled, seconds = in_a_process(tiled_memory, name, side, tile)
        cells = [f"{side} × {side}", f"{whole_memory(name, side):,.0f} MB", plain, f"{tiled:,.0f} MB"]
        print(f"| {' | '.join(cells)} | {seconds:.0f} s |", flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["exact", "memory"])
    parser.add_argument("--only", default="", help="exact: networks whose names contain this")
    parser.add_argument("--network", choices=NETWORKS, default="resnet18", help="memory: which network")
    parser.add_argument("--megapixels", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--tile", type=int, default=1024)
    parser.add_argument("--whole", type=int, default=16, help="memory: megapixels to run at once at most")
    options = parser.parse_args()
    if options.what == "exact":
        exact(options.only)
    else:
        memory(options.network, options.megapixels, options.tile, options.whole)


if __name__ == "__main__":
    main()
