"""Networks that are scored: tiny, one per way that derivatives flow, small enough for a dense Hessian."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.joins import PostAct
from networks.recipe import Case, Recipe
from networks.sharing import Twice


def real_targets(case: Case) -> Tensor:
    """Targets for the squared loss: (N, D)."""
    classes = case.model.get_submodule(case.output).out_features
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(case.example), classes, generator=generator, dtype=torch.float64)


def _net(**modules: nn.Module) -> nn.Sequential:
    """A named chain."""
    return nn.Sequential(OrderedDict(modules))


def mlp(activation: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    return _net(
        fc1=nn.Linear(5, 7, bias=bias),
        act1=activation(),
        fc2=nn.Linear(7, 6, bias=bias),
        act2=activation(),
        head=nn.Linear(6, 4, bias=bias),
    )


def conv_bn() -> nn.Module:
    return _net(
        conv1=nn.Conv2d(2, 4, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(4),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(4, 5, 3, padding=1),
        bn2=nn.BatchNorm2d(5),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        head=nn.Linear(5 * 2 * 2, 3),
    )


def conv_nobn() -> nn.Module:
    return _net(
        conv1=nn.Conv2d(2, 4, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(4, 5, 3, stride=2),
        relu2=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(5, 4),
    )


def residual() -> nn.Module:
    return _net(
        conv1=nn.Conv2d(2, 3, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(3),
        relu=nn.ReLU(inplace=True),
        block1=PostAct(3, 2, 3),
        block2=PostAct(3, 3, 4, stride=2),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(4, 3),
    )


class Dense(nn.Module):
    """BN-ReLU-conv, concatenated behind its own input."""

    def __init__(self, width_in: int, growth: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(width_in)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(width_in, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(self.relu(self.bn(x)))], 1)


def preact() -> nn.Module:
    return _net(
        conv=nn.Conv2d(2, 3, 3, padding=1, bias=False),
        dense1=Dense(3, 2),
        dense2=Dense(5, 2),
        bn=nn.BatchNorm2d(7),
        relu=nn.ReLU(inplace=True),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(7, 3),
    )


class Concat(nn.Module):
    """Two branches of unequal width over the same input, concatenated, then a convolution over both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(2, 3, 1, bias=False)
        self.left_bn = nn.BatchNorm2d(3)
        self.right = nn.Conv2d(2, 4, 3, padding=1)
        self.mix = nn.Conv2d(7, 5, 2, bias=False)
        self.mix_bn = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((F.relu(self.left_bn(self.left(x))), F.relu(self.right(x))), dim=1)
        x = F.relu(self.mix_bn(self.mix(x)))
        return self.head(x.mean((2, 3)))


def depthwise() -> nn.Module:
    return _net(
        expand=nn.Conv2d(3, 6, 1, bias=False),
        bn1=nn.BatchNorm2d(6),
        act1=nn.ReLU6(inplace=True),
        depthwise=nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
        bn2=nn.BatchNorm2d(6),
        act2=nn.ReLU6(inplace=True),
        project=nn.Conv2d(6, 4, 1, bias=False),
        bn3=nn.BatchNorm2d(4),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(4, 3),
    )


def grouped() -> nn.Module:
    return _net(
        conv1=nn.Conv2d(2, 4, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(4),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(4, 6, 2, groups=2),
        bn2=nn.BatchNorm2d(6),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(6, 3, 2, groups=3),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        head=nn.Linear(3 * 2 * 2, 4),
    )


class SharedWithNorm(nn.Module):
    """One convolution applied twice, each time followed by the same BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.bn(self.conv(x)))
        x = F.relu(self.bn(self.conv(x)))
        return self.head(x.mean((2, 3)))


class LayerNorms(nn.Module):
    """LayerNorm mixes the channels of the layer before it, so it belongs to none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.fc2 = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.fc1(x)))
        return self.head(x + self.fc2(x))


def conv1d() -> nn.Module:
    return _net(
        conv1=nn.Conv1d(2, 4, 3, padding=1, bias=False),
        bn1=nn.BatchNorm1d(4),
        act1=nn.SiLU(),
        conv2=nn.Conv1d(4, 5, 3, stride=2),
        bn2=nn.BatchNorm1d(5),
        act2=nn.SiLU(),
        pool=nn.AdaptiveAvgPool1d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(5, 3),
    )


class Attention(nn.Module):
    """A pre-norm transformer block of 2 heads of size 2 over tokens of size 3, then the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(3)
        self.q = nn.Linear(3, 4)
        self.k = nn.Linear(3, 4)
        self.v = nn.Linear(3, 4)
        self.proj = nn.Linear(4, 3)
        self.norm2 = nn.LayerNorm(3)
        self.fc1 = nn.Linear(3, 5)
        self.fc2 = nn.Linear(5, 3)
        self.norm3 = nn.LayerNorm(3)
        self.head = nn.Linear(3, 4)

    def heads(self, x: Tensor) -> Tensor:
        """(N, T, 4) -> (N, 2, T, 2)."""
        return x.unflatten(-1, (2, 2)).transpose(1, 2)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(self.norm3(x).mean(1))


def linear_in_gates() -> nn.Module:
    return _net(fc=nn.Linear(4, 6), head=nn.Linear(6, 3))


def transposed() -> nn.Module:
    return _net(
        down=nn.Conv2d(2, 4, 3, stride=2),
        bn1=nn.BatchNorm2d(4),
        relu1=nn.ReLU(),
        up=nn.ConvTranspose2d(4, 5, 3, stride=2),
        bn2=nn.BatchNorm2d(5),
        relu2=nn.ReLU(),
        up_plain=nn.ConvTranspose2d(5, 3, 2),
        relu3=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(3, 4),
    )


RESIDUAL_LAYERS = """
    conv1>bn1 block1.conv1>block1.bn1 block1.conv2>block1.bn2 block2.conv1>block2.bn1 block2.conv2>block2.bn2
    block2.downsample.0>block2.downsample.1
"""

# Seeds are chosen so that no structure is dead.
RECIPES: dict[str, Recipe] = {
    "mlp": Recipe(mlp, (5,), "fc1 fc2", classes=4, seed=35),
    "mlp-nobias": Recipe(lambda: mlp(bias=False), (5,), "fc1 fc2", classes=4, seed=3),
    "conv-bn": Recipe(conv_bn, (2, 4, 4), "conv1>bn1 conv2>bn2", classes=3, seed=2),
    "conv-nobn": Recipe(conv_nobn, (2, 5, 5), "conv1 conv2", classes=4, seed=2),
    "residual": Recipe(residual, (2, 4, 4), RESIDUAL_LAYERS, classes=3, seed=3),
    "preact": Recipe(preact, (2, 4, 4), "conv dense1.conv dense2.conv", classes=3, seed=0),
    "concat": Recipe(Concat, (2, 4, 4), "left>left_bn right mix>mix_bn", classes=4, seed=0),
    "depthwise": Recipe(depthwise, (3, 4, 4), "expand>bn1 depthwise>bn2 project>bn3", classes=3, seed=0),
    "grouped": Recipe(grouped, (2, 4, 4), "conv1>bn1 conv2>bn2 conv3", classes=4, seed=9),
    "shared": Recipe(Twice, (3,), "stem twice", classes=3, seed=15),
    "softplus": Recipe(lambda: mlp(nn.Softplus), (5,), "fc1 fc2", classes=4, seed=0),
    "layernorm": Recipe(LayerNorms, (5,), "fc1 fc2", classes=4, seed=0),
    "conv1d": Recipe(conv1d, (2, 7), "conv1>bn1 conv2>bn2", classes=3, seed=0),
    "attention": Recipe(Attention, (4, 3), "q k v proj fc1 fc2", classes=4, seed=41),
    "linear-in-gates": Recipe(linear_in_gates, (4,), "fc", classes=3, seed=0),
    "transposed": Recipe(transposed, (2, 5, 5), "down>bn1 up>bn2 up_plain", classes=4, seed=67),
    "conv-in-bn-shared": Recipe(SharedWithNorm, (2, 4, 4), "stem conv>bn", classes=3, seed=0),
}
