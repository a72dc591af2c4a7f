"""Make factors of a network's structures part of its weights: the same outputs, without gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.layers import find_layer_type
from sosp.errors import StructureError
from sosp.graph.records import Layer, Structures


def _places(model: nn.Module, layer: Layer, gate: str) -> list[tuple[str, Any]]:
    """The modules whose outputs are scaled: the norms of a layer, or itself."""
    names = (layer.norms if gate == "features" else ()) or (layer.name,)
    return [(name, model.get_submodule(name)) for name in names]


def refuse_unfoldable(model: nn.Module, structures: Structures) -> None:
    """Refuse, by name, what has no weights of its own to scale."""
    for layer in structures.layers:
        for name, module in _places(model, layer, structures.gate):
            if getattr(module, "weight", None) is None:
                raise StructureError(
                    f"{name!r} has no scale to multiply a soft mask into. Give it one (affine=True), find the "
                    f"structures with gate='weights', or exclude the layer, exclude=[{layer.name!r}]."
                )
            if "weight" not in module._parameters:
                raise StructureError(
                    f"the weight of {name!r} is computed from other parameters (weight_norm, a parametrization). Make "
                    "it an ordinary parameter (remove_parametrizations), or exclude the layer, "
                    f"exclude=[{layer.name!r}]."
                )


@torch.no_grad()
def fold_factors(model: nn.Module, structures: Structures, factors: Tensor) -> None:
    """Multiply every structure's output by its factor, (S,); changes the model it is given."""
    for layer, own in zip(structures.layers, structures.expand_to_channels(factors), strict=True):
        for _, module in _places(model, layer, structures.gate):
            _scale(module, own)
            if getattr(module, "bias", None) is not None:
                module.bias.mul_(own)


def _scale(module: Any, own: Tensor) -> None:
    """Multiply the weights that go into each channel of the output."""
    weight, kind = module.weight, find_layer_type(module)
    if kind is None or kind.weight_axis == 0:
        weight.mul_(own.view(-1, *[1] * (weight.dim() - 1)))
        return
    groups = getattr(module, "groups", 1)
    # (in, out / groups, ...): the channels of group g stand in its rows of ``in``.
    weight.unflatten(0, (groups, -1)).mul_(own.view(groups, 1, -1, *[1] * (weight.dim() - 2)))
