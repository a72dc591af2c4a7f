"""A cap that holds for every layer: where a structure spans several, and where a depthwise layer reads another."""

from __future__ import annotations

import torch
from torch import Tensor

from sosp.graph.records import Saliency, Structures
from sosp.selection.greedy_order import LayerLimits, limit_removals, order_removals


def find_depthwise_inputs(structures: Structures) -> dict[str, str]:
    """Depthwise layer -> the layer that it reads channel by channel: what that one loses, it loses too."""
    width = {layer.name: layer.channels for layer in structures.layers}
    found: dict[str, str] = {}
    for layer in structures.layers:
        up = structures.wiring.get(layer.name, ())
        if layer.depthwise and len(up) == 1 and width.get(up[0]) == layer.channels:
            found[layer.name] = up[0]
    return found


class CappedLayer:
    """The channels of a layer, and of the depthwise ones that read it: one is lost where any of them loses it."""

    def __init__(self, covers: dict[int, set[int]], cap: float) -> None:
        self.covers = covers  # structure -> the channels that go with it
        self.widest = max(map(len, covers.values()))
        self.left = limit_removals([len(set().union(*covers.values()))], cap)[0]
        self.gone: set[int] = set()

    def take(self, s: int) -> list[int]:
        """``s`` goes: the structures that may not go any more."""
        more = self.covers[s] - self.gone
        self.gone |= more
        self.left -= len(more)
        return self.closed() if more else []

    def closed(self) -> list[int]:
        """Those that would take more than may go. It stays so: whatever goes, they need no less than they lose room."""
        if self.left >= self.widest:
            return []
        return [s for s, channels in self.covers.items() if len(channels - self.gone) > self.left]


def find_capped_layers(structures: Structures, cap: float) -> dict[int, list[CappedLayer]]:
    """Structure -> the places where it takes channels."""
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
    for place in (CappedLayer(mine, cap) for mine in covers.values() if mine):
        for s in place.covers:
            found.setdefault(s, []).append(place)
    return found


class ChannelLimits(LayerLimits):
    """The room of layers that lose channels together. Where all are sorted at once nothing asks it: see ``within``."""

    def __init__(self, structures: Structures, cap: float, device: torch.device) -> None:
        super().__init__(structures, None, device)
        self.structures, self.cap = structures, cap
        self.places = find_capped_layers(structures, cap)

    def full(self) -> Tensor:
        return self.which(_find_unremovable(self.places))

    def closed_by(self, s: Tensor) -> Tensor | None:
        closed = [t for place in self.places[int(s)] for t in place.take(int(s))]
        return self.which(closed) if closed else None

    def which(self, those: list[int]) -> Tensor:
        """(S,) true for those."""
        found = torch.zeros_like(self.owner, dtype=torch.bool)
        found[torch.tensor(those, dtype=torch.long, device=found.device)] = True
        return found

    def within(self, order: Tensor) -> Tensor:
        """The order without those that a place has no room for, and without what comes when nothing is left."""
        places = find_capped_layers(self.structures, self.cap)
        shut = set(_find_unremovable(places))
        kept: list[int] = []
        for s in order.tolist():
            if s not in shut:
                kept.append(s)
                shut.add(s)
                shut.update(t for place in places[s] for t in place.take(s))
        return torch.tensor(kept, dtype=torch.long, device=order.device)


def _find_unremovable(places: dict[int, list[CappedLayer]]) -> list[int]:
    """Structures that may not go at all: they take more than the cap of a layer by themselves."""
    every = {id(place): place for those in places.values() for place in those}
    return [s for place in every.values() for s in place.closed()]


def build_limits(structures: Structures, cap: float | None, device: torch.device) -> LayerLimits:
    """How much every layer may lose."""
    room = LayerLimits(structures, cap, device)
    if cap is None or cap == 1 or (structures.plain and not find_depthwise_inputs(structures)):
        return room
    return ChannelLimits(structures, cap, device)


def order_capped_removals(saliency: Saliency, count: int, weights: Tensor | None, room: LayerLimits) -> Tensor:
    """The structures to remove, in the order they go; fewer than ``count`` where there is room for no more."""
    if not isinstance(room, ChannelLimits):
        return order_removals(saliency, count, weights, room)
    return room.within(order_removals(saliency, room.total, weights, room))[:count]
