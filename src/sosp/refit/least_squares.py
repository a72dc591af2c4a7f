"""Least squares, with the regularisation that errs least on rows held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sosp.refit.layer_errors import ErrorMeasure

# In units of the variance of an input.
RIDGES = (1e-10, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
STEPS = 20  # at most, towards targets that depend on the outputs
BLOCK = 8192  # rows that are multiplied at once, in the precision of the data; sums are in double
CONSTANT = 1e-6  # an input that varies less than this, beside the others, is no input
FACTORS = 2**26  # numbers of the matrices that are factorised together
KEPT = 4  # factors at least
MANY_UNKNOWNS = 512
TRIALS = 2**24  # numbers of the outputs that are compared together


@dataclass(frozen=True, eq=False)
class LayerEquations:
    """Equations: a layer's inputs, what comes of them now, and what should."""

    X: Tensor  # (G, R, K), in groups
    now: Tensor  # (R, C)
    target: Tensor  # (R, C)


@dataclass(frozen=True, eq=False)
class LayerFit:
    """A change of a layer's weights, and its error on the rows held out."""

    delta: Tensor  # (G, C/G, K)
    shift: Tensor  # (C,)
    ridge: float
    after: float


def fit_weights(
    rows: LayerEquations, held: LayerEquations, measure: ErrorMeasure, inputs: StandardisedInputs
) -> LayerFit | None:
    """The change of the weights that brings the outputs closest to their targets; None if it cannot be computed."""
    search = RidgeSearch(rows, held, measure, inputs)
    best = search.over_ridges()
    return best if best is None or measure.towards is None else search.towards(best, measure.towards)


class RidgeSearch:
    """Try changes on the rows held out."""

    def __init__(
        self, rows: LayerEquations, held: LayerEquations, measure: ErrorMeasure, inputs: StandardisedInputs
    ) -> None:
        self.rows, self.held, self.measure, self.inputs = rows, held, measure, inputs
        self.Z = inputs.of(held.X)

    def over_ridges(self, ridges: Sequence[float] = RIDGES) -> LayerFit | None:
        """Of all; with many unknowns, from the middle on as long as the error falls."""
        right, shift = self.inputs.right_side(self.rows.target - self.rows.now)
        middle = len(ridges) // 2
        few = len(ridges) <= 3 or self.inputs.A.shape[-1] <= MANY_UNKNOWNS
        low, high = (0, len(ridges)) if few else (middle - 1, middle + 2)
        best = self.best(self.inputs.solve(right, ridges[low:high]), shift)
        if best is None or best.ridge == ridges[high - 1]:
            further = ridges[high:]
        else:
            further = ridges[:low][::-1] if best.ridge == ridges[low] else ()
        for ridge in further:
            new = self.best(self.inputs.solve(right, [ridge]), shift)
            if best is not None and (new is None or not new.after < best.after):
                break
            best = new
        return best

    def towards(self, best: LayerFit, targets: Callable[[Tensor, Tensor], Tensor]) -> LayerFit:
        """Move the targets along with the outputs, as long as that helps."""
        new: LayerFit | None = best
        for _ in range(STEPS):
            assert new is not None
            now = self.rows.now + compute_outputs(self.rows.X, new.delta.mT) + new.shift
            right, shift = self.inputs.right_side(targets(now, self.rows.target) - self.rows.now)
            new = self.best(self.inputs.solve(right, [best.ridge]), shift)
            if new is None or not new.after < best.after:
                break
            best = new
        return best

    def best(self, changes: Mapping[float, Tensor], shift: Tensor) -> LayerFit | None:
        """Of changes with several regularisations."""
        if not changes:
            return None
        after, ridge = min(zip(self.errors(list(changes.values()), shift), changes, strict=True))
        delta = changes[ridge] * self.inputs.scale.mT
        return LayerFit(delta.mT, shift - compute_outputs(self.inputs.mean, delta)[0], ridge, after)

    def errors(self, changes: list[Tensor], shift: Tensor) -> list[float]:
        """On the rows held out, of as many changes together as there is room for."""
        start, size = self.held.now + shift, max(1, TRIALS // self.held.now.numel())
        some = [torch.stack(changes[k : k + size]) for k in range(0, len(changes), size)]
        outputs = (multiply_each(self.Z, change).movedim(1, 2).flatten(2) for change in some)
        errors = torch.cat([self.measure.error(start + y, self.held.target) for y in outputs])
        found: list[float] = errors.nan_to_num(torch.inf).tolist()
        return found


class StandardisedInputs:
    """Inputs with mean 0 and variance 1, and the matrix of their normal equations, in double."""

    def __init__(self, X: Tensor, intercept: bool) -> None:
        _, R, K = X.shape
        self.intercept = intercept
        self.mean = X.mean(1, keepdim=True) if intercept else torch.zeros_like(X[:, :1])
        spread = (X - self.mean).square().mean(1, keepdim=True).sqrt()
        self.scale = torch.where(spread > CONSTANT * spread.amax(), 1 / spread, 0)
        self.Z = self.of(X)
        self.primal = R >= K  # a matrix of the unknowns; with fewer rows one of the rows is smaller
        self.A = products(self.Z, self.Z) if self.primal else products(self.Z.mT, self.Z.mT) * (K / R)
        self.factors: dict[float, Tensor | None] = {}

    def of(self, X: Tensor) -> Tensor:
        return (X - self.mean) * self.scale

    def right_side(self, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Of the normal equations, for (R, C) that the outputs lack; and the mean of that, (C,)."""
        shift = missing.mean(0) if self.intercept else torch.zeros_like(missing[0])
        E = split_groups(missing - shift, len(self.Z))
        return products(self.Z, E) if self.primal else E.double() / E.shape[1], shift

    def solve(self, right: Tensor, ridges: Sequence[float]) -> dict[float, Tensor]:
        """(G, K, C/G) for each: ``(Z^T Z / R + ridge)^-1 Z^T E / R``, but where that matrix is singular."""
        found: dict[float, Tensor] = {}
        size = max(1, FACTORS // self.A.numel())
        for some in (ridges[k : k + size] for k in range(0, len(ridges), size)):
            self._factorise([ridge for ridge in some if ridge not in self.factors], max(size, KEPT))
            regular = {ridge: factor for ridge in some if (factor := self.factors[ridge]) is not None}
            if regular:
                first, *others = regular.values()
                solved = torch.cholesky_solve(right, torch.stack([first, *others]) if others else first[None])
                solved = solved.to(self.Z.dtype)
                found |= zip(regular, solved if self.primal else multiply_each(self.Z.mT, solved), strict=True)
        return found

    def _factorise(self, ridges: Sequence[float], most: int) -> None:
        """All at once. The newest ones are kept: targets that move are solved for again and again."""
        if not ridges:
            return
        sums = torch.stack([self.A] * len(ridges))
        sums.diagonal(dim1=-2, dim2=-1).add_(sums.new_tensor(ridges)[:, None, None])
        factors, singular = torch.linalg.cholesky_ex(sums)
        wrong = singular.flatten(1).any(1).tolist()
        self.factors |= {r: None if bad else L for r, bad, L in zip(ridges, wrong, factors, strict=True)}
        for old in list(self.factors)[:-most]:
            del self.factors[old]


def split_groups(x: Tensor, G: int) -> Tensor:
    """(G, R, C/G) from (R, C)."""
    return x.reshape(len(x), G, -1).movedim(1, 0)


def compute_outputs(X: Tensor, weights: Tensor) -> Tensor:
    """(R, C) from (G, R, K) and (G, K, C/G)."""
    return (X @ weights).movedim(0, 1).flatten(1)


def multiply_each(M: Tensor, N: Tensor) -> Tensor:
    """(S, G, A, C) from (G, A, B) and (S, G, B, C), in one product that leaves the first factor where it is."""
    S, G, B, C = N.shape
    return (M @ N.permute(1, 2, 0, 3).reshape(G, B, S * C)).unflatten(2, (S, C)).permute(2, 0, 1, 3)


def products(Z: Tensor, E: Tensor) -> Tensor:
    """``1/R sum_r z_r e_r^T``, (G, K, C), in double."""
    R = Z.shape[1]
    blocks = R // BLOCK
    end = blocks * BLOCK
    total = (Z[:, end:].mT @ E[:, end:]).double()
    if blocks:
        first, second = (x[:, :end].unflatten(1, (blocks, BLOCK)) for x in (Z, E))
        total += (first.mT @ second).sum(1, dtype=torch.float64)
    return total / R
