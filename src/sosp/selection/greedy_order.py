"""Order the removals: one structure at a time, the least important first, within the limits of each layer."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

import torch
from torch import Tensor

from sosp.core.progress import track_progress
from sosp.errors import ArgumentError, is_number
from sosp.graph.records import Saliency, Structures


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
