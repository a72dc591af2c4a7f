"""From a mask to a smaller network that computes the same function, and from widths to a larger one."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sosp.errors import ArgumentError, StructureError, SurgeryError
from sosp.graph.control_flow import format_names
from sosp.graph.flow import Flow, follow_channels
from sosp.graph.layout import LayoutStyle
from sosp.graph.mask import Mask, check_mask, masked
from sosp.graph.plan import Plan, plan_removal
from sosp.graph.recipe import Recipe, apply_recipe, set_rows_to_zero
from sosp.surgery.checkpoint.recipe_shapes import collect_shapes
from sosp.surgery.verify import BUG_REPORT_HINT, ROWS, check_same_outputs

MOST = 64  # rows that are compared where the code looks at values


def shrink(
    model: nn.Module, mask: Mask | Plan, example: Any, *, verify: bool = True, join: str = "scatter", round_to: int = 1
) -> nn.Module:
    """Return a smaller copy of ``model`` that computes what ``sosp.masked(model, mask)`` computes.

    Class, code and names stay the same. Filters, neurons and the inputs they fed are physically removed. A layer that
    lost all of them is replaced by zeros without parameters. The two networks agree in eval and in train mode.

    Args:
        model: The network; it is not changed.
        mask: The channels to remove, or a plan to remove them, which says how branches are joined and rounded.
        example: Inputs as ``model(...)`` takes them.
        verify: Compare the two networks on the example.
        join: Where a layer keeps fewer channels than the stream it feeds, ``"scatter"`` puts them in place.
            ``"zeros"`` lets the layer compute the missing ones with weights of zero: more to compute but one op less,
            for inference where the number of ops decides (training would bring those weights back).
        round_to: Round the widths of the streams up to a multiple, as fast kernels need. Round the widths of the
            layers in ``select``.

    Returns:
        The smaller network. It remembers how it was made, so that ``sosp.save`` can write it.

    Raises:
        StructureError: The mask is of another network, or the network cannot be followed.
        SurgeryError: The two networks differ.
    """
    plan = _as_plan(model, mask, example, join, round_to)
    small = apply_recipe_to_copy(model, plan.recipe)
    set_rows_to_zero(small, plan.zeroed)
    if verify:
        _check(small, masked(model, plan.mask), example, plan.flow, [*plan.mask.removed])
    return small


def _as_plan(model: nn.Module, mask: Mask | Plan, example: Any, join: str, round_to: int) -> Plan:
    """Return the plan itself, if it was made for such a network, or the plan to remove the channels of the mask."""
    if isinstance(mask, Plan):
        if (join, round_to) != ("scatter", 1):
            raise ArgumentError("the plan says how branches are joined and rounded: leave out join= and round_to=.")
        check_mask(model, mask.mask)
        if mask.flow.parameters != {name: tuple(p.shape) for name, p in model.named_parameters()}:
            raise StructureError("the plan was made for a network with other parameters. Make a plan for this network.")
        return mask
    check_mask(model, mask)
    if mask.kind == "weights":
        raise StructureError("single weights cannot be cut out of a layer: use sosp.masked, or kind='filters'.")
    style = LayoutStyle(join, round_to)
    return plan_removal(follow_channels(model, example), mask, style)


def _check(small: nn.Module, whole: nn.Module, example: Any, flow: Flow, layers: list[str]) -> None:
    """Compare the two networks, where the code looks at values on more of the example: rows may go different ways."""
    try:
        check_same_outputs(small, whole, example, flow.modes, MOST if flow.real else ROWS)
    except SurgeryError as error:
        if not str(error).endswith(BUG_REPORT_HINT):
            raise
        raise SurgeryError(str(error).removesuffix(BUG_REPORT_HINT) + _advice(flow, layers)) from error


def _advice(flow: Flow, layers: list[str]) -> str:
    """What in the user's code it may come from, and how to go on."""
    decides = format_names(tuple(dict.fromkeys(f"{d.op} at {d.where}" for d in flow.graph.decisions)))
    return (
        "Code that computes with the width of a layer (out_features, x.shape[1]) "
        + (f"or decides by values ({decides}) " if decides else "")
        + f"does that. Leave out the layers whose width it is, exclude=[...] with some of {format_names(tuple(layers))}"
        ", or use sosp.masked. If there is no such code, this is a defect of sosp: please report it, with the network."
    )


def apply_recipe_to_copy(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return a copy with the recipe applied. It remembers the recipe and the shapes from before, for saving."""
    small = copy.deepcopy(model)
    apply_recipe(small, recipe)
    small.sosp_recipes = (*getattr(model, "sosp_recipes", ()), recipe)  # type: ignore[assignment]
    small.sosp_shapes = getattr(model, "sosp_shapes", None) or collect_shapes(model)  # type: ignore[assignment]
    return small
