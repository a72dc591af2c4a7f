"""Name ops and the user's line that called one, and probe what an op does to channels on small random data."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from sosp.core.layers import find_layer_type

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
DROPOUTS = frozenset(
    {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
)
COMPOSITE = frozenset({"multi_head_attention_forward"})  # made of ops that are followed one by one
NORMALISATIONS = frozenset({"batch_norm", "instance_norm", "layer_norm"})
VALUES = frozenset(  # they look at numbers
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
)
COUNTING = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"})  # as many as they find
FACTORIES = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"})  # a type and a device
UNWRITTEN = frozenset({"empty_like"})  # how torch finds the shape of compiled code: nothing is known of it
# Every step of a sequence, or call of a cell, applies all of a recurrent module's matrices once: channels are mixed. It
# is not tried out: of gates that are not three or four times as wide as the state torch reads what is not there.
RECURRENT = frozenset(
    {"gru", "lstm", "rnn_tanh", "rnn_relu", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"}
)
UNTRIED = FACTORIES | UNWRITTEN | RECURRENT  # not run on small random tensors
ARITHMETIC = frozenset(  # a whole number among their arguments is a value, never a size or an axis
    {"add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "rsub", "pow", "float_power"}
    | {"__radd__", "__rsub__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__", "__floordiv__", "__rfloordiv__"}
    | {"__pow__", "__rpow__", "__mod__", "__rmod__", "addcmul", "addcdiv", "lerp", "clamp", "clamp_min", "clamp_max"}
    | {"tensor", "as_tensor", "scalar_tensor", "new_tensor", "full_like", "fill", "masked_fill"}
)
NUMBERS = frozenset(
    {"item", "tolist", "numpy", "__int__", "__float__", "__index__"}
)  # what they give may be computed with
SIZES = frozenset({"shape", "size", "__len__", "numel", "nelement", "stride"})
CUSTOM = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # called by way of torch.ops
TORCH = str(Path(torch.__file__).parent)
SOSP_FOLDER = str(Path(__file__).parent.parent)

_names: dict[Any, str] = {}


def find_op_name(func: Callable[..., Any]) -> str:
    """``relu`` for torch.relu_, Tensor.relu, F.relu; the property's name for a getter."""
    try:
        found = _names.get(func)
    except TypeError:
        return getattr(func, "__name__", str(func))
    if found is None:
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        parts = name.split(".")
        found = parts[-2] if parts[-1] == "__get__" and len(parts) > 1 else parts[-1]
        if isinstance(func, CUSTOM) and parts[0] != "aten":  # what it does is not what torch's op of that name does
            found = name
        if not found.startswith("__"):
            found = found.rstrip("_")
        _names[func] = found
    return found


def checks_arguments(func: Callable[..., Any]) -> bool:
    """Whether an op refuses shapes that do not fit: torch's public ones do.

    Private ones (``torch._weight_norm``) leave that to their callers, and nothing is known of those of other packages
    (``torch.ops.package.op``). On shapes that they do not expect they may write past the end of a tensor.
    """
    package, *parts = (resolve_name(func) or "?").split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return package in ("torch", "aten", "prims") and not private


def collect_numbers(name: str, leaves: Iterable[Any]) -> tuple[float, ...]:
    """The numbers that an op computes with: those with a fraction, and whole ones where they can be no size."""
    whole = name in ARITHMETIC
    return tuple(x for x in leaves if type(x) is float or (whole and type(x) is int))


def find_user_line() -> str:
    """``file.py:12``: the innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_user_code(frame.f_code):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def find_raising_line(error: Exception) -> str:
    """``file.py:12``: the innermost such line that an error came through."""
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    found = [f"{Path(code.co_filename).name}:{line}" for code, line in lines if _is_user_code(code)]
    return found[-1] if found else "?"


def _is_user_code(code: CodeType) -> bool:
    return not code.co_filename.startswith((f"{TORCH}/", SOSP_FOLDER, "<"))


def find_forward_code(model: Any) -> CodeType | None:
    """The code of a network's forward, under what may be wrapped around it."""
    return getattr(inspect.unwrap(getattr(model.forward, "__func__", model.forward)), "__code__", None)


def find_frame(code: CodeType | None) -> FrameType | None:
    """Where this code runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def find_return_line(model: Any, frame: FrameType | None) -> str:
    """``file.py:12`` where a network's forward returned; one of torch's own goes by its name."""
    code = find_forward_code(model)
    if code is None or code.co_filename.startswith((f"{TORCH}/", "<")):
        return f"{type(model).__name__}.forward"
    return f"{Path(code.co_filename).name}:{code.co_firstlineno if frame is None else frame.f_lineno}"


def is_called_by_torch() -> bool:
    """Torch itself makes this call, to find the shape of what compiled code returns."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(SOSP_FOLDER):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(f"{TORCH}/_")


def run_op(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call an op. On the meta device torch takes a millisecond to find the shape of a norm: it is its input's."""
    x = args[0] if args else None
    if name not in NORMALISATIONS or not isinstance(x, Tensor) or not x.is_meta:
        return func(*args, **kwargs)
    over = x.shape[1]
    if name == "layer_norm":
        shape = tuple(args[1] if len(args) > 1 else kwargs["normalized_shape"])
        over = torch.Size(shape).numel()
        if tuple(x.shape[len(x.shape) - len(shape) :]) != shape:
            raise ValueError(f"layer_norm over {shape} of {tuple(x.shape)}")
    widths = {y.numel() for y in tree_leaves((args[1:], kwargs)) if isinstance(y, Tensor)}
    if widths - {over}:
        raise ValueError(f"{name} over {over} channels with parameters for {widths}")
    return torch.empty_like(x)


@contextmanager
def skip_override_checks() -> Iterator[None]:
    """Torch's python functions ask first whether somebody overrides them; a composite one was asked already."""
    functional: Any = F
    before = functional.has_torch_function
    functional.has_torch_function = lambda *args: False
    try:
        yield
    finally:
        functional.has_torch_function = before


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """In pieces: one half times the sigmoid of the other."""
    a, b = input.chunk(2, dim)
    return a * b.sigmoid()


def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """In pieces: the groups side by side, then one of each in turn."""
    n, c, *rest = input.shape
    return input.reshape(n, groups, c // groups, *rest).transpose(1, 2).reshape(input.shape)


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """In pieces: r * r channels become r x r pixels."""
    *lead, c, h, w = input.shape
    r = upscale_factor
    x = input.reshape(*lead, c // (r * r), r, r, h, w)
    d = len(lead)
    x = x.permute(*range(d + 1), d + 3, d + 1, d + 4, d + 2)
    return x.reshape(*lead, c // (r * r), h * r, w * r)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """In pieces: directions times lengths. Torch's own kernel writes where it should not if the sizes do not match."""
    axes = [d for d in range(v.dim()) if dim == -1 or d != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=True))


# Followed as the simpler ops they are made of, which say which of their sizes are free.
DECOMPOSED: dict[str, Callable[..., Tensor]] = {
    "_weight_norm": weight_norm,
    "glu": glu,
    "channel_shuffle": channel_shuffle,
    "pixel_shuffle": pixel_shuffle,
}


TURNS = frozenset({"T", "t", "mT", "transpose", "swapaxes", "swapdims", "adjoint"})


def list_layer_parameters(model: nn.Module) -> set[int]:
    """Return the identities of the parameters of layers."""
    return {id(p) for m in model.modules() if find_layer_type(m) for p in m.parameters(recurse=False)}


def is_turned_weight(name: str, args: Sequence[Any], layer_parameters: set[int]) -> bool:
    """Return whether an op turns a layer's weight around, as in ``x @ layer.weight.T``: it has no record."""
    return name in TURNS and bool(args) and id(args[0]) in layer_parameters and args[0].dim() == 2


def name_arguments(name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a convolution, a linear layer or ``addmm(bias, input, weight)`` by name."""
    if name == "addmm":
        names = ["bias", "input", "weight"]
        kwargs = {{"mat1": "input", "mat2": "weight"}.get(k, k): v for k, v in kwargs.items()}
        if len(args) < 3 and "input" in kwargs and "bias" not in kwargs and not args:
            kwargs = {"bias": kwargs.pop("input"), **kwargs}
    elif name in TRANSPOSED:
        names = ["input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"]
    else:
        names = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    return dict(zip(names, args, strict=False)) | kwargs


# Probing an op on small random data -----------------------------------------------------------------------------------

SMALL = (3, 5, 4, 7, 6, 8, 9, 11, 10, 12, 13)  # stand-ins for the sizes of an op that takes no sizes itself
MOST = 1 << 22  # elements: beyond this an op is not tried out


@dataclass(frozen=True)
class OpCall:
    """One call of an op, with its arguments laid out flat."""

    func: Callable[..., Any]
    name: str
    leaves: Sequence[Any]
    spec: TreeSpec
    shapes: tuple[tuple[int, ...], ...]  # of the tensors it returned
    known: Mapping[int, Tensor]  # position -> the values of an integer or boolean tensor, where they are known

    @property
    def tensors(self) -> list[int]:
        return [k for k, x in enumerate(self.leaves) if isinstance(x, Tensor)]

    def run(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The op on other tensors."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        if "dropout_p" in kwargs:  # attention: what it does to channels does not depend on dropout
            kwargs["dropout_p"] = 0.0
        return [x for x in tree_leaves(self.func(*args, **kwargs)) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class SlicedOp:
    """An op that treats the slices along an axis by themselves."""

    axes: tuple[int, ...]  # of that axis in each output
    kills: tuple[bool, ...]  # per sliced operand: where it is zero, the output is
    all: bool  # where all of them are zero, the output is


CACHE: dict[Any, SlicedOp | None] = {}
NO_COPIES: set[Any] = set()  # calls that compute something


def probe_slices(call: OpCall, axes: Mapping[int, int]) -> SlicedOp | None:
    """Does ``f(x[S]) == f(x)[S]`` hold when operand k is sliced along ``axes[k]``?"""
    for sizes in ([small] if (small := _stand_ins(call)) else []) + [{}]:
        shapes = {k: tuple(sizes.get(n, n) for n in call.leaves[k].shape) for k in call.tensors}
        if any(torch.Size(s).numel() > MOST for s in shapes.values()):
            return None
        found = _probe_cached(call, axes, shapes, sizes)
        if found is not None:
            return found
    return None


def _probe_cached(call: OpCall, axes: Mapping[int, int], shapes: Mapping[int, Any], sizes: Mapping[int, int]) -> Any:
    if call.known:
        return _try(call, axes, shapes, sizes)
    key = (
        call.func,
        tuple(axes.items()),
        tuple((shapes[k], x.dtype) if k in shapes else _kind(x) for k, x in enumerate(call.leaves)),
        call.spec,
        tuple(tuple(sizes.get(n, n) for n in s) for s in call.shapes),
    )
    if key not in CACHE:
        CACHE[key] = _try(call, axes, shapes, sizes)
    return CACHE[key]


def _plain(x: Any) -> Any:
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return (type(x), x)


def _stand_ins(call: OpCall) -> dict[int, int]:
    """Smaller sizes to try an op with first; equal ones stay equal, and 1 stays 1."""
    if call.known:
        return {}
    found = sorted({n for k in call.tensors for n in call.leaves[k].shape if n > 1})
    if len(found) > len(SMALL) or any(n not in found for s in call.shapes for n in s if n > 1):
        return {}
    return dict(zip(found, SMALL, strict=False))


def _try(call: OpCall, axes: Mapping[int, int], shapes: Mapping[int, Any], sizes: Mapping[int, int]) -> SlicedOp | None:
    try:
        return _probe(call, axes, shapes, sizes)
    except Exception:  # an op may refuse the slices in any way it likes
        return None


def _probe(
    call: OpCall, axes: Mapping[int, int], shapes: Mapping[int, Any], sizes: Mapping[int, int]
) -> SlicedOp | None:
    generator = torch.Generator().manual_seed(0)
    given = list(call.leaves)
    for k, shape in shapes.items():
        given[k] = call.known[k] if k in call.known else _random(call.leaves[k], shape, generator)
    given = [torch.device("cpu") if isinstance(x, torch.device) else x for x in given]
    width = {given[k].shape[d] for k, d in axes.items()}
    if len(width) != 1:
        return None
    C = width.pop()
    # Not every other one, not all, not evenly spaced.
    S = torch.randperm(C, generator=generator)[: max(1, (2 * C) // 3)].sort().values if C > 2 else torch.tensor([C - 1])

    def run(change: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        return call.run([change(k, x.clone()) if k in shapes else x for k, x in enumerate(given)])

    whole = run(lambda k, x: x)
    if [tuple(y.shape) for y in whole] != [tuple(sizes.get(n, n) for n in s) for s in call.shapes]:
        return None
    part = run(lambda k, x: x.index_select(axes[k], S) if k in axes else x)
    found = [_axis(y, p, S, C) for y, p in zip(whole, part, strict=True)]
    if any(d is None for d in found):
        return None
    out = [d for d in found if d is not None]

    def zero(which: set[int]) -> bool:
        for turn in (torch.positive, torch.neg):  # the smaller of 0 and another number is 0 for one sign of that number
            ys = run(lambda k, x: x.index_fill(axes[k], S, 0) if k in which else _turn(x, turn))  # noqa: B023
            if not all(bool((y.index_select(d, S) == 0).all()) for y, d in zip(ys, out, strict=True)):
                return False
        return True

    return SlicedOp(tuple(out), tuple(zero({k}) for k in axes), zero(set(axes)))


def _turn(x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
    return turn(x) if x.is_floating_point() else x


def _random(like: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if like.dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if like.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    return torch.zeros(shape, dtype=like.dtype)


def _axis(whole: Tensor, part: Tensor, S: Tensor, C: int) -> int | None:
    """The one axis along which ``part`` is the slices S of ``whole``."""
    found = None
    for d in range(whole.dim()):
        expected = [len(S) if q == d else n for q, n in enumerate(whole.shape)]
        if whole.shape[d] != C or list(part.shape) != expected:
            continue
        if torch.allclose(whole.index_select(d, S), part, rtol=1e-6, atol=1e-9, equal_nan=True):
            if found is not None:
                return None
            found = d
    return found


def probe_copies(call: OpCall, labels: Mapping[int, Tensor], opaque: int, zero: int) -> list[Tensor] | None:
    """If every element of the output is a copy of one element of the input (or 0): the labels of the output.

    The op is run on numbered elements, which says where each one comes from, and on random ones, which checks it.
    """
    places = call.tensors
    if not all(call.leaves[k].is_floating_point() or k in call.known for k in places):
        return None
    sizes = [call.leaves[k].numel() for k in places]
    if sum(sizes) > MOST:
        return None
    key = (call.func, call.spec, tuple(_kind(x) for x in call.leaves))
    if key in NO_COPIES and not call.known:
        return None
    found = _find_copies(call, labels, opaque, zero, places, sizes)
    if found is None:
        NO_COPIES.add(key)
    return found


def _kind(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else _plain(x)


def _find_copies(
    call: OpCall, labels: Mapping[int, Tensor], opaque: int, zero: int, places: list[int], sizes: list[int]
) -> list[Tensor] | None:
    values = [torch.zeros(1, dtype=torch.float64)]
    names = [torch.tensor([zero])]
    codes, noise = list(call.leaves), list(call.leaves)
    generator = torch.Generator().manual_seed(1)
    start = 1
    for k, size in zip(places, sizes, strict=True):
        shape = call.leaves[k].shape
        if k in call.known:
            codes[k] = noise[k] = call.known[k]
            continue
        codes[k] = torch.arange(start, start + size, dtype=torch.float64).view(shape)
        values.append(torch.randn(size, generator=generator, dtype=torch.float64))
        noise[k] = values[-1].view(shape).clone()
        names.append(labels[k].reshape(-1) if k in labels else torch.full((size,), opaque))
        start += size
    try:
        numbered, random = call.run(codes), call.run(noise)
    except Exception:  # as above
        return None
    table, label = torch.cat(values), torch.cat(names)
    found = []
    for a, b, shape in zip(numbered, random, call.shapes, strict=False):
        index = a.round().long() if a.is_floating_point() and bool(torch.isfinite(a).all()) else None
        if index is None or tuple(a.shape) != shape or not bool(((index >= 0) & (index < start)).all()):
            return None
        if not bool((index == a).all()) or not torch.equal(table[index], b):
            return None
        found.append(label[index])
    return found if len(found) == len(call.shapes) else None
