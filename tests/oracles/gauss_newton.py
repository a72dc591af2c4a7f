"""Gauss-Newton terms from dense parameter Jacobians of every example, with R_n explicit."""

import torch
from torch import Tensor, nn

from . import network
from .losses import Loss, curvatures
from .theta import Theta


def jacobian(model: nn.Module, inputs: Tensor) -> Tensor:
    """``phi(x_n) = df(x_n)/dtheta``: (N, D, P), one backward pass per output."""
    parameters = network.leaves(model)
    f = network.outputs(model, parameters, inputs)
    rows = [[_gradient(f[n, d], parameters) for d in range(f.shape[1])] for n in range(f.shape[0])]
    return torch.stack([torch.stack(row) for row in rows])


def products(model: nn.Module, thetas: list[Theta], inputs: Tensor) -> Tensor:
    """``phi(x_n) theta_s``: (N, D, S)."""
    return jacobian(model, inputs) @ network.matrix(model, thetas).T


def correlate(products: Tensor, R: Tensor) -> Tensor:
    """``1/N sum_n J_n^T R_n J_n``: J (N, D, S) and R (N, D, D) -> (S, S)."""
    return sum(J_n.T @ R_n @ J_n for J_n, R_n in zip(products, R, strict=True)) / len(products)


def pairs(model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``1/N sum_n (phi(x_n) theta_s)^T R_n (phi(x_n) theta_s')``: (S, S)."""
    f = network.outputs(model, network.leaves(model), inputs).detach()
    return correlate(products(model, thetas, inputs), curvatures(f, targets, loss))


def second(model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """The row sums of ``pairs``: (S,)."""
    return pairs(model, thetas, inputs, targets, loss).sum(1)


def _gradient(value: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    variables = list(parameters.values())
    return network.flat(torch.autograd.grad(value, variables, retain_graph=True, materialize_grads=True))
