"""Which channel of the original network each channel of the small one is, from the recipes that made it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.layers import find_layer_type
from sosp.errors import StructureError
from sosp.graph.recipe import Recipe, collect_shapes, compute_new_shape

SOURCE_HINT = "Give the network that sosp.shrink, sosp.prune or sosp.load made the small one from."


def find_recipes_between(small: nn.Module, model: nn.Module) -> tuple[Recipe, ...]:
    """What was done to ``model`` to get ``small``; refuse a network that is not made of it."""
    done: tuple[Recipe, ...] = getattr(small, "sosp_recipes", ())
    before: tuple[Recipe, ...] = getattr(model, "sosp_recipes", ())
    if len(done) < len(before):
        raise StructureError(
            f"the small network was shrunk {len(done)} times and the original one {len(before)} times: they seem to be "
            f"the wrong way round. {SOURCE_HINT}"
        )
    recipes = done[len(before) :]
    whole = collect_shapes(model)
    first = {name for name, _ in [*small.named_parameters(), *small.named_buffers()]}  # recipes know no other names
    for name, shape in collect_shapes(small).items():
        if name in whole and name not in first:
            continue
        if name not in whole:
            raise StructureError(f"the small network has {name!r}, which the original one does not have. {SOURCE_HINT}")
        expected = whole[name]
        for recipe in recipes:
            expected = compute_new_shape(expected, recipe, name)
        if shape != expected:
            raise StructureError(
                f"{name!r} of the small network is {shape}, and shrinking the original one makes it {expected}. "
                f"{SOURCE_HINT}"
            )
    return recipes


def find_original_channels(name: str, layer: Any, recipes: tuple[Recipe, ...], width: int) -> Tensor | None:
    """(C,) the channel of the original layer of that width; None where that cannot be told."""
    kind = find_layer_type(layer)
    assert kind is not None
    kept = torch.arange(width)
    for recipe in recipes:
        if f"{name}.weight" in recipe.grouped:
            if kind.weight_axis != 0:  # of a transposed convolution, whose rows are its inputs
                return None
            kept = kept[recipe.grouped[f"{name}.weight"][0].cpu()]
        index = recipe.slices.get(f"{name}.weight", {}).get(kind.weight_axis)
        kept = kept if index is None else kept[index.cpu()]
    return kept
