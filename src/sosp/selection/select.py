"""Choose which structures go: from saliencies and a budget to a Mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from sosp.core.records import INPUT, OUTPUT, SCOPES, Saliency, Structures
from sosp.errors import ArgumentError, DisconnectedError, is_number, one_of
from sosp.graph.cost import cost_of, whole_cost
from sosp.graph.layout import Layout, Style
from sosp.graph.mask import Mask
from sosp.selection.caps import in_order, read_by, room_for
from sosp.selection.greedy import Room, check_share, greedy
from sosp.selection.layer_shares import Quotas, quotas_of, refuse_above_cap
from sosp.selection.quadratic_program import choose

SCALES = ("kernel", "macs", "params")


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
) -> Mask:
    """Remove the structures that are least needed.

    How many: ``ratio`` of all structures (half, if nothing is said); or as many as it takes until at most ``params``
    of the network's parameters, or ``macs`` of its multiply-accumulates, are left in the network that ``shrink``
    builds (a share, or a whole number above 1), by the exact count.

    ``scope``: ``"global"`` ranks all structures together; ``"layer"`` removes the same share from every layer
    (the share that meets the budget), one structure of which stays; without it, as the paper of the method does.
    ``ratios`` gives layers, or patterns of names, shares of their own; the others lose ``ratio``, or nothing.

    Greedy: one structure after the other, each time the one that raises the objective least given those already
    gone (Eq. 5); without pairs this is sorting once. Ties go to the lower index. ``cap`` bounds the share removed
    from any layer; what a depthwise layer loses counts together with what the layer it reads loses. ``scale`` divides
    what a structure adds to the objective by its kernel's edge (the paper's SOSP*), its MACs or its parameters, so that
    what saves more may cost more. ``round_to`` keeps a multiple of that many structures in every layer, by taking back
    those removed last. Give ``join`` and ``round_to`` as ``shrink`` will be told them: the budget is met by the network
    that it then builds. A mask that would cut the network in two is refused.
    """
    structures = saliency.structures
    budget = budget_of(ratio, params, macs, Style(join, round_to))
    if scale is not None:
        one_of("scale", scale, SCALES)
    scope = _scope(saliency, scope, ratios, budget)
    if scope == "layer":
        chosen = _by_layer(saliency, quotas_of(structures, ratios, cap), ratio, budget, cap, scale, round_to)
    else:
        chosen = _together(saliency, ratio, budget, cap, scale, round_to)
    mask = Mask.from_structures(structures, chosen)
    # Where every layer keeps something, only a depthwise one can be empty: it has lost some, the one it reads the rest.
    refuse_disconnected(structures, mask, budget, capped=scope == "layer" or (cap is not None and cap < 1))
    return mask


@dataclass(frozen=True)
class Budget:
    """What is limited, and to what, in a network that is built like this."""

    what: str
    limit: float
    style: Style


def _scope(saliency: Saliency, scope: str | None, ratios: Mapping[str, float] | None, budget: Budget | None) -> str:
    """How the structures are ranked; layers with shares of their own are ranked one by one."""
    if scope is not None:
        one_of("scope", scope, SCOPES)
    if ratios is None:
        return scope or saliency.scope
    if scope == "global":
        raise ArgumentError(
            "ratios gives every layer its share, which scope='global' does not keep. Use scope='layer'."
        )
    if budget is not None:
        raise ArgumentError(
            f"ratios says what every layer loses, and {budget.what} how much is left: give one of them."
        )
    return "layer"


def _together(
    saliency: Saliency, ratio: float | None, budget: Budget | None, cap: float | None, scale: str | None, round_to: int
) -> Tensor:
    """All structures in one ranking."""
    structures = saliency.structures
    room = room_for(structures, cap, saliency.scores.device)
    weights = _weights(structures, scale)
    if budget is not None:
        order = in_order(saliency, room.total, weights, room)
        return _within(structures, lambda n: _rounded(structures, order[:n], round_to), len(order), budget)
    ratio = 0.5 if ratio is None else ratio
    check_share("ratio", ratio)
    count = round(ratio * len(structures))
    order = in_order(saliency, min(count, room.total), weights, room)
    if count > len(order):
        raise ArgumentError(
            f"ratio={ratio} asks for {count} of {len(structures)} structures, but cap={cap} leaves only "
            f"{len(order)} to remove."
        )
    return _rounded(structures, order, round_to)


def _by_layer(
    saliency: Saliency,
    quotas: Quotas,
    ratio: float | None,
    budget: Budget | None,
    cap: float | None,
    scale: str | None,
    round_to: int,
) -> Tensor:
    """Every layer loses its share, the least needed of it."""
    structures = saliency.structures
    fill = _filler(saliency, cap, scale)

    def at(share: float) -> Tensor:
        return _rounded(structures, fill(quotas.at(share)), round_to)

    if budget is not None:
        steps = [0.0, *quotas.steps()]
        return _within(structures, lambda n: at(steps[n]), len(steps) - 1, budget)
    if ratio is None:
        ratio = 0.0 if quotas.shares else 0.5
    refuse_above_cap(ratio, cap)
    return at(ratio)


def _filler(saliency: Saliency, cap: float | None, scale: str | None) -> Callable[[list[int]], Tensor]:
    """From how many every layer loses to which: greedy, or the programme of each layer."""
    structures, device = saliency.structures, saliency.scores.device
    weights = _weights(structures, scale)
    if saliency.objective != "signed" or saliency.pairs is None:
        return lambda quotas: greedy(saliency, sum(quotas), weights, Room(structures, cap, device, quotas))
    if scale is not None:
        raise ArgumentError(
            f"scale={scale!r} divides what a structure costs by itself, and objective='signed' weighs those of a layer "
            "together. Leave it out, use scope='global', or saliency.with_objective('individual')."
        )
    first, pairs = saliency.first, saliency.pairs
    assert first is not None
    members = [torch.nonzero(structures.owner() == i).flatten().to(device) for i in range(len(structures.layers))]
    known: dict[tuple[int, int], Tensor] = {}

    def one(i: int, k: int) -> Tensor:
        if (i, k) not in known:
            m = members[i]
            known[i, k] = m[choose(pairs[m][:, m], first[m], k)]
        return known[i, k]

    return lambda quotas: torch.cat([one(i, k) for i, k in enumerate(quotas)])


def budget_of(ratio: float | None, params: float | None, macs: float | None, style: Style) -> Budget | None:
    """What is asked for; None where it is a ratio of the structures."""
    given = {"ratio": ratio, "params": params, "macs": macs}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise ArgumentError(f"give one of ratio, params and macs, not {' and '.join(named)}.")
    if ratio is not None or not named:
        return None
    ((name, value),) = named.items()
    if not is_number(value) or not isfinite(value) or not (0 < value <= 1 or value == int(value) > 1):
        raise ArgumentError(
            f"{name}={value!r} must be the share that may be left, up to 1, or a whole number of {name}."
        )
    return Budget(name, value, style)


def _within(structures: Structures, chosen: Callable[[int], Tensor], most: int, budget: Budget) -> Tensor:
    """The first of the growing sets ``chosen(0), ..., chosen(most)`` whose removal meets the limit."""
    what, limit = budget.what, budget.limit
    if structures.flow is None or structures.kind == "weights":
        raise ArgumentError(f"{what}= needs the channel flow of the network, which these structures do not have.")
    flow = structures.flow
    whole = getattr(whole_cost(flow), what)
    target = limit * whole * (1 + 1e-12) if limit <= 1 else limit  # 57 / 101 * 101 is 56.999...
    places = {layer.name: layer.norms for layer in structures.layers}

    def cost(count: int, layout: Callable[[dict[str, np.ndarray], Style], Layout]) -> int:
        removed = flow.removed(structures.channels_of(chosen(count)), places)
        return getattr(cost_of(flow, layout(removed, budget.style)), what)

    def left(count: int) -> int:
        return cost(count, flow.layout)

    low = 0
    while True:
        if low > most or left(most) > target:
            raise ArgumentError(
                f"{what}={limit} cannot be met: with everything removed that may go, {left(most):,} of {whole:,} "
                f"{what} are left. Raise it, lift the cap, round less, or exclude fewer layers."
            )
        high = most
        while low < high:
            middle = (low + high) // 2
            if left(middle) <= target:
                high = middle
            else:
                low = middle + 1
        # Building it may show that the code fixes a width nobody knew of: the search goes on with that in view.
        if cost(low, flow.built) <= target:
            return chosen(low)
        low += 1


def _rounded(structures: Structures, chosen: Tensor, round_to: int) -> Tensor:
    """Take back, layer by layer, what was removed last, until a multiple of ``round_to`` is kept."""
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


def _weights(structures: Structures, scale: str | None) -> Tensor | None:
    """(S,) what a structure's cost is divided by."""
    if scale is None:
        return None
    sizes = structures.sizes(scale)
    return sizes.clamp_min(
        1.0 if scale == "kernel" else sizes[sizes > 0].min().item() if bool((sizes > 0).any()) else 1.0
    )


def refuse_disconnected(
    structures: Structures, mask: Mask, budget: Budget | None = None, *, capped: bool = False
) -> None:
    """Refuse a mask that leaves no way from the input to the output around the layers it empties."""
    dead = _dead_layers(structures, mask)
    if not dead:
        return
    reached: set[str] = set()
    blocked: set[str] = set()
    stack = [OUTPUT]
    while stack:
        name = stack.pop()
        if name in reached or name in blocked:
            continue
        if name in dead:
            blocked.add(name)
            continue
        reached.add(name)
        stack += structures.wiring.get(name, ())
    if INPUT not in reached:
        names = ", ".join(repr(n) for n in sorted(blocked))
        why, way = "the mask removes", "Lower the ratio"
        bound = "let a depthwise layer lose the channels of the one it reads (groups='coupled')"
        if not capped:
            bound = "bound the share removed per layer (cap=0.95)"
        if budget is not None:
            why, way = f"{budget.what}={budget.limit} takes", f"Raise {budget.what}"
        raise DisconnectedError(
            f"{why} every channel of {names}, which cuts the network in two. {way}, {bound}, or exclude the layer."
        )


def _dead_layers(structures: Structures, mask: Mask) -> set[str]:
    """Layers that lose all their channels; a depthwise one also loses those its input lost."""
    gone: dict[str, set[int]] = {}
    width: dict[str, int] = {}
    for layer in structures.layers:
        name = layer.name.rpartition(".")[0] if structures.kind == "weights" else layer.name
        if structures.kind == "weights" and not layer.name.endswith(".weight"):
            continue
        gone[name] = set(mask.removed[layer.name].tolist()) if layer.name in mask.removed else set()
        width[name] = layer.channels
    for name, up in read_by(structures).items():
        gone[name] |= gone[up]
    return {name for name in gone if len(gone[name]) == width[name]}
