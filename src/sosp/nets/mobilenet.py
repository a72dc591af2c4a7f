"""MobileNetV2 (Sandler et al. 2018) for ImageNet; the checkpoints of torchvision fit."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sosp.errors import check_whole_number
from sosp.nets.widths import StreamWidth, Width, scale_channels

STAGES = (  # expansion, width, blocks, stride: Table 2
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


def build_conv_unit(into: int, out: int, edge: int, stride: int = 1, *, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU6."""
    conv = nn.Conv2d(into, out, edge, stride, edge // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Widen (unless it ``expands`` nothing), filter every channel by itself, narrow; ``adds`` the input."""

    def __init__(self, into: int, inside: int, out: int, stride: int, *, expands: bool, adds: bool) -> None:
        super().__init__()
        wider = [build_conv_unit(into, inside, 1)] if expands else []
        depthwise = build_conv_unit(inside, inside, 3, stride, groups=inside)
        self.conv = nn.Sequential(*wider, depthwise, nn.Conv2d(inside, out, 1, bias=False), nn.BatchNorm2d(out))
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    """A stem, seven stages of inverted residual blocks, a 1x1 convolution, the mean over the image, a linear layer.

    Names, shapes and order are torchvision's, and so is the start: Kaiming-normal convolutions over their outputs, a
    linear layer of N(0, 0.01²) whose bias is zero. From equal seeds come equal weights. Unlike there, ``width`` rounds
    to whole numbers, not to multiples of eight, and below 1 narrows the last convolution too.
    """

    def __init__(self, *, classes: int, width: Width) -> None:
        super().__init__()
        check_whole_number("classes", classes)
        widths = scale_channels(_streams(), width, head="classifier.1")
        into = widths["features.0.0"]
        features: list[nn.Module] = [build_conv_unit(3, into, 3, 2)]
        for expansion, _, blocks, stride in STAGES:
            for block in range(blocks):
                inside, end = _layers(len(features), expansion)
                out, step = widths[end], 1 if block else stride
                features.append(
                    InvertedResidual(into, widths[inside[0]], out, step, expands=expansion > 1, adds=block > 0)
                )
                into = out
        last = widths[f"features.{len(features)}.0"]
        self.features = nn.Sequential(*features, build_conv_unit(into, last, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))
        self.apply(_initialize_weights)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        return self.classifier(x.flatten(1))


def _layers(number: int, expansion: int) -> tuple[tuple[str, ...], str]:
    """The layers inside a block, which have one width, and the one it ends in."""
    inside = tuple(f"features.{number}.conv.{n}.0" for n in range(2 if expansion > 1 else 1))
    return inside, f"features.{number}.conv.{len(inside)}"


def _streams() -> list[StreamWidth]:
    """One inside each block, and one per stage: its blocks add to what the first of them gives."""
    found: list[StreamWidth] = []
    stem: tuple[str, ...] = ("features.0.0",)  # which the first block filters
    number, into = 1, 32
    for expansion, width, blocks, _ in STAGES:
        ends = []
        for _ in range(blocks):
            inside, end = _layers(number, expansion)
            found.append(StreamWidth(into * expansion, (*stem, *inside)))
            ends.append(end)
            number, into, stem = number + 1, width, ()
        found.append(StreamWidth(width, tuple(ends)))
    return [*found, StreamWidth(1280, (f"features.{number}.0",))]


def _initialize_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, 0.01)
        nn.init.zeros_(module.bias)


def mobilenet_v2(*, classes: int = 1000, width: Width = 1.0) -> nn.Module:
    """3,504,872 parameters, 300.8 M MACs."""
    return MobileNetV2(classes=classes, width=width)
