"""ResNet-18 and ResNet-50 for ImageNet; the checkpoints of torchvision fit."""

from __future__ import annotations

from torch import Tensor, nn

from sosp.errors import check_whole_number
from sosp.nets.residual import BasicBlock, Block, Bottleneck, build_conv, build_projection, build_stage, list_streams
from sosp.nets.widths import StreamWidth, Width, scale_channels


class ImageNetResNet(nn.Module):
    """A 7x7 stem and a max-pool, four stages, the mean over the image, a linear layer.

    Names, shapes and order are torchvision's, and so is the start: Kaiming-normal convolutions over their outputs,
    the linear layer as torch makes it. From equal seeds come equal weights.
    """

    def __init__(self, block: Block, blocks: tuple[int, ...], *, classes: int, width: Width) -> None:
        super().__init__()
        check_whole_number("classes", classes)
        widths = scale_channels(_streams(block, blocks), width, head="fc")
        ends = [widths[f"layer{k}.0.{block.layers[-1]}"] for k in (1, 2, 3, 4)]  # what leaves a stage
        first = build_projection if block.expansion > 1 else None
        self.conv1, self.bn1 = build_conv(3, widths["conv1"], 7, 2), nn.BatchNorm2d(widths["conv1"])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = build_stage(block, "layer1", widths["conv1"], widths, stride=1, skip=first)
        self.layer2 = build_stage(block, "layer2", ends[0], widths, stride=2, skip=build_projection)
        self.layer3 = build_stage(block, "layer3", ends[1], widths, stride=2, skip=build_projection)
        self.layer4 = build_stage(block, "layer4", ends[2], widths, stride=2, skip=build_projection)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(ends[3], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _streams(block: Block, blocks: tuple[int, ...]) -> list[StreamWidth]:
    """The first stage adds to the stem's own output, unless its blocks end wider than they begin."""
    found = [StreamWidth(64, ("conv1",))] if block.expansion > 1 else []
    for k, many in enumerate(blocks, 1):
        starts = "conv1" if k == 1 and block.expansion == 1 else f"layer{k}.0.downsample.0"
        found += list_streams(block, f"layer{k}", many, 64 * 2 ** (k - 1), [starts])
    return found


def resnet18(*, classes: int = 1000, width: Width = 1.0) -> nn.Module:
    """11,689,512 parameters, 1.814 G MACs."""
    return ImageNetResNet(BasicBlock, (2, 2, 2, 2), classes=classes, width=width)


def resnet50(*, classes: int = 1000, width: Width = 1.0) -> nn.Module:
    """25,557,032 parameters, 4.089 G MACs; the stride is in the 3x3 convolutions."""
    return ImageNetResNet(Bottleneck, (3, 4, 6, 3), classes=classes, width=width)
