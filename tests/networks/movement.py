"""Channels that are moved: split, sliced, shuffled, repeated, written into other tensors, and put back."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.recipe import Recipe


class Between(nn.Module):
    """A convolution to 8 channels, something in ``forward`` of the subclass, a convolution to 4 channels, a head."""

    def __init__(self, width_in: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(width_in, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def move(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.move(F.relu(self.conv1(x)))
        return self.head(F.relu(self.conv2(x)).mean((2, 3)))


class Chunk(nn.Module):
    """Two halves go two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Conv2d(4, 3, 3)
        self.right = nn.Conv2d(4, 3, 3)
        self.head = nn.Linear(6, 3)

    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.halves(F.relu(self.conv1(x)))
        y = torch.cat([self.left(a), self.right(b)], 1)
        return self.head(F.relu(y).mean((2, 3)))


class Split(Chunk):
    """The size of the parts is in the code."""

    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, [4, 4], dim=1)


class Slices(Chunk):
    """What lies behind the cut may get narrower; what lies before it may not."""

    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[:, :4], x[:, 4:]


class Interleaved(Chunk):
    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[:, 0::2], x[:, 1::2]


class Unbind(Chunk):
    def halves(self, x: Tensor) -> tuple[Tensor, ...]:
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).unbind(1)


class CrossStagePartial(nn.Module):
    """YOLO's C2f: one half goes through a block, both and the result are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.cv1 = nn.Conv2d(3, 8, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.cv2 = nn.Conv2d(12, 5, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = list(F.silu(self.bn1(self.cv1(x))).chunk(2, 1))
        y.append(y[-1] + self.inner(y[-1]))
        return self.head(F.silu(self.cv2(torch.cat(y, 1))).mean((2, 3)))


class Shuffle(Between):
    """ShuffleNet's channel shuffle; all sizes come from the tensor."""

    def move(self, x: Tensor) -> Tensor:
        b, c, h, w = x.size()
        x = x.view(b, 2, c // 2, h, w)
        return torch.transpose(x, 1, 2).contiguous().view(b, -1, h, w)


class ShuffleConstant(Between):
    """The same with the width in the code."""

    def move(self, x: Tensor) -> Tensor:
        b, _, h, w = x.size()
        return x.view(b, 2, 4, h, w).transpose(1, 2).reshape(b, 8, h, w)


class ShuffleModule(Between):
    def __init__(self) -> None:
        super().__init__()
        self.shuffle = nn.ChannelShuffle(4)

    def move(self, x: Tensor) -> Tensor:
        return self.shuffle(x)


class PixelShuffle(Between):
    """Four channels become one of twice the size."""

    def __init__(self) -> None:
        super().__init__(2)

    def move(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(x, 2)


class PixelUnshuffle(Between):
    def __init__(self) -> None:
        super().__init__(32)

    def move(self, x: Tensor) -> Tensor:
        return F.pixel_unshuffle(x, 2)


class Repeat(Between):
    """Every channel comes twice, in two orders."""

    def __init__(self) -> None:
        super().__init__(32)

    def move(self, x: Tensor) -> Tensor:
        return torch.cat([x.repeat(1, 2, 1, 1), x.repeat_interleave(2, dim=1)], 1)


class Reversed(Between):
    """Channels backwards, rolled and permuted through a buffer of indices."""

    def __init__(self) -> None:
        super().__init__(16)
        self.register_buffer("order", torch.tensor([3, 1, 4, 0, 5, 7, 2, 6]))

    def move(self, x: Tensor) -> Tensor:
        return torch.cat([x.flip(1), x[:, self.order]], 1)


class TokensAndBack(Between):
    """A linear layer over channels last, in the middle of a convolutional network."""

    def __init__(self) -> None:
        super().__init__(5)
        self.fc = nn.Linear(8, 5)

    def move(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x.permute(0, 2, 3, 1))).movedim(-1, 1).contiguous()


class InPlaceAdd(Between):
    """A write through a view changes the tensor behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Conv2d(8, 2, 1)

    def move(self, x: Tensor) -> Tensor:
        side = self.side(x)
        x = x * 1.5
        x[:, :2] += side
        return x


class InPlaceFill(Between):
    """The output is put together by assignment."""

    def __init__(self) -> None:
        super().__init__(6)
        self.a = nn.Conv2d(8, 3, 1)
        self.b = nn.Conv2d(8, 3, 1)

    def move(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], 6, x.shape[2], x.shape[3])
        out[:, ::2] = self.a(x)
        out[:, 1::2] = self.b(x)
        return out


class InPlaceView(Between):
    """An activation through a view of half the channels, seen again through the whole."""

    def move(self, x: Tensor) -> Tensor:
        x = x - 0.5
        half = x[:, 4:]
        half.clamp_(min=0)
        half.mul_(2)
        return x


class TemporalShift(nn.Module):
    """TSM: an eighth of the channels looks ahead, an eighth back, by a share of the width that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def shift(self, x: Tensor) -> Tensor:
        nt, c, h, w = x.size()
        x = x.view(nt // 2, 2, c, h, w)
        fold = c // 4
        out = torch.zeros_like(x)
        out[:, :-1, :fold] = x[:, 1:, :fold]
        out[:, 1:, fold : 2 * fold] = x[:, :-1, fold : 2 * fold]
        out[:, :, 2 * fold :] = x[:, :, 2 * fold :]
        return out.view(nt, c, h, w)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(self.shift(F.relu(self.conv1(x)))))
        return self.head(x.mean((2, 3)))


LAYERS = "conv1 conv2"
HALVES = {"conv1": [1, 6]}  # one of either half
BOTH = [("left", HALVES), ("right", HALVES), ("head", "left right")]
ONE = ("conv2", "conv1")
HEAD = ("head", "conv2")

RECIPES: dict[str, Recipe] = {
    "chunk": Recipe(Chunk, (3, 4, 4), "conv1 left right", narrows=BOTH, whole="left right"),
    # Two of either half: with one of 8 gone, every second channel of the rest would be another one.
    "interleaved": Recipe(
        Interleaved,
        (3, 4, 4),
        "conv1 left right",
        narrows=[("left", {"conv1": [2, 3]}), ("right", {"conv1": [2, 3]}), ("head", "left right")],
    ),
    "split": Recipe(Split, (3, 4, 4), "conv1 left right", narrows=[("head", "left right")], whole="left right"),
    "slices": Recipe(
        Slices, (3, 4, 4), "conv1 left right", narrows=[("head", "left right")]  # the code says where to cut
    ),
    "unbind": Recipe(Unbind, (3, 4, 4), "conv1 left right", narrows=[("head", "left right")]),
    "cross-stage-partial": Recipe(
        CrossStagePartial,
        (3, 4, 4),
        "cv1>bn1 inner cv2",
        narrows=[
            ("cv2", {"cv1": [1, 6], "inner": [2]}),
            ("inner", {"cv1": [1, 6], "inner": [2]}),
            ("head", "cv2"),
        ],
        whole="inner",
    ),
    "shuffle": Recipe(Shuffle, (3, 4, 4), LAYERS, narrows=[("conv2", {"conv1": [1, 5]}), HEAD]),
    "shuffle-constant": Recipe(ShuffleConstant, (3, 4, 4), LAYERS, narrows=[HEAD]),
    "shuffle-module": Recipe(ShuffleModule, (3, 4, 4), LAYERS, narrows=[("conv2", {"conv1": [1, 3, 5, 7]}), HEAD]),
    "pixel-shuffle": Recipe(PixelShuffle, (3, 4, 4), LAYERS, narrows=[("conv2", {"conv1": [4, 5, 6, 7]}), HEAD]),
    "pixel-unshuffle": Recipe(PixelUnshuffle, (3, 4, 4), LAYERS, narrows=[ONE, HEAD]),
    "repeat": Recipe(Repeat, (3, 4, 4), LAYERS, narrows=[ONE, HEAD]),
    "permuted": Recipe(Reversed, (3, 4, 4), LAYERS, narrows=[HEAD]),  # the indices in the buffer stay
    "tokens-and-back": Recipe(
        TokensAndBack, (3, 4, 4), "conv1 fc conv2", narrows=[("fc", "conv1"), ("conv2", "fc"), HEAD]
    ),
    "in-place-add": Recipe(
        InPlaceAdd, (3, 4, 4), "conv1 side conv2", narrows=[HEAD],  # a view that is written to
        whole="side",
    ),
    "in-place-fill": Recipe(
        InPlaceFill, (3, 4, 4), "conv1 a b conv2", narrows=[("a", "conv1"), ("b", "conv1"), HEAD], whole="a b"
    ),
    "in-place-view": Recipe(InPlaceView, (3, 4, 4), LAYERS, narrows=[HEAD]),  # x - 0.5 makes a zero something else
    "temporal-shift": Recipe(TemporalShift, (3, 4, 4), LAYERS, narrows=[HEAD]),
}  # fmt: skip
