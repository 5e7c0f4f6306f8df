"""Entry points of `torch.hub.load(repository, name)`: blocks, networks with blocks, and trained networks."""

import sys
from pathlib import Path as _Path

dependencies = ["jaxtyping", "numpy", "pydantic", "safetensors", "torch", "torchvision"]

# torch.hub finds this file, not the package below src; its modules are found through the package later on.
_SOURCE = str(_Path(__file__).resolve().parent / "src")
sys.path.insert(0, _SOURCE)
try:
    import polynl as _polynl
finally:
    sys.path.remove(_SOURCE)


def block(name, channels, **options):
    """A block by its name, such as "poly_nl"; see `polynl blocks` for the names and options."""
    return _polynl.build_block(name, channels, **options)


def poly_nl(channels, **options):
    """The paper's layer, for maps of so many channels."""
    return _polynl.PolyNL(channels, **options)


def resnet(arch="resnet50", **keys):
    """A ResNet of torchvision with a block, untrained or with `weights=FILE`.

    `keys` are those of a recipe's `model`, such as `block="poly_nl"` and `placement="res345"`, and
    `num_classes`.
    """
    from polynl.models.resnet import resnet

    return resnet(arch, **{"block": "poly_nl", **keys})


def resnet18(**keys):
    """See `resnet`."""
    return resnet("resnet18", **keys)


def resnet50(**keys):
    """See `resnet`."""
    return resnet("resnet50", **keys)


def load_run(path, **options):
    """A trained network of polynl with labels and preprocessing; see `polynl.load_run`."""
    return _polynl.load_run(path, **options)


def from_pretrained(name, **options):
    """A trained network from the Hugging Face Hub; see `polynl.from_pretrained`."""
    return _polynl.from_pretrained(name, **options)
