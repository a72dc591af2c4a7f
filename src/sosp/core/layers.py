"""Describe the layers that can lose channels, put their outputs back in place (Scatter), and gate their outputs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerType:
    """How a type of layer lays out its channels."""

    axis: int  # of the channels in the output
    channels: Callable[[Any], int]
    kernel: Callable[[Any], float] = lambda m: 1.0
    positions: Callable[[Tensor, Tensor], float] = lambda x, y: y.numel() / y.shape[-1]  # from input and output
    depthwise: Callable[[Any], bool] = lambda m: False
    weight_axis: int = 0  # of the output channels in the weight
    sizes: tuple[str, str] = ("out_features", "in_features")  # attributes that name its widths


def _edge(m: Any) -> float:
    return prod(m.kernel_size) ** (1 / len(m.kernel_size))


def _depthwise(m: Any) -> bool:
    return m.groups == m.in_channels == m.out_channels and m.groups > 1


WIDTHS = ("out_channels", "in_channels")
# Every position of the output (of the input, for transposed convolutions) applies the filter once.
CONV = LayerType(1, lambda m: m.out_channels, _edge, lambda x, y: y.numel() / y.shape[1], _depthwise, 0, WIDTHS)
TRANSPOSED = LayerType(1, lambda m: m.out_channels, _edge, lambda x, y: x.numel() / x.shape[1], _depthwise, 1, WIDTHS)

LAYERS: dict[type[nn.Module] | str, LayerType] = {
    nn.Conv1d: CONV,
    nn.Conv2d: CONV,
    nn.Conv3d: CONV,
    nn.ConvTranspose1d: TRANSPOSED,
    nn.ConvTranspose2d: TRANSPOSED,
    nn.ConvTranspose3d: TRANSPOSED,
    nn.Linear: LayerType(-1, lambda m: m.out_features),
    "transformers.pytorch_utils.Conv1D": LayerType(-1, lambda m: m.nf, weight_axis=1, sizes=("nf", "nx")),
}

# Normalisations that treat every channel by itself, so that they belong to the layer they follow. LayerNorm and
# GroupNorm mix channels: a channel in front of them is removed in front of them. A group can go as a whole.
NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NORM_NAMES = frozenset({"FrozenBatchNorm2d"})


def find_channel_axis(module: nn.Module, output: Tensor) -> int:
    """Where the channels of a layer's or a norm's output are: a convolution also takes an example without a batch."""
    kind = find_layer_type(module)
    axis = kind.axis if kind else 1
    spatial = len(getattr(module, "kernel_size", ()))
    return 0 if kind and axis == 1 and output.dim() == spatial + 1 else axis


def find_layer_type(module: nn.Module) -> LayerType | None:
    """The entry of ``LAYERS`` for this module, also for subclasses and classes known by name only."""
    for cls in type(module).__mro__:
        found = LAYERS.get(cls) or LAYERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if found:
            return found
    return None


def is_norm(module: nn.Module) -> bool:
    """A normalisation that may belong to the layer in front of it."""
    return isinstance(module, NORMS) or any(c.__name__ in NORM_NAMES for c in type(module).__mro__)


def is_group_norm(module: nn.Module) -> bool:
    """A normalisation of groups of channels, each by itself."""
    return isinstance(module, nn.GroupNorm)


def align_values(values: Tensor, dim: int, axis: int) -> Tensor:
    """Shape per-channel values (C,), or per-example ones (N, C), to multiply an output with ``dim`` dimensions."""
    axis = axis % dim
    shape = [1] * dim
    shape[axis] = values.shape[-1]
    if values.dim() == 2:
        shape[0] = values.shape[0]
    return values.view(shape)


def find_width(model: nn.Module, name: str, kind: str) -> int | None:
    """The channels of the layer (for kind "weights", the elements of the parameter) of that name, if it is one."""
    if kind == "weights":
        return model.get_parameter(name).numel()
    module = model.get_submodule(name)
    found = find_layer_type(module)
    return found.channels(module) if found else None


# Layers of a smaller network: outputs put back in place, and layers that lost everything ------------------------------


class Scatter(nn.Module):
    """Output channel j is input channel ``index[j]``, or zero where that is -1.

    It sits as ``scatter`` in the module whose output it rearranges, called by a forward hook. Its buffers are not
    in the state dict, whose names stay those of the original network.
    """

    index: Tensor  # (width,)
    places: Tensor  # (n,) the output channels that are not zero
    source: Tensor  # (n,) the input channels they take
    inverse: Tensor  # (width,) as index, with some valid channel where it is -1
    empty: Tensor  # (width,) bool

    def __init__(self, index: Tensor, axis: int, given: int) -> None:
        super().__init__()
        self.axis, self.given = axis, given  # given: the channels it takes
        places = (index >= 0).nonzero().flatten()
        self.dense = len(places) == len(index)  # nothing is zero: it only drops or reorders
        self.whole = torch.equal(index[places], torch.arange(given))  # it takes every channel, in order
        kept = {"index": index, "places": places, "source": index[places]}
        for name, value in {**kept, "inverse": index.clamp_min(0), "empty": index < 0}.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        axis = self.axis % x.dim()
        if axis == 1 and x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
            # Both ways channels last: the gradient of indexing would come back contiguous, and be converted.
            return self._moved(x.permute(0, 2, 3, 1), 3).permute(0, 3, 1, 2)
        return self._moved(x, axis)

    def _moved(self, x: Tensor, axis: int) -> Tensor:
        if self.dense:
            return x.index_select(axis, self.source)
        if torch.compiler.is_compiling() or type(x) is not Tensor:  # one gather that fuses with what follows
            return x.index_select(axis, self.inverse).masked_fill(align_values(self.empty, x.dim(), axis), 0)
        shape = list(x.shape)
        shape[axis] = len(self.index)
        if not len(self.places):
            return x.new_zeros(shape)
        taken = x if self.whole else x.index_select(axis, self.source)
        return x.new_zeros(shape).index_copy_(axis, self.places, taken)

    def extra_repr(self) -> str:
        return f"{self.given} -> {len(self.index)}, axis={self.axis}"


def scatter_output(module: Any, args: Any, output: Tensor) -> Tensor:
    """The forward hook of a module with a ``scatter``."""
    return module.scatter(output)


def _copy_plain_attributes(old: nn.Module, new: nn.Module, types: tuple[type, ...]) -> None:
    """Code may ask for them."""
    for key, value in vars(old).items():
        if not key.startswith("_") and isinstance(value, types):
            setattr(new, key, value)


def _make_zeros(like: object, axis: int, width: int) -> Tensor | None:
    """Zeros of the shape of a parameter, with another width along one axis."""
    if not isinstance(like, Tensor):
        return None
    shape = list(like.shape)
    shape[axis] = width
    return like.detach().new_zeros(shape)


class ZeroLayer(nn.Module):
    """What is left of a layer that lost every channel: zeros of the shape the layer would give.

    Code may ask a layer for its sizes, or for the type and the device of its weight: it answers as the layer would. Its
    weight and its bias are zeros; they are no parameters, and not in the state dict.
    """

    kernel_size: Any  # of a convolution, as all below
    stride: Any
    dilation: Any
    padding: Any
    output_padding: Any
    transposed: bool

    def __init__(self, layer: Any, width: int = 1) -> None:
        super().__init__()
        _copy_plain_attributes(layer, self, (int, str, tuple))
        self.width = width  # one channel, unless what follows needs more
        self.linear = not hasattr(layer, "kernel_size")
        kind = find_layer_type(layer)
        for key, axis in (("weight", kind.weight_axis if kind else 0), ("bias", 0)):
            self.register_buffer(key, _make_zeros(getattr(layer, key, None), axis, width), persistent=False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.linear:
            return x.new_zeros((*x.shape[:-1], self.width))
        d = len(self.kernel_size)
        return x.new_zeros((*x.shape[: -d - 1], self.width, *(self._size(n, i) for i, n in enumerate(x.shape[-d:]))))

    def _size(self, n: int, i: int) -> int:
        k, s, r = self.kernel_size[i], self.stride[i], self.dilation[i]
        if self.padding == "same":
            return n
        p = 0 if self.padding == "valid" else self.padding[i]
        if self.transposed:
            return (n - 1) * s - 2 * p + r * (k - 1) + self.output_padding[i] + 1
        return (n + 2 * p - r * (k - 1) - 1) // s + 1


class BypassedModule(nn.Module):
    """What is left of a module that gives one of its arguments, zeros of that shape, or what some of its parts give.

    Its parts keep their names. Those that do not run any more are replaced by modules without parameters.
    """

    def __init__(self, module: nn.Module, source: int | str, steps: Sequence[str], zero: bool) -> None:
        super().__init__()
        _copy_plain_attributes(module, self, (bool, int, float, str, tuple))
        self._modules.update({key: part for key, part in module._modules.items() if key != "scatter"})
        self._bypass = (source, tuple(steps), zero)
        for name, part in list(self.named_modules(remove_duplicate=False)):
            if name and not is_kept_part(name, steps):
                self._replace(name, _make_placeholder(part))
        if steps and getattr(first := self.get_submodule(steps[0]), "inplace", False):
            fresh: Any = copy.copy(first)  # it was given a tensor of its own to write into
            fresh.inplace = False
            self._replace(steps[0], fresh)

    def _replace(self, name: str, part: nn.Module) -> None:
        path, _, key = name.rpartition(".")
        self.get_submodule(path)._modules[key] = part

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        source, steps, zero = self._bypass
        x: Tensor = args[source] if isinstance(source, int) else kwargs[source]
        if zero:
            return x.new_zeros(()).expand(x.shape)
        for step in steps:
            x = self.get_submodule(step)(x) if "." in step else self._modules[step](x)  # type: ignore[misc]
        return x

    def extra_repr(self) -> str:
        source, steps, zero = self._bypass
        return "zeros" if zero else " -> ".join([f"argument {source!r}", *steps])


def is_kept_part(name: str, steps: Sequence[str]) -> bool:
    """Whether a part of a bypassed module still runs, has one that runs in it, or is in one."""
    return any(f"{name}.".startswith(f"{s}.") or f"{s}.".startswith(f"{name}.") for s in steps)


def _make_placeholder(part: nn.Module) -> nn.Module:
    """What takes the place of a module that does not run any more: it has no parameters, and nothing is scattered."""
    kind = find_layer_type(part)
    if kind is not None:
        return ZeroLayer(part, kind.channels(part))
    if not part._modules or is_norm(part):  # timm's norms hold their activation
        return nn.Identity() if part._parameters or (part._buffers and not isinstance(part, ZeroLayer)) else part
    part = copy.copy(part)
    part._modules = {key: child for key, child in part._modules.items() if key != "scatter"}
    part._forward_hooks = OrderedDict()
    if not isinstance(part, ZeroLayer):
        part._parameters, part._buffers = dict.fromkeys(part._parameters), dict.fromkeys(part._buffers)
    return part


def find_source(module: Any, args: Any, kwargs: Any) -> Tensor:
    """The argument that a bypassed module gives, takes the shape of, or gives to the first of its parts that run."""
    source = module._bypass[0]
    found: Tensor = kwargs[source] if isinstance(source, str) else args[source]
    return found


def gives_known_zeros(module: nn.Module) -> bool:
    """Whether it is a part of a smaller network that gives zeros, whatever it is given."""
    return isinstance(module, BypassedModule) and module._bypass[2]


# Gates: a hook on the output of each layer or of its own norm ---------------------------------------------------------

GateFunction = Callable[[int, Any], Any]  # (index of the layer, its output) -> the gated output


class GatedLayer(Protocol):
    """A layer by name, and the normalisations that are its own."""

    @property
    def name(self) -> str: ...

    @property
    def norms(self) -> tuple[str, ...]: ...


class GateHook:
    """On the output of a layer, or of its own norm. (A class, so that masked models copy and pickle.)"""

    def __init__(self, apply: GateFunction, index: int) -> None:
        self.apply, self.index = apply, index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.apply(self.index, output)


class InputHook:
    """A GateHook on what a module is given."""

    def __init__(self, hook: GateHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: Any) -> Any:
        return (self.hook(module, (), args[0]), *args[1:])


def install_gates(model: nn.Module, layers: Sequence[GatedLayer], gate: str, apply: GateFunction) -> list[Any]:
    """Hook ``apply`` onto the outputs of ``layers``, or of their own norms; returns the handles that undo it."""
    places = [
        (i, model.get_submodule(name))
        for i, layer in enumerate(layers)
        for name in (layer.norms if gate == "features" else ()) or (layer.name,)
    ]
    return [hook_output(module, GateHook(apply, i)) for i, module in places]


def hook_output(module: nn.Module, hook: GateHook) -> Any:
    """Hook what the module computes: in a shrunk network, before its channels are scattered to their places."""
    scatter = module._modules.get("scatter")
    if isinstance(scatter, Scatter):
        return scatter.register_forward_pre_hook(InputHook(hook))
    return module.register_forward_hook(hook)


@contextmanager
def apply_gates(model: nn.Module, layers: Sequence[GatedLayer], gate: str, apply: GateFunction) -> Iterator[None]:
    """``install`` for the length of the block."""
    handles = install_gates(model, layers, gate, apply)
    try:
        yield
    finally:
        for h in handles:
            h.remove()
