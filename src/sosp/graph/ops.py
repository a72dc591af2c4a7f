"""Ops by name, the user's line that called one, and how to call it without computing anything."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

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
        parts = (resolve_name(func) or getattr(func, "__name__", str(func))).split(".")
        found = parts[-2] if parts[-1] == "__get__" and len(parts) > 1 else parts[-1]
        if not found.startswith("__"):
            found = found.rstrip("_")
        _names[func] = found
    return found


def collect_numbers(name: str, leaves: Iterable[Any]) -> tuple[float, ...]:
    """The numbers that an op computes with: those with a fraction, and whole ones where they can be no size."""
    whole = name in ARITHMETIC
    return tuple(x for x in leaves if type(x) is float or (whole and type(x) is int))


def find_user_line() -> str:
    """``file.py:12``: the innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((f"{TORCH}/", SOSP_FOLDER, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


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


# Followed as the simpler ops they are made of, which say which of their sizes are free.
DECOMPOSED: dict[str, Callable[..., Tensor]] = {
    "glu": glu,
    "channel_shuffle": channel_shuffle,
    "pixel_shuffle": pixel_shuffle,
}


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
