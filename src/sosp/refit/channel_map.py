"""Which channel of the original network each channel of the small one is, from the recipes that made it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.layers import layer_type
from sosp.errors import StructureError
from sosp.graph.recipe import Recipe
from sosp.surgery.checkpoint.recipe_shapes import after, shapes

WAY_OUT = "Give the network that sosp.shrink, sosp.prune or sosp.load made the small one of."


def recipes_between(small: nn.Module, model: nn.Module) -> tuple[Recipe, ...]:
    """What was done to ``model`` to get ``small``; refuse a network that is not made of it."""
    done: tuple[Recipe, ...] = getattr(small, "sosp_recipes", ())
    before: tuple[Recipe, ...] = getattr(model, "sosp_recipes", ())
    if len(done) < len(before):
        raise StructureError(
            f"the small network was shrunk {len(done)} times and the original one {len(before)} times: they seem to be "
            f"the wrong way round. {WAY_OUT}"
        )
    recipes = done[len(before) :]
    whole = shapes(model)
    first = {name for name, _ in [*small.named_parameters(), *small.named_buffers()]}  # recipes know no other names
    for name, shape in shapes(small).items():
        if name in whole and name not in first:
            continue
        if name not in whole:
            raise StructureError(f"the small network has {name!r}, which the original one does not have. {WAY_OUT}")
        expected = whole[name]
        for recipe in recipes:
            expected = after(expected, recipe, name)
        if shape != expected:
            raise StructureError(
                f"{name!r} of the small network is {shape}, and shrinking the original one makes it {expected}. "
                f"{WAY_OUT}"
            )
    return recipes


def channels_of(name: str, layer: Any, recipes: tuple[Recipe, ...], width: int) -> Tensor | None:
    """(C,) the channel of the original layer of that width; None where that cannot be told."""
    kind = layer_type(layer)
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
