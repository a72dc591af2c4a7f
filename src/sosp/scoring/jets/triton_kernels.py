"""The epilogue as one pass over a GPU's memory, in Triton: six kernels' worth of traffic become one.

Both kernels see a tensor as (N, C, L): examples, channels, positions; memory is dense and either positions or channels
run fastest. A program handles one example and a few channels and walks along the positions, so that the sums over
positions stay in registers and the result, one number per example and channel, does not depend on scheduling.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

if TYPE_CHECKING:
    from sosp.scoring.jets.fused_ops import BackwardInputs, EpiloguePlan, ForwardInputs

TILE = 1024  # elements handled at once by a program


def is_supported(x: Tensor) -> bool:
    """Whether the kernels can take this tensor."""
    return triton is not None and x.is_cuda and x.dim() >= 2 and x.numel() > 0 and x.is_floating_point()


if triton is not None:

    @triton.jit
    def _forward_kernel(
        c, dc, r, dr, d, scale, shift, y, dy, C, L, stride_c, stride_l,
        DC: tl.constexpr, R: tl.constexpr, DR: tl.constexpr, D: tl.constexpr, AFFINE: tl.constexpr,
        DY: tl.constexpr, FIRST: tl.constexpr, RELU: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * BC + tl.arange(0, BC)
        inside = channel < C
        if AFFINE:
            s = tl.load(scale + channel, mask=inside, other=0.0)[None, :]
            b = tl.load(shift + channel, mask=inside, other=0.0)[None, :]
        if D:
            dd = tl.load(d + channel, mask=inside, other=0.0)[None, :]
        for start in range(0, L, BL):
            place = start + tl.arange(0, BL)
            ok = (place < L)[:, None] & inside[None, :]
            at = n * C * L + place.to(tl.int64)[:, None] * stride_l + channel.to(tl.int64)[None, :] * stride_c
            value = tl.load(c + at, mask=ok, other=0.0)
            z = value * s if AFFINE else value
            v = z + b if AFFINE else value
            tangent = tl.zeros_like(value)
            if DC:
                tangent = tl.load(dc + at, mask=ok, other=0.0)
                tangent = tangent * s if AFFINE else tangent
            if D:
                tangent += dd * (z if FIRST else v)
            if R:
                v += tl.load(r + at, mask=ok, other=0.0)
            if DR:
                tangent += tl.load(dr + at, mask=ok, other=0.0)
            if RELU:
                tangent = tl.where(v > 0, tangent, 0.0)
                v = tl.where(v > 0, v, 0.0)
            tl.store(y + at, v, mask=ok)
            if DY:
                tl.store(dy + at, tangent, mask=ok)

    @triton.jit
    def _backward_kernel(
        A, B, base, dbase, a, d, scale, shift, gc, gdc, gr, gdr, dg, dd, C, L, stride_c, stride_l,
        HAS_A: tl.constexpr, HAS_B: tl.constexpr, BASE: tl.constexpr, DBASE: tl.constexpr, MASK: tl.constexpr,
        D: tl.constexpr, AFFINE: tl.constexpr, GR: tl.constexpr, FIRST: tl.constexpr, COMPACT: tl.constexpr,
        BC: tl.constexpr, BL: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * BC + tl.arange(0, BC)
        inside = channel < C
        s = tl.zeros([BC], dtype=gc.dtype.element_ty) + 1
        b = tl.zeros([BC], dtype=gc.dtype.element_ty)
        move = tl.zeros([BC], dtype=gc.dtype.element_ty)
        if AFFINE:
            s = tl.load(scale + channel, mask=inside, other=0.0)
            b = tl.load(shift + channel, mask=inside, other=0.0)
        if D:
            move = tl.load(d + channel, mask=inside, other=0.0)
        none = tl.zeros([BC], dtype=gc.dtype.element_ty)
        zA, zB, tB, sA, sB = none, none, none, none, none
        for start in range(0, L, BL):
            place = start + tl.arange(0, BL)
            ok = (place < L)[:, None] & inside[None, :]
            at = n * C * L + place.to(tl.int64)[:, None] * stride_l + channel.to(tl.int64)[None, :] * stride_c
            x = tl.zeros([BL, BC], dtype=gc.dtype.element_ty)
            t = tl.zeros([BL, BC], dtype=gc.dtype.element_ty)
            if HAS_A:
                x = tl.load(A + at, mask=ok, other=0.0)
            if HAS_B:
                t = tl.load(B + at, mask=ok, other=0.0)
            if MASK:
                passed = tl.load(a + at, mask=ok, other=0.0) > 0
                x = tl.where(passed, x, 0.0)
                t = tl.where(passed, t, 0.0)
            if BASE:
                z = tl.load(base + at, mask=ok, other=0.0)
                zA += tl.sum(z * x, 0)
                zB += tl.sum(z * t, 0)
                if AFFINE:
                    sA += tl.sum(x, 0)
                    sB += tl.sum(t, 0)
            if DBASE:
                tB += tl.sum(tl.load(dbase + at, mask=ok, other=0.0) * t, 0)
            if GR:
                if HAS_A:
                    tl.store(gr + at, x, mask=ok)
                if HAS_B:
                    tl.store(gdr + at, t, mask=ok)
            tl.store(gc + at, (x + move[None, :] * t) * s[None, :], mask=ok)
            if HAS_B:
                tl.store(gdc + at, t * s[None, :], mask=ok)
        if BASE:  # sosp.scoring.jets.fused_ops.gate_gradients, here to save a dozen tiny kernels
            if COMPACT:
                if FIRST:
                    zA -= b * sA
                    zB -= b * sB
                tB -= move * zB
            else:
                zA, zB, tB = s * zA, s * zB, s * tB
                if not FIRST:
                    zA += b * sA
                    zB += b * sB
            tl.store(dg + n * C + channel, zA + tB, mask=inside)
            if D:
                tl.store(dd + n * C + channel, zB, mask=inside)


def _geometry(x: Tensor, axis: int) -> tuple[tuple[int, int], tuple[int, int, int, int], dict[str, int]]:
    """The grid, (C, L, stride of a channel, stride of a position) and the tile of a dense tensor."""
    N, C = x.shape[0], x.shape[axis]
    L = x.numel() // (N * C)
    if channels_fastest(x, axis):
        BC = min(64, triton.next_power_of_2(C))
        BL = min(TILE // BC, triton.next_power_of_2(L))
        strides = (1, C)
    else:
        BL = min(TILE, triton.next_power_of_2(L))
        BC = min(max(1, TILE // BL), triton.next_power_of_2(C))
        strides = (L, 1)
    return (N, triton.cdiv(C, BC)), (C, L, *strides), {"BC": BC, "BL": BL}


def channels_fastest(x: Tensor, axis: int) -> bool:
    """Whether neighbours in memory are channels of one position (channels last, or a linear layer's output)."""
    return axis == x.dim() - 1 or (x.stride(axis) == 1 and not x.is_contiguous())


def make_dense(x: Tensor, axis: int) -> Tensor:
    """The tensor in one of the two layouts the kernels read."""
    if axis == x.dim() - 1 or x.is_contiguous():
        return x.contiguous()
    if axis == 1 and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x.contiguous()


def _match_layout(x: Tensor | None, like: Tensor) -> Tensor | None:
    if x is None or x.stride() == like.stride():
        return x
    return torch.empty_like(like).copy_(x)


def _make_adjacent_pair(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors like this one, side by side in memory, so that a convolution can take both at once."""
    size = (2 * like.shape[0], *like.shape[1:])
    layout = torch.contiguous_format if like.is_contiguous() else torch.channels_last
    both = torch.empty(size, dtype=like.dtype, device=like.device, memory_format=layout)
    return both[: like.shape[0]], both[like.shape[0] :]


def forward(parts: ForwardInputs, plan: EpiloguePlan) -> tuple[Tensor, Tensor | None]:
    """See ``sosp.scoring.jets.fused_ops``."""
    c = make_dense(parts.c, plan.axis)
    dc, r, dr = (_match_layout(x, c) for x in (parts.dc, parts.r, parts.dr))
    grid, sizes, tile = _geometry(c, plan.axis)
    moving = any(x is not None for x in (dc, dr, parts.d))
    y, dy = _make_adjacent_pair(c) if moving else (torch.empty_like(c), None)
    _forward_kernel[grid](
        c, dc, r, dr, parts.d, parts.scale, parts.shift, y, dy, *sizes,
        DC=dc is not None, R=r is not None, DR=dr is not None, D=parts.d is not None, AFFINE=parts.scale is not None,
        DY=moving, FIRST=plan.gate_first, RELU=plan.relu, **tile,
    )  # fmt: skip
    return y, dy


def backward(back: BackwardInputs, plan: EpiloguePlan) -> tuple[Tensor | None, ...]:
    """See ``sosp.scoring.jets.fused_ops``."""
    A, B, base, dbase, a, d, scale, shift = back.tensors
    like = make_dense(next(x for x in (base, a, A, B) if x is not None), plan.axis)
    A, B, base, dbase, a = (_match_layout(x, like) for x in (A, B, base, dbase, a))
    grid, sizes, tile = _geometry(like, plan.axis)
    c, dc = _make_adjacent_pair(like) if B is not None else (torch.empty_like(like), None)
    apart = a is not None and back.residual  # the residual's cotangents differ from the incoming ones by the mask
    r, dr = ((None if x is None else torch.empty_like(like)) if apart else x for x in (A, B))
    gates = like.new_empty(2, like.shape[0], like.shape[plan.axis]) if base is not None else (None, None)
    _backward_kernel[grid](
        A, B, base, dbase, a, None if B is None else d, scale, shift, c, dc, r, dr, *gates, *sizes,
        HAS_A=A is not None, HAS_B=B is not None, BASE=base is not None, DBASE=dbase is not None and B is not None,
        MASK=a is not None, D=d is not None and B is not None, AFFINE=scale is not None, GR=apart,
        FIRST=plan.gate_first, COMPACT=back.compact, **tile,
    )  # fmt: skip
    if isinstance(gates, Tensor):
        gates = gates if back.each else gates.sum(1)
        if d is not None and B is None:
            gates[1].zero_()
    return c, dc, r, dr, *gates
