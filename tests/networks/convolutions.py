"""Convolutions of every kind: depthwise, grouped, transposed, in one and three dimensions, and what lies behind."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.recipe import Recipe


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, filter each channel by itself, project, add."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(4)
        self.conv = nn.Sequential(
            nn.Conv2d(4, 8, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(inplace=True),
            nn.Conv2d(8, 4, 1, bias=False),
            nn.BatchNorm2d(4),
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.stem_bn(self.stem(x)))
        x = x + self.conv(x)
        return self.head(x.mean((2, 3)))


class MobileNetV3(nn.Module):
    """Depthwise filters, squeeze and excitation, hard activations, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Hardswish())
        self.expand = nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.filter = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8))
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 8, 1), nn.Hardsigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.classifier = nn.Sequential(nn.Linear(4, 6), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = F.hardswish(self.filter(self.expand(x)))
        out = self.project(self.squeeze(out) * out)
        return self.classifier((x + out).mean((2, 3)))


class DepthwiseBias(nn.Module):
    """A depthwise filter with a bias: a removed channel in front of it comes out as that bias."""

    def __init__(self) -> None:
        super().__init__()
        self.pointwise = nn.Conv2d(3, 6, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.project = nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.depthwise(F.relu(self.pointwise(x))))
        return self.head(F.relu(self.project(x)).mean((2, 3)))


class DepthwiseMultiplier(nn.Module):
    """Two filters per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.pointwise = nn.Conv2d(3, 4, 1)
        self.depthwise = nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.project = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.depthwise(F.relu(self.pointwise(x)))))
        return self.head(F.relu(self.project(x)).mean((2, 3)))


class ResNeXt(nn.Module):
    """A bottleneck whose middle convolution has two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv1 = nn.Conv2d(4, 8, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        x = F.relu(x + self.bn3(self.conv3(out)))
        return self.head(x.mean((2, 3)))


class Decoder(nn.Module):
    """DCGAN's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 5)
        self.up1 = nn.ConvTranspose2d(5, 6, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.up2 = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.out = nn.ConvTranspose2d(4, 2, 1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.project(z)[:, :, None, None]
        x = F.relu(self.bn1(self.up1(x)))
        return torch.tanh(self.out(F.relu(self.up2(x))))


class GroupedDecoder(nn.Module):
    """Transposed convolutions in groups: two, and one per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.grouped = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.single = nn.ConvTranspose2d(6, 6, 2, groups=6, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.grouped(F.relu(self.conv(x))))
        return self.out(F.relu(self.bn(self.single(x))))


class Temporal(nn.Module):
    """A causal convolution over time: padded on both sides, then trimmed, as TCN does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 5, 3, padding=2)
        self.conv2 = nn.Conv1d(5, 5, 3, padding=4, dilation=2)
        self.downsample = nn.Conv1d(3, 5, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(x)[:, :, :-2].contiguous())
        out = F.relu(self.conv2(out)[:, :, :-4].contiguous())
        return self.head(F.relu(out + self.downsample(x))[:, :, -1])


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(2, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm3d(4)
        self.pool = nn.MaxPool3d((1, 2, 2))
        self.conv2 = nn.Conv3d(4, 5, (3, 1, 1))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        return self.head(F.relu(self.conv2(x)).mean((2, 3, 4)))


class LeNet(nn.Module):
    """Convolutions flattened into a linear layer: every channel is one column per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2))
        self.fc1 = nn.Linear(5 * 2 * 2, 6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.features(x))
        x = x.view(x.size(0), -1)
        return self.fc2(F.relu(self.fc1(x)))


class LeNetConstant(LeNet):
    """The same with the width in the code. A narrower input would quietly give another number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.features(x)).view(-1, 5 * 2 * 2)
        return self.fc2(F.relu(self.fc1(x)))


class Padded(nn.Module):
    """Borders that repeat or reflect the picture; pooling, interpolation and reflection by function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
        self.conv2 = nn.Conv2d(4, 5, 3, padding=1, padding_mode="circular")
        self.conv3 = nn.Conv2d(5, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.leaky_relu(self.conv1(x)), 2)
        x = F.interpolate(F.elu(self.conv2(x)), scale_factor=2, mode="nearest")
        x = F.relu(self.conv3(F.pad(x, (1, 1, 1, 1), mode="replicate")))
        return self.head(F.adaptive_max_pool2d(x, 1).flatten(1))


class Unbatched(nn.Module):
    """One picture without a batch dimension: its channels are in front."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(5, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.mean((1, 2)))


def one_picture(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)


RECIPES: dict[str, Recipe] = {
    "inverted-residual": Recipe(
        InvertedResidual,
        (3, 4, 4),
        "stem>stem_bn conv.0>conv.1 conv.3>conv.4 conv.6>conv.7",
        narrows=[
            ("conv.3", "conv.0"),
            ("conv.4", "conv.0"),
            ("conv.6", "conv.0"),
            ("conv.6", "conv.3"),
            ("conv.0", "stem conv.6"),
            ("head", "stem conv.6"),
        ],
        frees=[("conv.0", "conv.3"), ("conv.3", "conv.0")],
        whole="conv.6 conv.3",
    ),
    "mobilenet-v3": Recipe(
        MobileNetV3,
        (3, 4, 4),
        "stem.0>stem.1 expand.0>expand.1 filter.0>filter.1 squeeze.1 squeeze.3 project.0>project.1 classifier.0",
        narrows=[
            ("filter.0", "expand.0"),
            ("squeeze.1", "expand.0"),
            ("project.0", "filter.0"),
            ("expand.0", "stem.0 project.0"),
            ("classifier.0", "stem.0 project.0"),
        ],
        frees=[("squeeze.3", "expand.0"), ("expand.0", "filter.0")],
        whole="project.0 squeeze.1 squeeze.3",
    ),
    # Channel 1 of the pointwise layer comes out of the depthwise one as a constant: its rows go, zeros are put back.
    "depthwise-bias": Recipe(
        DepthwiseBias,
        (3, 4, 4),
        "pointwise depthwise project",
        narrows=[("project", "depthwise"), ("project", "pointwise depthwise"), ("depthwise", "pointwise depthwise")],
        frees=[("pointwise", "depthwise")],
    ),
    "depthwise-multiplier": Recipe(
        DepthwiseMultiplier,
        (3, 4, 4),
        "pointwise depthwise>bn project",
        narrows=[
            ("project", {"depthwise": [2, 3]}),
            ("project", "pointwise"),
            ("depthwise", "pointwise"),
            ("bn", "pointwise"),
        ],
        frees=[("pointwise", {"depthwise": [2, 3]})],
        by={"depthwise": [2, 3]},
    ),
    # Every group must lose as many channels as the others, or all of them.
    "resnext": Recipe(
        ResNeXt,
        (3, 4, 4),
        "stem conv1>bn1 conv2>bn2 conv3>bn3",
        narrows=[
            ("conv2", {"conv1": [1, 6]}),
            ("conv3", {"conv2": [1, 6]}),
            ("conv3", {"conv2": [4, 5, 6, 7]}),
            ("conv2", {"conv2": [4, 5, 6, 7], "conv1": [4, 5, 6, 7]}),
            ("head", "stem conv3"),
        ],
        frees=[("conv1", {"conv2": [4, 5, 6, 7]})],
        by={"conv2": [1, 6]},
        whole="conv3 conv2",
    ),
    "transposed-stack": Recipe(
        Decoder,
        (3,),
        "project up1>bn1 up2",
        narrows=[("up1", "project"), ("up2", "up1"), ("out", "up2")],
    ),
    "transposed-grouped": Recipe(
        GroupedDecoder,
        (2, 3, 3),
        "conv grouped single>bn",
        narrows=[
            ("grouped", {"conv": [1, 2]}),
            ("single", {"grouped": [1, 3]}),
            ("out", {"grouped": [1, 3]}),
            ("out", {"single": [1, 3]}),
        ],
        by={"grouped": [1, 3], "single": [1, 3]},
    ),
    "conv1d-blocks": Recipe(
        Temporal,
        (3, 6),
        "conv1 conv2 downsample",
        narrows=[("conv2", "conv1"), ("head", "conv2 downsample")],
        whole="conv2 downsample",
    ),
    "conv3d": Recipe(Video, (2, 3, 4, 4), "conv1>bn1 conv2", narrows=[("conv2", "conv1"), ("head", "conv2")]),
    "flatten": Recipe(
        LeNet,
        (2, 6, 6),
        "features.0 features.3 fc1",
        narrows=[("features.3", "features.0"), ("fc1", "features.3"), ("fc2", "fc1")],
    ),
    # fc1 keeps its columns: zeros are scattered back in front of the view.
    "flatten-constant": Recipe(
        LeNetConstant,
        (2, 6, 6),
        "features.0 features.3 fc1",
        narrows=[("features.3", "features.0"), ("fc2", "fc1")],
    ),
    "padding": Recipe(
        Padded,
        (2, 6, 6),
        "conv1 conv2 conv3",
        narrows=[("conv2", "conv1"), ("conv3", "conv2"), ("head", "conv3")],
    ),
    # Without a batch only the zeros are put in place: no layer gets smaller.
    "unbatched": Recipe(Unbatched, one_picture, "conv1 conv2", fixed="conv1 conv2"),
}
