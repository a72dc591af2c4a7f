"""Operations that look across channels or turn zeros into something else: rows go, zeros are put back behind them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.movement import Between
from networks.recipe import Recipe


class Sigmoid(Between):
    """A removed channel comes out as 0.5."""

    def move(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class Hardsigmoid(Between):
    def move(self, x: Tensor) -> Tensor:
        return F.hardsigmoid(x) * 2


class BiasBehind(Between):
    """A bias of the network's own, added behind the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def move(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bias[None, :, None, None])


class SoftmaxChannels(Between):
    def move(self, x: Tensor) -> Tensor:
        return F.softmax(x, dim=1)


class Cumulative(Between):
    def move(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Normalise(Between):
    """Unit vectors: zeros do not count, so that an implementation could drop them; putting them back is exact too."""

    def move(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1)


class SpatialAttention(Between):
    """CBAM: the mean and the largest of all channels at a pixel weigh that pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Conv2d(2, 1, 3, padding=1)

    def move(self, x: Tensor) -> Tensor:
        seen = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * torch.sigmoid(self.attend(seen))


class Maxout(Between):
    """The larger of two neighbours: both must go."""

    def __init__(self) -> None:
        super().__init__(4)

    def move(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return x.view(b, c // 2, 2, h, w).amax(2)


class Gated(Between):
    """F.glu: one half times the sigmoid of the other."""

    def __init__(self) -> None:
        super().__init__(4)

    def move(self, x: Tensor) -> Tensor:
        return F.glu(x, dim=1)


class Where(Between):
    """Leaky ReLU and thresholds by comparison."""

    def move(self, x: Tensor) -> Tensor:
        x = torch.where(x > 0.2, x, 0.1 * x)
        return x.masked_fill(x > 2, 2.0)


class Larger(nn.Module):
    """The larger of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 5, 3, padding=1)
        self.b = nn.Conv2d(3, 5, 1)
        self.mix = nn.Conv2d(5, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.maximum(self.a(x), self.b(x))
        return self.head(F.relu(self.mix(x)).mean((2, 3)))


class Gram(nn.Module):
    """Second moments of the channels, flattened: a removed channel is a row and a column of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(16, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        f = F.relu(self.conv(x)).flatten(2)
        gram = torch.bmm(f, f.transpose(1, 2)) / f.shape[2]
        return self.head(F.relu(self.fc(gram.flatten(1))))


class Film(nn.Module):
    """A condition scales and shifts the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.film = nn.Linear(2, 8)
        self.mix = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.film(x.mean((2, 3))).chunk(2, dim=1)
        x = self.bn(self.conv(x)) * scale[..., None, None] + shift[..., None, None]
        return self.head(F.relu(self.mix(F.relu(x))).mean((2, 3)))


class DynamicFilter(nn.Module):
    """A linear layer writes the filters of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.write = nn.Linear(2, 12)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        filters = self.write(x.mean((0, 2, 3))).view(3, 4, 1, 1)
        return self.head(F.relu(F.conv2d(F.relu(self.conv(x)), filters)).mean((2, 3)))


class Recurrent(nn.Module):
    """A recurrent network behind a convolution, another behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 3, padding=1)
        self.lstm = nn.LSTM(5, 4, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 4, batch_first=True)
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(F.relu(self.conv(x)).transpose(1, 2))
        x, _ = self.gru(x)
        return self.head(F.relu(self.fc(x[:, -1])))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 5)
        self.right = nn.Linear(4, 5)
        self.both = nn.Bilinear(5, 5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.both(F.relu(self.left(x)), torch.tanh(self.right(x)))))


LAYERS = "conv1 conv2"
HEAD = ("head", "conv2")

RECIPES: dict[str, Recipe] = {
    "sigmoid": Recipe(Sigmoid, (3, 4, 4), LAYERS, narrows=[HEAD]),
    "hardsigmoid": Recipe(Hardsigmoid, (3, 4, 4), LAYERS, narrows=[HEAD]),
    "bias-behind": Recipe(BiasBehind, (3, 4, 4), LAYERS, narrows=[HEAD]),
    "softmax-channels": Recipe(SoftmaxChannels, (3, 4, 4), LAYERS, narrows=[HEAD]),
    "cumsum": Recipe(Cumulative, (3, 4, 4), LAYERS, narrows=[HEAD]),
    "normalise": Recipe(Normalise, (3, 4, 4), LAYERS, narrows=[HEAD]),
    # Without the only channel of "attend" every pixel weighs 0.5.
    "spatial-attention": Recipe(
        SpatialAttention, (3, 4, 4), "conv1 attend conv2", narrows=[HEAD], by={"attend": [0]}, fixed="attend",
        whole="attend",
    ),
    "maxout": Recipe(Maxout, (3, 4, 4), LAYERS, narrows=[("conv2", {"conv1": [2, 3]}), HEAD]),
    "glu": Recipe(Gated, (3, 4, 4), LAYERS, narrows=[("conv2", {"conv1": [1, 5]}), HEAD]),
    "where": Recipe(Where, (3, 4, 4), LAYERS, narrows=[("conv2", "conv1"), HEAD]),
    "maximum": Recipe(Larger, (3, 4, 4), "a b mix", narrows=[("mix", "a b"), ("head", "mix")], whole="a b"),
    "gram": Recipe(Gram, (3, 4, 4), "conv fc", narrows=[("head", "fc")]),
    "film": Recipe(
        Film, (2, 4, 4), "film conv>bn mix", narrows=[("mix", {"conv": [1], "film": [1, 5]}), ("head", "mix")],
        whole="conv",
    ),
    "dynamic-filter": Recipe(DynamicFilter, (2, 4, 4), "write conv"),
    "recurrent": Recipe(Recurrent, (3, 5), "conv fc", narrows=[("head", "fc")]),
    "bilinear": Recipe(Bilinear, (4,), "left right"),
}  # fmt: skip
