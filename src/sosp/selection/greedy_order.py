"""Order removals: one structure at a time, the least important first, within the limits and caps of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import floor

import torch
from torch import Tensor

from sosp.core.progress import track_progress
from sosp.errors import ArgumentError, is_number
from sosp.graph.records import OUTPUT, Saliency, Structures


def check_share(name: str, value: object) -> None:
    """Raise ArgumentError unless ``value`` is a number from 0 to 1."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ArgumentError(f"{name}={value!r} must be a number from 0 to 1.")


def count_layer_structures(structures: Structures) -> list[int]:
    """Count the structures of each layer; one that spans several layers counts in the first."""
    return torch.bincount(structures.owner(), minlength=len(structures.layers)).tolist()


def limit_removals(widths: list[int], cap: float | None) -> list[int]:
    """Return how many structures of each layer may be removed, given the widths."""
    # 0.95 * 20 is 18.999...: a share that is a whole number of structures must count as one.
    return [w if cap is None else floor(cap * w + 1e-9) for w in widths]


class LayerLimits:
    """How many structures each layer may still lose."""

    def __init__(
        self, structures: Structures, cap: float | None, device: torch.device, quotas: list[int] | None = None
    ) -> None:
        if cap is not None:
            check_share("cap", cap)
        self.bounded = cap is not None or quotas is not None
        self.owner = structures.owner().to(device)
        self.left = list(quotas) if quotas is not None else limit_removals(count_layer_structures(structures), cap)
        self.total = sum(self.left)

    def full_structures(self) -> Tensor:
        """Return (S,) true for structures in a layer that may lose nothing more."""
        return torch.tensor([n <= 0 for n in self.left], device=self.owner.device)[self.owner]

    def remove(self, s: Tensor) -> Tensor | None:
        """Remove ``s`` and return (S,) true for its layer if that reached its limit, else None."""
        if not self.bounded:
            return None
        layer = int(self.owner[s])
        self.left[layer] -= 1
        return self.owner == layer if self.left[layer] <= 0 else None


def order_removals(saliency: Saliency, count: int, weights: Tensor | None, limits: LayerLimits) -> Tensor:
    """Return the structures to remove, in order."""
    if saliency.pairs is None and saliency.objective not in ("order", "joint"):
        return _sort_once(saliency.scores, count, weights, limits)
    return _order_stepwise(saliency, count, weights, limits)


def rank_structures(saliency: Saliency) -> Tensor:
    """Return (S,) the rank of each structure (0 is removed first) if all are ranked together and removed."""
    structures, device = saliency.structures, saliency.scores.device
    order = order_removals(saliency, len(structures), None, LayerLimits(structures, None, device))
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))


def _sort_once(scores: Tensor, count: int, weights: Tensor | None, limits: LayerLimits) -> Tensor:
    """Sort once, skipping layers at their limit: these costs do not depend on what is already removed."""
    order = torch.argsort(_per_size(scores.double(), weights), stable=True)
    if not limits.bounded:
        return order[:count]
    # Rank of each structure within its layer: the first `left` of a layer may be removed.
    layers = limits.owner[order]
    left = torch.tensor(limits.left, device=order.device)
    by_layer = torch.argsort(layers, stable=True)
    starts = torch.searchsorted(layers[by_layer].contiguous(), torch.arange(len(left), device=order.device))
    place = torch.empty_like(order)
    place[by_layer] = torch.arange(len(order), device=order.device) - starts[layers[by_layer]]
    return order[place < left[layers]][:count]


def _order_stepwise(saliency: Saliency, count: int, weights: Tensor | None, limits: LayerLimits) -> Tensor:
    """Remove one structure per step, in O(S): update every cost by the row of the structure just removed."""
    state = OBJECTIVES[saliency.objective](saliency)
    state.close(limits.full_structures())
    order = torch.empty(count, dtype=torch.long, device=limits.owner.device)
    for i in track_progress(range(count), "selecting", count):
        s = torch.argmin(
            state.costs() if weights is None else _per_size(state.rise(), weights)
        )  # the lowest index of a tie
        order[i] = s
        state.remove(s)
        state.close(s)
        closed = limits.remove(s)
        if closed is not None:
            state.close(closed)
    return order


def _per_size(costs: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the cost per unit of size; a negative cost (a gain) is multiplied, so larger structures gain more."""
    if sizes is None:
        return costs
    sizes = sizes.to(costs)
    return torch.where(costs < 0, costs * sizes, costs / sizes)


class IndividualObjective:
    """Eq. 3, ``sum_s |f_s| + 1/2 sum_ss' |H_ss'|``; s adds ``|f_s| + 1/2 |H_ss| + sum_{s' removed} |H_ss'|``."""

    def __init__(self, saliency: Saliency) -> None:
        self.pairs = saliency.pairs
        self.cost = saliency.scores.clone()

    def costs(self) -> Tensor:
        """Return (S,) the values to minimise."""
        return self.cost

    def rise(self) -> Tensor:
        """Return (S,) the increase of the objective if a structure is removed."""
        return self.cost

    def rise_together(self, which: Tensor) -> float:
        """Return the increase of the objective if these structures are removed."""
        alone = float(self.cost[which].double().sum())
        if self.pairs is None:
            return alone
        block = self.pairs[which][:, which].double().abs()
        return alone + 0.5 * float(block.sum() - block.diagonal().sum())

    def remove(self, s: Tensor) -> None:
        """Update the costs after ``s`` was removed."""
        if self.pairs is not None:
            self.cost += self.pairs.index_select(0, s.view(1))[0].abs_()

    def close(self, which: Tensor) -> None:
        """Exclude these structures: their cost becomes infinite and stays so, whatever is added later."""
        self.cost[which] = torch.inf


class JointObjective:
    """Eq. 2 itself: ``|sum_s f_s - 1/2 sum_ss' H_ss'|`` over the removed structures.

    Stores for each structure the sums if it were removed too, ``slope_s = sum f`` and ``curve_s = sum H``.
    """

    def __init__(self, saliency: Saliency) -> None:
        assert saliency.first is not None
        own = saliency.own
        self.first, self.pairs = saliency.first, saliency.pairs
        self.slope = self.first.clone()
        self.curve = torch.zeros_like(self.first) if own is None else own.clone()
        self.lost = self.first.new_zeros(())  # sum f over the removed structures
        self.gone = self.first.new_zeros(())  # sum H over the removed structures

    def costs(self) -> Tensor:
        """Return (S,) the objective if a structure were removed too."""
        return self.objective(self.slope, self.curve)

    def rise(self) -> Tensor:
        """Return (S,) the increase of the objective if a structure is removed."""
        return self.costs() - self.objective(self.lost, self.gone)

    def rise_together(self, which: Tensor) -> float:
        """Return the increase of the objective if these structures are removed."""
        slope = self.lost + self.first[which].sum()
        curve = self.gone + (self.curve[which] - self.gone).sum()
        if self.pairs is not None:
            block = self.pairs[which][:, which]
            curve = curve + block.sum() - block.diagonal().sum()
        return float(self.objective(slope, curve) - self.objective(self.lost, self.gone))

    def objective(self, slope: Tensor, curve: Tensor) -> Tensor:
        """Return the objective from the sums of f and H."""
        return torch.add(slope, curve, alpha=-0.5).abs_()

    def remove(self, s: Tensor) -> None:
        """Update the sums after ``s`` was removed."""
        # f_u + F becomes f_u + F + f_s; H_uu + 2 sum H_ug + G gains 2 H_us, and G moves to what it is with s.
        self.slope += self.first[s]
        self.lost = self.lost + self.first[s]
        gone = self.curve[s].clone()
        self.curve += gone - self.gone
        self.gone = gone
        if self.pairs is not None:
            self.curve.add_(self.pairs.index_select(0, s.view(1))[0], alpha=2)

    def close(self, which: Tensor) -> None:
        """Exclude these structures."""
        self.slope[which] = torch.inf


class OrderObjective(JointObjective):
    """``|sum_s f_s| + 1/2 |sum_ss' H_ss'|``: the absolute values around each order."""

    def objective(self, slope: Tensor, curve: Tensor) -> Tensor:
        """Return the objective from the sums of f and H."""
        return slope.abs().add_(curve.abs(), alpha=0.5)


class SignedObjective(JointObjective):
    """Eq. 2 without the absolute value, ``-sum_s f_s + 1/2 sum_ss' H_ss'``: what lowers it comes first (CCP)."""

    def objective(self, slope: Tensor, curve: Tensor) -> Tensor:
        """Return the objective from the sums of f and H."""
        return torch.add(-slope, curve, alpha=0.5)

    def close(self, which: Tensor) -> None:
        """Exclude these structures."""
        self.slope[which] = -torch.inf


# "structure": sum_s |f_s - 1/2 H_ss| + 1/2 sum_{s != s'} |H_ss'|; Saliency.scores contains the first sum.
OBJECTIVES: dict[str, Callable[[Saliency], IndividualObjective | JointObjective]] = {
    "individual": IndividualObjective,
    "structure": IndividualObjective,
    "order": OrderObjective,
    "joint": JointObjective,
    "signed": SignedObjective,
}


# Caps where structures lie in several layers, or a depthwise layer reads a layer channel by channel -------------------


def find_depthwise_inputs(structures: Structures) -> dict[str, str]:
    """Map each depthwise layer to the layer it reads channel by channel; it loses every channel that layer loses."""
    width = {layer.name: layer.channels for layer in structures.layers}
    found: dict[str, str] = {}
    for layer in structures.layers:
        up = structures.wiring.get(layer.name, ())
        if layer.depthwise and len(up) == 1 and width.get(up[0]) == layer.channels:
            found[layer.name] = up[0]
    return found


def find_reached(wiring: Mapping[str, tuple[str, ...]], dead: set[str]) -> set[str]:
    """Return what the output reads, directly or through other layers, without passing a dead layer."""
    reached: set[str] = set()
    stack = [OUTPUT]
    while stack:
        name = stack.pop()
        if name not in reached and name not in dead:
            reached.add(name)
            stack += wiring.get(name, ())
    return reached


class CappedLayer:
    """The channels of a layer and of the depthwise layers that read it; a channel is lost if any of them loses it."""

    def __init__(self, covers: dict[int, set[int]], cap: float) -> None:
        self.covers = covers  # structure -> the channels removed with it
        self.widest = max(map(len, covers.values()))
        self.left = limit_removals([len(set().union(*covers.values()))], cap)[0]
        self.removed: set[int] = set()

    def remove(self, s: int) -> list[int]:
        """Remove ``s`` and return the structures that can no longer be removed."""
        more = self.covers[s] - self.removed
        self.removed |= more
        self.left -= len(more)
        return self.find_closed() if more else []

    def find_closed(self) -> list[int]:
        """Return the structures that need more channels than can still be removed.

        They stay closed: removing another structure lowers the limit at least as much as their need.
        """
        if self.left >= self.widest:
            return []
        return [s for s, channels in self.covers.items() if len(channels - self.removed) > self.left]


def find_capped_layers(structures: Structures, cap: float) -> dict[int, list[CappedLayer]]:
    """Map each structure to the capped layers in which it has channels."""
    above = find_depthwise_inputs(structures)
    root: dict[str, str] = {}
    covers: dict[str, dict[int, set[int]]] = {}
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        root[layer.name] = root.get(above.get(layer.name, ""), layer.name)
        mine = covers.setdefault(root[layer.name], {})
        for channel, s in enumerate(ids.tolist()):
            if s >= 0:
                mine.setdefault(s, set()).add(channel)
    found: dict[int, list[CappedLayer]] = {}
    for limited in (CappedLayer(mine, cap) for mine in covers.values() if mine):
        for s in limited.covers:
            found.setdefault(s, []).append(limited)
    return found


class ChannelLimits(LayerLimits):
    """The limits of layers that lose channels together. If all structures are sorted once, use ``keep_allowed``."""

    def __init__(self, structures: Structures, cap: float, device: torch.device) -> None:
        super().__init__(structures, None, device)
        self.structures, self.cap = structures, cap
        self.capped = find_capped_layers(structures, cap)

    def full_structures(self) -> Tensor:
        """Return (S,) true for structures that can never be removed."""
        return self.make_mask(_find_unremovable(self.capped))

    def remove(self, s: Tensor) -> Tensor | None:
        """Remove ``s`` and return (S,) true for structures that can no longer be removed, or None."""
        closed = [t for layer in self.capped[int(s)] for t in layer.remove(int(s))]
        return self.make_mask(closed) if closed else None

    def make_mask(self, members: list[int]) -> Tensor:
        """Return (S,) true for these structures."""
        found = torch.zeros_like(self.owner, dtype=torch.bool)
        found[torch.tensor(members, dtype=torch.long, device=found.device)] = True
        return found

    def keep_allowed(self, order: Tensor) -> Tensor:
        """Return the order without the structures that exceed the limit of a layer at their turn."""
        capped = find_capped_layers(self.structures, self.cap)
        shut = set(_find_unremovable(capped))
        kept: list[int] = []
        for s in order.tolist():
            if s not in shut:
                kept.append(s)
                shut.add(s)
                shut.update(t for layer in capped[s] for t in layer.remove(s))
        return torch.tensor(kept, dtype=torch.long, device=order.device)


def _find_unremovable(capped: dict[int, list[CappedLayer]]) -> list[int]:
    """Return the structures that exceed the cap of a layer by themselves."""
    every = {id(layer): layer for members in capped.values() for layer in members}
    return [s for layer in every.values() for s in layer.find_closed()]


def build_limits(structures: Structures, cap: float | None, device: torch.device) -> LayerLimits:
    """Return how much each layer may lose."""
    limits = LayerLimits(structures, cap, device)
    if cap is None or cap == 1 or (structures.plain and not find_depthwise_inputs(structures)):
        return limits
    return ChannelLimits(structures, cap, device)


def order_capped_removals(saliency: Saliency, count: int, weights: Tensor | None, limits: LayerLimits) -> Tensor:
    """Return the structures to remove, in order; fewer than ``count`` if the limits allow no more."""
    if not isinstance(limits, ChannelLimits):
        return order_removals(saliency, count, weights, limits)
    return limits.keep_allowed(order_removals(saliency, limits.total, weights, limits))[:count]
