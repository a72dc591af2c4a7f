"""Four networks of the literature, written from their papers, whose parameters and MACs are known to the last digit."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(width_in: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias that keeps the size (but for its stride), and its batch norm."""
    conv = nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width)]


class Classifier(nn.Module):
    """Features, their mean over the picture, and a linear layer."""

    def __init__(self, features: list[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Residual(nn.Module):
    """``relu(branch(x) + skip(x))``."""

    def __init__(self, branch: list[nn.Module], skip: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.skip(x))


class Pad(nn.Module):
    """He et al.'s option A: every other pixel, and zeros for the channels that are new on both sides."""

    def __init__(self, new: int) -> None:
        super().__init__()
        self.new = new

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.new // 2, self.new // 2))


def skip(width_in: int, width: int, stride: int, option: str = "B") -> nn.Module:
    if stride == 1 and width_in == width:
        return nn.Identity()
    return Pad(width - width_in) if option == "A" else nn.Sequential(*conv_bn(width_in, width, 1, stride))


def basic(width_in: int, width: int, stride: int, option: str = "B") -> nn.Module:
    first, second = conv_bn(width_in, width, 3, stride), conv_bn(width, width, 3)
    return Residual([*first, nn.ReLU(), *second], skip(width_in, width, stride, option))


def bottleneck(width_in: int, width: int, stride: int) -> nn.Module:
    """The stride is in the 3 x 3 convolution, as everybody does since Goyal et al. 2017."""
    first, second, third = conv_bn(width_in, width), conv_bn(width, width, 3, stride), conv_bn(width, 4 * width)
    return Residual([*first, nn.ReLU(), *second, nn.ReLU(), *third], skip(width_in, 4 * width, stride))


def cifar_resnet(blocks: int = 9, width: int = 16, classes: int = 10, option: str = "B") -> nn.Module:
    """He et al. 2016, Sec. 4.2: 6 n + 2 layers; ResNet-56 for n = 9."""
    layers = [*conv_bn(3, width, 3), nn.ReLU()]
    for stage in range(3):
        for block in range(blocks):
            narrower = stage > 0 and block == 0
            after = width * 2**stage
            layers.append(basic(after // 2 if narrower else after, after, 2 if narrower else 1, option))
    return Classifier(layers, 4 * width, classes)


def resnet50() -> nn.Module:
    """He et al. 2016, Table 1."""
    layers = [*conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        for block in range(blocks):
            width = 64 * 2**stage
            layers.append(bottleneck(before, width, 2 if stage and not block else 1))
            before = 4 * width
    return Classifier(layers, 2048, 1000)


class Plus(nn.Sequential):
    """``x + branch(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def inverted(width_in: int, width: int, stride: int, expansion: int) -> nn.Module:
    inside = expansion * width_in
    widen = [*conv_bn(width_in, inside), nn.ReLU6()] if expansion > 1 else []
    layers = [*widen, *conv_bn(inside, inside, 3, stride, inside), nn.ReLU6(), *conv_bn(inside, width)]
    return (Plus if stride == 1 and width_in == width else nn.Sequential)(*layers)


def mobilenet_v2() -> nn.Module:
    """Sandler et al. 2018, Table 2: expansion, width, blocks, stride."""
    table = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    layers = [*conv_bn(3, 32, 3, 2), nn.ReLU6()]
    before = 32
    for expansion, width, blocks, stride in table:
        for block in range(blocks):
            layers.append(inverted(before, width, stride if block == 0 else 1, expansion))
            before = width
    return Classifier([*layers, *conv_bn(before, 1280), nn.ReLU6()], 1280, 1000)


class Joined(nn.Sequential):
    """``[x, branch(x)]``, one behind the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], 1)


def bn_relu_conv(width_in: int, width: int, kernel: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(width_in, width, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(width_in), nn.ReLU(), conv]


def densenet121(growth: int = 32) -> nn.Module:
    """Huang et al. 2017, Table 1: bottlenecks of 4 growth, half the channels after every block."""
    layers = [*conv_bn(3, 2 * growth, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 2 * growth
    for blocks in (6, 12, 24, 16):
        if blocks > 6:
            layers += [*bn_relu_conv(width, width // 2), nn.AvgPool2d(2)]
            width //= 2
        for _ in range(blocks):
            layers.append(Joined(*bn_relu_conv(width, 4 * growth), *bn_relu_conv(4 * growth, growth, 3)))
            width += growth
    return Classifier([*layers, nn.BatchNorm2d(width), nn.ReLU()], width, 1000)
