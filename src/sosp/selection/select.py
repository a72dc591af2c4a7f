"""Choose which structures to remove: from a saliency and a budget to a Mask, and the plan to remove it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from sosp.errors import ArgumentError, BudgetError, DisconnectedError, check_choice, is_number
from sosp.graph.flow import Flow
from sosp.graph.layout import LayoutStyle
from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, Plan, compute_cost, compute_whole_cost, plan_removal
from sosp.graph.records import INPUT, SCOPES, Saliency, Structures
from sosp.selection.greedy_order import (
    LayerLimits,
    build_limits,
    check_share,
    find_depthwise_inputs,
    find_reached,
    order_capped_removals,
    order_removals,
)
from sosp.selection.layer_shares import LayerQuotas, build_quotas, refuse_above_cap
from sosp.selection.priced_order import order_by_price
from sosp.selection.quadratic_program import choose_subset

SCALES = ("kernel", "macs", "params")
RULES = ("saliency", "priced")
MOST_RESTORED = 256  # structures that are tried to be kept after all
LARGEST = 3  # layers in a message


@dataclass(frozen=True)
class SelectionOptions:
    """The arguments of ``select``."""

    ratio: float | None = None
    params: float | None = None
    macs: float | None = None
    cap: float | None = None
    scale: str | None = None
    round_to: int = 1
    join: str = "scatter"
    scope: str | None = None
    ratios: Mapping[str, float] | None = None
    rule: str = "saliency"


def select(
    saliency: Saliency,
    *,
    ratio: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    cap: float | None = None,
    scale: str | None = None,
    round_to: int = 1,
    join: str = "scatter",
    scope: str | None = None,
    ratios: Mapping[str, float] | None = None,
    rule: str = "saliency",
) -> Mask:
    """Return a mask that removes the least important structures.

    Greedy: one structure at a time, always the one that raises the objective least given those already removed
    (Eq. 5). Without pairs this sorts once. Ties go to the lower index.

    Args:
        saliency: From ``sosp.score``.
        ratio: Share of all structures to remove; half by default. Give one of ``ratio``, ``params`` and ``macs``.
        params: Largest exact number of parameters of the network that ``shrink`` builds: a share up to 1, or a whole
            number above 1.
        macs: Largest number of multiply-accumulates, likewise.
        cap: Largest share removed from any layer. The losses of a depthwise layer and of the layer it reads count
            together.
        scale: Divide the increase of the objective by the edge of the structure's kernel (``"kernel"``, the paper's
            SOSP*), its ``"macs"`` or its ``"params"``.
        round_to: Keep a multiple of this many structures in every layer, by restoring those removed last.
        join: How ``shrink`` will join branches. The budget is met by the network that ``shrink`` builds with the same
            ``join`` and ``round_to``.
        scope: ``"global"`` ranks all structures together. ``"layer"`` removes the same share from every layer (the
            share that meets the budget) and keeps at least one structure of each. The default is the scope that the
            method's paper uses.
        ratios: The share to remove from each layer, by name or pattern. The other layers lose ``ratio``, or nothing.
        rule: What decides between structures of all layers. ``"saliency"``: the rise of the objective, or that per
            ``scale``. ``"priced"``: the rise per cost (MACs, or parameters for ``params``) that a removal saves given
            what is already removed, and more for layers that connect input and output as they become narrow. At least
            one structure of every layer stays.

    Returns:
        The mask. The arguments are not changed.

    Raises:
        ArgumentError: If the budget cannot be met, or the arguments contradict each other.
        DisconnectedError: If the mask would cut the network in two.
    """
    options = SelectionOptions(ratio, params, macs, cap, scale, round_to, join, scope, ratios, rule)
    return select_and_plan(saliency, options)[0]


def select_and_plan(saliency: Saliency, options: SelectionOptions) -> tuple[Mask, Plan | None]:
    """Return the mask, and the plan to remove it if a budget of the built network had to be met."""
    structures, cap, scale = saliency.structures, options.cap, options.scale
    budget = parse_budget(options)
    if scale is not None:
        check_choice("scale", scale, SCALES)
    check_choice("rule", options.rule, RULES)
    scope = _resolve_scope(saliency, options.scope, options.ratios, budget)
    if scope == "layer":
        found = _select_by_layer(saliency, build_quotas(structures, options.ratios, cap), options, budget)
    else:
        found = _select_globally(saliency, options, budget)
    mask, plan = (found.mask, found) if isinstance(found, Plan) else (Mask.from_structures(structures, found), None)
    # If every layer keeps something, only a depthwise one can be empty: it lost some channels, its input the others.
    refuse_disconnected(structures, mask, budget, capped=scope == "layer" or (cap is not None and cap < 1))
    return mask, plan


@dataclass(frozen=True)
class SelectionBudget:
    """A limit on the parameters or MACs of a network built with this layout."""

    what: str
    limit: float
    style: LayoutStyle
    cap: float | None = None


def _resolve_scope(
    saliency: Saliency, scope: str | None, ratios: Mapping[str, float] | None, budget: SelectionBudget | None
) -> str:
    """Return the scope of the ranking; with ``ratios`` each layer is ranked separately."""
    if scope is not None:
        check_choice("scope", scope, SCOPES)
    if ratios is None:
        return scope or saliency.scope
    if scope == "global":
        raise ArgumentError(
            "ratios sets the share of each layer, but scope='global' ranks all layers together. Use scope='layer'."
        )
    if budget is not None:
        raise ArgumentError(
            f"ratios sets the share to remove from each layer, and {budget.what} limits the whole network: give one "
            "of them."
        )
    return "layer"


def _select_globally(saliency: Saliency, options: SelectionOptions, budget: SelectionBudget | None) -> Tensor | Plan:
    """Choose structures from one ranking of all layers."""
    structures, ratio, round_to = saliency.structures, options.ratio, options.round_to
    ratio = 0.5 if ratio is None else ratio
    check_share("ratio", ratio)
    count = len(structures) if budget is not None else round(ratio * len(structures))
    order = _order_globally(saliency, options, count)
    if budget is not None:
        plan = _meet_budget(structures, lambda n: _round_widths(structures, order[:n], round_to), len(order), budget)
        return _restore_fitting(saliency, order, plan, budget) if options.rule == "priced" and round_to == 1 else plan
    if count > len(order):
        why = "keeping one of every layer" if options.cap is None else f"cap={options.cap}"
        raise ArgumentError(
            f"ratio={ratio} asks for {count} of {len(structures)} structures, but {why} leaves only "
            f"{len(order)} to remove."
        )
    return _round_widths(structures, order, round_to)


def _restore_fitting(saliency: Saliency, order: Tensor, plan: Plan, budget: SelectionBudget) -> Plan:
    """Return a plan that keeps some structures more, the last removed first, as far as the budget allows."""
    structures, owner = saliency.structures, saliency.structures.owner()
    target = _find_target(getattr(compute_whole_cost(plan.flow), budget.what), budget)
    removed, full = order[: plan.mask.chosen].tolist(), set[int]()
    for s in reversed(removed[-MOST_RESTORED:]):
        if int(owner[s]) not in full:
            fewer = torch.tensor([t for t in removed if t != s], dtype=torch.long)
            if _count_left(structures, plan.flow, fewer, budget) <= target:
                removed.remove(s)
            else:
                full.add(int(owner[s]))  # the others of its layer save as much
    mask = Mask.from_structures(structures, torch.tensor(removed, dtype=torch.long))
    better = plan_removal(plan.flow, mask, budget.style)
    return better if getattr(better.cost, budget.what) <= target else plan


def _order_globally(saliency: Saliency, options: SelectionOptions, count: int) -> Tensor:
    """Return up to ``count`` structures in the order of their removal, as the rule ranks those of all layers."""
    structures = saliency.structures
    if options.rule == "saliency":
        limits = build_limits(structures, options.cap, saliency.scores.device)
        weights = _find_sizes(structures, options.scale)
        return order_capped_removals(saliency, min(count, limits.total), weights, limits)
    if options.scale is not None:
        raise ArgumentError("rule='priced' divides by what a removal really saves. Leave scale out.")
    if structures.flow is None or structures.kind == "weights":
        raise ArgumentError(
            "rule='priced' needs the channel flow of the network, which these structures do not have. Use "
            "rule='saliency'."
        )
    what = "params" if options.params is not None else "macs"
    return order_by_price(saliency, structures.flow, what, options.cap)[:count]


def _select_by_layer(
    saliency: Saliency, quotas: LayerQuotas, options: SelectionOptions, budget: SelectionBudget | None
) -> Tensor | Plan:
    """Choose the least important share of every layer."""
    structures, ratio = saliency.structures, options.ratio
    fill = _build_layer_selector(saliency, options.cap, options.scale)

    def at(share: float) -> Tensor:
        return _round_widths(structures, fill(quotas.at(share)), options.round_to)

    if budget is not None:
        steps = [0.0, *quotas.steps()]
        return _meet_budget(structures, lambda n: at(steps[n]), len(steps) - 1, budget)
    if ratio is None:
        ratio = 0.0 if quotas.shares else 0.5
    refuse_above_cap(ratio, options.cap)
    return at(ratio)


def _build_layer_selector(saliency: Saliency, cap: float | None, scale: str | None) -> Callable[[list[int]], Tensor]:
    """Return a function from the number each layer loses to its structures: greedy or a quadratic program."""
    structures, device = saliency.structures, saliency.scores.device
    weights = _find_sizes(structures, scale)
    if saliency.objective != "signed" or saliency.pairs is None:
        return lambda quotas: order_removals(
            saliency, sum(quotas), weights, LayerLimits(structures, cap, device, quotas)
        )
    if scale is not None:
        raise ArgumentError(
            f"scale={scale!r} divides the cost of single structures, but objective='signed' weighs all structures of a "
            "layer together. Leave scale out, use scope='global', or saliency.with_objective('individual')."
        )
    first, pairs = saliency.first, saliency.pairs
    assert first is not None
    members = [torch.nonzero(structures.owner() == i).flatten().to(device) for i in range(len(structures.layers))]
    known: dict[tuple[int, int], Tensor] = {}

    def one(i: int, k: int) -> Tensor:
        if (i, k) not in known:
            m = members[i]
            known[i, k] = m[choose_subset(pairs[m][:, m], first[m], k)]
        return known[i, k]

    return lambda quotas: torch.cat([one(i, k) for i, k in enumerate(quotas)])


def parse_budget(options: SelectionOptions) -> SelectionBudget | None:
    """Return the budget of parameters or MACs; None if the budget is a ratio of the structures."""
    given = {"ratio": options.ratio, "params": options.params, "macs": options.macs}
    named = {name: value for name, value in given.items() if value is not None}
    style = LayoutStyle(options.join, options.round_to)
    if len(named) > 1:
        raise ArgumentError(f"give one of ratio, params and macs, not {' and '.join(named)}.")
    if options.ratio is not None or not named:
        return None
    ((name, value),) = named.items()
    if not is_number(value) or not isfinite(value) or not (0 < value <= 1 or value == int(value) > 1):
        raise ArgumentError(f"{name}={value!r} must be the share to keep, up to 1, or a whole number of {name}.")
    return SelectionBudget(name, value, style, options.cap)


def _meet_budget(structures: Structures, chosen: Callable[[int], Tensor], most: int, budget: SelectionBudget) -> Plan:
    """Plan to remove the first of the growing sets ``chosen(0), ..., chosen(most)`` that meets the limit."""
    what = budget.what
    if structures.flow is None or structures.kind == "weights":
        raise ArgumentError(f"{what}= needs the channel flow of the network, which these structures do not have.")
    flow = structures.flow
    whole = getattr(compute_whole_cost(flow), what)
    target = _find_target(whole, budget)

    def left(flow: Flow, count: int) -> int:
        return _count_left(structures, flow, chosen(count), budget)

    low = 0
    while True:
        if low > most or left(flow, most) > target:
            smallest = plan_removal(flow, Mask.from_structures(structures, chosen(most)), budget.style).cost
            raise BudgetError(_describe_unmet_budget(structures, budget, smallest, whole))
        high = most
        while low < high:
            middle = (low + high) // 2
            if left(flow, middle) <= target:
                high = middle
            else:
                low = middle + 1
        plan = plan_removal(flow, Mask.from_structures(structures, chosen(low)), budget.style)
        if getattr(plan.cost, what) <= target:
            return plan
        # The dry run showed that the code requires a fixed width: the search continues with that width.
        flow = flow.with_pins(plan.flow.learned, plan.flow.fixed)
        low += 1


def _find_target(whole: int, budget: SelectionBudget) -> float:
    """Return the largest number of parameters or MACs that may remain of the whole network's."""
    limit = budget.limit
    return limit * whole * (1 + 1e-12) if limit <= 1 else limit  # 57 / 101 * 101 is 56.999...


def _count_left(structures: Structures, flow: Flow, removed: Tensor, budget: SelectionBudget) -> int:
    """Return the parameters or MACs that remain without these structures, if the flow's pins are all there are."""
    places = {layer.name: layer.norms for layer in structures.layers}
    outputs = flow.find_removed_outputs(structures.channels_of(removed), places)
    return getattr(compute_cost(flow, flow.layout(outputs, budget.style)), budget.what)


def _describe_unmet_budget(structures: Structures, budget: SelectionBudget, smallest: Cost, whole: int) -> str:
    """Say what remains of the network, in which layers, and which of the options given allow less."""
    what, cap, round_to = budget.what, budget.cap, budget.style.round_to
    ways = f"Raise {what}" + (f" or cap={cap}" if cap is not None else "")
    ways += f", or lower round_to={round_to}" if round_to > 1 else ""
    return (
        f"{what}={budget.limit} cannot be met: after everything that can be removed is removed, "
        f"{getattr(smallest, what):,} of {whole:,} {what} remain. "
        f"{_describe_largest_layers(structures, what, smallest)}{ways}."
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


def _round_widths(structures: Structures, chosen: Tensor, round_to: int) -> Tensor:
    """Restore the last removals of each layer until it keeps a multiple of ``round_to`` structures."""
    if round_to == 1:
        return chosen
    owner = structures.owner()
    widths = torch.bincount(owner, minlength=len(structures.layers))
    layers = owner[chosen.cpu()]
    back = torch.zeros(len(chosen), dtype=torch.bool)
    for i, width in enumerate(widths.tolist()):
        mine = (layers == i).nonzero().flatten()
        again = min(len(mine), -(width - len(mine)) % round_to)
        back[mine[len(mine) - again :]] = True
    return chosen[~back.to(chosen.device)]


def _find_sizes(structures: Structures, scale: str | None) -> Tensor | None:
    """Return (S,) the sizes that costs are divided by; None without ``scale``."""
    if scale is None:
        return None
    sizes = structures.sizes(scale)
    return sizes.clamp_min(
        1.0 if scale == "kernel" else sizes[sizes > 0].min().item() if bool((sizes > 0).any()) else 1.0
    )


def refuse_disconnected(
    structures: Structures, mask: Mask, budget: SelectionBudget | None = None, *, capped: bool = False
) -> None:
    """Raise DisconnectedError if every path from the input to the output passes a layer that the mask empties."""
    dead = _find_dead_layers(structures, mask)
    if not dead:
        return
    reached = find_reached(structures.wiring, dead)
    if INPUT not in reached:
        blocked = dead & {up for name in reached for up in structures.wiring.get(name, ())}
        names = ", ".join(repr(n) for n in sorted(blocked))
        why, way = "the mask removes", "Lower the ratio"
        bound = "remove the channels of a depthwise layer together with those it reads (groups='coupled')"
        if not capped:
            bound = "bound the share removed per layer (cap=0.95)"
        if budget is not None:
            why, way = f"{budget.what}={budget.limit} takes", f"Raise {budget.what}"
        raise DisconnectedError(
            f"{why} every channel of {names}, which disconnects the network. {way}, {bound}, or exclude the layer."
        )


def _find_dead_layers(structures: Structures, mask: Mask) -> set[str]:
    """Return the layers that lose all their channels; a depthwise layer also loses those its input lost."""
    gone: dict[str, set[int]] = {}
    width: dict[str, int] = {}
    for layer in structures.layers:
        name = layer.name.rpartition(".")[0] if structures.kind == "weights" else layer.name
        if structures.kind == "weights" and not layer.name.endswith(".weight"):
            continue
        gone[name] = set(mask.removed[layer.name].tolist()) if layer.name in mask.removed else set()
        width[name] = layer.channels
    for name, up in find_depthwise_inputs(structures).items():
        gone[name] |= gone[up]
    return {name for name in gone if len(gone[name]) == width[name]}
