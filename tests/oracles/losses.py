"""Losses per example and their dense Hessians with respect to the outputs, written out by hand."""

from collections.abc import Callable

import torch
from torch import Tensor

Loss = str | Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """``l_n = log sum_j exp f_j(x_n) - f_{y_n}(x_n)``: (N, D), (N,) integers -> (N,)."""
    return torch.logsumexp(outputs, 1) - outputs[torch.arange(len(outputs)), targets]


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """``l_n = 1/2 ||f(x_n) - y_n||^2``: (N, D), (N, D) -> (N,)."""
    return 0.5 * ((outputs - targets) ** 2).sum(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": cross_entropy, "mse": squared}


def per_example(outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``l(f(x_n), y_n)`` for each n: (N,). A callable loss is used as it is."""
    values = (LOSSES[loss] if isinstance(loss, str) else loss)(outputs, targets)
    assert values.shape == (len(outputs),), f"loss must give one number per example, not {tuple(values.shape)}"
    return values


def curvatures(outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``R_n = d^2 l / df^2``, (N, D, D): ``diag(p) - p p^T`` (cross-entropy), ``I`` (squared) or autograd."""
    if loss == "mse":
        return torch.stack([torch.eye(f.numel(), dtype=f.dtype) for f in outputs])
    if loss == "cross_entropy":
        return torch.stack([torch.diag(p) - torch.outer(p, p) for p in outputs.softmax(1)])
    return torch.stack([_curvature(f, y, loss) for f, y in zip(outputs, targets, strict=True)])


def _curvature(output: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The dense (D, D) Hessian of one example's loss, by autograd."""
    return torch.autograd.functional.hessian(lambda f: loss(f[None], target[None]).sum(), output.detach())
