"""Choose k of n by a convex quadratic program: relax it to the box, solve it and round the solution."""

from __future__ import annotations

import torch
from torch import Tensor

GAP = 1e-10  # largest distance of the relaxed solution from the minimum, in units of the largest coefficient
STEPS = 100  # of Newton's method; it usually takes 12 to 24


def choose_subset(H: Tensor, f: Tensor, k: int) -> Tensor:
    """Return k of the n indices that approximately minimise ``1/2 x . H x - f . x`` over 0/1 vectors.

    They are the largest entries of the relaxed solution, in descending order; ties go to the lower index.
    """
    return torch.argsort(solve_relaxation(H, f, k), descending=True, stable=True)[:k]


def solve_relaxation(H: Tensor, f: Tensor, k: int) -> Tensor:
    """Return (n,) the minimiser over ``0 <= x <= 1``, ``sum x = k``; H positive semidefinite.

    A primal-dual interior point method. At the solution the slope ``H x - f`` is ``y + z - w``: y where x is inside,
    larger by z >= 0 at 0, smaller by w >= 0 at 1. Newton's method solves this while ``x z`` and ``(1 - x) w`` decrease
    to zero; their sum bounds the distance of the value from the minimum.
    """
    n = len(f)
    if k <= 0 or k >= n:
        return torch.full_like(f, float(k > 0), dtype=torch.float64)
    H, f = (x.cpu().double() if x.device.type == "mps" else x.double() for x in (H, f))
    size = max(float(H.abs().max()), float(f.abs().max()), torch.finfo(f.dtype).tiny)
    H, f = H / size, f / size
    x, z, w = torch.full_like(f, k / n), torch.ones_like(f), torch.ones_like(f)
    y = (H @ x - f).mean()
    for _ in range(STEPS):
        rest = H @ x - f - y - z + w
        gap = x @ z + (1 - x) @ w
        if float(gap + rest.abs().sum()) < GAP:
            break
        x, y, z, w = _newton(H, rest, (x, y, z, w), 0.1 * gap / (2 * n))
    return x


InteriorPoint = tuple[Tensor, Tensor, Tensor, Tensor]


def _newton(H: Tensor, rest: Tensor, point: InteriorPoint, aim: Tensor) -> InteriorPoint:
    """Take one step towards ``x z = (1 - x) w = aim`` and a residual of zero, as long as all values stay positive."""
    x, y, z, w = point
    s = 1 - x
    root = torch.linalg.cholesky(H + torch.diag(z / x + w / s))
    slope = rest + z - w - aim / x + aim / s
    a, b = torch.cholesky_solve(torch.stack([-slope, torch.ones_like(x)], 1), root).T
    dy = -a.sum() / b.sum()  # so that the sum of x does not change
    dx = a + dy * b
    dz, dw = (aim - z * dx) / x - z, (aim + w * dx) / s - w
    now, move = torch.cat([x, s, z, w]), torch.cat([dx, -dx, dz, dw])
    far = torch.where(move < 0, -now / move, torch.inf).min()
    length = torch.clamp(0.995 * far, max=1.0)
    return x + length * dx, y + length * dy, z + length * dz, w + length * dw
