"""Fit a layer for the only one that reads it: what it feeds should come out right, not what it gives itself.

Two layers and the activation between them, on rows in memory: for every choice of the first, the second is the solution
of least squares (and will be, when its own turn comes). The first moves by Gauss-Newton steps, in which the curvature
is that of the Kronecker factors: the inputs of the first layer, and the weights of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sosp.refit.activations import Activation
from sosp.refit.layer_errors import ErrorMeasure
from sosp.refit.least_squares import RIDGES, LayerEquations, LayerFit, StandardisedInputs, compute_outputs, split_groups

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

    @property
    def wanted(self) -> Tensor:
        """(R, C2) what the second layer's weights should give."""
        return self.target - self.rest

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
class SecondLayer:
    """The second layer, fitted to what the first one gives."""

    weights: Tensor  # (G, K, C2/G)
    shift: Tensor  # (C2,)
    ridge: float

    def outputs(self, X: Tensor) -> Tensor:
        return compute_outputs(X, self.weights) + self.shift


def fit_second_layers(X: Tensor, wanted: Tensor, ridges: Sequence[float]) -> list[SecondLayer]:
    """One for each regularisation with which the equations can be solved; without any, a constant."""
    inputs = StandardisedInputs(X, intercept=True)
    right, shift = inputs.right_side(wanted)
    found = []
    for ridge, change in inputs.solve(right, ridges).items():
        weights = change * inputs.scale.mT
        found.append(SecondLayer(weights, shift - compute_outputs(inputs.mean, weights)[0], ridge))
    G, _, K = X.shape
    return found or [SecondLayer(X.new_zeros(G, K, len(shift) // G), shift, ridges[-1])]


@dataclass(frozen=True, eq=False)
class FirstLayerStep:
    """A step of the first layer."""

    change: Tensor  # (G, K, C/G) of its weights, in standardised inputs
    shift: Tensor  # (C,)
    moved: Tensor  # (n, C) what that changes of what it gives


@dataclass(frozen=True, eq=False)
class TwoLayerState:
    """A choice of the first layer, and the second one that belongs to it."""

    fit: LayerFit  # with the error on the rows held out
    hidden: Tensor  # (n, C) what the first layer gives, before the activation
    second: SecondLayer
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
        given, tested = (
            c.inputs(c.act(h)) for c, h in ((self.fitted, hidden), (self.held, _first_layer_outputs(self.held, fit)))
        )
        found = fit_second_layers(given, self.fitted.wanted, ridges)
        each = [self.measure.error(s.outputs(tested) + self.held.rest, self.held.target) for s in found]
        errors = torch.stack(each).nan_to_num(torch.inf).tolist()
        best = min(range(len(found)), key=errors.__getitem__)
        return TwoLayerState(replace(fit, after=errors[best]), hidden, found[best])

    def step(self, state: TwoLayerState) -> TwoLayerState:
        """Along what the second layer misses and along the last step, as far as both together help it."""
        chain, weights = self.fitted, state.second.weights
        slope = _slope(chain.act, state.hidden)
        residual = chain.wanted - state.second.outputs(chain.inputs(chain.act(state.hidden)))
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


def _combine_steps(steps: Sequence[FirstLayerStep], lengths: Sequence[float]) -> FirstLayerStep:
    """So lengths each step."""
    sums = (
        sum(f * getattr(step, name) for f, step in zip(lengths, steps, strict=True))
        for name in ("change", "shift", "moved")
    )
    return FirstLayerStep(*sums)


def _fit_step_lengths(residual: Tensor, effects: list[Tensor]) -> list[float]:
    """How lengths to go each step: least squares."""
    E = torch.stack([e.flatten() for e in effects], 1).double()
    A = E.T @ E
    A = A + 1e-12 * A.diagonal().mean().clamp_min(1e-300) * torch.eye(len(A), dtype=A.dtype, device=A.device)
    return torch.linalg.solve(A, E.T @ residual.flatten().double()).tolist()


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
    found = torch.linalg.solve(M, split_groups(change, G).double().mT)  # (G, c, n)
    return found.permute(2, 0, 1).flatten(1).to(change.dtype)
