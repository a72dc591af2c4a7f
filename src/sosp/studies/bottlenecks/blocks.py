"""Find the layers that share a width and the layers that form a block, from the streams of any network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from sosp.errors import ArgumentError, StructureError, suggest_name
from sosp.graph import Flow
from sosp.graph.records import Structures
from sosp.surgery.widen import find_ties, is_depthwise

Key = tuple[int, ...]  # identifies a stream: the classes of its channels
NamedBlocks = Mapping[str, Iterable[str]]


@dataclass(frozen=True)
class Block:
    """Layers that are widened together."""

    name: str
    layers: tuple[str, ...]


class LayerStreams:
    """The streams that layers write their channels to, and the layers that read them."""

    def __init__(self, flow: Flow) -> None:
        together = flow.graph.classes(find_ties(flow))
        calls = flow.graph.calls
        dense = {d.module: d for d in flow.graph.dense.values() if d.module in calls}
        self.key: dict[str, Key] = {n: tuple(np.sort(together[calls[n][0].out]).tolist()) for n in dense}
        self.reads = {n: {c for into in d.into for c in together[into].tolist()} for n, d in dense.items()}
        self.members: dict[Key, list[str]] = {}
        for name, key in self.key.items():
            self.members.setdefault(key, []).append(name)
        mixing = {n for n, d in dense.items() if not is_depthwise(d)}
        self.joints = {key for key, names in self.members.items() if len(mixing & set(names)) > 1}
        self._ahead: dict[Key, Key | None] = {}

    def find_joint(self, key: Key) -> Key | None:
        """Return the stream, from ``key`` on, in which several layers are added; None unless exactly one exists."""
        if key in self.joints:
            return key
        if key not in self._ahead:
            self._ahead[key] = None  # for a layer that reads itself
            mine = set(key)
            found = {
                self.find_joint(self.key[n]) for n, read in self.reads.items() if read & mine and self.key[n] != key
            }
            self._ahead[key] = found.pop() if len(found) == 1 else None
        return self._ahead[key]


def find_blocks(structures: Structures, named: NamedBlocks | None = None) -> tuple[Block, ...]:
    """Return the blocks of a network, in its order.

    Layers whose outputs are added share a width. They form a block with the layers inside the branches that lead there:
    a stage of a ResNet. Every other layer is a block by itself, as in a VGG. If that gives a single block, as in a
    transformer, every stream is a block. ``named``, block -> layers, containers or patterns, overrides this.
    """
    layers = [layer.name for layer in structures.layers]
    streams = None if structures.flow is None else LayerStreams(structures.flow)
    if named is not None:
        return _named(layers, named, streams)
    if streams is None:
        return tuple(Block(name, (name,)) for name in layers)
    found = _grouped(layers, {n: streams.find_joint(k) or k for n, k in streams.key.items()})
    found = found if len(found) > 1 else _grouped(layers, streams.key)
    return tuple(Block(_name(group, layers), tuple(group)) for group in found)


def _grouped(layers: list[str], key: Mapping[str, Key]) -> list[list[str]]:
    groups: dict[object, list[str]] = {}
    for name in layers:
        groups.setdefault(key.get(name, name), []).append(name)
    return list(groups.values())


def _name(group: list[str], layers: list[str]) -> str:
    """Return the container that holds most of the group and nothing else, or the first and the last layer."""
    if len(group) == 1:
        return group[0]
    held: dict[str, list[str]] = {}
    for layer in layers:
        for container in _containers(layer):
            held.setdefault(container, []).append(layer)
    inside = {c: len(names) for c, names in held.items() if set(names) <= set(group)}
    best = max(inside, key=lambda c: inside[c], default="")
    return best if 2 * inside.get(best, 0) > len(group) else f"{group[0]} to {group[-1]}"


def _containers(layer: str) -> list[str]:
    """Return ``a``, ``a.b`` for ``a.b.c``; the outermost first."""
    parts = layer.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _named(layers: list[str], named: NamedBlocks, streams: LayerStreams | None) -> tuple[Block, ...]:
    """Return the blocks that the user names; every other layer is a block by itself."""
    home: dict[str, str] = {}
    for block, patterns in named.items():
        for layer in _covered(block, patterns, layers):
            if home.setdefault(layer, block) != block:
                raise ArgumentError(f"blocks puts {layer!r} into {home[layer]!r} and into {block!r}; choose one.")
    home = {layer: home.get(layer, layer) for layer in layers}
    for names in [] if streams is None else streams.members.values():
        mine = [n for n in names if n in home]
        for other in mine[1:]:
            if home[other] != home[mine[0]]:
                raise StructureError(
                    f"blocks separates {mine[0]!r} ({home[mine[0]]}) and {other!r} ({home[other]}), whose outputs are "
                    "added or combined channel by channel: they share one width. Put them into one block."
                )
    return tuple(Block(b, tuple(n for n in layers if home[n] == b)) for b in dict.fromkeys(home.values()))


def _covered(block: str, patterns: Iterable[str], layers: list[str]) -> list[str]:
    words = [patterns] if isinstance(patterns, str) else list(patterns)
    found = []
    for word in words:
        hit = [n for n in layers if n == word or n.startswith(f"{word}.") or fnmatchcase(n, word)]
        if not hit:
            known = dict.fromkeys([*layers, *(c for layer in layers for c in _containers(layer))])
            raise StructureError(
                f"blocks[{block!r}] names {word!r}, which is not a layer of this network.{suggest_name(word, known)}"
            )
        found += hit
    return found
