"""A small ResNet, with torchvision's names of modules."""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

from polynl.blocks.options import positive


class SmallResNet(nn.Module):
    """A ResNet for small images: a 3×3 stem, three stages of `depth` bottlenecks, a classifier.

    The stages have 4, 6 and 8 times `width` channels. Modules are named as in torchvision's ResNets, so that
    `PLACEMENTS` mean the same: `res4` is before the last residual block of `layer3`. The stem and the second
    stage halve the map; with `depth` 1 an output position sees 19 × 19 pixels.
    """

    def __init__(
        self,
        *,
        depth: int = 1,
        width: int = 16,
        dropout: float = 0.0,
        num_classes: int = 10,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        if positive("depth", depth) > 256:
            raise ValueError(f"depth={depth!r}: expected at most 256")
        if positive("width", width) % 2 or width > 1024:
            raise ValueError(
                f"width={width!r}: expected an even number up to 1024, since a stage is 3/2 as wide"
            )
        if isinstance(dropout, str) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout!r}: expected a number from 0 to 1")
        self.conv1 = nn.Conv2d(3, 2 * width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(2 * width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _small_stage(2 * width, width, depth, stride=1)
        self.layer2 = _small_stage(4 * width, width * 3 // 2, depth, stride=2)
        self.layer3 = _small_stage(6 * width, 2 * width, depth, stride=1)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(8 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and zero_init_residual:
                nn.init.zeros_(module.bn3.weight)

    def features(self, x: Tensor) -> Tensor:
        """The last map, before the mean over positions."""
        x = self.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (b, num_classes)."""
        return self.fc(self.dropout(self.avgpool(self.features(x)).flatten(1)))


def _small_stage(inputs: int, planes: int, depth: int, *, stride: int) -> nn.Sequential:
    outputs = Bottleneck.expansion * planes
    shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
    )
    first = Bottleneck(inputs, planes, stride, shortcut)
    return nn.Sequential(first, *(Bottleneck(outputs, planes) for _ in range(depth - 1)))
