"""Which branches of a network disappear as a whole when layers inside them are emptied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sosp.graph.records import INPUT, OUTPUT, Structures
from sosp.selection.greedy_order import find_reached


@dataclass(frozen=True, eq=False)
class Emptied:
    """What goes with layers that are emptied."""

    ends: frozenset[str]  # layers in which the branches end that give nothing but constants
    structures: np.ndarray  # those that no path to the output passes any more


class EmptiedBranches:
    """The branches of a network that something goes around, and what disappears with one."""

    def __init__(self, structures: Structures) -> None:
        self.wiring, self.branches = structures.wiring, structures.branches or ()
        self.ids = {layer.name: ids.numpy() for layer, ids in zip(structures.layers, structures.ids, strict=True)}

    def find(self, gone: np.ndarray) -> Emptied | None:
        """Return what goes with the structures that are ``gone``; None if no path from input to output remains."""
        dead = {name for name, ids in self.ids.items() if bool((ids >= 0).all() and gone[ids].all())}
        ends = self._find_ends(dead) if dead else frozenset[str]()
        reached = find_reached(self.wiring, dead | ends)
        if dead and INPUT not in reached:
            return None
        stays = gone.copy()
        for name in reached & self.ids.keys():
            stays[self.ids[name][self.ids[name] >= 0]] = True
        return Emptied(ends, np.flatnonzero(~stays) if dead else np.zeros(0, dtype=np.int64))

    def _find_ends(self, dead: set[str]) -> frozenset[str]:
        """Return the last layers of the branches in which only constants arrive."""
        constant, size = set(dead), -1
        while size < len(constant):
            size = len(constant)
            constant |= {name for name, above in self.wiring.items() if above and constant.issuperset(above)}
        constant.discard(OUTPUT)
        return frozenset(name for ends in self.branches if constant.issuperset(ends) for name in ends)


def find_removed_channels(structures: Structures, chosen: Tensor) -> dict[str, Tensor]:
    """Return layer -> the channels that go with structures, and with the branches that these empty."""
    found = structures.channels_of(chosen)
    if not structures.branches:
        return found
    gone = np.zeros(len(structures), dtype=bool)
    gone[chosen.cpu().numpy()] = True
    emptied = EmptiedBranches(structures).find(gone)
    widths = {layer.name: layer.channels for layer in structures.layers}
    found |= {name: torch.arange(widths[name]) for name in (emptied.ends if emptied else ()) if name in widths}
    return {name: found[name] for name in widths if name in found}
