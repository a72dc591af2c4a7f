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

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from sosp.scoring.jets.fused_ops import EpiloguePlan, apply_epilogue

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
        raise UnsupportedError("an in-place operation that changes something that is not a jet, or changes its shape")
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


# Torch's forward-mode rules: trusted once they have been seen to differentiate backward -------------------------------

# Some of torch's forward-mode rules (layer norm, softmax) compute the right tangent but cannot be differentiated
# backward, or, worse, give a wrong result when they are. So each operation is tried once, on the data at hand: the
# derivative of its tangent, backward over forward, must equal the tangent of its derivative, forward over backward.
DIFFERENTIABLE: dict[Any, bool] = {}


def check_forward_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``Unsupported`` unless torch's forward-mode rule for this call can be differentiated backward."""
    settings = tree_map(lambda a: "tensor" if isinstance(a, Tensor) else repr(a), (args, kwargs))
    key = (func, str(settings))
    if key not in DIFFERENTIABLE:
        DIFFERENTIABLE[key] = _mixed_derivatives_agree(func, args, kwargs)
    if not DIFFERENTIABLE[key]:
        raise UnsupportedError(
            f"torch's forward-mode rule for {getattr(func, '__name__', func)} cannot be differentiated"
        )


def _mixed_derivatives_agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    moving = {id(a): a for a in tree_leaves((args, kwargs)) if isinstance(a, Jet) and a.tangent is not None}
    places = {key: i for i, key in enumerate(moving)}
    p = [j.primal.detach() for j in moving.values()]
    t = [j.tangent.detach() for j in moving.values() if j.tangent is not None]

    def run(values: list[Tensor]) -> list[Tensor]:
        swap = lambda a: values[places[id(a)]] if id(a) in places else get_primal(a)  # noqa: E731
        swapped = tree_map(swap, (args, kwargs))
        out = tree_leaves(func(*swapped[0], **swapped[1]))
        return [o for o in out if isinstance(o, Tensor) and o.is_floating_point()]

    try:
        if not run(p):
            return True  # a comparison, an index: nothing to differentiate
        backward = _backward_over_forward(run, p, t)
        forward = _forward_over_backward(run, p, t)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    ahead, back = (torch.cat([x.flatten() for x in xs]) for xs in (forward, backward))
    loose = {torch.float64: 1e-6, torch.float32: 1e-2}.get(back.dtype, 0.2)
    return bool((ahead - back).norm() <= loose * (ahead.norm() + back.norm()))


Run = Callable[[list[Tensor]], list[Tensor]]


@cache
def load_forward_rules() -> None:
    """Compile torch's own forward-mode rules, which it does with its deprecated torch.jit.script at first use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        from torch._decomp import decompositions_for_jvp  # noqa: F401


def _weigh(outputs: list[Tensor]) -> Tensor:
    """One number from all outputs, with fixed weights that treat no two alike."""
    weights = [torch.arange(o.numel(), device=o.device).cos().to(o.dtype).view(o.shape) for o in outputs]
    return torch.stack([(o * w).sum() for o, w in zip(outputs, weights, strict=True)]).sum()


def _backward_over_forward(run: Run, p: list[Tensor], t: list[Tensor]) -> list[Tensor]:
    """The way jets take."""
    load_forward_rules()
    inputs = [x.clone().requires_grad_() for x in p]
    with forward_ad.dual_level():
        pairs = [
            forward_ad.unpack_dual(o)
            for o in run([forward_ad.make_dual(*pair) for pair in zip(inputs, t, strict=True)])
        ]
        moved = [pair.tangent for pair in pairs if pair.tangent is not None]
    total = _weigh(moved) if moved else None
    if total is None or not total.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return list(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))


def _forward_over_backward(run: Run, p: list[Tensor], t: list[Tensor]) -> list[Tensor]:
    def along(values: list[Tensor]) -> Tensor:
        return _weigh(run(values))

    return list(torch.func.jvp(torch.func.grad(along), (p,), (t,))[1])


# Scale and shift of every batch norm in the network that is running, computed at once, by what they are made of.
FOLDED: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}


@contextmanager
def fold_batch_norms(model: nn.Module) -> Iterator[None]:
    """In eval mode a batch norm is an affine map of each channel; work all of them out in a few operations."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, _BatchNorm) and _plain_norm(m)]
    try:
        if norms:
            means, variances = [m.running_mean for m in norms], [m.running_var for m in norms]
            scales: Any = _rsqrt(variances, [m.eps for m in norms])
            scales = torch._foreach_mul(scales, [m.weight for m in norms])
            shifts = torch._foreach_sub([m.bias for m in norms], torch._foreach_mul(means, scales))
            keys = [_key(m.running_mean, m.running_var, m.weight, m.bias, m.eps) for m in norms]
            FOLDED.update(zip(keys, zip(scales, shifts, strict=True), strict=True))
        yield
    finally:
        FOLDED.clear()


def _key(mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, ...]:
    return id(mean), id(var), id(weight), id(bias), eps


def _plain_norm(m: Any) -> bool:
    return m.running_mean is not None and m.weight is not None and m.bias is not None and not m.weight.requires_grad


def _rsqrt(var: list[Any], eps: list[float]) -> list[Tensor]:
    return list(torch._foreach_reciprocal(torch._foreach_sqrt(torch._foreach_add(var, eps))))


def apply_batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In eval mode a batch norm is an affine map of each channel: put it off."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, mean = given["input"], given["running_mean"]
    if given.get("training") or not isinstance(x, Jet) or mean is None:
        raise UnsupportedError("a batch norm in train mode")
    key = _key(mean, given["running_var"], given.get("weight"), given.get("bias"), given.get("eps", 1e-5))
    scale, shift = FOLDED.get(key) or _affine(given)
    if scale.requires_grad:
        raise UnsupportedError("a batch norm with trainable parameters")
    before = x.pending or PendingOps()
    if before.scale is not None or before.residual is not None or (before.gate and before.gate.axis % x.dim() != 1):
        flush_pending(x)
        before = PendingOps()
    return Jet(x._p, x._t, replace(before, scale=scale.to(x.dtype), shift=shift.to(x.dtype)))


def _affine(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    scale = (given["running_var"] + given.get("eps", 1e-5)).rsqrt()
    scale = scale if given.get("weight") is None else scale * given["weight"]
    shift = -given["running_mean"] * scale
    return scale, shift if given.get("bias") is None else shift + given["bias"]


def apply_layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    dims = tuple(range(-len(given["normalized_shape"]), 0))
    out = _standardised(given["input"], dims, given.get("eps", 1e-5))
    out = out if given.get("weight") is None else out * given["weight"]
    return out if given.get("bias") is None else out + given["bias"]


def apply_group_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x = given["input"]
    grouped = _standardised(x.reshape(x.shape[0], given["num_groups"], -1), (-1,), given.get("eps", 1e-5))
    out = grouped.reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    out = out if given.get("weight") is None else out * given["weight"].view(shape)
    return out if given.get("bias") is None else out + given["bias"].view(shape)


def _standardised(x: Any, dims: tuple[int, ...], eps: float) -> Any:
    centred = x - x.mean(dims, keepdim=True)
    return centred * ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt()
