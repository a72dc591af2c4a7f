"""Values that carry their tangent: one forward pass computes f and df, ordinary backward differentiates both.

A ``Jet`` is a pair (p, t) that looks like the tensor p. Give every gate g a tangent d and let the loss of the network
be the jet (L, L'), with L' = sum_s d_s dL/dg_s. Then

    d L' / d g = H d        and        d L' / d d = dL/dg,

so a single backward pass from L' yields the first- and the second-order term together. Linear operations run on p and
on t as ordinary kernels; what costs memory traffic (normalisation, gate, residual add, ReLU) is put off and done in one
step, ``settle``; anything else goes through torch's own forward-mode rule for that one operation. A jet without
tangents (t = None) takes the same short cuts for plain gate gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sosp.scoring.jets.epilogue import EpiloguePlan, apply_epilogue

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}  # how an operation acts on jets (None: any other one); filled by sosp.scoring.jets.rules


class UnsupportedError(Exception):
    """This computation does not fit jets; another exact way must be taken."""


@dataclass(frozen=True)
class Gate:
    """One factor per channel, all ones: ``values`` (C,) or, per example, (N, C), and its ``tangent`` (C,) or None."""

    values: Tensor
    tangent: Tensor | None
    axis: int


@dataclass(frozen=True)
class PendingOps:
    """What is still to be done to a jet, channel by channel: gate, affine map (or the other way round), add."""

    scale: Tensor | None = None  # (C,)
    shift: Tensor | None = None  # (C,)
    gate: Gate | None = None
    gate_first: bool = True  # the gate acts before scale and shift
    residual: Jet | None = None


class Jet(torch.Tensor):
    """A value and its tangent; see the module's docstring."""

    _p: Tensor
    _t: Tensor | None
    pending: PendingOps | None
    family: list[weakref.ref[Jet]]  # every jet that torch's rules let share memory with this one

    @staticmethod
    def __new__(cls, p: Tensor, t: Tensor | None = None, pending: PendingOps | None = None) -> Jet:
        self: Any = torch.Tensor._make_wrapper_subclass(
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device
        )
        self._p, self._t, self.pending, self.family = p, t, pending, []
        return self

    @property
    def primal(self) -> Tensor:
        """The value, with everything pending done."""
        flush_pending(self)
        return self._p

    @property
    def tangent(self) -> Tensor | None:
        """The tangent, with everything pending done; None stands for zero."""
        flush_pending(self)
        return self._t

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Jet({tuple(self._p.shape)}, tangent={self._t is not None}, pending={self.pending is not None})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Inside torch.no_grad or a custom autograd.Function the link to the gates would be lost without a word.
        if not torch.is_grad_enabled():
            raise UnsupportedError("torch.no_grad or a custom autograd.Function in forward")
        target, func, kwargs = _out_of_place(func, args, kwargs)
        rule = RULES.get(func) or RULES[None]
        result = rule(func, args, kwargs)
        return result if target is None else _rebind(target, result)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UnsupportedError(f"{func} reached a jet below torch functions")


T = torch.Tensor
METADATA: frozenset[Any] = frozenset(
    getattr(T, n).__get__
    for n in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_mps", "is_quantized",
              "requires_grad", "is_meta", "is_nested", "names", "is_mkldnn", "is_cpu", "is_xpu", "itemsize")
    if hasattr(T, n)
) | {T.size, T.dim, T.ndimension, T.numel, T.nelement, T.stride, T.is_contiguous, T.is_floating_point, T.is_complex,
     T.__len__, T.element_size, T.get_device, T.is_signed, T.__hash__, T.storage_offset, torch.is_floating_point,
     torch.is_complex, torch.numel}  # fmt: skip


# In-place operations: jets are values, so compute the result and let the name stand for it --------------------------


def _out_of_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """(the tensor written to, or None; the function that only computes; its keyword arguments)."""
    if kwargs.get("inplace"):
        return args[0], func, {**kwargs, "inplace": False}
    name = getattr(func, "__name__", "")
    if func in (T.__setitem__, T.copy_, T.set_, T.resize_) or kwargs.get("out") is not None:
        raise UnsupportedError(f"{name} writes into part of a tensor")
    if name.startswith("__i") and hasattr(T, "__" + name[3:]):  # __iadd__ -> __add__; __invert__ has no twin
        return args[0], getattr(T, "__" + name[3:]), kwargs
    if name.endswith("_") and not name.endswith("__"):
        plain = getattr(T, name[:-1], None) or getattr(torch, name[:-1], None) or getattr(F, name[:-1], None)
        if plain is None:
            raise UnsupportedError(f"in-place {name}")
        return args[0], plain, kwargs
    return None, func, kwargs


def mark_aliases(a: Jet, b: Jet) -> None:
    """Writing into one of the two would have to show in the other, and in all that share with either."""
    if a.family is not b.family or not a.family:
        family = [*(a.family or [weakref.ref(a)]), *(b.family or [weakref.ref(b)])]
        for member in family:
            jet = member()
            if jet is not None:
                jet.family = family


def _rebind(target: Any, result: Any) -> Jet:
    if result is target:  # dropout in eval mode
        return result
    if not isinstance(target, Jet) or not isinstance(result, Jet) or target.shape != result.shape:
        raise UnsupportedError("an in-place operation that changes what is no jet, or its shape")
    if any(other() is not None and other() is not target for other in target.family):
        raise UnsupportedError("an in-place operation on a view")
    target._p, target._t, target.pending = result._p, result._t, result.pending
    return target


# The pending work in one step, forward and backward ------------------------------------------------------------------


def flush_pending(jet: Jet) -> None:
    """Do what is pending; the jet is then plain (p, t)."""
    if jet.pending is not None:
        jet._p, jet._t = apply_pending(jet._p, jet._t, jet.pending, False)
        jet.pending = None


def get_primal(x: Any) -> Any:
    """A jet's value; anything else as it is."""
    return x.primal if isinstance(x, Jet) else x


def apply_pending(p: Tensor, t: Tensor | None, todo: PendingOps, relu: bool) -> tuple[Tensor, Tensor | None]:
    rp, rt = (todo.residual._p, todo.residual._t) if todo.residual is not None else (None, None)
    g, d, axis = (todo.gate.values, todo.gate.tangent, todo.gate.axis) if todo.gate else (None, None, 1)
    plan = EpiloguePlan(axis % max(p.dim(), 1), todo.gate_first, relu)
    return apply_epilogue(p, t, rp, rt, g, d, todo.scale, todo.shift, plan)
