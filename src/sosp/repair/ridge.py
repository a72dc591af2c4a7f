"""Least squares with the regularisation that errs least on rows held out; targets that follow what a layer feeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sosp.repair.trails import Range

# Of the variance of a standardised input.
RIDGES = (1e-10, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
STEPS = 20  # at most, towards a measure that is not a plain sum of squares
BLOCK = 8192  # rows multiplied at once, in the precision of the data; their sums are in double


@dataclass(frozen=True, eq=False)
class Rows:
    """Equations: a layer's inputs, what it gives now (with all that is added to it), and what it should give."""

    X: Tensor  # (G, R, K)
    now: Tensor  # (R, C)
    target: Tensor  # (R, C)


@dataclass(frozen=True)
class Measure:
    """How wrong outputs are, and the targets whose squares lie above that and touch it where the outputs are."""

    error: Callable[[Tensor, Tensor], float]  # of (R, C) outputs and targets
    towards: Callable[[Tensor, Tensor], Tensor] | None = None  # None: the targets themselves


def squares(clip: Range) -> Measure:
    """Squares behind an activation that clips: where both lie beyond the same end there is nothing to correct."""
    low, high = clip

    def error(outputs: Tensor, target: Tensor) -> float:
        y, t = outputs.clamp(low, high).double(), target.clamp(low, high).double()
        return _share((y - t).square().sum(), (t - t.mean(0)).square().sum())

    def towards(outputs: Tensor, target: Tensor) -> Tensor:
        found = torch.where(target <= low, outputs.clamp_max(low), target)
        return torch.where(target >= high, outputs.clamp_min(high), found)

    return Measure(error, towards if (low, high) != (-torch.inf, torch.inf) else None)


def divergence() -> Measure:
    """Kullback-Leibler, for logits. The Hessian of log-sum-exp is at most 1/2: a step of 2 (p - q) never overshoots."""

    def error(outputs: Tensor, target: Tensor) -> float:
        p, q = target.double().log_softmax(1), outputs.double().log_softmax(1)
        mean = p.exp().mean(0).log()
        return _share((p.exp() * (p - q)).sum(), (p.exp() * (p - mean)).sum())

    def towards(outputs: Tensor, target: Tensor) -> Tensor:
        return outputs + 2 * (target.softmax(1) - outputs.softmax(1))

    return Measure(error, towards)


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole > 0 else float(part)


@dataclass(frozen=True, eq=False)
class Fit:
    """A change of a layer's weights, and its error on the rows held out."""

    delta: Tensor  # (G, C/G, K)
    shift: Tensor  # (C,)
    ridge: float
    before: float
    after: float


class Standardised:
    """The inputs of the equations with mean 0 and variance 1, and their normal equations in double."""

    def __init__(self, X: Tensor, intercept: bool) -> None:
        self.mean = X.mean(1, keepdim=True) if intercept else torch.zeros_like(X[:, :1])
        spread = (X - self.mean).square().mean(1, keepdim=True).sqrt()
        self.scale = torch.where(spread > 1e-6 * spread.amax(2, keepdim=True), 1 / spread, 0)  # 0: always the same
        self.intercept = intercept
        self.Z = self.of(X)
        self.A = products(self.Z, self.Z) if self.primal else products(self.Z.mT, self.Z.mT) * (X.shape[2] / X.shape[1])

    @property
    def primal(self) -> bool:
        """More rows than unknowns: a matrix of the unknowns; otherwise one of the rows is smaller."""
        return self.Z.shape[1] >= self.Z.shape[2]

    def of(self, X: Tensor) -> Tensor:
        return (X - self.mean) * self.scale

    def solver(self, ridge: float) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """From what is missing, (R, C), to the change (G, K, C/G) and shift (C,); None where it is singular."""
        G, R, _ = self.Z.shape
        eye = torch.eye(self.A.shape[-1], dtype=self.A.dtype, device=self.A.device)
        factor, singular = torch.linalg.cholesky_ex(self.A + ridge * eye)
        if bool(singular.any()):
            return None

        def solve(missing: Tensor) -> tuple[Tensor, Tensor]:
            shift = missing.mean(0) if self.intercept else torch.zeros_like(missing[0])
            E = in_groups(missing - shift, G)
            if self.primal:
                found = torch.cholesky_solve(products(self.Z, E), factor).to(E.dtype)
            else:
                found = self.Z.mT @ torch.cholesky_solve(E.double(), factor).to(E.dtype) / R
            return found, shift

        return solve


def in_groups(x: Tensor, G: int) -> Tensor:
    """(R, C) -> (G, R, C/G)"""
    return x.reshape(len(x), G, -1).movedim(1, 0)


def products(Z: Tensor, E: Tensor) -> Tensor:
    """``1/R sum_r z_r e_r^T``, (G, K, C) in double."""
    R = Z.shape[1]
    total = torch.zeros(len(Z), Z.shape[2], E.shape[2], dtype=torch.float64, device=Z.device)
    for k in range(0, R, BLOCK):
        total += Z[:, k : k + BLOCK].mT @ E[:, k : k + BLOCK]
    return total / R


def fit(rows: Rows, held: Rows, measure: Measure, intercept: bool) -> Fit | None:
    """The change of the weights that brings the outputs closest to their targets; None where there is none."""
    before = measure.error(held.now, held.target)
    best: Fit | None = None
    inputs = Standardised(rows.X, intercept)
    Z = inputs.of(held.X)
    solvers = {ridge: found for ridge in RIDGES if (found := inputs.solver(ridge)) is not None}

    def tried(ridge: float, found: Tensor, shift: Tensor) -> Fit:
        after = measure.error(held.now + outputs_of(Z, found) + shift, held.target)
        delta = found * inputs.scale.mT
        return Fit(delta.mT, shift - outputs_of(inputs.mean, delta)[0], ridge, before, after)

    missing = rows.target - rows.now
    for ridge, solve in solvers.items():
        new = tried(ridge, *solve(missing))
        best = new if best is None or new.after < best.after else best
    if best is None or measure.towards is None:
        return best
    solve = solvers[best.ridge]
    found, shift = solve(missing)
    for _ in range(STEPS):
        now = rows.now + outputs_of(inputs.Z, found) + shift
        found, shift = solve(measure.towards(now, rows.target) - rows.now)
        new = tried(best.ridge, found, shift)
        if not new.after < best.after:
            break
        best = new
    return best


def outputs_of(Z: Tensor, found: Tensor) -> Tensor:
    """(R, C) from (G, R, K) and (G, K, C/G)."""
    return (Z @ found).movedim(0, 1).flatten(1)
