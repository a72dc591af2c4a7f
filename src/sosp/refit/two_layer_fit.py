"""Fit a layer for the only one that reads it: what it feeds should come out right, not what it gives itself.

Two layers and the activation between them, on rows in memory: for every choice of the first, the second is the solution
of least squares (and will be, when its own turn comes). The first moves by Gauss-Newton steps, in which the curvature
is that of the Kronecker factors: the inputs of the first layer, and the weights of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from sosp.refit.activations import Activation
from sosp.refit.layer_errors import ErrorMeasure
from sosp.refit.least_squares import (
    RIDGES,
    LayerEquations,
    LayerFit,
    RidgeSearch,
    StandardisedInputs,
    compute_outputs,
    split_groups,
)

STEPS = 6  # at most
DAMPING = 0.1  # of the second layer's weights


@dataclass(frozen=True, eq=False)
class TwoLayerEquations:
    """Rows of both layers: the first one's stand where the second one reads."""

    first: LayerEquations  # (.., n, ..) of the n positions that are inside
    where: Tensor  # (n,) their places among the R * T that the second layer reads
    taps: int  # T
    groups: int  # of the second layer
    act: Activation
    target: Tensor  # (R, C2) where the second layer is compared
    present: Tensor  # (R, C2) what is there now
    rest: Tensor  # (R, C2) what is there without its weights

    def inputs(self, hidden: Tensor) -> Tensor:
        """(G, R, K) of the second layer, from (n, C) values it reads."""
        full = hidden.new_zeros(len(self.target) * self.taps, hidden.shape[1])
        full[self.where] = hidden
        rows = full.view(len(self.target), self.taps, self.groups, -1)
        return rows.permute(2, 0, 3, 1).flatten(2)

    def back(self, residual: Tensor) -> Tensor:
        """(n, C) from (G, R, K), the transpose of ``inputs``."""
        G, R, _ = residual.shape
        full = residual.view(G, R, -1, self.taps).permute(1, 3, 0, 2).reshape(R * self.taps, -1)
        return full[self.where]


@dataclass(frozen=True, eq=False)
class FirstLayerStep:
    """A step of the first layer."""

    change: Tensor  # (G, K, C/G) of its weights, in standardised inputs
    shift: Tensor  # (C,)
    moved: Tensor  # (n, C) what that changes of what it gives


@dataclass(frozen=True, eq=False)
class TwoLayerState:
    """A choice of the first layer, and the second one for it."""

    fit: LayerFit  # with the error on the rows held out
    hidden: Tensor  # (n, C) what the first layer gives, before the activation
    second: LayerFit  # that belongs to it, all of its weights
    last: FirstLayerStep | None = None  # that led here


class TwoLayerSearch:
    """Move the first layer for the sake of the second."""

    def __init__(
        self, fitted: TwoLayerEquations, held: TwoLayerEquations, measure: ErrorMeasure, inputs: StandardisedInputs
    ) -> None:
        self.fitted, self.held, self.measure, self.inputs = fitted, held, measure, inputs

    def best(self, own: LayerFit) -> LayerFit | None:
        """From the layer as it is, or as it was fitted to its own targets, by steps; None if it is best as it is."""
        none = replace(own, delta=torch.zeros_like(own.delta), shift=torch.zeros_like(own.shift))
        still, fitted = (self.solve_second(fit, RIDGES) for fit in (none, own))
        state = min(still, fitted, key=lambda s: s.fit.after)
        for _ in range(STEPS):
            new = self.step(state)
            if not new.fit.after < state.fit.after:
                break
            state = new
        return state.fit if state.fit.after < still.fit.after else None

    def solve_second(self, fit: LayerFit, ridges: Sequence[float], hidden: Tensor | None = None) -> TwoLayerState:
        """The second layer for a choice of the first, which gives ``hidden``."""
        hidden = _first_layer_outputs(self.fitted, fit) if hidden is None else hidden
        chains = (self.fitted, hidden), (self.held, _first_layer_outputs(self.held, fit))
        rows, held = (LayerEquations(c.inputs(c.act(h)), c.rest, c.target) for c, h in chains)
        search = RidgeSearch(rows, held, self.measure, StandardisedInputs(rows.X, intercept=True))
        second = search.over_ridges(ridges) or _make_zero_fit(rows)
        return TwoLayerState(replace(fit, after=second.after), hidden, second)

    def step(self, state: TwoLayerState) -> TwoLayerState:
        """Along what the second layer misses and along the last step, as far as both together help it."""
        chain, weights = self.fitted, state.second.delta.mT
        slope = _slope(chain.act, state.hidden)
        given = compute_outputs(chain.inputs(chain.act(state.hidden)), weights) + state.second.shift
        residual = chain.target - chain.rest - given
        wanted = chain.back(split_groups(residual, chain.groups) @ weights.mT) * slope
        right, shift = self.inputs.right_side(_divide_by_curvature(wanted, weights, chain.taps))
        change = self.inputs.solve(right, [state.fit.ridge])
        if not change:
            return state
        (steep,) = change.values()
        steps = [FirstLayerStep(steep, shift, compute_outputs(self.inputs.Z, steep) + shift)]
        steps += [] if state.last is None else [state.last]
        # What small steps change behind the second layer, (R, C2).
        effects = [compute_outputs(chain.inputs(step.moved * slope), weights) for step in steps]
        step = _combine_steps(steps, _fit_step_lengths(residual, effects))
        found = self.solve_second(self._after(state.fit, step), [state.second.ridge], state.hidden + step.moved)
        return replace(found, last=step)

    def _after(self, fit: LayerFit, step: FirstLayerStep) -> LayerFit:
        delta = step.change * self.inputs.scale.mT
        shift = fit.shift + step.shift - compute_outputs(self.inputs.mean, delta)[0]
        return replace(fit, delta=fit.delta + delta.mT, shift=shift)


def _first_layer_outputs(chain: TwoLayerEquations, fit: LayerFit) -> Tensor:
    """(n, C) what the first layer gives."""
    return chain.first.now + compute_outputs(chain.first.X, fit.delta.mT) + fit.shift


def _make_zero_fit(rows: LayerEquations) -> LayerFit:
    """Of equations that cannot be solved: worse than any other."""
    G, _, K = rows.X.shape
    C = rows.now.shape[1]
    return LayerFit(rows.X.new_zeros(G, C // G, K), rows.now.new_zeros(C), RIDGES[-1], inf)


def _combine_steps(steps: Sequence[FirstLayerStep], lengths: Sequence[Tensor]) -> FirstLayerStep:
    """Their sum, each as long as said."""
    sums = (
        sum(f * getattr(step, name) for f, step in zip(lengths, steps, strict=True))
        for name in ("change", "shift", "moved")
    )
    return FirstLayerStep(*sums)


def _fit_step_lengths(residual: Tensor, effects: list[Tensor]) -> Sequence[Tensor]:
    """How far to go each step: least squares. On a GPU nothing waits for the numbers."""
    E = torch.stack([e.flatten() for e in effects], 1).double()
    A = E.T @ E
    A = A + 1e-12 * A.diagonal().mean().clamp_min(1e-300) * torch.eye(len(A), dtype=A.dtype, device=A.device)
    return torch.linalg.solve_ex(A, E.T @ residual.flatten().double())[0].unbind()


def _slope(act: Activation, x: Tensor) -> Tensor:
    """The derivative of an activation, element by element."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(act(x).sum(), x)
    return slope


def _divide_by_curvature(change: Tensor, weights: Tensor, taps: int) -> Tensor:
    """Divided by the curvature that the second layer's weights give its inputs, (c, c) in every group."""
    G, K, _ = weights.shape
    V = weights.reshape(G, K // taps, -1)
    M = (V @ V.mT).double()
    size = M.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-300)
    M = M + DAMPING * size * torch.eye(M.shape[1], dtype=M.dtype, device=M.device)
    found = split_groups(change, G) @ torch.linalg.inv_ex(M)[0].to(change.dtype)  # (G, n, c)
    return found.movedim(0, 1).flatten(1)
