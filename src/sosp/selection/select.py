"""Choose which structures to remove: from a saliency and a budget to a Mask, and the plan to remove it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sosp.errors import ArgumentError, DisconnectedError, check_choice
from sosp.graph.mask import Mask
from sosp.graph.plan import Plan, compute_whole_cost
from sosp.graph.records import INPUT, SCOPES, Saliency, Structures
from sosp.selection.budgets import Budget, compute_cost_left, meet_budget, parse_limits, plan_structures
from sosp.selection.emptied_branches import find_removed_channels
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
from sosp.selection.priced_order import STEPS, order_by_price
from sosp.selection.quadratic_program import choose_subset
from sosp.selection.selection_options import RULES, SCALES, Selection

MOST_RESTORED = 256  # removals that are tried to be taken back


def select(
    saliency: Saliency,
    *,
    ratio: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    cap: float | None = None,
    scale: str | None = None,
    round_to: int | str = 1,
    join: str = "scatter",
    scope: str | None = None,
    ratios: Mapping[str, float] | None = None,
    rule: str = "saliency",
    options: Selection | None = None,
) -> Mask:
    """Return a mask that removes the least important structures.

    Greedy: one structure at a time, always the one that raises the objective least given those already removed
    (Eq. 5). Without pairs this sorts once. Ties go to the lower index.

    Args:
        saliency: From ``sosp.score``.
        ratio: Share of all structures to remove; half if no budget is given. Of several budgets all are met.
        params: Largest exact number of parameters of the network that ``shrink`` builds: a share up to 1, or a whole
            number above 1.
        macs: Largest number of multiply-accumulates, likewise.
        cap: Largest share removed from any layer. The losses of a depthwise layer and of the layer it reads count
            together.
        scale: Divide the increase of the objective by the edge of the structure's kernel (``"kernel"``, the paper's
            SOSP*), its ``"macs"`` or its ``"params"``.
        round_to: Keep a multiple of this many structures in every layer, by restoring those removed last, or by
            removing as many at a time with ``rule="priced"``. There ``"auto"`` stands for 8 on a CPU and 32 on a GPU,
            and for less in narrow layers.
        join: How ``shrink`` will join branches. The budget is met by the network that ``shrink`` builds with the same
            ``join`` and ``round_to``.
        scope: ``"global"`` ranks all structures together. ``"layer"`` removes the same share from every layer (the
            share that meets the budget) and keeps at least one structure of each. The default is the scope that the
            method's paper uses.
        ratios: The share to remove from each layer, by name or pattern. The other layers lose ``ratio``, or nothing.
        rule: What decides between structures of all layers. ``"saliency"``: the rise of the objective, or that per
            ``scale``. ``"priced"``: the rise per cost (MACs, or parameters for ``params``) that a removal saves given
            what is already removed, and more for layers that connect input and output as they become narrow. Each of
            these keeps something; a branch that something goes around may be emptied, and goes as a whole.
            ``"auto"``: priced where it applies.
        options: These options as one record, ``sosp.Selection(...)``, in place of the single ones.

    Returns:
        The mask. The arguments are not changed.

    Raises:
        ArgumentError: If the budget cannot be met, or the arguments contradict each other.
        DisconnectedError: If the mask would cut the network in two.
    """
    given: dict[str, Any] = {"cap": cap, "scale": scale, "round_to": round_to, "join": join}
    given |= {"scope": scope, "ratios": ratios, "rule": rule}
    if options is None:
        options = Selection(**given)
    else:
        refuse_both(given, {"round_to": 1, "join": "scatter", "rule": "saliency"})
    return select_and_plan(saliency, options, ratio=ratio, params=params, macs=macs)[0]


def refuse_both(given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Raise ArgumentError if an option is given beside the record of options."""
    twice = [name for name, value in given.items() if value != usual.get(name)]
    if twice:
        raise ArgumentError(f"options= is a record of all options: put {' and '.join(twice)} into it.")


def check_selection(
    options: Selection, ratio: float | None = None, params: float | None = None, macs: float | None = None
) -> None:
    """Raise ArgumentError for options and budgets that contradict each other."""
    if options.cap is not None:
        check_share("cap", options.cap)
    if options.scope is not None:
        check_choice("scope", options.scope, SCOPES)
    if options.scale is not None:
        check_choice("scale", options.scale, SCALES)
    check_choice("rule", options.rule, RULES)
    if isinstance(options.round_to, str):
        check_choice("round_to", options.round_to, ("auto",))
    limits = parse_limits(params, macs)
    if options.ratios is not None and limits:
        raise ArgumentError(
            f"ratios sets the share to remove from each layer, and {' and '.join(limits)} limits the whole network: "
            "give one of them."
        )
    if ratio is not None:
        check_share("ratio", ratio)
    assert options.style  # checks join and round_to


def select_and_plan(
    saliency: Saliency,
    options: Selection,
    *,
    ratio: float | None = None,
    params: float | None = None,
    macs: float | None = None,
) -> tuple[Mask, Plan | None]:
    """Return the mask, and the plan to remove it if a budget of the built network had to be met."""
    check_selection(options, ratio, params, macs)
    options, scope = resolve_rule(saliency, options), _resolve_scope(saliency, options)
    limits = parse_limits(params, macs)
    budget = Budget(limits, options.style, options.cap) if limits else None
    structures, cap = saliency.structures, options.cap
    if options.rule == "saliency" and structures.branches:  # it removes what it chooses and nothing else
        structures = replace(structures, branches=None)
        saliency = replace(saliency, structures=structures)
    if scope == "layer":
        quotas = build_quotas(structures, options.ratios, cap)
        found = _select_by_layer(saliency, quotas, options, ratio, budget)
    else:
        found = _select_globally(saliency, options, ratio, budget)
    if isinstance(found, Plan):
        mask, plan = found.mask, found
    else:
        mask, plan = Mask.from_structures(structures, found, find_removed_channels(structures, found)), None
    # If every layer keeps something, only a depthwise one can be empty: it lost some channels, its input the others.
    refuse_disconnected(structures, mask, budget, capped=scope == "layer" or (cap is not None and cap < 1))
    return mask, plan


def resolve_rule(saliency: Saliency, options: Selection) -> Selection:
    """Return the options with the rule and the step of widths that apply."""
    structures = saliency.structures
    known = structures.flow is not None and structures.kind == "filters"
    if options.rule == "auto":  # a method that ranks every layer by itself has no use for a price
        priced = known and _resolve_scope(saliency, options) == "global" and options.scale is None
        options = replace(options, rule="priced" if priced else "saliency")
    if options.rule == "saliency":
        return replace(options, round_to=options.style.round_to)
    if options.scale is not None:
        raise ArgumentError("rule='priced' divides by what a removal really saves. Leave scale out.")
    if structures.flow is None or structures.kind == "weights":
        raise ArgumentError(
            "rule='priced' needs the channel flow of the network, which these structures do not have. Use "
            "rule='saliency'."
        )
    return options


def _resolve_scope(saliency: Saliency, options: Selection) -> str:
    """Return the scope of the ranking; with ``ratios`` each layer is ranked separately."""
    if options.ratios is None:
        return options.scope or saliency.scope
    if options.scope == "global":
        raise ArgumentError(
            "ratios sets the share of each layer, but scope='global' ranks all layers together. Use scope='layer'."
        )
    return "layer"


def _select_globally(
    saliency: Saliency, options: Selection, ratio: float | None, budget: Budget | None
) -> Tensor | Plan:
    """Choose structures from one ranking of all layers."""
    structures = saliency.structures
    ratio = ratio if ratio is not None else 0.0 if budget else 0.5
    count = round(ratio * len(structures))
    steps = _order_globally(saliency, options, budget, len(structures) if budget else count)
    sizes = [0, *accumulate(map(len, steps))]
    if count > sizes[-1]:
        why = "keeping one of every layer" if options.cap is None else f"cap={options.cap}"
        raise ArgumentError(
            f"ratio={ratio} asks for {count} of {len(structures)} structures, but {why} leaves only "
            f"{sizes[-1]} to remove."
        )
    least = next(k for k, size in enumerate(sizes) if size >= count)
    order = _join(steps)
    round_to = 1 if options.rule == "priced" else options.style.round_to

    def chosen(k: int) -> Tensor:
        return _round_widths(structures, order[: sizes[k]], round_to)

    if budget is None:
        return chosen(least)
    plan = meet_budget(structures, chosen, len(steps), budget, least)
    if options.rule == "saliency":
        return plan
    return _restore_fitting(saliency, steps, plan, budget, count, finer=options.round_to == "auto")


def _restore_fitting(
    saliency: Saliency, steps: list[Tensor], plan: Plan, budget: Budget, count: int, finer: bool
) -> Plan:
    """Return a plan that takes some removals back, the last first, as far as the budget allows.

    ``finer``: where a whole step does not fit, the more important half of it may.
    """
    structures, owner = saliency.structures, saliency.structures.owner()
    whole, now, full = compute_whole_cost(plan.flow), plan.cost, set[int]()
    taken = steps[: int((torch.tensor([len(s) for s in steps]).cumsum(0) <= plan.mask.chosen).sum())]
    for step in reversed(taken[-MOST_RESTORED:]):
        layer = int(owner[step[0]])
        half = step[-(-len(step) // 2) :] if finer else step[:0]
        for back in (step, half):
            if layer in full or not len(back):
                continue
            fewer = [other if other is not step else step[: len(step) - len(back)] for other in taken]
            cost = compute_cost_left(structures, plan.flow, _join(fewer), budget.style)
            if sum(map(len, fewer)) >= count and budget.is_met(cost, whole) and cost != now:
                taken, now = fewer, cost
                break
        else:
            full.add(layer)  # its other removals save as much
    better = plan_structures(structures, plan.flow, _join(taken), budget.style)
    return better if budget.is_met(better.cost, whole) else plan


def _join(steps: list[Tensor]) -> Tensor:
    return torch.cat(steps) if steps else torch.zeros(0, dtype=torch.long)


def _order_globally(saliency: Saliency, options: Selection, budget: Budget | None, count: int) -> list[Tensor]:
    """Return what is removed in each step, as the rule ranks the structures of all layers."""
    structures, device = saliency.structures, saliency.scores.device
    if options.rule == "saliency":
        limits = build_limits(structures, options.cap, device)
        weights = _find_sizes(structures, options.scale)
        order = order_capped_removals(saliency, min(count, limits.total), weights, limits)
        return list(order.split(1)) if len(order) else []
    assert structures.flow is not None
    shares = {"macs": 1.0} if budget is None else budget.weigh_costs(compute_whole_cost(structures.flow))
    found = order_by_price(saliency, shares, options.cap, resolve_step(saliency, options))
    return [torch.from_numpy(bundle).to(device) for bundle in found]


def resolve_step(saliency: Saliency, options: Selection) -> int | str:
    """Return the step of the widths: a number, or the kind of device whose steps apply to coupled channels."""
    if options.round_to != "auto":
        return options.round_to
    if options.rule == "saliency" or saliency.structures.branches is None:
        return 1
    kind = saliency.scores.device.type
    return kind if kind in STEPS else "cpu"


def _select_by_layer(
    saliency: Saliency, quotas: LayerQuotas, options: Selection, ratio: float | None, budget: Budget | None
) -> Tensor | Plan:
    """Choose the least important share of every layer."""
    structures = saliency.structures
    fill = _build_layer_selector(saliency, options.cap, options.scale)
    round_to = options.style.round_to

    def at(share: float) -> Tensor:
        return _round_widths(structures, fill(quotas.at(share)), round_to)

    if budget is not None:
        steps = [0.0, *quotas.steps()]
        least = next((k for k, share in enumerate(steps) if share >= (ratio or 0.0)), len(steps) - 1)
        return meet_budget(structures, lambda n: at(steps[n]), len(steps) - 1, budget, least)
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
    structures: Structures, mask: Mask, budget: Budget | None = None, *, capped: bool = False
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
            why, way = f"{budget} takes", f"Raise {' or '.join(budget.limits)}"
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
