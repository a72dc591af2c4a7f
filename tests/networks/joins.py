"""Branches that meet: residual adds, concatenations and products, with other channels removed on each side."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.recipe import Recipe


class PostAct(nn.Module):
    """torchvision's BasicBlock."""

    def __init__(self, width_in: int, width: int, width_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        self.downsample = None
        if stride != 1 or width_in != width_out:
            skip = nn.Conv2d(width_in, width_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(skip, nn.BatchNorm2d(width_out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(PostAct(4, 3, 4), PostAct(4, 5, 4))
        self.layer2 = nn.Sequential(PostAct(4, 6, 6, stride=2), PostAct(6, 4, 6))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class PreAct(nn.Module):
    """BN-ReLU-conv twice, added to the input, which no normalisation has seen."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        return x + self.conv2(F.relu(self.bn2(out)))


class PreActNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.blocks = nn.Sequential(PreAct(5, 4), PreAct(5, 3))
        self.bn = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.stem(x))))
        return self.head(x.mean((2, 3)))


class TypeA(nn.Module):
    """The CIFAR ResNet's parameter-free skip: every second pixel, zeros for the new channels on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.a = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.bn_a = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn_b = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        out = self.bn_b(self.b(F.relu(self.bn_a(self.a(x)))))
        out += F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), "constant", 0)
        out = F.relu(out)
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


class DenseLayer(nn.Module):
    """torchvision's DenseNet layer: it takes the list of all features so far."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, 5, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        x = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(x)))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.layers = nn.ModuleList([DenseLayer(4, 3), DenseLayer(7, 3)])
        self.norm = nn.BatchNorm2d(10)
        self.transition = nn.Conv2d(10, 4, 1, bias=False)
        self.norm5 = nn.BatchNorm2d(4)
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.conv0(x)]
        for layer in self.layers:
            features.append(layer(features))
        x = self.transition(F.relu(self.norm(torch.cat(features, 1))))
        x = F.avg_pool2d(x, 2, 2)
        return self.classifier(F.relu(self.norm5(x)).mean((2, 3)))


class Inception(nn.Module):
    """Three branches side by side; one of them only pools the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.branch1 = nn.Conv2d(4, 3, 1)
        self.branch3 = nn.Sequential(
            nn.Conv2d(4, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 5, 3, padding=1)
        )
        self.mix = nn.Conv2d(12, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        branches = [self.branch1(x), self.branch3(x), F.max_pool2d(x, 3, stride=1, padding=1)]
        x = F.relu(self.mix(F.relu(torch.cat(branches, dim=1))))
        return self.head(x.mean((2, 3)))


class CoordConv(nn.Module):
    """Features concatenated with the network's own input, which always stays."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1)
        self.mix = nn.Conv2d(7, 4, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.mix(torch.cat([x, F.relu(self.conv(x))], 1)))
        return self.head(torch.cat([y, x], 1).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.down2 = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.fuse = nn.Conv2d(10, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        deep = self.up(self.down2(self.pool(skip)))
        return self.out(F.relu(self.fuse(torch.cat([skip, deep], 1))))


class SqueezeExcite(nn.Module):
    """Every channel is scaled by a sigmoid that all channels decide on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.squeeze = nn.Conv2d(6, 3, 1)
        self.excite = nn.Conv2d(3, 6, 1)
        self.project = nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.bn(self.conv(x)))
        scale = x.mean((2, 3), keepdim=True)
        scale = self.excite(F.silu(self.squeeze(scale))).sigmoid()
        x = F.relu(self.project(x * scale))
        return self.head(x.mean((2, 3)))


class TwoStreams(nn.Module):
    """The product of two branches is zero wherever one of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 5, 3, padding=1)
        self.right = nn.Conv2d(3, 5, 1, bias=False)
        self.right_bn = nn.BatchNorm2d(5)
        self.mix = nn.Conv2d(5, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.left(x)) * self.right_bn(self.right(x))
        return self.head(F.relu(self.mix(x)).mean((2, 3)))


class SelectiveSum(nn.Module):
    """Branches stacked and summed, and a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Conv2d(3, 5, 1)
        self.large = nn.Conv2d(3, 5, 3, padding=1)
        self.mean = nn.Conv2d(3, 5, 1)
        self.mix = nn.Conv2d(5, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([F.relu(self.small(x)), F.relu(self.large(x))], dim=1).sum(1)
        x = both - 0.5 * self.mean(x)
        return self.head(F.relu(self.mix(x)).mean((2, 3)))


class StochasticDepth(nn.Module):
    """timm's DropPath: in training, whole examples skip a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.branch1 = nn.Conv2d(4, 4, 3, padding=1)
        self.branch2 = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def drop(self, x: Tensor, keep: float = 0.5) -> Tensor:
        if not self.training:
            return x
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.drop(self.branch1(F.relu(x)))
        x = x + self.drop(self.branch2(F.relu(x)))
        return self.head(F.relu(x).mean((2, 3)))


STAGE1, STAGE2 = "conv1 layer1.0.conv2 layer1.1.conv2", "layer2.0.downsample.0 layer2.0.conv2 layer2.1.conv2"
# Channel 3 of the second stage is channel 1 of the first, behind two channels of zeros.
TYPE_A = {"conv1": [1], "b": [3]}

RECIPES: dict[str, Recipe] = {
    "resnet": Recipe(
        ResNet,
        (3, 6, 6),
        "conv1>bn1 layer1.0.conv1>layer1.0.bn1 layer1.0.conv2>layer1.0.bn2 layer1.1.conv1>layer1.1.bn1"
        " layer1.1.conv2>layer1.1.bn2 layer2.0.conv1>layer2.0.bn1 layer2.0.conv2>layer2.0.bn2"
        " layer2.0.downsample.0>layer2.0.downsample.1 layer2.1.conv1>layer2.1.bn1 layer2.1.conv2>layer2.1.bn2",
        narrows=[
            ("layer1.0.conv1", STAGE1),
            ("layer1.1.conv1", STAGE1),
            ("layer2.0.conv1", STAGE1),
            ("layer2.0.downsample.0", STAGE1),
            ("layer1.0.conv2", "layer1.0.conv1"),
            ("layer2.1.conv1", STAGE2),
            ("fc", STAGE2),
        ],
        whole="layer1.0.conv2 layer1.1.conv1 layer2.0.conv2 layer2.0.downsample.0 layer2.1.conv2",
    ),
    "resnet-preact": Recipe(
        PreActNet,
        (3, 4, 4),
        "stem blocks.0.conv1>blocks.0.bn2 blocks.0.conv2 blocks.1.conv1>blocks.1.bn2 blocks.1.conv2",
        narrows=[
            ("blocks.0.bn1", "stem blocks.0.conv2 blocks.1.conv2"),
            ("blocks.1.conv1", "stem blocks.0.conv2 blocks.1.conv2"),
            ("blocks.1.conv2", "blocks.1.conv1"),
            ("head", "stem blocks.0.conv2 blocks.1.conv2"),
        ],
        whole="blocks.0.conv2 blocks.1.conv1",
    ),
    "resnet-type-a": Recipe(
        TypeA,
        (3, 4, 4),
        "conv1>bn1 a>bn_a b>bn_b",
        narrows=[("a", TYPE_A), ("linear", TYPE_A), ("b", "a")],
        whole="b a",
    ),
    "densenet": Recipe(
        DenseNet,
        (3, 4, 4),
        "conv0 layers.0.conv1>layers.0.norm2 layers.0.conv2 layers.1.conv1>layers.1.norm2 layers.1.conv2 transition",
        narrows=[
            ("layers.0.norm1", "conv0"),
            ("layers.0.conv1", "conv0"),
            ("layers.1.conv1", "conv0"),
            ("layers.1.conv1", "layers.0.conv2"),
            ("transition", "conv0 layers.0.conv2 layers.1.conv2"),
            ("norm", "layers.1.conv2"),
            ("classifier", "transition"),
        ],
        whole="layers.0.conv2 layers.0.conv1 layers.1.conv2",
    ),
    "inception": Recipe(
        Inception,
        (3, 6, 6),
        "stem branch1 branch3.0>branch3.1 branch3.3 mix",
        narrows=[
            ("mix", "branch1 branch3.3"),
            ("mix", "stem"),
            ("branch1", "stem"),
            ("branch3.0", "stem"),
            ("branch3.3", "branch3.0"),
        ],
        whole="branch1 branch3.3 branch3.0",
    ),
    "coordconv": Recipe(CoordConv, (2, 4, 4), "conv mix", narrows=[("mix", "conv"), ("head", "mix")], whole="conv mix"),
    "unet": Recipe(
        UNet,
        (2, 6, 6),
        "down1.0>down1.1 down2.0>down2.1 fuse",
        narrows=[("down2.0", "down1.0"), ("fuse", "down1.0"), ("fuse", "down2.0"), ("out", "fuse")],
        whole="down2.0",
    ),
    "squeeze-excite": Recipe(
        SqueezeExcite,
        (3, 4, 4),
        "conv>bn squeeze excite project",
        narrows=[("squeeze", "conv"), ("project", "conv"), ("excite", "squeeze"), ("head", "project")],
        frees=[("excite", "conv")],
        whole="squeeze excite",
    ),
    "two-streams": Recipe(
        TwoStreams,
        (3, 4, 4),
        "left right>right_bn mix",
        narrows=[("mix", "left right"), ("mix", "left"), ("mix", "right")],
        frees=[("right", "left"), ("left", "right")],
    ),
    "selective-sum": Recipe(
        SelectiveSum,
        (3, 4, 4),
        "small large mean mix",
        narrows=[("mix", "small large mean"), ("head", "mix")],
        whole="small large mean",
    ),
    "stochastic-depth": Recipe(
        StochasticDepth,
        (3, 4, 4),
        "stem branch1 branch2",
        narrows=[("branch1", "stem branch1 branch2"), ("head", "stem branch1 branch2")],
        whole="branch1 branch2",
    ),
}
