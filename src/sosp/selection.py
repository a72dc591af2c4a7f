"""Choose which structures go: from saliencies and a budget to a Mask."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

import torch
from torch import Tensor

from sosp.errors import ArgumentError, DisconnectedError, one_of
from sosp.mask import Mask
from sosp.progress import track
from sosp.records import INPUT, OUTPUT, Saliency, Structures

SCALES = ("kernel", "macs", "params")


def select(saliency: Saliency, *, ratio: float = 0.5, cap: float | None = None, scale: str | None = None) -> Mask:
    """Remove the ``ratio`` of structures that is least needed.

    Greedy: one structure after the other, each time the one that raises the objective least given those already
    gone (Eq. 5); without pairs this is sorting once. Ties go to the lower index. ``cap`` bounds the share removed
    from one layer. ``scale`` divides a structure's cost by its kernel's edge (the paper's SOSP*), its MACs or its
    parameters, so that what saves more may cost more. A mask that would cut the network in two is refused.
    """
    _share("ratio", ratio)
    structures = saliency.structures
    S = len(structures)
    count = round(ratio * S)
    if scale is not None:
        one_of("scale", scale, SCALES)
    room = Room(structures, cap, saliency.scores.device)
    if count > room.total:
        raise ArgumentError(
            f"ratio={ratio} asks for {count} of {S} structures, but cap={cap} leaves only {room.total} to remove."
        )
    chosen = greedy(saliency, count, _weights(structures, scale), room)
    mask = Mask.from_structures(structures, chosen)
    refuse_disconnected(structures, mask)
    return mask


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
        widths = torch.bincount(self.owner, minlength=len(structures.layers))
        # 0.95 * 20 is 18.999...: a share that is a whole number of structures must count as one.
        self.left = (
            widths if cap is None else torch.tensor([floor(cap * w + 1e-9) for w in widths.tolist()], device=device)
        )
        self.total = int(self.left.sum())

    def closed_after(self, chosen: Tensor) -> Tensor:
        """(S,) who shares a layer that is full once ``chosen`` goes."""
        layer = self.owner[chosen]
        self.left[layer] -= 1
        return (self.owner == layer) & (self.left[layer] <= 0)


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
    by_layer = torch.argsort(layers, stable=True)
    starts = torch.searchsorted(layers[by_layer].contiguous(), torch.arange(len(room.left), device=layers.device))
    place = torch.empty_like(order)
    place[by_layer] = torch.arange(len(order), device=order.device) - starts[layers[by_layer]]
    return order[place < room.left[layers]][:count]


def _one_by_one(saliency: Saliency, count: int, weights: Tensor | None, room: Room) -> Tensor:
    """O(S) a step: every cost is kept up to date by the row of the structure that just went."""
    state = OBJECTIVES[saliency.objective](saliency)
    closed = torch.zeros_like(state.first)  # infinite where a structure may not go (any more)
    if room.cap is not None:
        closed[(room.left <= 0)[room.owner]] = torch.inf
    scale = None if weights is None else weights.to(closed)
    order = torch.empty(count, dtype=torch.long, device=closed.device)
    for i in track(range(count), "selecting", count):
        cost = state.costs()
        cost = cost + closed if scale is None else cost / scale + closed
        s = torch.argmin(cost)
        order[i] = s
        state.remove(s)
        closed[s] = torch.inf
        if room.cap is not None:
            closed.masked_fill_(room.closed_after(s), torch.inf)
    return order


class Individual:
    """Eq. 3: ``sum_s |f_s| + 1/2 sum_ss' |H_ss'|``; a step costs ``|f_s| + 1/2 |H_ss| + sum_{s' gone} |H_ss'|``."""

    def __init__(self, saliency: Saliency) -> None:
        assert saliency.first is not None
        self.first, self.pairs = saliency.first, saliency.pairs
        self.cost = saliency.scores.clone()

    def costs(self) -> Tensor:
        return self.cost

    def remove(self, s: Tensor) -> None:
        if self.pairs is not None:
            self.cost += self.pairs.index_select(0, s.view(1))[0].abs_()


class Joint:
    """Eq. 2 itself: ``|sum_s f_s - 1/2 sum_ss' H_ss'|`` over what is gone."""

    def __init__(self, saliency: Saliency) -> None:
        assert saliency.first is not None
        own = saliency.own
        self.first, self.pairs = saliency.first, saliency.pairs
        self.own = torch.zeros_like(self.first) if own is None else own
        self.shared = torch.zeros_like(self.first)  # 2 sum_{s' gone} H_ss'
        self.slope = self.first.new_zeros(())
        self.curve = self.first.new_zeros(())

    def combined(self, slope: Tensor, curve: Tensor) -> Tensor:
        return (slope - 0.5 * curve).abs_()

    def costs(self) -> Tensor:
        return self.combined(self.slope + self.first, self.curve + self.shared + self.own)

    def remove(self, s: Tensor) -> None:
        self.slope = self.slope + self.first[s]
        self.curve = self.curve + self.shared[s] + self.own[s]
        if self.pairs is not None:
            self.shared.add_(self.pairs.index_select(0, s.view(1))[0], alpha=2)


class Order(Joint):
    """``|sum_s f_s| + 1/2 |sum_ss' H_ss'|``: the absolute values around each order."""

    def combined(self, slope: Tensor, curve: Tensor) -> Tensor:
        return slope.abs() + 0.5 * curve.abs()


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
