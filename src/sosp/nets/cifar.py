"""The ResNets of He et al. (2016) for 32 x 32 images, with the plain and the wide one, and a small one for digits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from sosp.errors import check_choice, check_whole_number
from sosp.nets.residual import SKIPS, BasicBlock, PlainBlock, build_conv, build_stage, list_streams
from sosp.nets.widths import StreamWidth, Width, scale_channels


@dataclass(frozen=True)
class ResNetShape:
    """Three stages of ``blocks`` blocks, ``base`` channels in the first and twice as many in each that follows."""

    blocks: int
    base: int = 16
    inputs: int = 3
    block: type[BasicBlock] = BasicBlock


class CifarResNet(nn.Module):
    """A 3x3 stem, three stages whose width doubles as their size halves, the mean over the image, a linear layer.

    ``skip``, where the width changes: ``"A"`` subsamples and pads with zeros, ``"B"`` is a 1x1 convolution with its
    batch norm; the stages have widths of their own with either. Convolutions and the linear layer start with
    Kaiming-normal weights over their inputs, as in akamaster/pytorch_resnet_cifar10, everything else as torch makes it.
    """

    def __init__(self, shape: ResNetShape, *, classes: int, width: Width, skip: str) -> None:
        super().__init__()
        check_choice("skip", skip, SKIPS)
        check_whole_number("classes", classes)
        beside = SKIPS[skip] if shape.block.adds else None
        widths = scale_channels(_streams(shape, skip), width, head="linear")
        ends = {k: widths[f"layer{k}.{shape.blocks - 1}.conv2"] for k in (1, 2, 3)}  # what leaves a stage
        self.conv1, self.bn1 = build_conv(shape.inputs, widths["conv1"], 3), nn.BatchNorm2d(widths["conv1"])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = build_stage(shape.block, "layer1", widths["conv1"], widths, stride=1, skip=None)
        self.layer2 = build_stage(shape.block, "layer2", ends[1], widths, stride=2, skip=beside)
        self.layer3 = build_stage(shape.block, "layer3", ends[2], widths, stride=2, skip=beside)
        self.linear = nn.Linear(ends[3], classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def _streams(shape: ResNetShape, skip: str) -> list[StreamWidth]:
    found = list_streams(shape.block, "layer1", shape.blocks, shape.base, ["conv1"])
    for k in (2, 3):
        tied = [f"layer{k}.0.downsample.0"] if skip == "B" and shape.block.adds else []
        found += list_streams(shape.block, f"layer{k}", shape.blocks, shape.base * 2 ** (k - 1), tied)
    return found


def resnet20(*, classes: int = 10, width: Width = 1.0, skip: str = "A") -> nn.Module:
    """269,722 parameters, 40.6 M MACs."""
    return CifarResNet(ResNetShape(3), classes=classes, width=width, skip=skip)


def resnet32(*, classes: int = 10, width: Width = 1.0, skip: str = "A") -> nn.Module:
    """464,154 parameters, 68.9 M MACs."""
    return CifarResNet(ResNetShape(5), classes=classes, width=width, skip=skip)


def resnet44(*, classes: int = 10, width: Width = 1.0, skip: str = "A") -> nn.Module:
    """658,586 parameters, 97.2 M MACs."""
    return CifarResNet(ResNetShape(7), classes=classes, width=width, skip=skip)


def resnet56(*, classes: int = 10, width: Width = 1.0, skip: str = "A") -> nn.Module:
    """853,018 parameters (855,770 with ``skip="B"``), 125.5 M MACs."""
    return CifarResNet(ResNetShape(9), classes=classes, width=width, skip=skip)


def resnet110(*, classes: int = 10, width: Width = 1.0, skip: str = "A") -> nn.Module:
    """1,727,962 parameters, 252.9 M MACs."""
    return CifarResNet(ResNetShape(18), classes=classes, width=width, skip=skip)


def resnet32x4(*, classes: int = 10, width: Width = 1.0, skip: str = "B") -> nn.Module:
    """ResNet-32 four times as wide, 7,427,914 parameters, 1.101 G MACs.

    As EigenDamage has it (Wang et al. 2019), whose skips are convolutions; the bias of the linear layer starts at
    zero there, and here as torch makes it.
    """
    return CifarResNet(ResNetShape(5, base=64), classes=classes, width=width, skip=skip)


def plainnet20(*, classes: int = 10, width: Width = 1.0) -> nn.Module:
    """ResNet-20 without its skips (AMC's Plain-20): the same names, 269,722 parameters and 40.6 M MACs."""
    return CifarResNet(ResNetShape(3, block=PlainBlock), classes=classes, width=width, skip="A")


def digits_resnet(*, classes: int = 10, width: Width = 1.0, skip: str = "B") -> nn.Module:
    """For 8 x 8 images of one channel: three blocks of widths 16, 32 and 64, 77,754 parameters, 0.76 M MACs."""
    return CifarResNet(ResNetShape(1, inputs=1), classes=classes, width=width, skip=skip)
