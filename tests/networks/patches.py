"""Pictures cut into patches and windows, and put together again."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.recipe import Recipe


class PatchConv(nn.Module):
    """ViT's patch embedding, behind a convolutional stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(5)
        self.proj = nn.Conv2d(5, 6, 2, stride=2)
        self.fc = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(F.relu(self.bn(self.stem(x)))).flatten(2).transpose(1, 2)
        return self.head(F.gelu(self.fc(F.gelu(x))).mean(1))


class PatchLinear(nn.Module):
    """The same by reshaping: a channel of the stem is four columns of the linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.proj = nn.Linear(20, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
        return self.head(F.gelu(self.proj(x.reshape(b, h * w // 4, c * 4))).mean(1))


class Unfold(nn.Module):
    """A convolution spelled out: F.unfold, a linear layer, F.fold."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.fc = nn.Linear(5 * 9, 6)
        self.spread = nn.Linear(6, 4 * 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        patches = F.unfold(x, 3, stride=2, padding=1).transpose(1, 2)
        out = self.spread(F.relu(self.fc(patches))).transpose(1, 2)
        out = F.fold(out, x.shape[-2:], 2, stride=2)
        return self.head(F.relu(out).mean((2, 3)))


class TensorUnfold(nn.Module):
    """Windows by Tensor.unfold, their means weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.mix = nn.Conv2d(20, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).unfold(2, 2, 2).unfold(3, 2, 2)
        x = x.permute(0, 1, 4, 5, 2, 3).flatten(1, 3)
        return self.head(F.relu(self.mix(x)).mean((2, 3)))


class PatchMerging(nn.Module):
    """Swin's: four neighbours side by side, normalised, half the width."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(20) if norm else nn.Identity()
        self.reduction = nn.Linear(20, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.embed(x))
        x0, x1 = x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :]
        x2, x3 = x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]
        x = self.reduction(self.norm(torch.cat([x0, x1, x2, x3], -1)))
        return self.head(F.gelu(x).mean((1, 2)))


class SwinBlock(nn.Module):
    """Shifted windows: roll, cut, attend inside each, put together, roll back, add; then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.norm1 = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.proj = nn.Linear(4, 4)
        self.norm2 = nn.LayerNorm(4)
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)
        self.bias_table = nn.Parameter(torch.zeros(9, 2))
        corner = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = corner[:, :, None] - corner[:, None, :] + 1
        self.register_buffer("index", 3 * apart[0] + apart[1])

    def windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, 4, c)

    def attend(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        attn = (q * 2**-0.5) @ k.transpose(-2, -1)
        bias = self.bias_table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1)
        attn = (attn + bias.unsqueeze(0)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        b, h, w, c = x.shape
        shifted = torch.roll(self.norm1(x), shifts=(-1, -1), dims=(1, 2))
        out = self.attend(self.windows(shifted))
        out = out.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(out, shifts=(1, 1), dims=(1, 2))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(x.mean((1, 2)))


RECIPES: dict[str, Recipe] = {
    "patch-conv": Recipe(
        PatchConv, (3, 4, 4), "stem>bn proj fc", narrows=[("proj", "stem"), ("fc", "proj"), ("head", "fc")]
    ),
    "patch-linear": Recipe(PatchLinear, (3, 4, 4), "stem proj", narrows=[("proj", "stem"), ("head", "proj")]),
    # A channel of the fold is four rows of the linear layer in front of it.
    "unfold": Recipe(
        Unfold,
        (3, 4, 4),
        "stem fc spread",
        narrows=[
            ("spread", "fc"),
            ("head", {"spread": [4, 5, 6, 7]}),
        ],  # the zeros of im2col's padding hold fc's inputs
    ),
    "tensor-unfold": Recipe(TensorUnfold, (3, 4, 4), "stem mix", narrows=[("mix", "stem"), ("head", "mix")]),
    "patch-merging": Recipe(
        lambda: PatchMerging(norm=True), (4, 4, 3), "embed reduction", narrows=[("head", "reduction")]
    ),
    "patch-merging-plain": Recipe(
        lambda: PatchMerging(norm=False),
        (4, 4, 3),
        "embed reduction",
        narrows=[("reduction", "embed"), ("head", "reduction")],
    ),
    # LayerNorm counts the zeros of the stream, and the width of a head is read off the stream.
    "swin": Recipe(SwinBlock, (4, 4, 3), "embed qkv proj fc1 fc2", narrows=[("fc2", "fc1")], whole="proj fc1 fc2"),
}
