"""Random networks written as users write them, and random masks for them: one seed, one network, always the same."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import sosp

WIDTHS = (2, 3, 4, 4, 5, 6, 6, 8, 8, 9, 12)
PARTS_AT_MOST = 9  # of one network: keeps a forward pass under 10 ms and a trace under 200


@dataclass(frozen=True)
class Example:
    """A network in eval mode, an input for it, and what it is made of."""

    model: nn.Module
    inputs: Tensor  # (N, ...) float64, N >= 3
    description: str


class Part(NamedTuple):
    """A piece of a network, the width of what it returns, and its name in descriptions."""

    module: nn.Module
    width: int
    text: str


class Dice:
    """Every random decision on the way to a network, and the shape of the feature maps where it stands."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.choice = self.random.choice
        self.dims = 2  # of the feature maps
        self.size = 0  # their extent along each
        self.left = PARTS_AT_MOST

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def width(self) -> int:
        return self.choice(WIDTHS)

    def divisor(self, n: int) -> int:
        """A divisor of n, not 1 unless n is prime or small."""
        return self.choice([k for k in range(2, n) if n % k == 0] or [1, n])

    def weighted(self, table: dict[str, float]) -> str:
        return self.random.choices(list(table), list(table.values()))[0]


# --- what users write: activations and norms ------------------------------------------------------------


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class FunctionalRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class ReluMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class SquaredRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) ** 2


ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda w: nn.ReLU(),
    "relu-inplace": lambda w: nn.ReLU(inplace=True),
    "relu-functional": lambda w: FunctionalRelu(),
    "relu-method": lambda w: ReluMethod(),
    "relu6": lambda w: nn.ReLU6(inplace=True),
    "relu-squared": lambda w: SquaredRelu(),
    "gelu": lambda w: nn.GELU(),
    "silu": lambda w: nn.SiLU(),
    "silu-by-hand": lambda w: Swish(),
    "hardswish": lambda w: nn.Hardswish(inplace=True),
    "sigmoid": lambda w: nn.Sigmoid(),
    "tanh": lambda w: nn.Tanh(),
    "leaky": lambda w: nn.LeakyReLU(0.1),
    "prelu": lambda w: nn.PReLU(w),
    "prelu-single": lambda w: nn.PReLU(),
    "elu": lambda w: nn.ELU(),
    "softplus": lambda w: nn.Softplus(),
    "mish": lambda w: nn.Mish(),
}


class ChannelsLastNorm(nn.Module):
    """LayerNorm over the channels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class ConvNextNorm(nn.Module):
    """LayerNorm over channels by hand, as ConvNeXt spells it for images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = 1e-2

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class FrozenBatchNorm2d(nn.Module):
    """As in torchvision.ops: everything is a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(width))
        self.register_buffer("bias", torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight.reshape(1, -1, 1, 1), self.bias.reshape(1, -1, 1, 1)
        scale = w * (self.running_var.reshape(1, -1, 1, 1) + 1e-2).rsqrt()
        return x * scale + (b - self.running_mean.reshape(1, -1, 1, 1) * scale)


NORMS = {"bn": 14, "gn": 2.5, "in": 1.5, "ln": 1.5, "ln-by-hand": 0.7, "bn-frozen": 0.4}


def norm(dice: Dice, width: int, which: str = "") -> tuple[nn.Module, str]:
    which = which or dice.weighted(NORMS)
    if which in ("ln-by-hand", "bn-frozen") and dice.dims != 2:
        which = "bn"
    if which == "gn":
        groups = dice.choice([k for k in range(1, width + 1) if width % k == 0])
        return nn.GroupNorm(groups, width), f"gn{groups}"
    kinds: dict[str, Callable[[], nn.Module]] = {
        "bn": lambda: getattr(nn, f"BatchNorm{dice.dims}d")(width),
        "bn-frozen": lambda: FrozenBatchNorm2d(width),
        "in": lambda: getattr(nn, f"InstanceNorm{dice.dims}d")(width, affine=True),
        "ln": lambda: ChannelsLastNorm(width),
        "ln-by-hand": lambda: ConvNextNorm(width),
    }
    return kinds[which](), which


def activation(dice: Dice, width: int, *, inplace: bool = True) -> tuple[nn.Module, str]:
    names = [n for n in ACTIVATIONS if inplace or n not in ("relu-inplace", "relu-method", "relu6", "hardswish")]
    name = dice.choice(names) if dice.chance(0.6) else dice.choice(["relu", "relu-inplace"] if inplace else ["relu"])
    return ACTIVATIONS[name](width), name


# --- what users write: a convolution with its norm and activation ---------------------------------------


class ConvNormAct(nn.Module):
    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv, norm, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class ConvActNorm(ConvNormAct):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.conv(x)))


class NormActConv(ConvNormAct):
    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm(x))
        return self.conv(out)


class StdConv2d(nn.Conv2d):
    """Weight standardisation, as in Big Transfer."""

    def forward(self, x: Tensor) -> Tensor:
        v, m = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (self.weight - m) / torch.sqrt(v + 1e-2)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class RawConv(nn.Module):
    """A convolution whose kernel is a plain parameter of the block."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(out, width, 3, 3))
        self.bias = nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, self.bias, padding=1)


def conv(
    dice: Dice, width: int, out: int, *, kernel: int = 0, stride: int = 1, groups: int = 1, bias: bool | None = None
) -> nn.Module:
    kernel = kernel or dice.choice([1, 3, 3])
    bias = dice.chance(0.5) if bias is None else bias
    dilation = 2 if kernel == 3 and stride == 1 and dice.size >= 3 and dice.chance(0.05) else 1
    mode = dice.choice(["reflect", "circular", "replicate"]) if dice.size >= 3 and dice.chance(0.05) else "zeros"
    cls = getattr(nn, f"Conv{dice.dims}d")
    return cls(
        width, out, kernel, stride=stride, padding=dilation * (kernel // 2), dilation=dilation, groups=groups,
        bias=bias, padding_mode=mode,
    )  # fmt: skip


def conv_text(module: Any) -> str:
    text = f"conv{module.kernel_size[0]}({module.in_channels}>{module.out_channels}"
    return text + (f"/{module.groups})" if module.groups > 1 else ")") + ("b" if module.bias is not None else "")


ORDERS = {"conv-norm-act": 8, "norm-act-conv": 3, "conv-act-norm": 2, "conv-act": 3, "conv-norm": 2, "conv": 1}


def with_norm_and_act(dice: Dice, layer: nn.Module, width: int, out: int, order: str = "") -> Part:
    order = order or dice.weighted(ORDERS)
    n, n_text = norm(dice, width if order == "norm-act-conv" else out)
    a, a_text = activation(dice, width if order == "norm-act-conv" else out)
    words = {"conv": (layer, conv_text(layer)), "norm": (n, n_text), "act": (a, a_text)}
    used = [words[w] for w in order.split("-")]
    classes = {"conv-norm-act": ConvNormAct, "conv-act-norm": ConvActNorm, "norm-act-conv": NormActConv}
    if order in classes and dice.chance(0.6):
        module: nn.Module = classes[order](layer, n, a)
    else:
        module = nn.Sequential(*[m for m, _ in used])
    return Part(module, out, ".".join(t for _, t in used))


def unit(dice: Dice, width: int, depth: int = 0, out: int = 0, order: str = "") -> Part:
    """The plain part: a convolution, its norm, its activation."""
    out = out or dice.width()
    return with_norm_and_act(dice, conv(dice, width, out), width, out, order)


def computed_weight(dice: Dice, width: int, depth: int) -> Part:
    out = dice.width()
    if dice.dims == 2 and dice.chance(0.5):
        return with_norm_and_act(dice, StdConv2d(width, out, 3, padding=1), width, out)._replace(text="stdconv")
    layer = parametrizations.weight_norm(conv(dice, width, out))
    return with_norm_and_act(dice, layer, width, out)._replace(text="weightnorm")


def raw_conv(dice: Dice, width: int, depth: int) -> Part:
    out = dice.width()
    return Part(RawConv(width, out), out, f"rawconv({width}>{out})")


# --- depthwise and grouped convolutions -----------------------------------------------------------------


class InvertedResidual(nn.Module):
    """MobileNet's block."""

    def __init__(self, body: nn.Module, use_residual: bool) -> None:
        super().__init__()
        self.conv = body
        self.use_res_connect = use_residual

    def forward(self, x: Tensor) -> Tensor:
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


def separable(dice: Dice, width: int, depth: int) -> Part:
    out = dice.width()
    one = with_norm_and_act(dice, conv(dice, width, width, kernel=3, groups=width), width, width)
    two = with_norm_and_act(dice, conv(dice, width, out, kernel=1), width, out, "conv-norm-act")
    return Part(nn.Sequential(one.module, two.module), out, f"separable[{one.text}, {two.text}]")


def inverted(dice: Dice, width: int, depth: int) -> Part:
    hidden, out = dice.choice([6, 8, 12]), dice.choice([width, dice.width()])
    parts = [
        unit(dice, width, out=hidden, order="conv-norm-act"),
        with_norm_and_act(dice, conv(dice, hidden, hidden, kernel=3, groups=hidden), hidden, hidden, "conv-norm-act"),
        *([squeeze_excite(dice, hidden, 0)] if dice.chance(0.4) else []),
        unit(dice, hidden, out=out, order="conv-norm"),
    ]
    body = nn.Sequential(*[p.module for p in parts])
    text = "inverted[" + ", ".join(p.text for p in parts) + "]"
    return Part(InvertedResidual(body, width == out), out, text)


def multiplier(dice: Dice, width: int, depth: int) -> Part:
    out = width * dice.choice([2, 3])
    first = with_norm_and_act(dice, conv(dice, width, out, kernel=3, groups=width), width, out)
    last = unit(dice, out)
    return Part(nn.Sequential(first.module, last.module), last.width, f"multiplier[{first.text}, {last.text}]")


def grouped(dice: Dice, width: int, depth: int) -> Part:
    groups = dice.divisor(width)
    out = groups * dice.choice([k for k in (1, 2, 3, 4) if k * groups <= 12] or [1])
    made = with_norm_and_act(dice, conv(dice, width, out, groups=groups), width, out)
    return made._replace(text=f"grouped.{made.text}")


# --- adding ---------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, body: nn.Module, skip: nn.Module | None, act: nn.Module | None) -> None:
        super().__init__()
        self.body, self.downsample, self.act = body, skip, act

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.body(x) + identity
        return out if self.act is None else self.act(out)


class ResidualInPlace(Residual):
    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.body(x)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        if self.act is not None:
            out = self.act(out)
        return out


class ResidualAdd(Residual):
    def forward(self, x: Tensor) -> Tensor:
        skip = self.downsample(x) if self.downsample is not None else x
        out = torch.add(skip, self.body(x))
        return self.act(out) if self.act is not None else out


def residual(dice: Dice, width: int, depth: int) -> Part:
    out = width if dice.chance(0.6) else dice.width()
    body, skip, skip_text = branch(dice, width, out, depth - 1), None, ""
    if out != width or dice.chance(0.1):
        skip, skip_text = projection(dice, width, out)
    act, act_text = activation(dice, out) if dice.chance(0.7) else (None, "")
    cls = dice.choice([Residual, ResidualInPlace, ResidualInPlace, ResidualAdd])
    sign = {Residual: "+", ResidualInPlace: "+=", ResidualAdd: "add"}[cls]
    return Part(cls(body.module, skip, act), out, f"residual[{body.text} {sign} {skip_text or 'x'}]{act_text}")


def projection(dice: Dice, width: int, out: int) -> tuple[nn.Module, str]:
    layer = conv(dice, width, out, kernel=1)
    if dice.chance(0.3):
        return layer, conv_text(layer)
    n, text = norm(dice, out, "bn")
    return nn.Sequential(layer, n), f"{conv_text(layer)}.{text}"


class Sum(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return sum(b(x) for b in self.branches)


class ThreeWay(Sum):
    def forward(self, x: Tensor) -> Tensor:
        return self.branches[0](x) + self.branches[1](x) + self.branches[2](x)


class StackMean(Sum):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([b(x) for b in self.branches]).mean(0)


class Difference(Sum):
    def forward(self, x: Tensor) -> Tensor:
        return self.branches[0](x) - self.branches[1](x)


class Maximum(Sum):
    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(self.branches[0](x), self.branches[1](x))


class Mixture(Sum):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__(*branches)
        self.alpha = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * self.branches[0](x) + (1 - self.alpha) * self.branches[1](x)


SUMS: dict[str, tuple[type[Sum], int]] = {
    "three-way": (ThreeWay, 3),
    "sum": (Sum, 3),
    "stack-mean": (StackMean, 2),
    "difference": (Difference, 2),
    "maximum": (Maximum, 2),
    "mixture": (Mixture, 2),
}


def several(dice: Dice, width: int, depth: int) -> Part:
    name = dice.choice(["three-way", *SUMS])
    cls, count = SUMS[name]
    identity = dice.chance(0.5)
    out = width if identity else dice.width()
    parts = [branch(dice, width, out, depth - 1) for _ in range(count - identity)]
    modules = [p.module for p in parts] + [nn.Identity()] * identity
    return Part(cls(*modules), out, f"{name}[{', '.join([p.text for p in parts] + ['x'] * identity)}]")


class PreActBlock(nn.Module):
    def __init__(self, width: int, hidden: int, dims: int, project: bool) -> None:
        super().__init__()
        conv, bn = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
        self.bn1 = bn(width)
        self.conv1 = conv(width, hidden, 3, padding=1, bias=False)
        self.bn2 = bn(hidden)
        self.conv2 = conv(hidden, width, 3, padding=1, bias=False)
        if project:
            self.shortcut = nn.Sequential(conv(width, width, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out += shortcut
        return out


def preact(dice: Dice, width: int, depth: int) -> Part:
    """A residual stream that no norm or activation touches: only its readers normalise it."""
    stream, hidden = dice.width(), dice.width()
    blocks = [
        PreActBlock(stream, hidden, dice.dims, project=i == 0 and dice.chance(0.3))
        for i in range(dice.choice([1, 2, 3]))
    ]
    first = conv(dice, width, stream)
    end = nn.Sequential(norm(dice, stream, "bn")[0], nn.ReLU(inplace=True)) if dice.chance(0.7) else nn.Identity()
    text = f"preact[{conv_text(first)}, {len(blocks)} blocks of {hidden}]"
    return Part(nn.Sequential(first, *blocks, end), stream, text)


class PadSkip(nn.Module):
    """A ResNet's skip of type A: every other pixel, zeros for the new channels."""

    def __init__(self, stride: int, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.before, self.after = stride, before, after

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 2:
            x = x[:, :, ::2, ::2]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


class ZeroSkip(nn.Module):
    """The same with a concatenation of zeros behind."""

    def __init__(self, stride: int, before: int, after: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(stride)
        self.more = before + after

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x)
        b, _, h, w = x.shape
        return torch.cat([x, x.new_zeros(b, self.more, h, w)], dim=1)


def type_a(dice: Dice, width: int, depth: int) -> Part:
    more = dice.choice([1, 2, 3, 4])
    before = dice.choice([0, more // 2])
    even = dice.size % 2 == 0
    stride = 2 if depth >= TOP and dice.size >= 6 and even else 1  # nested parts keep the size
    first = with_norm_and_act(dice, conv(dice, width, 6, kernel=3, stride=stride), width, 6, "conv-norm-act")
    if stride == 2:
        dice.size //= 2
    last = unit(dice, 6, out=width + more, order="conv-norm")
    skip = dice.choice([PadSkip, ZeroSkip])(stride, before, more - before)
    body = nn.Sequential(first.module, last.module)
    act, act_text = activation(dice, width + more)
    return Part(ResidualInPlace(body, skip, act), width + more, f"type-a{stride}[{first.text}, {last.text}]{act_text}")


# --- concatenating and splitting ------------------------------------------------------------------------


class DenseLayer(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class DenseBlock(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, dim=1)


def dense(dice: Dice, width: int, depth: int) -> Part:
    growth, count = dice.choice([2, 3]), dice.choice([2, 3])
    order = dice.choice(["norm-act-conv", "norm-act-conv", "conv-norm-act"])
    bodies = [unit(dice, width + i * growth, out=growth, order=order) for i in range(count)]
    if dice.chance(0.5):
        block: nn.Module = DenseBlock([b.module for b in bodies])
    else:
        block = nn.Sequential(*[DenseLayer(b.module) for b in bodies])
    last = unit(dice, width + count * growth)
    text = f"dense[{', '.join(b.text for b in bodies)}], {last.text}"
    return Part(nn.Sequential(block, last.module), last.width, text)


class Inception(nn.Module):
    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([b(x) for b in self.branches], 1)


def inception(dice: Dice, width: int, depth: int) -> Part:
    parts = [chain(dice, width, depth - 1, most=2, out=dice.choice([2, 3, 4])) for _ in range(dice.choice([2, 3]))]
    if dice.chance(0.4) and dice.size >= 3:
        pool = getattr(nn, dice.choice(["MaxPool", "AvgPool"]) + f"{dice.dims}d")(3, stride=1, padding=1)
        last = unit(dice, width, out=2)
        parts.append(Part(nn.Sequential(pool, last.module), 2, f"pool.{last.text}"))
    if dice.chance(0.2):
        parts.append(Part(nn.Identity(), width, "x"))
    out = sum(p.width for p in parts)
    return Part(Inception([p.module for p in parts]), out, f"inception[{' | '.join(p.text for p in parts)}]")


class Chunked(nn.Module):
    """Split into two halves, treat each, concatenate."""

    def __init__(self, left: nn.Module, right: nn.Module, at: int) -> None:
        super().__init__()
        self.left, self.right, self.at = left, right, at

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        return torch.cat([self.left(a), self.right(b)], dim=1)


class SplitSizes(Chunked):
    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(x, [self.at, x.shape[1] - self.at], dim=1)
        return torch.cat((self.right(b), self.left(a)), dim=1)


class Sliced(Chunked):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x[:, : self.at]), self.right(x[:, self.at :])], 1)


class SlicedHalf(Chunked):
    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return torch.cat([self.left(x[:, :half]), self.right(x[:, half:])], 1)


class Interleaved(Chunked):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x[:, ::2]), self.right(x[:, 1::2])], 1)


class SplitAdd(Chunked):
    """One half is added to the other."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split(self.at, dim=1)
        return self.left(a) + self.right(b)


SPLITS: dict[str, type[Chunked]] = {
    "chunk": Chunked, "split": SplitSizes, "slice": Sliced, "half": SlicedHalf, "interleave": Interleaved,
    "split-add": SplitAdd,
}  # fmt: skip


def split(dice: Dice, width: int, depth: int) -> Part:
    before = unit(dice, width, out=dice.choice([4, 6, 8])) if width % 2 or width < 4 else None
    width = before.width if before else width
    name = dice.choice(list(SPLITS))
    at = dice.choice(range(1, width)) if name in ("split", "slice") else width // 2
    if name == "split-add":
        left, right = (branch(dice, at, at, depth - 1) for _ in range(2))
    else:
        left = chain(dice, at, depth - 1, most=1) if dice.chance(0.5) else Part(nn.Identity(), at, "x")
        right = chain(dice, width - at, depth - 1, most=2)
    out = left.width if name == "split-add" else left.width + right.width
    part = Part(SPLITS[name](left.module, right.module, at), out, f"{name}[{left.text} | {right.text}]")
    return part if before is None else joined([before, part])


class Res2(nn.Module):
    """Res2Net: each slice also sees what became of the one before."""

    def __init__(self, convs: list[nn.Module], width: int) -> None:
        super().__init__()
        self.convs, self.width = nn.ModuleList(convs), width

    def forward(self, x: Tensor) -> Tensor:
        spx = torch.split(x, self.width, 1)
        out = [spx[0]]
        for i, conv in enumerate(self.convs):
            y = spx[i + 1] if i == 0 else out[-1] + spx[i + 1]
            out.append(conv(y))
        return torch.cat(out, 1)


def res2(dice: Dice, width: int, depth: int) -> Part:
    piece, scale = dice.choice([2, 3]), dice.choice([2, 3, 4])
    first = unit(dice, width, out=piece * scale)
    convs = [unit(dice, piece, out=piece, order="conv-norm-act") for _ in range(scale - 1)]
    module = nn.Sequential(first.module, Res2([c.module for c in convs], piece))
    return Part(module, piece * scale, f"{first.text}, res2[{', '.join(c.text for c in convs)}]")


class CRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.relu(x), F.relu(-x)], 1)


def crelu(dice: Dice, width: int, depth: int) -> Part:
    first = unit(dice, width, out=dice.choice([2, 3, 4]), order=dice.choice(["conv", "conv-norm"]))
    return Part(nn.Sequential(first.module, CRelu()), 2 * first.width, f"{first.text}, crelu")


# --- moving channels around -----------------------------------------------------------------------------


class Shuffle(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).contiguous()
        return x.view(b, c, h, w)


class ShuffleFlat(Shuffle):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)


class ShuffleReshape(Shuffle):
    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(shape[0], self.groups, shape[1] // self.groups, -1).permute(0, 2, 1, 3)
        return x.reshape(shape)


class Reorder(nn.Module):
    """A fixed permutation of the channels."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order]


def shuffle(dice: Dice, width: int, depth: int) -> Part:
    if dice.chance(0.15):
        order = dice.random.sample(range(width), width)
        return Part(Reorder(order), width, "reorder")
    before = unit(dice, width, out=dice.choice([4, 6, 8, 12])) if width in (2, 3, 5, 7, 11, 13) else None
    width = before.width if before else width
    groups = dice.divisor(width)
    builtin: Any = nn.ChannelShuffle
    cls = dice.choice([ShuffleFlat, ShuffleReshape, *([Shuffle, Shuffle, builtin] if dice.dims == 2 else [])])
    part = Part(cls(groups), width, f"shuffle({cls.__name__}, {groups})")
    return part if before is None else joined([before, part])


class Maxout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        b, c = x.shape[:2]
        return x.view(b, c // 2, 2, *x.shape[2:]).max(dim=2).values


def maxout(dice: Dice, width: int, depth: int) -> Part:
    first = unit(dice, width, out=dice.choice([4, 6, 8]), order=dice.choice(["conv", "conv-norm"]))
    return Part(nn.Sequential(first.module, Maxout()), first.width // 2, f"{first.text}, maxout")


def pixels(dice: Dice, width: int, depth: int) -> Part:
    """Channels to pixels and back: at the top it changes the size, elsewhere it undoes what it did."""
    if dice.size % 2 == 0 and dice.size >= 4:
        middle = unit(dice, 4 * width, out=dice.choice([4, 8, 12]))
        modules, text, out = [nn.PixelUnshuffle(2), middle.module], f"unshuffle, {middle.text}", middle.width
        if depth < TOP or dice.chance(0.5):
            return Part(nn.Sequential(*modules, nn.PixelShuffle(2)), out // 4, f"{text}, pixelshuffle")
        dice.size //= 2
        return Part(nn.Sequential(*modules), out, text)
    first = unit(dice, width, out=dice.choice([4, 8, 12]))
    back = nn.Conv2d(first.width // 4, 4, 2, stride=2)
    return Part(
        nn.Sequential(first.module, nn.PixelShuffle(2), back), 4, f"{first.text}, pixelshuffle, {conv_text(back)}"
    )


# --- multiplying ----------------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    """With 1x1 convolutions, as timm and torchvision."""

    def __init__(self, width: int, squeezed: int, dims: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{dims}d")
        self.avgpool = getattr(nn, f"AdaptiveAvgPool{dims}d")(1)
        self.fc1, self.fc2 = conv(width, squeezed, 1), conv(squeezed, width, 1)
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Tensor:
        scale = self.avgpool(x)
        scale = self.fc2(self.act(self.fc1(scale)))
        return self.gate(scale) * x


class SqueezeLinear(nn.Module):
    """With linear layers, as the many copies of the original."""

    def __init__(self, width: int, squeezed: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(width, squeezed, bias=False), act, nn.Linear(squeezed, width), gate)

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = F.adaptive_avg_pool2d(x, 1).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


class SqueezeMean(SqueezeLinear):
    def forward(self, x: Tensor) -> Tensor:
        s = self.fc(x.flatten(2).mean(2))
        return x * s.reshape(s.shape + (1,) * (x.dim() - 2))


def squeeze_excite(dice: Dice, width: int, depth: int) -> Part:
    squeezed = dice.choice([2, 3, 4])
    act, act_text = activation(dice, squeezed)
    gate = dice.choice([nn.Sigmoid, nn.Sigmoid, nn.Hardsigmoid])()
    kind = dice.choice(["conv", "mean", *(["linear"] if dice.dims == 2 else [])])
    text = f"se-{kind}({width}>{squeezed}.{act_text})"
    if kind == "conv":
        return Part(SqueezeExcite(width, squeezed, dice.dims, act, gate), width, text)
    cls = SqueezeLinear if kind == "linear" else SqueezeMean
    return Part(cls(width, squeezed, act, gate), width, text)


class Eca(nn.Module):
    """Efficient channel attention: a convolution along the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.mean((2, 3)).view(x.shape[0], 1, -1)
        y = self.conv(y).view(x.shape[0], -1, 1, 1).sigmoid()
        return x * y


def eca(dice: Dice, width: int, depth: int) -> Part:
    return Part(Eca(), width, "eca")


class Gate(nn.Module):
    def __init__(self, value: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.value, self.gate = value, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * torch.sigmoid(self.gate(x))


class Product(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * self.gate(x)


class TanhGate(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.value(x)).mul(self.gate(x).sigmoid())


class GatedUnit(nn.Module):
    """One convolution makes both value and gate."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.chunk(self.conv(x), 2, 1)
        return a * torch.sigmoid(b)


def gated(dice: Dice, width: int, depth: int) -> Part:
    out = dice.width()
    if dice.chance(0.35):
        both = branch(dice, width, 2 * out, depth - 1)
        module = nn.Sequential(both.module, nn.GLU(dim=1)) if dice.chance(0.5) else GatedUnit(both.module)
        return Part(module, out, f"glu[{both.text}]")
    value, gate = branch(dice, width, out, depth - 1), unit(dice, width, out=out)
    cls = dice.choice([Gate, Product, TanhGate])
    name = {Gate: "gate", Product: "product", TanhGate: "tanh-gate"}[cls]
    return Part(cls(value.module, gate.module), out, f"{name}[{value.text} | {gate.text}]")


# --- mixing channels without a layer --------------------------------------------------------------------


class SpatialAttention(nn.Module):
    """CBAM's second half: the mean and the largest of all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        mean, top = x.mean(dim=1, keepdim=True), x.max(dim=1, keepdim=True).values
        return x * torch.sigmoid(self.conv(torch.cat([mean, top], dim=1)))


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * F.softmax(x, dim=1)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


def mixing(dice: Dice, width: int, depth: int) -> Part:
    kinds: dict[str, Callable[[], nn.Module]] = {
        "channel-softmax": Softmax,
        "channel-mean": Centred,
        "lrn": lambda: nn.LocalResponseNorm(3),
        **({"cbam": SpatialAttention} if dice.dims == 2 else {}),
    }
    name = dice.choice(list(kinds))
    return Part(kinds[name](), width, name)


class NonLocal(nn.Module):
    """Attention between pixels."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g = (nn.Conv2d(width, inner, 1) for _ in range(3))
        self.out = nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        q = self.theta(x).flatten(2).transpose(1, 2)
        k = self.phi(x).flatten(2)
        v = self.g(x).view(b, -1, h * w).transpose(1, 2)
        att = torch.softmax(torch.bmm(q, k) * q.shape[-1] ** -0.5, dim=-1)
        y = torch.bmm(att, v).transpose(1, 2).reshape(b, -1, h, w)
        return x + self.out(y)


def nonlocal_block(dice: Dice, width: int, depth: int) -> Part:
    inner = dice.choice([2, 3, 4])
    return Part(NonLocal(width, inner), width, f"nonlocal({inner})")


# --- raw parameters, norms by themselves, dropout -------------------------------------------------------


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return self.gamma[:, None, None] * x
        return self.gamma.view(-1, *[1] * (x.dim() - 2)) * x


class ChannelBias(nn.Module):
    def __init__(self, width: int, dims: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, width, *[1] * dims))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Constants(nn.Module):
    """Numbers in the code."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + 0.25


class ScalarScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def raw(dice: Dice, width: int, depth: int) -> Part:
    kinds: dict[str, Callable[[], nn.Module]] = {
        "layerscale": lambda: LayerScale(width),
        "channelbias": lambda: ChannelBias(width, dice.dims),
        "scalar": ScalarScale,
        "constants": Constants,
    }
    name = dice.choice(["layerscale", *kinds])
    return Part(kinds[name](), width, name)


class FunctionalDropout(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


def dropout(dice: Dice, width: int, depth: int) -> Part:
    cls = dice.choice([nn.Dropout, FunctionalDropout, getattr(nn, f"Dropout{dice.dims}d")])
    return Part(cls(0.3), width, "dropout")


def norm_alone(dice: Dice, width: int, depth: int) -> Part:
    module, text = norm(dice, width, dice.choice(["bn", "gn", "in", "ln"]))
    act, act_text = activation(dice, width)
    return Part(nn.Sequential(module, act), width, f"{text}.{act_text}")


class ConvNext(nn.Module):
    def __init__(self, width: int, hidden: int, act: nn.Module) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(width, hidden), act, nn.Linear(hidden, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        return shortcut + x.permute(0, 3, 1, 2)


def convnext(dice: Dice, width: int, depth: int) -> Part:
    hidden = dice.choice([6, 8, 12])
    act, text = activation(dice, hidden) if dice.chance(0.3) else (nn.GELU(), "gelu")
    if text == "prelu":  # its channels would be the pixels
        act, text = nn.GELU(), "gelu"
    return Part(ConvNext(width, hidden, act), width, f"convnext({hidden}.{text})")


# --- one module, several calls --------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return self.block(x)


class TwiceRelu(Twice):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.block(x))
        return self.block(y) + x


class Siamese(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.block(x), self.block(x.flip(-1))], 1)


class TwoNorms(nn.Module):
    """One convolution, a norm of its own for each of its calls."""

    def __init__(self, conv: nn.Module, norm1: nn.Module, norm2: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm1, self.norm2 = conv, norm1, norm2

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv(x)))
        return F.relu(self.norm2(self.conv(x)))


def shared(dice: Dice, width: int, depth: int) -> Part:
    name = dice.choice(["twice", "twice-relu", "siamese", "sequential", "two-norms"])
    if name == "two-norms":
        norms = [norm(dice, width, "bn")[0] for _ in range(2)]
        return Part(TwoNorms(conv(dice, width, width), *norms), width, f"shared-two-norms({width})")
    order = dice.choice(["conv", "conv-norm", "conv-norm-act", "norm-act-conv"])
    block = unit(dice, width, out=width, order="conv" if name == "twice-relu" else order)
    if name == "sequential":
        return Part(nn.Sequential(*[block.module] * 2), width, f"shared-sequential[{block.text}]")
    cls = {"twice": Twice, "twice-relu": TwiceRelu, "siamese": Siamese}[name]
    return Part(cls(block.module), width * (1 + (cls is Siamese)), f"shared-{name}[{block.text}]")


# --- down and up ----------------------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self, down: nn.Module, inner: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.inner, self.up = down, inner, up

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.inner(self.down(x)))
        return torch.cat([x, y], dim=1)


class UNetAdd(UNet):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        y = F.interpolate(self.inner(y), size=x.shape[2:], mode="nearest")
        return x + self.up(y)


def transposed(dice: Dice, width: int, out: int) -> nn.Module:
    groups = dice.choice([1, 1, *[k for k in (2, 3, 4, 6) if width % k == 0 and out % k == 0]])
    return getattr(nn, f"ConvTranspose{dice.dims}d")(width, out, 2, stride=2, groups=groups, bias=dice.chance(0.5))


def unet(dice: Dice, width: int, depth: int) -> Part:
    hidden, add = dice.choice([4, 6, 8]), dice.chance(0.4)
    down = with_norm_and_act(dice, conv(dice, width, hidden, kernel=3, stride=2), width, hidden, "conv-norm-act")
    size, dice.size = dice.size, (dice.size + 1) // 2
    inner = chain(dice, hidden, min(depth, TOP) - 1, most=1)
    dice.size = size
    if add or size % 2:
        up = branch(dice, inner.width, width, 0)
        text = f"unet-add[{down.text}, {inner.text}, {up.text}]"
        return Part(UNetAdd(down.module, inner.module, up.module), width, text)
    out = dice.choice([2, 4, 6])
    up = with_norm_and_act(dice, transposed(dice, inner.width, out), inner.width, out, "conv-norm-act")
    text = f"unet[{down.text}, {inner.text}, transposed.{up.text}]"
    return Part(UNet(down.module, inner.module, up.module), width + out, text)


def resize(dice: Dice, width: int, depth: int) -> Part:
    """Only at the top: the size changes."""
    down = ["max", "avg"] * (dice.size >= 6) + ["stride"] * (dice.size >= 5) + ["adaptive"] * (dice.size >= 4)
    up = ["upsample", "transposed"] * (dice.size <= (5 if dice.dims < 3 else 3))
    name = dice.choice(down + up)
    if name in ("max", "avg"):
        pool = getattr(nn, {"max": "MaxPool", "avg": "AvgPool"}[name] + f"{dice.dims}d")(2)
        dice.size //= 2
        return Part(pool, width, f"{name}pool")
    if name == "adaptive":
        dice.size = dice.choice([3, dice.size - 1])
        kind = dice.choice(["Max", "Avg"])
        return Part(getattr(nn, f"Adaptive{kind}Pool{dice.dims}d")(dice.size), width, f"adaptive{kind.lower()}pool")
    if name == "stride":
        out = dice.width()
        part = with_norm_and_act(dice, conv(dice, width, out, kernel=3, stride=2), width, out)
        dice.size = (dice.size + 1) // 2
        return part._replace(text=f"strided.{part.text}")
    dice.size *= 2
    if name == "upsample":
        last = unit(dice, width)
        up_module = nn.Upsample(scale_factor=2, mode="bilinear" if dice.dims == 2 and dice.chance(0.5) else "nearest")
        return Part(nn.Sequential(up_module, last.module), last.width, f"upsample, {last.text}")
    out = dice.width()
    part = with_norm_and_act(dice, transposed(dice, width, out), width, out)
    return part._replace(text=f"transposed.{part.text}")


# --- putting parts together -----------------------------------------------------------------------------

TOP = 3  # the depth of the outermost chain; parts there may change the size of the feature maps


class Kind(NamedTuple):
    """How often a part is drawn, and where it may stand."""

    make: Callable[[Dice, int, int], Part]
    weight: float
    nests: bool = False  # holds chains of its own
    images: bool = False  # two spatial dimensions only
    top: bool = False  # in the outermost chain only


KINDS: tuple[Kind, ...] = (
    Kind(unit, 8),
    Kind(computed_weight, 1.2),
    Kind(raw_conv, 0.8, images=True),
    Kind(separable, 3),
    Kind(inverted, 3),
    Kind(multiplier, 2),
    Kind(grouped, 4),
    Kind(residual, 9, nests=True),
    Kind(several, 6, nests=True),
    Kind(preact, 3),
    Kind(type_a, 4, images=True),
    Kind(dense, 3),
    Kind(inception, 4, nests=True),
    Kind(split, 6, nests=True),
    Kind(res2, 1.5),
    Kind(crelu, 1),
    Kind(shuffle, 3),
    Kind(maxout, 1),
    Kind(pixels, 2, images=True),
    Kind(squeeze_excite, 4),
    Kind(eca, 1, images=True),
    Kind(gated, 5, nests=True),
    Kind(mixing, 2.5),
    Kind(nonlocal_block, 1.5, images=True),
    Kind(raw, 4),
    Kind(dropout, 2),
    Kind(norm_alone, 2),
    Kind(convnext, 2, images=True),
    Kind(shared, 5),
    Kind(unet, 3, nests=True),
    Kind(resize, 9, top=True),
)


def part(dice: Dice, width: int, depth: int) -> Part:
    dice.left -= 1
    if dice.left < 0:
        return unit(dice, width)
    allowed = [
        k
        for k in KINDS
        if (depth > 0 or not k.nests) and (dice.dims == 2 or not k.images) and (depth >= TOP or not k.top)
    ]
    return dice.random.choices(allowed, [k.weight for k in allowed])[0].make(dice, width, depth)


class Chain(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def joined(parts: list[Part], cls: Callable[[list[nn.Module]], nn.Module] = lambda ms: nn.Sequential(*ms)) -> Part:
    return Part(cls([p.module for p in parts]), parts[-1].width, ", ".join(p.text for p in parts))


def chain(dice: Dice, width: int, depth: int, most: int = 3, out: int = 0) -> Part:
    """One to ``most`` parts; with ``out``, a unit behind them that brings the width there."""
    parts: list[Part] = []
    for _ in range(dice.choice(range(1, most + 1)) - bool(out)):
        parts.append(part(dice, parts[-1].width if parts else width, depth))
    if out or parts[-1].width > 16:
        parts.append(unit(dice, parts[-1].width if parts else width, out=out))
    return joined(parts, Chain if dice.chance(0.2) else lambda ms: nn.Sequential(*ms))


def branch(dice: Dice, width: int, out: int, depth: int) -> Part:
    """A chain that ends in a convolution or its norm: what it returns may be written into."""
    last_order = dice.choice(["conv-norm", "conv-norm", "conv"])
    if depth <= 0 or dice.chance(0.4):
        first = unit(dice, width)
        return joined([first, unit(dice, first.width, out=out, order=last_order)])
    inner = chain(dice, width, depth, most=2)
    return joined([inner, unit(dice, inner.width, out=out, order=last_order)])


# --- tokens: (N, T, C) ----------------------------------------------------------------------------------


class ToTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class ToTokensByShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        b, c = x.shape[:2]
        return x.reshape(b, c, -1).permute(0, 2, 1)


class ClassToken(nn.Module):
    """A learned token in front, and a learned embedding of the positions."""

    def __init__(self, width: int, tokens: int, positions: bool) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens + 1, width)) if positions else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x if self.pos_embed is None else x + self.pos_embed


class PreNorm(nn.Module):
    """x + f(norm(x)), with or without the norm, with or without layer scale."""

    def __init__(self, body: nn.Module, norm: nn.Module, gamma: int = 0) -> None:
        super().__init__()
        self.norm, self.body = norm, body
        self.gamma = nn.Parameter(torch.ones(gamma)) if gamma else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.norm(x))
        return x + (y if self.gamma is None else self.gamma * y)


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.body(x))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, out: int, act: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(width, hidden), act, nn.Dropout(0.1), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class SwiGlu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TimmAttention(nn.Module):
    """timm: one projection for all, sizes from the shape of x."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class ShapeAttention(nn.Module):
    """Every size is read off a shape, also that in the scale."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        b, n, c = q.shape
        q, k, v = (t.view(b, n, self.heads, c // self.heads).transpose(1, 2) for t in (q, k, v))
        attn = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
        y = (attn @ v).transpose(1, 2).contiguous().view(b, n, c)
        return self.out(y)


class ConstantAttention(nn.Module):
    """Heads and their size are constants of the module; einsum."""

    def __init__(self, width: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        inner = heads * dim_head
        self.to_q, self.to_kv = nn.Linear(width, inner, bias=False), nn.Linear(width, 2 * inner)
        self.to_out = nn.Sequential(nn.Linear(inner, width), nn.Dropout(0.1))

    def split(self, t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], t.shape[1], self.heads, self.dim_head).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = self.split(self.to_q(x)), self.split(k), self.split(v)
        attn = torch.einsum("bhid,bhjd->bhij", q, k).mul(self.dim_head**-0.5).softmax(-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.permute(0, 2, 1, 3).flatten(2))


class SdpaAttention(nn.Module):
    """torch's own kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).split(self.width, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class TokensNorm(nn.Module):
    """BatchNorm over the channels of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


class MixTokens(nn.Module):
    """MLP-Mixer: a layer along the tokens."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(1, 2)).transpose(1, 2)


def token_activation(dice: Dice) -> tuple[nn.Module, str]:
    name = dice.choice([n for n in ACTIVATIONS if n not in ("prelu", "relu-inplace", "relu-method", "relu6")])
    return ACTIVATIONS[name](1), name


def token_norm(dice: Dice, width: int) -> tuple[nn.Module, str]:
    name = dice.choice(["ln", "ln", "ln", "rms", "bn", "none"])
    made = {"ln": nn.LayerNorm, "rms": nn.RMSNorm, "bn": TokensNorm, "none": lambda w: nn.Identity()}
    return made[name](width), name


def attention(dice: Dice, width: int) -> tuple[nn.Module, str]:
    heads = dice.divisor(width)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "timm": lambda: TimmAttention(width, heads),
        "shape": lambda: ShapeAttention(width, heads),
        "constant": lambda: ConstantAttention(width, dice.choice([1, 2, 3]), dice.choice([2, 3])),
        "sdpa": lambda: SdpaAttention(width, heads),
        "mha": lambda: TorchAttention(width, heads),
    }
    name = dice.choice(list(kinds))
    return kinds[name](), f"attention-{name}"


def token_body(dice: Dice, width: int, tokens: int) -> tuple[nn.Module, str]:
    """What a residual block on tokens computes."""
    name = dice.choice(["attention", "attention", "attention", "mlp", "mlp", "swiglu", "mixer"])
    hidden = dice.choice([4, 5, 6, 8])
    act, act_text = token_activation(dice)
    if name == "attention":
        return attention(dice, width)
    if name == "mlp":
        return Mlp(width, hidden, width, act), f"mlp({hidden}.{act_text})"
    if name == "swiglu":
        return SwiGlu(width, hidden), f"swiglu({hidden})"
    return MixTokens(Mlp(tokens, hidden, tokens, act)), f"mixer({hidden}.{act_text})"


def token_block(dice: Dice, width: int, tokens: int) -> Part:
    if dice.chance(0.08) and width % 2 == 0:
        layer = nn.TransformerEncoderLayer(width, 2, 6, dropout=0.0, batch_first=True, norm_first=dice.chance(0.5))
        return Part(layer, width, "encoderlayer")
    (body, text), (norm_, norm_text) = token_body(dice, width, tokens), token_norm(dice, width)
    post = dice.chance(0.2)
    module = PostNorm(body, norm_) if post else PreNorm(body, norm_, width if dice.chance(0.2) else 0)
    return Part(module, width, f"{'post' if post else 'pre'}.{norm_text}[{text}]")


class TokenHead(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).mean(1))


class ClassHead(TokenHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)[:, 0])


class FlatHead(TokenHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).flatten(1))


def token_stage(dice: Dice, width: int, tokens: int) -> Part:
    """Blocks on tokens and the head behind them."""
    parts: list[Part] = []
    if dice.chance(0.5):
        out = dice.choice([4, 6, 8])
        parts.append(Part(nn.Linear(width, out), out, f"linear({width}>{out})"))
        width = out
    class_token = dice.chance(0.4)
    if class_token:
        parts.append(Part(ClassToken(width, tokens, dice.chance(0.6)), width, "classtoken"))
        tokens += 1
    parts += [token_block(dice, width, tokens) for _ in range(dice.choice([1, 2, 2, 3]))]
    mixed = any(word in parts[-1].text for word in ("attention", "mixer", "encoderlayer"))
    kind, name = (ClassHead, "class") if class_token and mixed else (TokenHead, "mean")
    if dice.chance(0.15):
        kind, name = FlatHead, "flat"
    norm_, norm_text = token_norm(dice, width)
    head, head_text = classifier(dice, width * tokens if kind is FlatHead else width)
    parts.append(Part(kind(norm_, head), 0, f"{norm_text}.{name}.{head_text}"))
    return joined(parts)


# --- heads and whole networks ---------------------------------------------------------------------------


def classifier(dice: Dice, width: int) -> tuple[nn.Module, str]:
    """From (N, width) to logits."""
    classes = dice.choice([2, 3, 4, 5])
    if dice.chance(0.6):
        return nn.Linear(width, classes, bias=dice.chance(0.8)), f"linear({width}>{classes})"
    hidden = dice.choice([4, 6, 8])
    act, act_text = activation(dice, hidden)
    norms = [nn.BatchNorm1d(hidden)] if dice.chance(0.5) else []
    layers = [nn.Linear(width, hidden), *norms, act, nn.Dropout(0.2), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers), f"linear({width}>{hidden}){'.bn' * len(norms)}.{act_text}.linear({classes})"


class PooledHead(nn.Module):
    """The average over all pixels, then a classifier."""

    def __init__(self, head: nn.Module, dims: int) -> None:
        super().__init__()
        self.avgpool = getattr(nn, f"AdaptiveAvgPool{dims}d")(1)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.avgpool(x), 1))


class MeanHead(PooledHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(dim=tuple(range(2, x.dim()))))


class MaxHead(PooledHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(2).amax(-1))


class FlattenHead(PooledHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.view(x.size(0), -1) if x.is_contiguous() else x.reshape(x.shape[0], -1))


def image_head(dice: Dice, width: int) -> Part:
    if dice.size**dice.dims * width <= 400 and dice.chance(0.4):
        head, text = classifier(dice, width * dice.size**dice.dims)
        if dice.chance(0.5):
            return Part(nn.Sequential(nn.Flatten(), head), 0, f"flatten.{text}")
        return Part(FlattenHead(head, dice.dims), 0, f"flatten.{text}")
    cls = dice.choice([PooledHead, PooledHead, MeanHead, MaxHead])
    head, text = classifier(dice, width)
    return Part(cls(head, dice.dims), 0, f"{cls.__name__.lower().removesuffix('head')}.{text}")


class Classifier(nn.Module):
    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class TwoHeads(nn.Module):
    def __init__(self, features: nn.Module, head: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.features, self.head, self.other = features, head, other

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.features(x)
        return self.head(x), self.other(x)


class FeaturesToo(Classifier):
    """Returns what the head sees as well."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.features(x)
        return {"logits": self.head(x), "features": x}


class FeaturePair(Classifier):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.features(x)
        return self.head(x), x


class WithAux(nn.Module):
    """GoogLeNet: a head in the middle, in training only."""

    def __init__(self, front: nn.Module, aux: nn.Module, back: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.front, self.aux, self.back, self.head = front, aux, back, head

    def forward(self, x: Tensor) -> Any:
        x = self.front(x)
        aux = self.aux(x) if self.training else None
        x = self.head(self.back(x))
        return (x, aux) if self.training else x


def end(dice: Dice, width: int) -> Part:
    """What stands behind the convolutions: a head, or tokens and a head."""
    if not dice.chance(0.25) or dice.size**dice.dims > 100:
        return image_head(dice, width)
    stage = token_stage(dice, width, dice.size**dice.dims)
    tokens = dice.choice([ToTokens, ToTokensByShape])()
    return Part(nn.Sequential(tokens, stage.module), 0, f"tokens, {stage.text}")


def image_network(dice: Dice, width: int) -> Part:
    parts = [unit(dice, width)]
    for _ in range(dice.choice([1, 1, 2, 3, 4])):
        parts.append(part(dice, parts[-1].width, TOP))
        if dice.left <= 0:
            break
    middle = dice.choice(range(1, len(parts) + 1))
    form = dice.weighted({"plain": 78, "two-heads": 7, "aux": 9, "features": 3, "pair": 3})
    if form == "pair":  # the layer whose features are returned is not prunable: leave another
        parts.append(unit(dice, parts[-1].width))
    if form == "aux":
        front = joined(parts[:middle])
        head, text = classifier(dice, front.width)
        aux = Part(MeanHead(head, dice.dims), 0, f"mean.{text}")
        back = joined(parts[middle:]) if parts[middle:] else Part(nn.Identity(), front.width, "x")
        last = end(dice, back.width)
        model = WithAux(front.module, aux.module, back.module, last.module)
        return Part(model, 0, f"{front.text}; aux {aux.text}; {back.text}; {last.text}")
    features = joined(parts)
    last = end(dice, features.width)
    if form == "two-heads":
        other = image_head(dice, features.width)
        text = f"{features.text}; two-heads {last.text} and {other.text}"
        return Part(TwoHeads(features.module, last.module, other.module), 0, text)
    cls = {"plain": Classifier, "features": FeaturesToo, "pair": FeaturePair}[form]
    return Part(
        cls(features.module, last.module), 0, f"{features.text}; {'' if form == 'plain' else form + ' '}{last.text}"
    )


def token_network(dice: Dice, width: int, tokens: int) -> Part:
    first = dice.choice([4, 6, 8, 9, 12])
    stage = token_stage(dice, first, tokens)
    return Part(nn.Sequential(nn.Linear(width, first), stage.module), 0, f"linear({width}>{first}), {stage.text}")


def vector_network(dice: Dice, width: int) -> Part:
    """Linear layers with norms and residuals."""
    parts = []
    for _ in range(dice.choice([2, 3, 4])):
        out = dice.width()
        act, act_text = activation(dice, out)
        norm_, norm_text = dice.choice([(nn.BatchNorm1d, "bn"), (nn.LayerNorm, "ln"), (nn.Identity, "none")])
        body, text = (
            nn.Sequential(nn.Linear(width, out), norm_(out), act),
            f"linear({width}>{out}).{norm_text}.{act_text}",
        )
        if dice.chance(0.4):
            mlp = Mlp(out, dice.width(), out, nn.GELU())
            body, text = nn.Sequential(body, PreNorm(mlp, nn.Identity())), f"{text}, residual[mlp]"
        parts.append(Part(body, out, text))
        width = out
    head, text = classifier(dice, width)
    return joined([*parts, Part(head, 0, text)])


def network(seed: int) -> Example:
    """The network of this seed, the same whatever the global random state."""
    dice = Dice(seed)
    batch, width = dice.choice([3, 4, 5]), dice.choice([2, 3, 4])
    form = dice.weighted({"2d": 66, "1d": 9, "3d": 7, "tokens": 13, "vectors": 5})
    with torch.random.fork_rng(devices=[]):
        if form == "tokens":
            tokens = dice.choice([4, 5, 6])
            shape, built = (tokens, width), token_network(dice, width, tokens)
        elif form == "vectors":
            shape, built = (width + 3,), vector_network(dice, width + 3)
        else:
            dice.dims = int(form[0])
            dice.size = dice.choice([4, 5] if dice.dims == 3 else [4, 5, 6, 6, 7, 8, 8, 10])
            shape = (width, *[dice.size] * dice.dims)
            built = image_network(dice, width)
    model = built.module.double().eval()
    generator = torch.Generator().manual_seed(seed)
    randomise(model, dice, generator)
    inputs = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
    return Example(model, inputs, f"{form} {tuple(inputs.shape)}: {built.text}")


@torch.no_grad()
def randomise(model: nn.Module, dice: Dice, generator: torch.Generator) -> None:
    """No parameter or statistic is left at its default."""
    for module in model.modules():
        if isinstance(getattr(module, "eps", None), float):
            # A constant channel through a norm is rounding noise / sqrt(eps); with 1e-5 a few norms in a row would
            # lift that above any tolerance.
            module.eps = dice.choice([1e-2, 1e-1])
    tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if b.is_floating_point())]
    for name, x in tensors:
        x.copy_(values(name.split(".")[-1], x, generator))


def values(name: str, x: Tensor, generator: torch.Generator) -> Tensor:
    """Weights of layers are normal with variance 2 / fan in, scales near 1 and shifts near 0, but not there."""
    if x.dim() > 1 and x.shape[0] > 1 and x[0].numel() > 1:
        return (2 / x[0].numel()) ** 0.5 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    size = 0.2 + 0.4 * torch.rand(x.shape, generator=generator, dtype=x.dtype)
    away = torch.where(torch.rand(x.shape, generator=generator) < 0.5, -size, size)
    scales = ("weight", "gamma", "scale", "running_var", "original0")
    return 1 + away if name in scales else away


# --- masks ----------------------------------------------------------------------------------------------


def removal(
    model: nn.Module, inputs: Tensor, seed: int, structures: sosp.Structures | None = None
) -> dict[str, list[int]]:
    """A random mask, layer by layer: from one channel of one layer to nearly everything."""
    dice = Dice(seed)
    structures = structures or sosp.find_structures(model, inputs)
    widths = {layer.name: layer.channels for layer in structures.layers}
    ratio = dice.random.uniform(0.1, 0.9)
    form = dice.weighted({"anywhere": 30, "uneven": 20, "coupled": 20, "runs": 10, "one": 8, "layers": 6, "branch": 6})
    if form == "anywhere":
        removed = {n: some(dice, w, ratio) for n, w in widths.items()}
    elif form == "uneven":  # a ratio of its own for every layer
        removed = {n: some(dice, w, dice.random.uniform(0, 1)) for n, w in widths.items()}
    elif form == "coupled":  # the same channels wherever the width is the same, so that sums lose them too
        same = {w: some(dice, w, ratio) for w in sorted(set(widths.values()))}
        removed = {n: same[w] for n, w in widths.items() if not dice.chance(0.1)}
    elif form == "runs":  # neighbours: whole groups, heads or chunks
        removed = {n: run(dice, w, ratio) for n, w in widths.items()}
    elif form == "one":
        name = dice.choice(list(widths))
        removed = {name: some(dice, widths[name], ratio)}
    else:
        chosen = layers_at_once(dice, model, inputs, widths, branch=form == "branch")
        removed = {n: list(range(w)) if n in chosen else some(dice, w, ratio / 2) for n, w in widths.items()}
    return {n: channels for n, channels in removed.items() if channels} or {next(iter(widths)): [0]}


def some(dice: Dice, width: int, ratio: float) -> list[int]:
    """Each channel with probability ``ratio``, but never all."""
    chosen = [c for c in range(width) if dice.chance(ratio)]
    return chosen if len(chosen) < width else chosen[1:]


def run(dice: Dice, width: int, ratio: float) -> list[int]:
    length = min(round(ratio * width), width - 1)
    start = dice.random.randint(0, width - length)
    return list(range(start, start + length))


def layers_at_once(dice: Dice, model: nn.Module, inputs: Tensor, widths: dict[str, int], *, branch: bool) -> set[str]:
    """The layers that lose everything: a few at random, or all that a parallel branch ends in."""
    if branch:
        try:
            found = sosp.find_structures(model, inputs, kind="blocks")
        except sosp.errors.StructureError:  # no branches
            branch = False
    if not branch:
        return set(dice.random.sample(list(widths), min(len(widths), dice.choice([1, 1, 2]))))
    chosen = dice.random.sample(range(len(found)), min(len(found), dice.choice([1, 1, 2])))
    return set(found.channels_of(torch.tensor(sorted(chosen))))
