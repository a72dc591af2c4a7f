"""Normalisations, and other parameters that belong to a channel: which of them keep a zero a zero."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.recipe import Recipe


class Behind(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, between: nn.Module, width: int = 6, bias: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=bias)
        self.between = between
        self.conv2 = nn.Conv2d(width, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(self.between(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class FrozenBatchNorm2d(nn.Module):
    """torchvision's: constants in buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.ones(width))
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight.reshape(1, -1, 1, 1), self.bias.reshape(1, -1, 1, 1)
        rv, rm = self.running_var.reshape(1, -1, 1, 1), self.running_mean.reshape(1, -1, 1, 1)
        scale = w * (rv + 1e-5).rsqrt()
        return x * scale + (b - rm * scale)


class Affine(nn.Module):
    """ResMLP's: a scale and a shift per channel, which is no normalisation: a zero comes out as the shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(width, 1, 1))
        self.beta = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class LayerScale(nn.Module):
    """A scale per channel: a zero stays a zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.view(1, -1, 1, 1)


class GlobalResponse(nn.Module):
    """ConvNeXt V2's GRN: each channel divided by the mean norm of all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, width, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        g = torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)
        n = g / (g.mean(dim=1, keepdim=True) + 1e-6)
        return self.gamma * (x * n) + self.beta + x


class RMSNorm(nn.Module):
    """Llama's, by hand: the mean counts the zeros, so its width must stay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Tokens(nn.Module):
    """A residual stream of tokens with a normalisation in front of every reader."""

    def __init__(self, norm1: nn.Module, norm2: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.norm1 = norm1
        self.fc1 = nn.Linear(5, 6)
        self.fc2 = nn.Linear(6, 5)
        self.norm2 = norm2
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.fc2(F.gelu(self.fc1(self.norm1(x))))
        return self.head(self.norm2(x).mean(1))


class ConvNeXt(nn.Module):
    """Depthwise 7x7, channels last, LayerNorm, two linear layers, layer scale, back and added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2, stride=2)
        self.dwconv = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm = nn.LayerNorm(4, eps=1e-6)
        self.pwconv1 = nn.Linear(4, 8)
        self.pwconv2 = nn.Linear(8, 4)
        self.gamma = nn.Parameter(1e-6 * torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = x = self.stem(x)
        x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = self.pwconv2(F.gelu(self.pwconv1(x)))
        x = skip + (self.gamma * x).permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


class BatchNormOfTokens(nn.Module):
    """Batch norm over the channels of tokens, with a transpose before it: not the layer's own, but dead with it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 5)
        self.bn = nn.BatchNorm1d(5)
        self.fc2 = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.fc1(x).transpose(1, 2)).transpose(1, 2)
        return self.head(F.relu(self.fc2(F.relu(x))).mean(1))


class BatchNormOfNeurons(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6, bias=False)
        self.bn1 = nn.BatchNorm1d(6)
        self.fc2 = nn.Linear(6, 5)
        self.bn2 = nn.BatchNorm1d(5, affine=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.fc1(x)))
        return self.head(F.relu(self.bn2(self.fc2(x))))


class SharedBatchNorm(nn.Module):
    """One batch norm for two layers: it is nobody's own, and a channel of it is live if either side is."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 5, 3, padding=1)
        self.right = nn.Conv2d(3, 5, 1)
        self.bn = nn.BatchNorm2d(5)
        self.mix = nn.Conv2d(10, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([F.relu(self.bn(self.left(x))), F.relu(self.bn(self.right(x)))], 1)
        return self.head(F.relu(self.mix(x)).mean((2, 3)))


FROM_CONV1 = [("conv2", "conv1"), ("between", "conv1"), ("head", "conv2")]
ROWS_ONLY = [("head", "conv2")]  # conv1 loses rows, zeros are put back, conv2 keeps its columns
TOKEN_LAYERS = "embed fc1 fc2"

RECIPES: dict[str, Recipe] = {
    "batchnorm": Recipe(
        lambda: Behind(nn.BatchNorm2d(6), bias=False), (3, 4, 4), "conv1>between conv2", narrows=FROM_CONV1
    ),
    "batchnorm-neurons": Recipe(
        BatchNormOfNeurons,
        (4,),
        "fc1>bn1 fc2>bn2",
        narrows=[("fc2", "fc1"), ("bn1", "fc1"), ("bn2", "fc2"), ("head", "fc2")],
    ),
    "batchnorm-tokens": Recipe(
        BatchNormOfTokens, (6, 3), "fc1 fc2", narrows=[("fc2", "fc1"), ("bn", "fc1"), ("head", "fc2")]
    ),
    # ReLU first: the norm is not conv1's own, but its input is zero with conv1's channel.
    "batchnorm-behind-relu": Recipe(
        lambda: Behind(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(6), nn.MaxPool2d(1))),
        (3, 4, 4),
        "conv1 conv2",
        narrows=[("conv2", "conv1"), ("between.1", "conv1"), ("head", "conv2")],
    ),
    "batchnorm-shared": Recipe(
        SharedBatchNorm, (3, 4, 4), "left right mix", narrows=[("head", "mix")], whole="left right"
    ),
    "instancenorm": Recipe(
        lambda: Behind(nn.InstanceNorm2d(6, affine=True)), (3, 4, 4), "conv1>between conv2", narrows=FROM_CONV1
    ),
    "frozen-batchnorm": Recipe(
        lambda: Behind(FrozenBatchNorm2d(6)), (3, 4, 4), "conv1>between conv2", narrows=FROM_CONV1
    ),
    "affine": Recipe(lambda: Behind(Affine(6)), (3, 4, 4), "conv1 conv2", narrows=ROWS_ONLY),
    "groupnorm": Recipe(
        lambda: Behind(nn.Sequential(nn.GroupNorm(2, 6), nn.ReLU())), (3, 4, 4), "conv1 conv2", narrows=ROWS_ONLY
    ),
    "response-norm": Recipe(lambda: Behind(GlobalResponse(6)), (3, 4, 4), "conv1 conv2", narrows=ROWS_ONLY),
    "local-response-norm": Recipe(
        lambda: Behind(nn.LocalResponseNorm(3)), (3, 4, 4), "conv1 conv2", narrows=ROWS_ONLY
    ),
    "prelu": Recipe(lambda: Behind(nn.PReLU(6)), (3, 4, 4), "conv1 conv2", narrows=FROM_CONV1),
    "prelu-single": Recipe(
        lambda: Behind(nn.PReLU()), (3, 4, 4), "conv1 conv2", narrows=[("conv2", "conv1"), ("head", "conv2")]
    ),
    "layer-scale": Recipe(
        lambda: Behind(LayerScale(6)), (3, 4, 4), "conv1 conv2", narrows=[("conv2", "conv1"), ("head", "conv2")]
    ),
    "layernorm-neurons": Recipe(
        lambda: Tokens(nn.LayerNorm(5), nn.LayerNorm(5, bias=False)), (4, 3), TOKEN_LAYERS, narrows=[("fc2", "fc1")],
        whole="fc1 fc2",
    ),
    "rmsnorm": Recipe(
        lambda: Tokens(RMSNorm(5), nn.RMSNorm(5)), (4, 3), TOKEN_LAYERS, narrows=[("fc2", "fc1")], whole="fc1 fc2"
    ),
    "convnext": Recipe(
        ConvNeXt,
        (3, 8, 8),
        "stem dwconv pwconv1 pwconv2",
        # dwconv turns a zero of the stream into its bias, which LayerNorm needs: the stream keeps its width.
        narrows=[("pwconv2", "pwconv1")],
        fixed="dwconv",
        whole="pwconv2 pwconv1",
    ),
}  # fmt: skip
