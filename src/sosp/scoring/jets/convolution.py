"""Convolutions with frozen weights, of a value and its tangent at once: backward needs no input, so none is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
