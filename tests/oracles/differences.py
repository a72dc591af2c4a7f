"""The same derivatives by central differences of the gates, for networks without kinks within eps."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from . import dense, network
from .losses import Loss
from .theta import Theta

# A first difference errs by eps^2/6 L''' (truncation) + u|L|/eps (rounding, u = 1.1e-16): least near u^(1/3).
EPS_FIRST = 5e-6  # about 1e-11
# A mixed second difference errs by eps^2/3 L'''' + u|L|/eps^2: least near u^(1/4).
EPS_SECOND = 1e-4  # about 2e-8
# A difference of slopes errs like a first difference; smaller, so that ReLU networks rarely meet a kink.
EPS_SLOPE = 1e-6  # about 1e-10


def shifted(model: nn.Module, thetas: list[Theta], shifts: Tensor) -> network.Parameters:
    """``theta(g) = theta + sum_s (g_s - 1) theta_s`` for shifts ``g - 1``: (S,)."""
    parameters = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    for shift, theta in zip(shifts.tolist(), thetas, strict=True):
        if shift != 0:
            for name in parameters:
                parameters[name] += shift * theta[name].double()
    return parameters


def first(
    model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss, eps: float = EPS_FIRST
) -> Tensor:
    """``(L(1 + eps e_s) - L(1 - eps e_s)) / (2 eps)``: (S,)."""
    at = _loss(model, thetas, inputs, targets, loss)
    return torch.stack([(at(e) - at(-e)) / (2 * eps) for e in eps * _units(thetas)])


def pairs(
    model: nn.Module,
    thetas: list[Theta],
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    eps: float = EPS_SECOND,
) -> Tensor:
    """``(L(+e_s+e_s') - L(+e_s-e_s') - L(-e_s+e_s') + L(-e_s-e_s')) / (4 eps^2)``: (S, S)."""
    at = _loss(model, thetas, inputs, targets, loss)
    units = _units(thetas)
    P = torch.zeros_like(units)
    for s in range(len(units)):
        for t in range(s + 1):
            P[s, t] = P[t, s] = _mixed(at, units[s], units[t], eps)  # symmetric as it is written
    return P


def second(
    model: nn.Module,
    thetas: list[Theta],
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    eps: float = EPS_SECOND,
) -> Tensor:
    """The mixed difference along ``e_s`` and the all-ones vector: (S,)."""
    at = _loss(model, thetas, inputs, targets, loss)
    return torch.stack([_mixed(at, e, _units(thetas).sum(0), eps) for e in _units(thetas)])


def pairs_of_slopes(
    model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss, eps: float = EPS_SLOPE
) -> Tensor:
    """``theta_s' . (dL/dtheta(1 + eps e_s) - dL/dtheta(1 - eps e_s)) / (2 eps)``: (S, S)."""

    def at(shifts: Tensor) -> Tensor:
        moved = deepcopy(model).double()
        moved.load_state_dict(shifted(model, thetas, shifts), strict=False)  # the buffers stay
        return dense.first(moved, thetas, inputs, targets, loss)

    return torch.stack([(at(e) - at(-e)) / (2 * eps) for e in eps * _units(thetas)])


def products(model: nn.Module, thetas: list[Theta], inputs: Tensor, eps: float = EPS_FIRST) -> Tensor:
    """``phi(x_n) theta_s = (f(1 + eps e_s) - f(1 - eps e_s)) / (2 eps)``: (N, D, S)."""

    def at(shifts: Tensor) -> Tensor:
        return network.outputs(model, shifted(model, thetas, shifts), inputs).detach()

    return torch.stack([(at(e) - at(-e)) / (2 * eps) for e in eps * _units(thetas)], dim=-1)


def _loss(
    model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss
) -> Callable[[Tensor], Tensor]:
    """``L`` as a function of the shifts ``g - 1``."""

    def at(shifts: Tensor) -> Tensor:
        return network.mean_loss(model, shifted(model, thetas, shifts), inputs, targets, loss).detach()

    return at


def _mixed(at: Callable[[Tensor], Tensor], u: Tensor, v: Tensor, eps: float) -> Tensor:
    """``d^2 L(1 + a u + b v) / da db`` at 0."""
    u, v = eps * u, eps * v
    return (at(u + v) - at(u - v) - at(v - u) + at(-u - v)) / (4 * eps**2)


def _units(thetas: list[Theta]) -> Tensor:
    return torch.eye(len(thetas), dtype=torch.float64)
