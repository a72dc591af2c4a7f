"""Meet a budget of parameters or MACs, counted on the network that is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from sosp.errors import ArgumentError, BudgetError, is_number
from sosp.graph.flow import Flow
from sosp.graph.layout import LayoutStyle
from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, Plan, compute_cost, compute_whole_cost, plan_removal
from sosp.graph.records import Structures
from sosp.selection.emptied_branches import find_removed_channels

LARGEST = 3  # layers in a message


@dataclass(frozen=True)
class Budget:
    """Limits on the network that is built: all of them hold."""

    limits: Mapping[str, float]  # "params", "macs" -> the share or the number that may remain
    style: LayoutStyle
    cap: float | None = None

    def is_met(self, cost: Cost, whole: Cost) -> bool:
        """Return whether a network of this cost is small enough."""
        return all(getattr(cost, what) <= _find_target(getattr(whole, what), x) for what, x in self.limits.items())

    def weigh_costs(self, whole: Cost) -> dict[str, float]:
        """Return what one parameter and one MAC count: of several budgets the one that asks for more counts more."""
        if len(self.limits) == 1:
            return dict.fromkeys(self.limits, 1.0)
        found = {}
        for what, limit in self.limits.items():
            size = getattr(whole, what)
            found[what] = 1 / max(size - _find_target(size, limit), 1e-6 * size, 1.0)
        return found

    def __str__(self) -> str:
        return " and ".join(f"{what}={limit}" for what, limit in self.limits.items())


def parse_limits(params: float | None, macs: float | None) -> dict[str, float]:
    """Return the limits that are given.

    Raises:
        ArgumentError: One is neither a share nor a whole number.
    """
    limits = {what: value for what, value in (("params", params), ("macs", macs)) if value is not None}
    for name, value in limits.items():
        if not is_number(value) or not isfinite(value) or not (0 < value <= 1 or value == int(value) > 1):
            noun = {"params": "parameters", "macs": "MACs"}[name]
            raise ArgumentError(
                f"{name}={value!r} must be the share of the {noun} to keep, above 0 and up to 1, or their number, a "
                "whole number above 1."
            )
    return limits


def _find_target(whole: int, limit: float) -> float:
    """Return the largest number of parameters or MACs that may remain of the whole network's."""
    return limit * whole * (1 + 1e-12) if limit <= 1 else limit  # 57 / 101 * 101 is 56.999...


def meet_budget(
    structures: Structures, chosen: Callable[[int], Tensor], most: int, budget: Budget, least: int = 0
) -> Plan:
    """Plan to remove the first of the growing sets ``chosen(least), ..., chosen(most)`` that meets all limits."""
    flow = structures.flow
    if flow is None or structures.kind == "weights":
        raise ArgumentError(f"{budget} needs the channel flow of the network, which these structures do not have.")
    whole = compute_whole_cost(flow)

    def fits(flow: Flow, count: int) -> bool:
        return budget.is_met(compute_cost_left(structures, flow, chosen(count), budget.style), whole)

    low = least
    while True:
        if low > most or not fits(flow, most):
            smallest = plan_structures(structures, flow, chosen(most), budget.style).cost
            raise BudgetError(_describe_unmet_budget(structures, budget, smallest, whole))
        high = most
        while low < high:
            middle = (low + high) // 2
            if fits(flow, middle):
                high = middle
            else:
                low = middle + 1
        plan = plan_structures(structures, flow, chosen(low), budget.style)
        if budget.is_met(plan.cost, whole):
            return plan
        # The dry run showed that the code requires a fixed width: the search continues with that width.
        flow = flow.with_pins(plan.flow.learned, plan.flow.fixed)
        low += 1


def plan_structures(structures: Structures, flow: Flow, removed: Tensor, style: LayoutStyle) -> Plan:
    """Return the plan to remove structures, and the branches that they empty."""
    mask = Mask.from_structures(structures, removed, find_removed_channels(structures, removed))
    return plan_removal(flow, mask, style)


def compute_cost_left(structures: Structures, flow: Flow, removed: Tensor, style: LayoutStyle) -> Cost:
    """Return the cost that remains without these structures, if the flow's pins are all there are."""
    places = {layer.name: layer.norms for layer in structures.layers}
    outputs = flow.find_removed_outputs(find_removed_channels(structures, removed), places)
    return compute_cost(flow, flow.layout(outputs, style))


def _describe_unmet_budget(structures: Structures, budget: Budget, smallest: Cost, whole: Cost) -> str:
    """Say what remains of the network, in which layers, and which of the options given allow less."""
    unmet = [w for w, x in budget.limits.items() if getattr(smallest, w) > _find_target(getattr(whole, w), x)]
    what = (unmet or [*budget.limits])[0]
    cap, round_to = budget.cap, budget.style.round_to
    ways = f"Raise {what}" + (f" or cap={cap}" if cap is not None else "")
    ways += f", or lower round_to={round_to}" if round_to > 1 else ""
    limit = budget.limits[what]
    hint = f" {what}={limit} is read as a number; a share is between 0 and 1, such as {what}=0.5." if limit > 1 else ""
    return (
        f"{what}={limit} cannot be met: after everything that can be removed is removed, "
        f"{getattr(smallest, what):,} of {getattr(whole, what):,} {what} remain. "
        f"{_describe_largest_layers(structures, what, smallest)}{ways}.{hint}"
    )


def _describe_largest_layers(structures: Structures, what: str, cost: Cost) -> str:
    """Name the layers that hold most of what remains, and their shares."""
    sizes = {layer.name: getattr(layer, what) for layer in cost.layers if getattr(layer, what)}
    prunable = {layer.name for layer in structures.layers}
    shares = [
        f"{name!r} ({size / sum(sizes.values()):.1%}{'' if name in prunable else ', without structures'})"
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST]
    ]
    return f"Most of them are in {', '.join(shares)}. " if shares else ""
