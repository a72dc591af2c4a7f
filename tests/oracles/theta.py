"""Structure vectors theta_s: the parameters that a structure's gate scales, zero everywhere else."""

import torch
from torch import Tensor, nn

Theta = dict[str, Tensor]
Group = list[tuple[str, int]]  # (layer, channel) pairs that share one gate


def thetas(
    model: nn.Module, layers: dict[str, str | None], gate: str, groups: list[Group] | None = None
) -> list[Theta]:
    """One theta per structure (in layer, then channel order), or per group: ``sum_{s in group} theta_s``."""
    if groups is None:
        groups = [[s] for s in structures(model, layers)]
    assert all(len(set(group)) == len(group) for group in groups), "a structure occurs twice in a group"
    return [_sum([theta(model, layer, layers[layer], c, gate) for layer, c in group]) for group in groups]


def structures(model: nn.Module, layers: dict[str, str | None]) -> Group:
    """Every (layer, channel), in layer order and then channel order."""
    return [(name, c) for name in layers for c in range(width(model.get_submodule(name)))]


def theta(model: nn.Module, layer: str, norm: str | None, channel: int, gate: str) -> Theta:
    """``weights``: the layer's weight row and bias; ``features``: gamma and beta of its BatchNorm, if any."""
    assert gate in ("weights", "features"), gate
    owner = norm if gate == "features" and norm is not None else layer
    module = model.get_submodule(owner)
    vector = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for name, p in module.named_parameters(recurse=False):
        row = _row(module, name, channel)
        vector[f"{owner}.{name}"][row] = p.detach()[row]
    return vector


def width(layer: nn.Module) -> int:
    """The number of output channels or neurons."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _row(module: nn.Module, name: str, channel: int) -> tuple[slice | int, ...]:
    """Where a channel lies in a parameter: on axis 0, but on axis 1 of a transposed weight (in, out, ...)."""
    if name == "weight" and isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        assert module.groups == 1, "grouped transposed convolutions are not laid out as (in, out, ...)"
        return (slice(None), channel)
    return (channel,)


def _sum(vectors: list[Theta]) -> Theta:
    return {name: sum(v[name] for v in vectors) for name in vectors[0]}
