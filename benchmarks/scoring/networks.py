"""The networks the benchmarks run on: random weights, settled batch norms, names like torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv(into: int, out: int, edge: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(into, out, edge, stride, edge // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; where the width changes, the skip subsamples and pads with zeros (type A)."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(into, out, 3, stride), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = _conv(out, out, 3), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.stride, self.missing = stride, out - into

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.skip(x))

    def skip(self, x: Tensor) -> Tensor:
        if not self.missing:
            return x
        before = self.missing // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.missing - before))


class CifarResNet(nn.Module):
    """He et al. (2015), Sec. 4.2: three stages of widths 16, 32 and 64; depth = 6 blocks + 2."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 16, 3), nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._stage(16, 16, 1, blocks)
        self.layer2 = self._stage(16, 32, 2, blocks)
        self.layer3 = self._stage(32, 64, 2, blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)

    @staticmethod
    def _stage(into: int, out: int, stride: int, blocks: int) -> nn.Sequential:
        rest = [BasicBlock(out, out, 1) for _ in range(blocks - 1)]
        return nn.Sequential(BasicBlock(into, out, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.avgpool(x).flatten(1))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which carries the stride), 1x1 to four times the width."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = _conv(into, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, out, 1), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if into != out:
            self.downsample = nn.Sequential(_conv(into, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """The ImageNet ResNet-50, layer by layer torchvision's (the stride in the 3x3)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._stage(64, 64, 1, 3)
        self.layer2 = self._stage(256, 128, 2, 4)
        self.layer3 = self._stage(512, 256, 2, 6)
        self.layer4 = self._stage(1024, 512, 2, 3)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)

    @staticmethod
    def _stage(into: int, width: int, stride: int, blocks: int) -> nn.Sequential:
        rest = [Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)]
        return nn.Sequential(Bottleneck(into, width, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class CifarVgg16(nn.Module):
    """VGG-16 with batch norm for 32 x 32 images: thirteen convolutions and one linear layer."""

    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: max-pool

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        into = 3
        for out in self.widths:
            if not out:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [_conv(into, out, 3), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
            into = out
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).flatten(1))


@dataclass(frozen=True)
class Recipe:
    """How to make a network, and what its data looks like."""

    build: Callable[[], nn.Module]
    pixels: int
    classes: int
    structures: int  # filters, without those on the skip path of a stage's first block


NETWORKS: dict[str, Recipe] = {
    "resnet56": Recipe(lambda: CifarResNet(9), 32, 10, 2032),  # 853,018 parameters
    "vgg16": Recipe(CifarVgg16, 32, 10, 4224),  # 14,724,042 parameters
    "resnet50": Recipe(ResNet50, 224, 1000, 22720),  # 25,557,032 parameters
}


def network(name: str, seed: int = 0) -> nn.Module:
    """The network in eval mode, equal on every call, its running statistics those of random images."""
    recipe = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.build()
        for m in model.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
    # Enough examples for a variance, no more: ResNet-50's warm-up is a second on two cores.
    settle(model, images(name, 64 if recipe.pixels < 100 else 8, torch.Generator().manual_seed(seed + 1))[0])
    return model.eval()


def settle(model: nn.Module, x: Tensor) -> None:
    """Set the running statistics of every batch norm to those of ``x``."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum


def images(name: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random images (N, 3, pixels, pixels) and labels (N,).

    Coarse blobs under the noise: of noise alone every image has the same mean, and so the same logits.
    """
    recipe = NETWORKS[name]
    edge = recipe.pixels
    coarse = torch.randn(count, 3, 4, 4, generator=generator)
    blobs = F.interpolate(coarse, size=(edge, edge), mode="bilinear")
    noise = torch.randn(count, 3, edge, edge, generator=generator)
    labels = torch.randint(recipe.classes, (count,), generator=generator)
    return blobs + 0.5 * noise, labels
