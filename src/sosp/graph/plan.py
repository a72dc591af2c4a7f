"""Plan a removal: what stays, how to get there and what it costs, before a tensor is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sosp.errors import StructureError, check_choice
from sosp.graph.cost import Cost, compute_alternative_cost, compute_cost, compute_whole_cost
from sosp.graph.dry_run import fit_layout
from sosp.graph.flow import Flow, follow_channels
from sosp.graph.layout import Layout, LayoutStyle
from sosp.graph.mask import Mask, check_mask
from sosp.graph.recipe import Recipe, find_zero_rows

CONVENTIONS = ("exact", "alternative")


@dataclass(frozen=True, eq=False)
class Plan:
    """One removal, complete: ``shrink`` carries it out without a decision."""

    mask: Mask
    flow: Flow  # with the pins that trying the removal out has shown
    layout: Layout
    recipe: Recipe
    zeroed: Mapping[str, tuple[int, Tensor]]  # parameter -> axis and rows set to zero (``join="zeros"``)
    cost: Cost


def plan_removal(flow: Flow, mask: Mask, style: LayoutStyle | None = None) -> Plan:
    """Return the plan to remove the channels of ``mask`` from the network of ``flow``.

    Pins that ``flow`` has learned from other removals do not count: whatever this one cannot lose is found again.
    """
    removed = flow.find_removed_outputs(mask.removed, mask.own_norms)
    fit = fit_layout(flow.without_learned(), removed, style)
    zeroed = find_zero_rows(flow.network, flow.graph, fit.layout, removed, fit.recipe)
    return Plan(mask, fit.flow, fit.layout, fit.recipe, zeroed, compute_cost(fit.flow, fit.layout))


def count(model: nn.Module, example: Any, mask: Mask | None = None, *, convention: str = "exact") -> Cost:
    """Return the parameters and MACs of ``model``, or of what ``sosp.shrink(model, mask, example)`` makes of it.

    Args:
        model: The network.
        example: Inputs as ``model(...)`` takes them: a tensor, a tuple of arguments or a dict of keyword arguments.
        mask: What is removed; None for the whole network.
        convention: ``"exact"`` counts the network that is built. A channel of a stream disappears only if it is dead
            in every branch that feeds it. ``"alternative"`` takes as the inputs of a layer the outputs of the layer
            before it in the chain, as if the skips were adapted (the paper's App. D). It counts fewer, is comparable
            with papers that count in this way, and is equal for a network without a mask.

    Returns:
        The cost of the network, layer by layer.

    Raises:
        StructureError: The network cannot be followed, or the mask is of single weights or of another network.
    """
    check_choice("convention", convention, CONVENTIONS)
    flow = follow_channels(model, example)
    if mask is None:
        return compute_whole_cost(flow)
    check_mask(model, mask)
    if mask.kind == "weights":
        raise StructureError("single weights cannot be cut out of a layer: count a mask of kind='filters'.")
    if convention == "alternative":
        return compute_alternative_cost(flow, flow.find_removed_outputs(mask.removed, mask.own_norms))
    return plan_removal(flow, mask).cost
