"""Normalisations of jets: batch norms in eval mode are put off, those that mix channels are taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sosp.scoring.jets.jet import Jet, PendingOps, UnsupportedError, flush_pending

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
