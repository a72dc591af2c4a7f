"""Weights that are shared, computed or used in more than one place, and layers that run in train mode only."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from networks.recipe import Recipe, floats


class Twice(nn.Module):
    """One layer applied two times: its input is another's output and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        self.twice = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.twice(x))
        return self.head(F.relu(self.twice(x)))


class TwiceWithNorms(nn.Module):
    """One convolution, a batch norm of its own for every application."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for norm in self.norms:
            x = x + F.relu(norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


class TwoNames(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.block = nn.ModuleDict({"same": self.first, "other": nn.Linear(6, 4)})
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block["other"](F.relu(self.first(x)))
        return self.head(F.relu(self.block["same"](F.relu(x))))


class Siamese(nn.Module):
    """Two inputs through one encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
        self.head = nn.Linear(15, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.encoder(a), self.encoder(b)
        return self.head(torch.cat([a, b, (a - b).abs()], -1))


class TiedLinears(nn.Module):
    """Two layers with one weight; a mask may name the first only, so the weight keeps its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        self.fc1 = nn.Linear(5, 5)
        self.fc2 = nn.Linear(5, 5)
        self.fc2.weight = self.fc1.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(F.relu(self.stem(x))))
        return self.head(F.relu(self.fc2(x)))


class TiedTranspose(nn.Module):
    """An autoencoder whose decoder is the transpose of its encoder, outside of any module."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 6)
        self.bias = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.encode(x))
        return self.head(F.relu(F.linear(hidden, self.encode.weight.t(), self.bias)))


class Auxiliary(nn.Module):
    """A second head that runs in train mode only: what it reads gets narrower all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 4, 3, padding=1)
        self.aux = nn.Sequential(nn.Conv2d(5, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.relu(self.bn1(self.conv1(x)))
        out = self.head(F.relu(self.conv2(x)).mean((2, 3)))
        return (out, self.aux(x)) if self.training else out


class EvalOnly(nn.Module):
    """The other way round: test-time averaging over a flip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(5, 4, 3, padding=1)
        self.smooth = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        if not self.training:
            x = x + self.smooth(x.flip(-1))
        return self.head(x.mean((2, 3)))


class StandardisedConv2d(nn.Conv2d):
    """Each filter is standardised over its inputs: filters may go, inputs may not."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        std = self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (std + 1e-5), self.bias, padding=self.padding)


class Computed(nn.Module):
    """Two layers whose weight is computed on the way."""

    def __init__(self, conv1: nn.Module, conv2: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv1, conv2
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class Halved(nn.Module):
    """A user's own parametrisation, elementwise."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def standardised() -> nn.Module:
    return Computed(StandardisedConv2d(3, 6, 3, padding=1), StandardisedConv2d(6, 4, 3, padding=1))


def weight_norm() -> nn.Module:
    convs = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
    return Computed(*map(parametrizations.weight_norm, convs))


def spectral_norm() -> nn.Module:
    convs = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
    return Computed(*map(parametrizations.spectral_norm, convs))


def halved() -> nn.Module:
    convs = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
    for conv in convs:
        parametrize.register_parametrization(conv, "weight", Halved())
    return Computed(*convs)


CONVS = "conv1 conv2"

RECIPES: dict[str, Recipe] = {
    "twice": Recipe(Twice, (3,), "stem twice", narrows=[("twice", "stem twice"), ("head", "stem twice")]),
    "twice-with-norms": Recipe(
        TwiceWithNorms, (3, 4, 4), "stem conv>norms.0,norms.1",
        narrows=[("conv", "stem conv"), ("head", "stem conv")], whole="conv",
    ),
    "two-names": Recipe(
        TwoNames, (4,), "first block.other",
        narrows=[("block.other", "first"), ("head", "first")],
    ),
    "siamese": Recipe(
        Siamese, floats((4,), (4,)), "encoder.0 encoder.2",
        narrows=[("encoder.2", "encoder.0"), ("head", "encoder.2")],
    ),
    "tied-linears": Recipe(
        TiedLinears, (3,), "stem fc1", fixed="fc1", exclude="fc2",
    ),
    "tied-transpose": Recipe(TiedTranspose, (4,), "encode", fixed="encode"),
    "auxiliary": Recipe(
        Auxiliary, (3, 4, 4), "conv1>bn1 conv2",
        narrows=[("conv2", "conv1"), ("aux.0", "conv1"), ("head", "conv2")],
    ),
    "eval-only": Recipe(
        EvalOnly, (3, 4, 4), "conv1 conv2 smooth",
        narrows=[("conv2", "conv1"), ("head", "conv2"), ("smooth", "conv2")],
        fixed="smooth", whole="smooth",  # what it reads stays, for others
    ),
    # Rows go where each depends on itself alone; columns stay, the norm or mean over them would be another.
    "standardised": Recipe(standardised, (3, 4, 4), CONVS, narrows=[("head", "conv2")]),
    "weight-norm": Recipe(weight_norm, (3, 4, 4), CONVS, narrows=[("head", "conv2")]),
    "spectral-norm": Recipe(spectral_norm, (3, 4, 4), CONVS, fixed=CONVS, narrows=[("head", "conv2")]),
    "parametrised": Recipe(halved, (3, 4, 4), CONVS, narrows=[("head", "conv2")]),
}  # fmt: skip
