"""First and second order terms from the dense gradient and the dense parameter Hessian, row by row."""

import torch
from torch import Tensor, nn

from .losses import Loss
from .network import flat, leaves, matrix, mean_loss
from .theta import Theta


def gradient(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``dL/dtheta``: (P,)."""
    parameters = leaves(model)
    value = mean_loss(model, parameters, inputs, targets, loss)
    return flat(torch.autograd.grad(value, list(parameters.values()), materialize_grads=True))


def hessian(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``H = d^2 L / dtheta^2``: (P, P), one backward pass per row."""
    parameters = leaves(model)
    value = mean_loss(model, parameters, inputs, targets, loss)
    variables = list(parameters.values())
    slopes = flat(torch.autograd.grad(value, variables, create_graph=True, materialize_grads=True))
    options = {"retain_graph": True, "materialize_grads": True}
    return torch.stack([flat(torch.autograd.grad(slope, variables, **options)) for slope in slopes])


def first(model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``theta_s . dL/dtheta``: (S,)."""
    return matrix(model, thetas) @ gradient(model, inputs, targets, loss)


def pairs(model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``theta_s^T H theta_s'``: (S, S)."""
    T = matrix(model, thetas)
    return T @ hessian(model, inputs, targets, loss) @ T.T


def second(model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``theta_s . (H sum_s' theta_s')``: (S,)."""
    T = matrix(model, thetas)
    return T @ (hessian(model, inputs, targets, loss) @ T.sum(0))
