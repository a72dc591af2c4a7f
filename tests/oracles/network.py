"""Run a float64 eval-mode copy of a network as a plain function of its parameters."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from .losses import Loss, per_example

Parameters = dict[str, Tensor]


def double(model: nn.Module) -> nn.Module:
    """A float64 copy in eval mode; the caller's model is left alone."""
    return deepcopy(model).double().eval()


def leaves(model: nn.Module) -> Parameters:
    """Every named parameter in float64, as a fresh leaf that requires a gradient."""
    return {name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()}


def outputs(model: nn.Module, parameters: Parameters, inputs: Tensor) -> Tensor:
    """``f_theta(x_n)``: (N, D)."""
    # Only the math kernel of scaled_dot_product_attention can be differentiated twice.
    with sdpa_kernel(SDPBackend.MATH):
        result = functional_call(_evaluating(model), parameters, (_double(inputs),))
    assert result.ndim == 2, f"outputs must be (N, D), not {tuple(result.shape)}"
    return result


def mean_loss(model: nn.Module, parameters: Parameters, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``L(theta) = 1/N sum_n l(f_theta(x_n), y_n)``: a scalar."""
    return per_example(outputs(model, parameters, inputs), _double(targets), loss).sum() / len(inputs)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors to one vector: (P,)."""
    return torch.cat([t.reshape(-1) for t in tensors])


def matrix(model: nn.Module, thetas: list[Parameters]) -> Tensor:
    """The structure vectors as rows: (S, P), columns in the order of ``named_parameters``."""
    names = [name for name, _ in model.named_parameters()]
    return torch.stack([flat([theta[name].detach().double() for name in names]) for theta in thetas])


def _evaluating(model: nn.Module) -> nn.Module:
    """The model itself if it is float64 in eval mode throughout (it is only read), otherwise such a copy."""
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()]
    ready = all(t.dtype == torch.float64 for t in tensors) and not any(m.training for m in model.modules())
    return model if ready else double(model)


def _double(tensor: Tensor) -> Tensor:
    """Floats to float64; integers (labels, tokens) stay."""
    return tensor.double() if tensor.is_floating_point() else tensor
