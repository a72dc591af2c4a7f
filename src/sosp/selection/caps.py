"""Apply the cap to every layer, also to structures in several layers and to depthwise layers and their inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from sosp.graph.records import Saliency, Structures
from sosp.selection.greedy_order import LayerLimits, limit_removals, order_removals


def find_depthwise_inputs(structures: Structures) -> dict[str, str]:
    """Map each depthwise layer to the layer it reads channel by channel; it loses every channel that layer loses."""
    width = {layer.name: layer.channels for layer in structures.layers}
    found: dict[str, str] = {}
    for layer in structures.layers:
        up = structures.wiring.get(layer.name, ())
        if layer.depthwise and len(up) == 1 and width.get(up[0]) == layer.channels:
            found[layer.name] = up[0]
    return found


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
