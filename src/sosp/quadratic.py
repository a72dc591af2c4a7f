"""Choose k of n by a convex quadratic programme: relaxed to the box, solved, rounded."""

from __future__ import annotations

import torch
from torch import Tensor

GAP = 1e-10  # how far from the least value the relaxed one may be, in units of the largest coefficient
FASTER = 20.0  # by which the barrier weakens from one centre to the next


def choose(H: Tensor, f: Tensor, k: int) -> Tensor:
    """k of the n that minimise ``1/2 x . H x - f . x`` over 0/1 vectors, nearly: the largest of the relaxed solution.

    In descending order of it; ties go to the lower index.
    """
    return torch.argsort(relaxed(H, f, k), descending=True, stable=True)[:k]


def relaxed(H: Tensor, f: Tensor, k: int) -> Tensor:
    """(n,) the minimiser over ``0 <= x <= 1``, ``sum x = k``; H positive semidefinite.

    Follows the minimisers of ``t (1/2 x . H x - f . x) - sum log x - sum log(1 - x)`` as t grows, by Newton steps; at
    each the value is within 2n / t of the least.
    """
    n = len(f)
    if k <= 0 or k >= n:
        return torch.full_like(f, float(k > 0), dtype=torch.float64)
    H, f = (x.cpu().double() if x.device.type == "mps" else x.double() for x in (H, f))
    size = max(float(H.abs().max()), float(f.abs().max()), torch.finfo(f.dtype).tiny)
    H, f = H / size, f / size
    x, t = torch.full_like(f, k / n), 1.0
    while True:
        x = _centre(H, f, x, t)
        if 2 * n / t < GAP:
            return x
        t *= FASTER


def _centre(H: Tensor, f: Tensor, x: Tensor, t: float) -> Tensor:
    """The minimiser for one t, from a point near it; the sum of x stays."""
    for _ in range(50):
        slope = t * (H @ x - f) - 1 / x + 1 / (1 - x)
        curve = t * H + torch.diag(x**-2 + (1 - x) ** -2)
        a, b = torch.cholesky_solve(torch.stack([-slope, torch.ones_like(x)], 1), torch.linalg.cholesky(curve)).T
        step = a - b * (a.sum() / b.sum())
        gain = -float(slope @ step)
        if gain < 1e-8:  # far inside the region where Newton's method converges at once
            return x
        x = x + _length(H, f, x, t, step, gain) * step
    return x


def _length(H: Tensor, f: Tensor, x: Tensor, t: float, step: Tensor, gain: float) -> float:
    """As far along the step as the value falls as it should, and inside the box."""
    away = torch.where(step > 0, (1 - x) / step, torch.where(step < 0, -x / step, torch.inf))
    length, here = min(1.0, 0.99 * float(away.min())), _value(H, f, x, t)
    while _value(H, f, x + length * step, t) > here - 0.1 * length * gain and length > 1e-12:
        length *= 0.5
    return length


def _value(H: Tensor, f: Tensor, x: Tensor, t: float) -> float:
    return float(t * (0.5 * x @ H @ x - f @ x) - (x.log() + (1 - x).log()).sum())
