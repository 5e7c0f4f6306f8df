"""Networks to put blocks into."""

import copy

import pytest
import torch
import torchvision
from torch import nn

from polynl.insertion import inserted
from polynl.insertion.hooks import wiring_of


def from_torchvision(name):
    return lambda: torchvision.models.get_model(name, weights=None)


def from_timm(name):
    return lambda: pytest.importorskip("timm").create_model(name, pretrained=False)


IMAGE, CLIP = (2, 3, 64, 64), (2, 3, 4, 32, 32)


# How to make the host, the module to go next to, its widths there (input, output) and the input's shape.
HOSTS = {
    "resnet18": (from_torchvision("resnet18"), "layer3.1", (256, 256), IMAGE),
    "resnet50": (from_torchvision("resnet50"), "layer3.5", (1024, 1024), IMAGE),
    "convnext_tiny": (from_torchvision("convnext_tiny"), "features.3.2", (192, 192), IMAGE),
    "mobilenet_v3_small": (from_torchvision("mobilenet_v3_small"), "features.4", (24, 40), (4, 3, 64, 64)),
    "efficientnet_b0": (from_torchvision("efficientnet_b0"), "features.4.0", (40, 80), IMAGE),
    "r3d_18": (from_torchvision("r3d_18"), "layer2.1", (128, 128), CLIP),
    "timm_resnet18": (from_timm("resnet18"), "layer3.1", (256, 256), IMAGE),
    "timm_convnext": (from_timm("convnext_atto"), "stages.2.blocks.3", (160, 160), IMAGE),
    "timm_efficientnet": (from_timm("efficientnet_lite0"), "blocks.3.1", (80, 80), IMAGE),
}


class Tiny(nn.Module):
    """A stem, a Sequential stage, a module called by keyword, and one that returns a tuple."""

    class Named(nn.Module):
        def forward(self, *, x):
            return x

    class Keywords(nn.Module):
        def forward(self, **inputs):
            return inputs["x"]

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.stage = nn.Sequential(nn.Conv2d(8, 12, 1), nn.Sequential(nn.ReLU(), nn.Conv2d(12, 16, 1)))
        self.drop = nn.Dropout(0.5)
        self.named = self.Named()
        self.keywords = self.Keywords()
        self.pair = self.Pair()
        self.unused = nn.Conv2d(1, 1, 1)
        self.empty = nn.Sequential()
        self.listed = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = self.drop(self.stage(self.norm(self.stem(x))))
        x, _ = self.pair(self.keywords(x=self.named(x=x)))
        for layer in self.listed:
            x = layer(x)
        return self.fc(x.mean((2, 3)))


def randomised(model):
    """The model with every block's parameters drawn at random, matrices so that they keep the scale."""
    with torch.no_grad():
        for block in inserted(model).values():
            for parameter in block.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(
                    noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise
                )
    return model


def hooks(model):
    return [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]


def layout_at(model, name):
    """The layout that was found for the block of this name."""
    parent, _, child = name.rpartition(".")
    return wiring_of(model.get_submodule(parent), child).layout


def wrapped_by_hand(model, target, before, after):
    """A copy of the model whose target is replaced by a Sequential of it between the two blocks."""
    parent, _, key = target.rpartition(".")
    model = copy.deepcopy(model)
    setattr(model.get_submodule(parent), key, nn.Sequential(before, model.get_submodule(target), after))
    return model
