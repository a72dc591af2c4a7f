"""From a mask to a smaller network that computes the same function, and from widths to a larger one."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sosp.flow import trace
from sosp.flow.plan import plan
from sosp.mask import Mask, check_mask, masked
from sosp.recipe import Recipe, apply
from sosp.verify import check_same


def shrink(model: nn.Module, mask: Mask, example: Any, *, verify: bool = True) -> nn.Module:
    """A smaller copy of ``model`` that computes what ``sosp.masked(model, mask)`` computes."""
    check_mask(model, mask)
    flow = trace(model, example)
    removed = flow.removed(mask.removed, {layer.name: layer.norms for layer in mask.layers})
    _, recipe = plan(model, flow, removed, example)
    small = cooked(model, recipe)
    if verify:
        check_same(small, masked(model, mask), example, tuple(m for m in flow.graph.records if m not in flow.untraced))
    return small


def cooked(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy with the recipe applied, which remembers it."""
    small = copy.deepcopy(model)
    apply(small, recipe)
    small.sosp_recipes = (*getattr(model, "sosp_recipes", ()), recipe)  # type: ignore[assignment]
    return small
