"""What ResNets are made of: blocks, the skips beside them, and stages of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from sosp.nets.widths import StreamWidth

Skip = Callable[[int, int, int], nn.Module]  # channels in, channels out, stride


def build_conv(into: int, out: int, edge: int, stride: int = 1) -> nn.Conv2d:
    """Without bias, and padded so that only the stride changes the size."""
    return nn.Conv2d(into, out, edge, stride, edge // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a skip."""

    layers: ClassVar[tuple[str, ...]] = ("conv1", "conv2")
    expansion: ClassVar[int] = 1  # of the last layer over the others
    adds: ClassVar[bool] = True  # the skip to what it computes

    def __init__(self, into: int, widths: Sequence[int], stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        inside, out = widths
        self.conv1, self.bn1 = build_conv(into, inside, 3, stride), nn.BatchNorm2d(inside)
        self.conv2, self.bn2 = build_conv(inside, out, 3), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class PlainBlock(BasicBlock):
    """The same two convolutions without a skip."""

    adds: ClassVar[bool] = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which carries the stride), 1x1 to four times the width, beside a skip."""

    layers: ClassVar[tuple[str, ...]] = ("conv1", "conv2", "conv3")
    expansion: ClassVar[int] = 4
    adds: ClassVar[bool] = True

    def __init__(self, into: int, widths: Sequence[int], stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        first, second, out = widths
        self.conv1, self.bn1 = build_conv(into, first, 1), nn.BatchNorm2d(first)
        self.conv2, self.bn2 = build_conv(first, second, 3, stride), nn.BatchNorm2d(second)
        self.conv3, self.bn3 = build_conv(second, out, 1), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class PadSkip(nn.Module):
    """He et al.'s option A: every ``stride``-th pixel, and zeros for the channels that are new; no parameters.

    The narrower side lies in the middle of the wider one. New channels are split evenly before and behind the old
    ones, the odd one behind; where the block is narrower than its input, as many of the input's are left out.
    """

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        before = abs(out - into) // 2 * (1 if out > into else -1)  # negative: left out
        self.stride, self.pad = stride, (0, 0, 0, 0, before, out - into - before)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.pad)

    def extra_repr(self) -> str:
        return f"stride={self.stride}, before={self.pad[4]}, behind={self.pad[5]}"


def build_projection(into: int, out: int, stride: int) -> nn.Module:
    """He et al.'s option B: a 1x1 convolution and its batch norm."""
    return nn.Sequential(build_conv(into, out, 1, stride), nn.BatchNorm2d(out))


SKIPS: dict[str, Skip] = {"A": PadSkip, "B": build_projection}

Block = type[BasicBlock] | type[Bottleneck]


def build_stage(
    block: Block, name: str, into: int, widths: Mapping[str, int], *, stride: int, skip: Skip | None
) -> nn.Sequential:
    """The blocks that ``widths`` knows under ``name``; ``skip`` is the first one's, an identity where it is None."""
    built: list[nn.Module] = []
    while f"{name}.{len(built)}.conv1" in widths:
        own = [widths[f"{name}.{len(built)}.{layer}"] for layer in block.layers]
        beside = skip(into, own[-1], stride) if skip and not built else None
        built.append(block(into, own, stride if not built else 1, beside))
        into = own[-1]
    return nn.Sequential(*built)


def list_streams(block: Block, name: str, blocks: int, channels: int, tied: Sequence[str] = ()) -> list[StreamWidth]:
    """A stream inside each block, and the stage's own: what the blocks end in, and ``tied``, what it starts from."""
    *inside, last = block.layers
    within = [StreamWidth(channels, (f"{name}.{n}.{layer}",)) for n in range(blocks) for layer in inside]
    ends = (*tied, *(f"{name}.{n}.{last}" for n in range(blocks)))
    wide = channels * block.expansion
    return [*within, StreamWidth(wide, ends)] if block.adds else [*within, *(StreamWidth(wide, (end,)) for end in ends)]
