"""From a mask to a smaller network that computes the same function, and from widths to a larger one."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sosp.cost import Cost, cost_of
from sosp.errors import StructureError
from sosp.flow import Flow, trace
from sosp.flow.plan import plan
from sosp.mask import Mask, check_mask, masked
from sosp.recipe import Recipe, apply
from sosp.verify import check_same


def shrink(model: nn.Module, mask: Mask, example: Any, *, verify: bool = True) -> nn.Module:
    """A smaller copy of ``model`` that computes what ``sosp.masked(model, mask)`` computes, in eval and train mode.

    Class, code and names stay the same; filters, neurons and the inputs they fed are physically gone. Where a layer
    keeps fewer channels than the stream it feeds, a scatter puts them in place; a layer that lost all of them is
    replaced by zeros without parameters. ``verify`` compares the two networks on the example.
    """
    check_mask(model, mask)
    if mask.kind == "weights":
        raise StructureError("single weights cannot be cut out of a layer: use sosp.masked, or kind='filters'.")
    return shrink_along(model, mask, example, trace(model, example), verify=verify)[0]


def shrink_along(
    model: nn.Module, mask: Mask, example: Any, flow: Flow, *, verify: bool = True
) -> tuple[nn.Module, Cost]:
    """``shrink`` with the channel flow at hand, which may learn of more pins; and what the result costs."""
    removed = flow.removed(mask.removed, {layer.name: layer.norms for layer in mask.layers})
    layout, recipe = plan(model, flow, removed, example)
    small = cooked(model, recipe)
    if verify:
        check_same(small, masked(model, mask), example, flow.modes)
    return small, cost_of(flow, layout)


def cooked(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy with the recipe applied, which remembers it."""
    small = copy.deepcopy(model)
    apply(small, recipe)
    small.sosp_recipes = (*getattr(model, "sosp_recipes", ()), recipe)  # type: ignore[assignment]
    return small
