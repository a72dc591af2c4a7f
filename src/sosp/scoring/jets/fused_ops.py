"""Run a convolution, and in one step what follows it, on a value and its tangent at once.

What follows is normalisation, gate, residual add and ReLU, the *epilogue*.
Channel by channel, with tangents written as c', r', d (the gate's):

    v = scale c + shift            v' = scale c'
    y = v + r                      y' = v' + d z + r'         z = v, or scale c for a gate that comes first
    a = max(y, 0)                  a' = [y > 0] y'

Backward receives the cotangents A of a and B of a', masks both by [y > 0], and returns

    c: scale (A + d B)    c': scale B    r: A    r': B    gate: sum z A + v' B    d: sum z B
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sosp.scoring.jets import triton_kernels


@dataclass(frozen=True)
class EpiloguePlan:
    """``axis`` of the channels; whether the gate acts before scale and shift; whether a ReLU ends it."""

    axis: int
    gate_first: bool
    relu: bool


class ForwardInputs(NamedTuple):
    """The tensors of a forward step; those that are absent are None."""

    c: Tensor
    dc: Tensor | None
    r: Tensor | None
    dr: Tensor | None
    d: Tensor | None  # (C,)
    scale: Tensor | None  # (C,)
    shift: Tensor | None  # (C,)


@dataclass(frozen=True)
class BackwardInputs:
    """What a backward step works on."""

    A: Tensor | None
    B: Tensor | None
    base: Tensor | None  # what the gate's sums are formed with: a where ``compact``, else c; None without a gate
    dbase: Tensor | None
    a: Tensor | None  # the ReLU's output
    d: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    compact: bool  # nothing but a ReLU follows: its output tells all, since there y = v and y' = v' + d z
    each: bool  # sums for each example by itself
    residual: bool

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.A, self.B, self.base, self.dbase, self.a, self.d, self.scale, self.shift


def apply_epilogue(
    p: Tensor, t: Tensor | None, r: Tensor | None, dr: Tensor | None, gate: Tensor | None, d: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, plan: EpiloguePlan,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The value and the tangent after everything pending."""
    return Epilogue.apply(p, t, r, dr, gate, d, scale, shift, plan)


class Epilogue(torch.autograd.Function):
    """The step with its gradient; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, c: Tensor, dc: Tensor | None, r: Tensor | None, dr: Tensor | None, g: Tensor | None,
        d: Tensor | None, scale: Tensor | None, shift: Tensor | None, plan: EpiloguePlan,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        parts = ForwardInputs(c, dc, r, dr, d, scale, shift)
        y, dy = (
            triton_kernels.forward(parts, plan)
            if c.is_cuda and triton_kernels.is_supported(c)
            else forward(parts, plan)
        )
        compact = plan.relu and r is None and g is not None
        base, dbase = (y, dy) if compact else (c, dc) if g is not None else (None, None)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(base, dbase, y if plan.relu else None, d, scale, shift)
        ctx.plan = plan
        ctx.options = {"compact": compact, "each": g is not None and g.dim() == 2, "residual": r is not None}
        ctx.present = [x is not None for x in (c, dc, r, dr, g, d)]
        return y, dy

    @staticmethod
    def backward(ctx: Any, A: Tensor | None, B: Tensor | None) -> tuple[Tensor | None, ...]:
        back = BackwardInputs(A, B, *ctx.saved_tensors, **ctx.options)
        like = A if A is not None else B
        if like is None:
            return (None,) * 9
        fused = like.is_cuda and triton_kernels.is_supported(like)
        found = triton_kernels.backward(back, ctx.plan) if fused else backward(back, ctx.plan)
        return *(x if there else None for x, there in zip(found, ctx.present, strict=True)), None, None, None


# With torch's own operations (``triton_kernels`` does the same in one pass over the memory of a GPU) -----------------


def forward(parts: ForwardInputs, plan: EpiloguePlan) -> tuple[Tensor, Tensor | None]:
    c, dc, r, dr, d, scale, shift = parts
    at = _shaper(c, plan.axis)
    y, dy = c, dc
    if scale is not None:
        y = torch.addcmul(at(shift), at(scale), c)
        dy = None if dc is None else dc * at(scale)
    if d is not None:
        z = c * at(scale) if plan.gate_first and scale is not None else y
        dy = _plus_times(dy, z, at(d))
    if r is not None:
        y = y + r if y is c else y.add_(r)
    if dr is not None:
        dy = dr.clone() if dy is None else torch.add(dy, dr)
    if plan.relu:
        y = y.relu() if y is c else y.relu_()
        dy = None if dy is None else torch.ops.aten.threshold_backward(dy, y, 0)
    # What only passes through must leave as a tensor of its own.
    return y.view_as(y) if y is c else y, dc.view_as(dc) if dc is not None and dy is dc else dy


def backward(back: BackwardInputs, plan: EpiloguePlan) -> tuple[Tensor | None, ...]:
    A, B, base, _, a, d, scale, _ = back.tensors
    if a is not None:
        A = None if A is None else torch.ops.aten.threshold_backward(A, a, 0)
        B = None if B is None else torch.ops.aten.threshold_backward(B, a, 0)
    dg, dd = (None, None) if base is None else gate_gradients(replace(back, A=A, B=B), plan)
    at = _shaper(A if A is not None else B, plan.axis)
    c = A if d is None or B is None else _plus_times(A, B, at(d))
    c = c if c is None or scale is None else c * at(scale)
    dc = B if B is None or scale is None else B * at(scale)
    return c, dc, A, B, dg, dd


def gate_gradients(back: BackwardInputs, plan: EpiloguePlan) -> tuple[Tensor, Tensor]:
    """(sum z A + v' B, sum z B) over every channel."""

    def total(x: Tensor | None, y: Tensor | None) -> Any:
        return 0.0 if x is None or y is None else sum_per_channel(x * y, plan.axis, back.each)

    def alone(x: Tensor | None) -> Any:
        return 0.0 if x is None else sum_per_channel(x, plan.axis, back.each)

    A, B, base, dbase, _, d, scale, shift = back.tensors
    zA, zB, tB = total(base, A), total(base, B), total(dbase, B)
    if back.compact:
        # base = v: z is v, or v - shift for a gate that comes first; dbase = v' + d z.
        if shift is not None and plan.gate_first:
            zA, zB = zA - shift * alone(A), zB - shift * alone(B)
        tB = tB if d is None else tB - d * zB
    elif scale is not None and shift is not None:
        # base = c: z is scale c, plus shift for a gate that comes last; dbase = c'.
        zA, zB, tB = scale * zA, scale * zB, scale * tB
        if not plan.gate_first:
            zA, zB = zA + shift * alone(A), zB + shift * alone(B)
    return zA + tB, zB


def _plus_times(x: Tensor | None, y: Tensor, factor: Tensor) -> Tensor:
    """``x + y * factor``; x may be absent."""
    return y * factor if x is None else torch.addcmul(x, y, factor)


def _shaper(x: Any, axis: int) -> Callable[[Any], Any]:
    """Per-channel values, shaped to broadcast along ``axis`` of x."""

    def at(values: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[axis] = values.numel()
        return values.view(shape)

    return at


# Sums over all but the channels ---------------------------------------------------------------------------------------


def sum_per_channel(x: Tensor, axis: int, each: bool) -> Tensor:
    """(C,), or (N, C) with ``each`` example by itself.

    As a product with a vector of ones: on the layouts that occur this reads the memory once, at full speed, where
    ``x.sum(dims)`` takes up to four times as long on a CPU.
    """
    channels = x.shape[axis]
    last = axis == x.dim() - 1
    if not last and x.dim() > 2 and x.stride(axis) == 1 and not x.is_contiguous():  # channels_last
        x, last = x.movedim(axis, -1), True
    if last:
        if not each:
            rows = x.reshape(-1, channels)
            return rows.new_ones(rows.shape[0]) @ rows
        rows = x.reshape(x.shape[0], -1, channels)
        return rows[:, 0] if rows.shape[1] == 1 else rows.sum(1)
    if axis != 1:
        x = x.movedim(axis, 1)
    rows = x.reshape(x.shape[0] * channels, -1)
    each_channel = (rows @ rows.new_ones(rows.shape[1])).view(-1, channels)
    return each_channel if each else each_channel.sum(0)


# Convolutions with frozen weights: backward needs no input, so none is kept -------------------------------------------


@dataclass(frozen=True)
class ConvPlan:
    """The numbers of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def tail(self) -> tuple[Any, ...]:
        """The last arguments of torch's general convolution."""
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups


def plan_convolution(weight: Tensor, rest: tuple[Any, ...], given: dict[str, Any]) -> ConvPlan | None:
    """The plan of a call ``conv(x, weight, bias, *rest, **given)``, or None where it is unusual."""
    options = dict(zip(("stride", "padding", "dilation", "groups"), rest, strict=False)) | given
    if weight.requires_grad or isinstance(options.get("padding"), str):
        return None
    dims = weight.dim() - 2
    stride, padding, dilation = (
        _tuple(options.get(key, default), dims) for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    return ConvPlan(stride, padding, dilation, options.get("groups", 1))


def _tuple(v: Any, n: int) -> tuple[int, ...]:
    return (v,) * n if isinstance(v, int) else tuple(v) * (n if len(v) == 1 else 1)


class FrozenConv(torch.autograd.Function):
    """``conv(p) + bias`` and ``conv(t)``; one call where p and t lie side by side in memory."""

    @staticmethod
    def forward(
        ctx: Any, p: Tensor, t: Tensor | None, weight: Tensor, bias: Tensor | None, plan: ConvPlan
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.layout = torch.channels_last if _channels_last(p) else torch.contiguous_format
        weight = weight.contiguous(memory_format=ctx.layout)  # once, instead of in every call below
        ctx.save_for_backward(weight)
        ctx.plan, ctx.shape = plan, p.shape
        if t is None:
            return torch.convolution(p, weight, bias, *plan.tail), None
        both = join_adjacent(p, t)
        if both is None:
            return torch.convolution(p, weight, bias, *plan.tail), torch.convolution(t, weight, None, *plan.tail)
        out = torch.convolution(both, weight, None, *plan.tail)
        value, tangent = out[: p.shape[0]], out[p.shape[0] :]
        if bias is not None:
            value += bias.view(-1, *[1] * (p.dim() - 2))
        return value, tangent

    @staticmethod
    def backward(ctx: Any, A: Tensor | None, B: Tensor | None) -> tuple[Tensor | None, ...]:
        both = None if A is None or B is None else join_adjacent(A, B)
        if both is None:
            return _input_gradient(ctx, A), _input_gradient(ctx, B), None, None, None
        grads = _input_gradient(ctx, both)
        assert grads is not None
        n = ctx.shape[0]
        return grads[:n], grads[n:], None, None, None


def _input_gradient(ctx: Any, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    (weight,) = ctx.saved_tensors
    # Only the shape and the layout of the input matter here; its memory is never read.
    shape = (grad.shape[0], *ctx.shape[1:])
    x = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.layout)
    grad = grad.contiguous(memory_format=ctx.layout)
    found = torch.ops.aten.convolution_backward(grad, x, weight, None, *ctx.plan.tail, (True, False, False))
    return found[0]


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def join_adjacent(p: Tensor, t: Tensor) -> Tensor | None:
    """Both as one tensor of twice the examples, if t begins where p ends."""
    dense = p.is_contiguous() or _channels_last(p)
    if not dense or p.shape != t.shape or p.stride() != t.stride() or t.data_ptr() != p.data_ptr() + p.nbytes:
        return None
    if p.untyped_storage().data_ptr() != t.untyped_storage().data_ptr():
        return None
    return p.as_strided((2 * p.shape[0], *p.shape[1:]), p.stride())
