"""App. C: Gauss-Newton terms as correlations of the outputs of edited networks, without derivatives.

For a bias-free ReLU network without BatchNorm, ``phi(x) theta_s = f_{theta^s}(x)``, where theta^s sets the
weights of all other structures of the layer of s to zero. The proof writes f with the on/off patterns of the
*unedited* network, ``1[h(x) >= 0]``, so the identity holds with these patterns held fixed (`outputs`). Run
afresh (`literal_outputs`), the edited network switches units of later layers on and off, and the identity
holds only for the last hidden layer.
"""

import torch
from torch import Tensor, nn

from . import network
from .gauss_newton import correlate
from .losses import Loss, curvatures
from .theta import structures


class FixedReLU(nn.Module):
    """``x * 1[x_first > 0]``: a ReLU that keeps the pattern of its first call. One call per forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.pattern: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.pattern is None:
            self.pattern = (x > 0).to(x)
        return x * self.pattern


def outputs(model: nn.Module, layers: dict[str, str | None], inputs: Tensor) -> Tensor:
    """``f_{theta^s}(x_n)`` with the ReLU patterns of the unedited network: (N, D, S)."""
    return _outputs(model, layers, inputs, _fixed(model, inputs))


def literal_outputs(model: nn.Module, layers: dict[str, str | None], inputs: Tensor) -> Tensor:
    """``f_{theta^s}(x_n)`` of the edited network run afresh: (N, D, S)."""
    return _outputs(model, layers, inputs, network.double(model))


def pairs(model: nn.Module, layers: dict[str, str | None], inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``1/N sum_n f_{theta^s}(x_n)^T R_n f_{theta^s'}(x_n)``: (S, S)."""
    with torch.no_grad():
        f = network.double(model)(inputs.double())
    return correlate(outputs(model, layers, inputs), curvatures(f, targets, loss))


def _outputs(model: nn.Module, layers: dict[str, str | None], inputs: Tensor, run: nn.Module) -> Tensor:
    _check(model)
    return torch.stack([_alone(run, *s, inputs) for s in structures(model, layers)], dim=-1)


def _check(model: nn.Module) -> None:
    """The identity needs a network of weights and ReLUs only."""
    names = [name for name, _ in model.named_parameters()]
    assert all(name.endswith("weight") for name in names), f"biases in {names}"
    assert not any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for m in model.modules()), "BatchNorm"


def _fixed(model: nn.Module, inputs: Tensor) -> nn.Module:
    """A copy whose ReLUs are held at the patterns they have on these inputs."""
    copy = network.double(model)
    for name in [name for name, module in copy.named_modules() if isinstance(module, nn.ReLU)]:
        copy.set_submodule(name, FixedReLU())
    with torch.no_grad():
        copy(inputs.double())
    return copy


def _alone(run: nn.Module, layer: str, channel: int, inputs: Tensor) -> Tensor:
    """The outputs (N, D) with ``channel`` the only structure left in ``layer``; the weights are put back."""
    weight = run.get_submodule(layer).weight.data
    kept = weight.clone()
    weight.zero_()
    weight[channel] = kept[channel]
    with torch.no_grad():
        result = run(inputs.double())
    weight.copy_(kept)
    return result
