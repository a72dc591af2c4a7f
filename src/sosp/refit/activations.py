"""Ops that treat every element by itself, and the range that some of them let through as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from torch import Tensor

Range = tuple[float, float]
FULL_RANGE: Range = (-inf, inf)
Activation = Callable[[Tensor], Tensor]
# Ops that treat every element by itself.
ACTIVATIONS = frozenset(
    {
        *("relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus"),
        *("hardswish", "hardsigmoid", "sigmoid", "tanh"),
    }
)
# Of them, those that let a range through as it is: op -> the range, from its arguments.
CLIPS: dict[str, Callable[..., Range]] = {
    "relu": lambda input, inplace=False: (0.0, inf),
    "relu6": lambda input, inplace=False: (0.0, 6.0),
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0, inplace=False: (min_val, max_val),
}


def return_input(x: Tensor) -> Tensor:
    return x


def bind_activation(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Activation:
    """The op as a function of one tensor, which it leaves as it is."""
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "inplace")}
    more = tuple(False if isinstance(a, bool) else a for a in args[1:])  # inplace is the only one that is a bool
    return lambda x: func(x.clone(), *more, **rest)
