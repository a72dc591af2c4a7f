"""How many structures every layer may keep within a budget of MACs, by the exact count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from sosp.baselines.arguments import check_number
from sosp.errors import ArgumentError
from sosp.graph.flow import Flow, learn_pins
from sosp.graph.plan import compute_cost, compute_whole_cost
from sosp.graph.records import Structures


@dataclass(frozen=True, eq=False)
class AmcBudget:
    """Layers that keep the end of their own order."""

    structures: Structures
    flow: Flow
    layers: tuple[int, ...]  # those that have structures
    orders: tuple[Tensor, ...]  # of each: its structures, the one that goes first first
    fewest: tuple[int, ...]  # that stay
    limit: float  # MACs
    whole: int  # MACs of the network as it is

    @property
    def widths(self) -> list[int]:
        return [len(order) for order in self.orders]

    def removed(self, kept: Sequence[int]) -> Tensor:
        """The structures that go where each layer keeps so many."""
        return torch.cat([order[: len(order) - k] for order, k in zip(self.orders, kept, strict=True)])

    def left(self, kept: Sequence[int]) -> int:
        """The MACs of the network that ``sosp.shrink`` builds then."""
        flow = self.flow
        places = {layer.name: layer.norms for layer in self.structures.layers}
        removed = flow.find_removed_outputs(self.structures.channels_of(self.removed(kept)), places)
        return compute_cost(flow, flow.layout(removed)).macs

    def fitting(self, kept: Sequence[int], wish: int) -> tuple[int, int]:
        """How many the next layer keeps, ``wish`` at most, and the MACs left then.

        As many as leave room for the layers behind it at their fewest: AMC's bound on the action, without its
        approximation of what a layer costs.
        """
        t = len(kept)

        def cost(n: int) -> int:
            return self.left([*kept, n, *self.fewest[t + 1 :]])

        low, high = self.fewest[t], max(wish, self.fewest[t])
        if (most := cost(high)) <= self.limit:
            return high, most
        least = cost(low)
        while high - low > 1:  # MACs grow almost linearly with the width: two or three counts, not log2 of it
            guess = low + int((high - low) * (self.limit - least) / (most - least))
            middle = min(max(guess, low + 1), high - 1)
            found = cost(middle)
            low, least, high, most = (middle, found, high, most) if found <= self.limit else (low, least, middle, found)
        return low, least


def build_budget(structures: Structures, scores: Tensor, macs: float, least: float) -> AmcBudget:
    """Layers keep the structures with the largest scores, a share of ``least`` or more; refuse what cannot be met."""
    if structures.flow is None:
        raise ArgumentError("macs= needs the channel flow of the network, which these structures do not have.")
    flow = learn_pins(structures.flow)
    whole = compute_whole_cost(flow).macs
    limit = _limit(macs, whole)
    owner = structures.owner()
    members = [(owner == i).nonzero().flatten() for i in range(len(structures.layers))]
    layers = tuple(i for i, own in enumerate(members) if len(own))
    orders = tuple(members[i][scores.cpu()[members[i]].argsort(stable=True)] for i in layers)
    fewest = tuple(max(1, ceil(check_number("least", least, most=1.0) * len(order) - 1e-9)) for order in orders)
    found = AmcBudget(structures, flow, layers, orders, fewest, limit, whole)
    if (lowest := found.left(fewest)) > limit:
        raise ArgumentError(
            f"macs={macs} cannot be met: if every layer keeps least={least}, {lowest:,} of {whole:,} MACs remain. "
            "Raise macs, or lower least."
        )
    return found


def _limit(macs: float, whole: int) -> float:
    share = check_number("macs", macs)
    if not 0 < share <= 1 and share != int(share):
        raise ArgumentError(f"macs={macs!r} must be the share of MACs to keep, up to 1, or a whole number of MACs.")
    return share * whole * (1 + 1e-12) if share <= 1 else share  # 57 / 101 * 101 is 56.999...
