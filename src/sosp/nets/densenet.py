"""DenseNet-40 (Huang et al. 2017) with growth 12 for 32 x 32 images, without bottlenecks or compression."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosp.errors import check_whole_number
from sosp.nets.widths import StreamWidth, Width, scale_channels

GROWTH, LAYERS = 12, 12  # channels per layer, layers per block


class DenseLayer(nn.Module):
    """A 3x3 convolution of all that came before, set beside it."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.bn1, self.relu = nn.BatchNorm2d(into), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(into, out, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv1(self.relu(self.bn1(x)))), 1)


class TransitionLayer(nn.Module):
    """A 1x1 convolution, and half the size."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.bn1, self.relu = nn.BatchNorm2d(into), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(into, out, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv1(self.relu(self.bn1(x))), 2)


class CifarDenseNet(nn.Module):
    """A 3x3 stem, three dense blocks with transitions between, the mean over the image, a linear layer.

    Layers, names and start are Network Slimming's (Liu et al. 2017): Kaiming-normal convolutions over their outputs,
    batch norms that scale by 0.5, the linear layer as torch makes it. ``width`` multiplies a layer's growth.
    """

    def __init__(self, *, classes: int, width: Width) -> None:
        super().__init__()
        check_whole_number("classes", classes)
        widths = scale_channels(_streams(), width, head="fc")
        self.conv1 = nn.Conv2d(3, widths["conv1"], 3, padding=1, bias=False)
        self.dense1, seen = _block("dense1", widths["conv1"], widths)
        self.trans1 = TransitionLayer(seen, widths["trans1.conv1"])
        self.dense2, seen = _block("dense2", widths["trans1.conv1"], widths)
        self.trans2 = TransitionLayer(seen, widths["trans2.conv1"])
        self.dense3, seen = _block("dense3", widths["trans2.conv1"], widths)
        self.bn, self.relu = nn.BatchNorm2d(seen), nn.ReLU(inplace=True)
        self.fc = nn.Linear(seen, classes)
        self.apply(_initialize_weights)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trans1(self.dense1(self.conv1(x)))
        x = self.dense3(self.trans2(self.dense2(x)))
        return self.fc(self.relu(self.bn(x)).mean((2, 3)))


def _block(name: str, into: int, widths: Mapping[str, int]) -> tuple[nn.Sequential, int]:
    """The block, and how many channels leave it."""
    layers: list[nn.Module] = []
    for n in range(LAYERS):
        out = widths[f"{name}.{n}.conv1"]
        layers.append(DenseLayer(into, out))
        into += out
    return nn.Sequential(*layers), into


def _streams() -> list[StreamWidth]:
    """Every layer by itself; a transition is as wide as what it reads is at factor 1."""
    seen = 2 * GROWTH
    found = [StreamWidth(seen, ("conv1",))]
    for k in (1, 2, 3):
        found += [StreamWidth(GROWTH, (f"dense{k}.{n}.conv1",)) for n in range(LAYERS)]
        seen += GROWTH * LAYERS
        found += [StreamWidth(seen, (f"trans{k}.conv1",))] if k < 3 else []
    return found


def _initialize_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.constant_(module.weight, 0.5)


def densenet40(*, classes: int = 10, width: Width = 1.0) -> nn.Module:
    """1,059,298 parameters (1,040,578, the literature's 1.04 M, without those of the batch norms), 282.9 M MACs."""
    return CifarDenseNet(classes=classes, width=width)
