"""From a mask to a smaller network that computes the same function, and from widths to a larger one."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sosp.errors import StructureError, SurgeryError
from sosp.graph import Flow, follow
from sosp.graph.control_flow import listed
from sosp.graph.cost import Cost, cost_of
from sosp.graph.layout import Style
from sosp.graph.mask import Mask, check_mask, masked
from sosp.graph.plan import plan, set_zero
from sosp.graph.recipe import Recipe, apply
from sosp.surgery.checkpoint.recipe_shapes import shapes
from sosp.surgery.verify import REPORT, ROWS, check_same

MOST = 64  # rows that are compared where the code looks at values


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
        _check(small, masked(model, mask), example, flow, [*mask.removed])
    return small, cost_of(flow, layout)


def _check(small: nn.Module, whole: nn.Module, example: Any, flow: Flow, layers: list[str]) -> None:
    """Compare the two networks, where the code looks at values on more of the example: rows may go different ways."""
    try:
        check_same(small, whole, example, flow.modes, MOST if flow.real else ROWS)
    except SurgeryError as error:
        if not str(error).endswith(REPORT):
            raise
        raise SurgeryError(str(error).removesuffix(REPORT) + _advice(flow, layers)) from error


def _advice(flow: Flow, layers: list[str]) -> str:
    """What in the user's code it may come from, and how to go on."""
    decides = listed(tuple(dict.fromkeys(f"{d.op} at {d.where}" for d in flow.graph.decisions)))
    return (
        "Code that computes with the width of a layer (out_features, x.shape[1]) "
        + (f"or decides by values ({decides}) " if decides else "")
        + f"does that. Leave out the layers whose width it is, exclude=[...] with some of {listed(tuple(layers))}, or "
        "use sosp.masked. If there is no such code, this is a defect of sosp: please report it, with the network."
    )


def cooked(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy with the recipe applied, which remembers it and the shapes from before, for saving."""
    small = copy.deepcopy(model)
    apply(small, recipe)
    small.sosp_recipes = (*getattr(model, "sosp_recipes", ()), recipe)  # type: ignore[assignment]
    small.sosp_shapes = getattr(model, "sosp_shapes", None) or shapes(model)  # type: ignore[assignment]
    return small
