"""From a mask to a smaller network that computes the same function, and from widths to a larger one."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sosp.checkpoint.shapes import shapes
from sosp.cost import Cost, cost_of
from sosp.errors import StructureError
from sosp.flow import Flow, follow
from sosp.flow.layout import Style
from sosp.flow.plan import plan, set_zero
from sosp.mask import Mask, check_mask, masked
from sosp.recipe import Recipe, apply
from sosp.verify import check_same


def shrink(
    model: nn.Module, mask: Mask, example: Any, *, verify: bool = True, join: str = "scatter", round_to: int = 1
) -> nn.Module:
    """A smaller copy of ``model`` that computes what ``sosp.masked(model, mask)`` computes, in eval and train mode.

    Class, code and names stay the same; filters, neurons and the inputs they fed are physically gone. A layer that
    lost all of them is replaced by zeros without parameters. ``verify`` compares the two networks on the example.

    Where a layer keeps fewer channels than the stream it feeds, ``join="scatter"`` puts them in place;
    ``join="zeros"`` lets it compute the missing ones with weights of zero instead: more to compute but one op less,
    for inference where ops are what takes time (training would bring those weights back). ``round_to=8`` rounds the
    widths of the streams up, as fast kernels like them; round those of the layers in ``select``.
    """
    check_mask(model, mask)
    if mask.kind == "weights":
        raise StructureError("single weights cannot be cut out of a layer: use sosp.masked, or kind='filters'.")
    style = Style(join, round_to)
    return shrink_along(model, mask, example, follow(model, example), style, verify=verify)[0]


def shrink_along(
    model: nn.Module, mask: Mask, example: Any, flow: Flow, style: Style | None = None, *, verify: bool = True
) -> tuple[nn.Module, Cost]:
    """``shrink`` with the channel flow at hand, which may learn of more pins; and what the result costs."""
    removed = flow.removed(mask.removed, mask.places)
    layout, recipe = plan(model, flow, removed, example, style)
    small = cooked(model, recipe)
    set_zero(small, flow.graph, layout, removed)
    if verify:
        check_same(small, masked(model, mask), example, flow.modes)
    return small, cost_of(flow, layout)


def cooked(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy with the recipe applied, which remembers it and the shapes from before, for saving."""
    small = copy.deepcopy(model)
    apply(small, recipe)
    small.sosp_recipes = (*getattr(model, "sosp_recipes", ()), recipe)  # type: ignore[assignment]
    small.sosp_shapes = getattr(model, "sosp_shapes", None) or shapes(model)  # type: ignore[assignment]
    return small
