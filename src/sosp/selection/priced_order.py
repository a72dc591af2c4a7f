"""Order removals by price: the rise of the objective per unit of cost that the removal saves at that moment.

A bundle of ``k`` structures of one layer at a time, always the one with the smallest

    rise / left ** 2 / k / (saved / k) ** 0.75

``saved``: the MACs (or parameters) that disappear with it in the layers that make its channels and in those that read
them, given what is already removed. ``left``: the share of its layer that remains, only for layers that connect input
and output; emptying one of them costs more than the sum of its parts. A layer inside a branch that something goes
around may be emptied: then the whole branch disappears. Every other layer keeps a bundle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from sosp.core.progress import track_progress
from sosp.graph.records import Saliency, Structures
from sosp.selection.emptied_branches import Emptied, EmptiedBranches
from sosp.selection.greedy_order import OBJECTIVES, check_share, limit_removals
from sosp.selection.savings import Savings

SAVING_POWER = 0.75  # below 1: many cheap removals cost more together than their sum
CROWDING_POWER = 2
STEPS = {"cpu": 8, "cuda": 32}  # widths that are multiples of this are fast there
FITTING = {"cpu": (8, 8), "cuda": (4, 2)}  # so many steps must fit into a layer; the second inside a branch
SMALL = 8  # in narrower layers the step is the power of two that fits so often


def order_by_price(
    saliency: Saliency, shares: Mapping[str, float], cap: float | None = None, round_to: int | str = 1
) -> list[np.ndarray]:
    """Return the bundles of structures in the order of their removal.

    Args:
        saliency: Its structures have a flow.
        shares: What counts as cost: ``{"macs": 1.0}``, or several with their weights.
        cap: Largest share of structures to remove from a layer.
        round_to: The width that remains of every layer is a multiple of this; ``"cpu"`` and ``"cuda"`` for what is
            fast there, with smaller steps for narrow layers.
    """
    if cap is not None:
        check_share("cap", cap)
    work = PricedRemoval(saliency.to("cpu"), shares, cap, round_to)
    order = []
    for _ in track_progress(range(work.most_bundles), "selecting", work.most_bundles):
        bundle = work.find_cheapest()
        if bundle is None:
            break
        work.remove(bundle)
        order.append(bundle.removed)
    return order


@dataclass(frozen=True, eq=False)
class Bundle:
    """Structures of one layer that are removed in one step."""

    layer: int
    members: np.ndarray
    price: float
    emptied: Emptied | None = None  # what goes with it, if it empties the layer

    @property
    def removed(self) -> np.ndarray:
        """Return all structures that go."""
        return self.members if self.emptied is None else np.union1d(self.members, self.emptied.structures)


@dataclass(eq=False)
class LayerState:
    """The structures of a layer that are still there, and how many are removed at a time."""

    alive: np.ndarray
    width: int  # structures at the beginning
    channels: int  # of the layer that remain, also those that no structure covers
    each: int  # channels of a structure
    step: int  # structures
    most: int  # structures that may still be removed
    cut: bool  # it connects input and output

    @property
    def next_size(self) -> int:
        """Return how many structures go next: as many as lead to a multiple of the step; 0 if none may go."""
        size = (self.channels % (self.step * self.each)) // self.each or self.step
        size = min(size, len(self.alive))
        return size if size <= self.most else 0


class PricedRemoval:
    """What is left of the structures, and what the next bundle of every layer costs."""

    def __init__(self, saliency: Saliency, shares: Mapping[str, float], cap: float | None, round_to: int | str) -> None:
        structures = saliency.structures
        self.state = OBJECTIVES[saliency.objective](saliency)
        self.savings = Savings(structures, shares)
        self.branches = EmptiedBranches(structures)
        self.owner = structures.owner().numpy()
        self.layers = list_layers(structures, self.branches, cap, round_to)
        self.gone = np.zeros(len(structures), dtype=bool)
        self.crowding = np.ones(len(structures))
        self.single = np.zeros(len(structures), dtype=bool)  # they go one by one, and the layer keeps another
        self.emptied: dict[int, Emptied | None] = {}  # known for the branches that are there
        self.ends: frozenset[str] = frozenset()  # of the branches that have vanished
        for layer in self.layers:
            self._update_singles(layer)

    @property
    def most_bundles(self) -> int:
        """Return an upper bound of the number of bundles."""
        return sum(-(-layer.width // layer.step) + 1 for layer in self.layers)

    def find_cheapest(self) -> Bundle | None:
        """Return the bundle with the smallest price; None if nothing more may be removed."""
        rise = self.state.rise().double().numpy()
        prices = rise / self.savings.per_structure() ** SAVING_POWER * self.crowding
        offers = [self._offer(i, rise, prices) for i, layer in enumerate(self.layers) if layer.next_size]
        if self.single.any():
            s = int(np.argmin(np.where(self.single, prices, np.inf)))
            offers.append(Bundle(int(self.owner[s]), np.array([s]), float(prices[s])))
        return min((o for o in offers if o is not None), key=lambda o: o.price, default=None)

    def _offer(self, i: int, rise: np.ndarray, prices: np.ndarray) -> Bundle | None:
        """Return the next bundle of a layer, unless it is one of the ``single`` structures."""
        layer, emptied = self.layers[i], None
        if layer.next_size == len(layer.alive):
            emptied = self._find_emptied(i)
            if emptied is None:
                return None
        elif layer.next_size == 1:
            return None
        nearest = np.argsort(prices[layer.alive], kind="stable")[: layer.next_size]
        members = layer.alive[nearest]
        left = (len(layer.alive) - np.arange(len(members))) / layer.width
        crowding = float(np.mean(left**-CROWDING_POWER)) if layer.cut else 1.0
        ends = emptied.ends - self.ends if emptied else ()
        removed = np.union1d(members, emptied.structures) if emptied else members
        saved = self.savings.count_saved(removed, ends) / len(members)
        together = self.state.rise_together(torch.from_numpy(members)) / len(members)
        return Bundle(i, members, together * crowding / saved**SAVING_POWER, emptied)

    def _find_emptied(self, i: int) -> Emptied | None:
        """Return what goes with the rest of a layer; None if it must keep something."""
        if i not in self.emptied:
            gone = self.gone.copy()
            gone[self.layers[i].alive] = True
            found = self.branches.find(gone)
            self.emptied[i] = found if found is not None and found.ends > self.ends else None
        return self.emptied[i]

    def remove(self, bundle: Bundle) -> None:
        """Take a bundle away."""
        for s in bundle.members:
            self.state.remove(torch.tensor(s))
        self.state.close(torch.from_numpy(bundle.removed))
        self.gone[bundle.removed], self.single[bundle.removed] = True, False
        changed = [self.layers[bundle.layer]]
        changed[0].most -= len(bundle.members)
        ends: frozenset[str] = frozenset()
        if bundle.emptied is not None:
            ends = bundle.emptied.ends - self.ends
            self.ends, changed = bundle.emptied.ends, self.layers
            self.emptied.clear()
        self.savings.remove(bundle.removed, ends)
        for layer in changed:
            before = len(layer.alive)
            layer.alive = layer.alive[~self.gone[layer.alive]]
            layer.channels -= (before - len(layer.alive)) * layer.each
            self._update_singles(layer)

    def _update_singles(self, layer: LayerState) -> None:
        """Say which structures of a layer can go one by one, and how crowded they are."""
        self.single[layer.alive] = layer.next_size == 1 and len(layer.alive) > 1
        if layer.cut and len(layer.alive):
            self.crowding[layer.alive] = (len(layer.alive) / layer.width) ** -CROWDING_POWER


def list_layers(
    structures: Structures, branches: EmptiedBranches, cap: float | None, round_to: int | str
) -> list[LayerState]:
    """Return the layers that own structures, with how many of them go at a time."""
    owner = structures.owner().numpy()
    found = []
    for i, (layer, ids) in enumerate(zip(structures.layers, structures.ids, strict=True)):
        mine = np.flatnonzero(owner == i)
        alone = np.isin(np.arange(len(structures)), mine)
        emptied = branches.find(alone)
        each = max(1, int(np.isin(ids.numpy(), mine).sum()) // max(len(mine), 1))
        step = choose_step(layer.channels, emptied is not None and bool(emptied.ends), round_to)
        most = limit_removals([len(mine)], cap)[0]
        found.append(LayerState(mine, len(mine), layer.channels, each, max(1, step // each), most, cut=emptied is None))
    return found


def choose_step(width: int, emptiable: bool, round_to: int | str) -> int:
    """Return the number of channels that go together from a layer."""
    if not isinstance(round_to, str):
        return round_to
    step = STEPS[round_to]
    if width < FITTING[round_to][emptiable] * step:
        while step > 1 and step * SMALL > width:
            step //= 2
    return step
