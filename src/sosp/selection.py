"""Choose which structures go: from saliencies and a budget to a Mask."""

from __future__ import annotations

from collections.abc import Callable
from math import floor, isfinite

import torch
from torch import Tensor

from sosp.cost import cost_of, whole_cost
from sosp.errors import ArgumentError, DisconnectedError, one_of, whole_number
from sosp.mask import Mask
from sosp.progress import track
from sosp.records import INPUT, OUTPUT, Saliency, Structures

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
) -> Mask:
    """Remove the structures that are least needed.

    How many: ``ratio`` of all structures (half, if nothing is said); or as many as it takes until at most ``params``
    of the network's parameters, or ``macs`` of its multiply-accumulates, are left in the network that ``shrink``
    builds (a share, or a whole number above 1), by the exact count.

    Greedy: one structure after the other, each time the one that raises the objective least given those already
    gone (Eq. 5); without pairs this is sorting once. Ties go to the lower index. ``cap`` bounds the share removed
    from one layer. ``scale`` divides a structure's cost by its kernel's edge (the paper's SOSP*), its MACs or its
    parameters, so that what saves more may cost more. ``round_to`` keeps a multiple of that many structures in every
    layer, by taking back those that were removed last. A mask that would cut the network in two is refused.
    """
    structures = saliency.structures
    budget = _budget(ratio, params, macs)
    if scale is not None:
        one_of("scale", scale, SCALES)
    whole_number("round_to", round_to)
    room = Room(structures, cap, saliency.scores.device)
    weights = _weights(structures, scale)
    if budget is None:
        ratio = 0.5 if ratio is None else ratio
        _share("ratio", ratio)
        count = round(ratio * len(structures))
        if count > room.total:
            raise ArgumentError(
                f"ratio={ratio} asks for {count} of {len(structures)} structures, but cap={cap} leaves only "
                f"{room.total} to remove."
            )
        chosen = _rounded(structures, greedy(saliency, count, weights, room), round_to)
    else:
        order = greedy(saliency, room.total, weights, room)
        chosen = _within(structures, order, *budget, round_to)
    mask = Mask.from_structures(structures, chosen)
    refuse_disconnected(structures, mask)
    return mask


def _budget(ratio: float | None, params: float | None, macs: float | None) -> tuple[str, float] | None:
    """What is limited, and to what; None for a ratio of structures."""
    given = {"ratio": ratio, "params": params, "macs": macs}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise ArgumentError(f"give one of ratio, params and macs, not {' and '.join(named)}.")
    if ratio is not None or not named:
        return None
    ((name, value),) = named.items()
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not isfinite(value)
        or not (0 < value <= 1 or value == int(value) > 1)
    ):
        raise ArgumentError(
            f"{name}={value!r} must be the share that may be left, up to 1, or a whole number of {name}."
        )
    return name, value


def _within(structures: Structures, order: Tensor, what: str, limit: float, round_to: int) -> Tensor:
    """The shortest beginning of ``order`` whose removal meets the limit: costs fall with every structure that goes."""
    if structures.flow is None or structures.kind == "weights":
        raise ArgumentError(f"{what}= needs the channel flow of the network, which these structures do not have.")
    flow = structures.flow
    whole = getattr(whole_cost(flow), what)
    target = limit * whole * (1 + 1e-12) if limit <= 1 else limit  # 57 / 101 * 101 is 56.999...
    places = {layer.name: layer.norms for layer in structures.layers}

    def left(count: int) -> int:
        chosen = _rounded(structures, order[:count], round_to)
        return getattr(cost_of(flow, flow.layout(flow.removed(structures.channels_of(chosen), places))), what)

    low, high = 0, len(order)
    if left(high) > target:
        raise ArgumentError(
            f"{what}={limit} cannot be met: with everything removed that may go, {left(high):,} of {whole:,} {what} "
            "are left. Raise it, lift the cap, or exclude fewer layers."
        )
    while low < high:
        middle = (low + high) // 2
        if left(middle) <= target:
            high = middle
        else:
            low = middle + 1
    return _rounded(structures, order[:low], round_to)


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


def _share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ArgumentError(f"{name}={value!r} must be a number from 0 to 1.")


def _weights(structures: Structures, scale: str | None) -> Tensor | None:
    """(S,) what a structure's cost is divided by."""
    if scale is None:
        return None
    sizes = structures.sizes(scale)
    return sizes.clamp_min(
        1.0 if scale == "kernel" else sizes[sizes > 0].min().item() if bool((sizes > 0).any()) else 1.0
    )


class Room:
    """How many structures each layer may still lose."""

    def __init__(self, structures: Structures, cap: float | None, device: torch.device) -> None:
        if cap is not None:
            _share("cap", cap)
        self.cap = cap
        self.owner = structures.owner().to(device)
        widths = torch.bincount(self.owner, minlength=len(structures.layers)).tolist()
        # 0.95 * 20 is 18.999...: a share that is a whole number of structures must count as one.
        self.left = [w if cap is None else floor(cap * w + 1e-9) for w in widths]
        self.total = sum(self.left)

    def full(self) -> Tensor:
        """(S,) who sits in a layer that may lose nothing."""
        return torch.tensor([n <= 0 for n in self.left], device=self.owner.device)[self.owner]

    def closed_by(self, s: Tensor) -> Tensor | None:
        """(S,) who shares a layer that is full now that ``s`` goes; None while it has room, or without a cap."""
        if self.cap is None:
            return None
        layer = int(self.owner[s])
        self.left[layer] -= 1
        return self.owner == layer if self.left[layer] <= 0 else None


def greedy(saliency: Saliency, count: int, weights: Tensor | None, room: Room) -> Tensor:
    """The structures to remove, in the order they go."""
    if saliency.pairs is None and saliency.objective not in ("order", "joint"):
        return _by_order(saliency.scores, count, weights, room)
    return _one_by_one(saliency, count, weights, room)


def _by_order(scores: Tensor, count: int, weights: Tensor | None, room: Room) -> Tensor:
    """Costs do not depend on what is gone: sort once, skipping layers that are full."""
    costs = scores.double() if weights is None else scores.double() / weights.to(scores.device)
    order = torch.argsort(costs, stable=True)
    if room.cap is None:
        return order[:count]
    # The place of each structure among its layer's, in the order they go: the first `left` of a layer may go.
    layers = room.owner[order]
    left = torch.tensor(room.left, device=order.device)
    by_layer = torch.argsort(layers, stable=True)
    starts = torch.searchsorted(layers[by_layer].contiguous(), torch.arange(len(left), device=order.device))
    place = torch.empty_like(order)
    place[by_layer] = torch.arange(len(order), device=order.device) - starts[layers[by_layer]]
    return order[place < left[layers]][:count]


def _one_by_one(saliency: Saliency, count: int, weights: Tensor | None, room: Room) -> Tensor:
    """O(S) a step: every cost is kept up to date by the row of the structure that just went."""
    state = OBJECTIVES[saliency.objective](saliency)
    scale = None if weights is None else weights.to(saliency.scores)
    state.close(room.full())
    order = torch.empty(count, dtype=torch.long, device=room.owner.device)
    for i in track(range(count), "selecting", count):
        costs = state.costs()
        s = torch.argmin(costs if scale is None else costs / scale)  # the first of equals
        order[i] = s
        state.remove(s)
        state.close(s)
        closed = room.closed_by(s)
        if closed is not None:
            state.close(closed)
    return order


class Individual:
    """Eq. 3: ``sum_s |f_s| + 1/2 sum_ss' |H_ss'|``; a step costs ``|f_s| + 1/2 |H_ss| + sum_{s' gone} |H_ss'|``."""

    def __init__(self, saliency: Saliency) -> None:
        self.pairs = saliency.pairs
        self.cost = saliency.scores.clone()

    def costs(self) -> Tensor:
        return self.cost

    def remove(self, s: Tensor) -> None:
        if self.pairs is not None:
            self.cost += self.pairs.index_select(0, s.view(1))[0].abs_()

    def close(self, which: Tensor) -> None:
        """These may not go any more: infinitely costly, whatever is added later."""
        self.cost[which] = torch.inf


class Joint:
    """Eq. 2 itself: ``|sum_s f_s - 1/2 sum_ss' H_ss'|`` over what is gone.

    Kept for every structure: the sums if it went too, ``slope_s = sum f`` and ``curve_s = sum H``.
    """

    def __init__(self, saliency: Saliency) -> None:
        assert saliency.first is not None
        own = saliency.own
        self.first, self.pairs = saliency.first, saliency.pairs
        self.slope = self.first.clone()
        self.curve = torch.zeros_like(self.first) if own is None else own.clone()
        self.gone = self.first.new_zeros(())  # sum H over what is gone

    def costs(self) -> Tensor:
        return torch.add(self.slope, self.curve, alpha=-0.5).abs_()

    def remove(self, s: Tensor) -> None:
        # f_u + F becomes f_u + F + f_s; H_uu + 2 sum H_ug + G gains 2 H_us, and G moves to what it is with s.
        self.slope += self.first[s]
        gone = self.curve[s].clone()
        self.curve += gone - self.gone
        self.gone = gone
        if self.pairs is not None:
            self.curve.add_(self.pairs.index_select(0, s.view(1))[0], alpha=2)

    def close(self, which: Tensor) -> None:
        self.slope[which] = torch.inf


class Order(Joint):
    """``|sum_s f_s| + 1/2 |sum_ss' H_ss'|``: the absolute values around each order."""

    def costs(self) -> Tensor:
        return self.slope.abs().add_(self.curve.abs(), alpha=0.5)


# "structure": sum_s |f_s - 1/2 H_ss| + 1/2 sum_{s != s'} |H_ss'|; its own cost comes with Saliency.scores.
OBJECTIVES: dict[str, Callable[[Saliency], Individual | Joint]] = {
    "individual": Individual,
    "structure": Individual,
    "order": Order,
    "joint": Joint,
}


def refuse_disconnected(structures: Structures, mask: Mask) -> None:
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
        raise DisconnectedError(
            f"the mask removes every channel of {names}, which cuts the network in two. Lower the ratio, bound the "
            "share removed per layer (cap=0.95), or exclude the layer."
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
    for layer in structures.layers:
        up = structures.wiring.get(layer.name, ())
        if layer.depthwise and len(up) == 1 and width.get(up[0]) == layer.channels:
            gone[layer.name] |= gone[up[0]]
    return {name for name in gone if len(gone[name]) == width[name]}
