"""How wide every layer is: from one factor, or factors by name, to channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sosp.errors import ArgumentError, is_number, suggest_name

Width = float | Mapping[str, float]
MOST = 64


@dataclass(frozen=True)
class StreamWidth:
    """Layers whose outputs have one width: they are added up, or one takes the other channel by channel."""

    channels: int  # at factor 1
    layers: tuple[str, ...]


def scale_channels(streams: Sequence[StreamWidth], width: Width, *, head: str) -> dict[str, int]:
    """Layer -> output channels, for every layer but ``head``, whose width is the number of classes.

    ``width``: a factor for all layers, or layer, container or pattern -> factor, ``{"layer1": 2.0, "conv1": 1.5}``;
    what is not named keeps its width. A stream takes the largest factor asked of any of its layers.
    """
    factors = _factors([name for s in streams for name in s.layers], width, head)
    found: dict[str, int] = {}
    for stream in streams:
        factor = max((factors[name] for name in stream.layers if name in factors), default=1.0)
        found |= dict.fromkeys(stream.layers, max(1, round(stream.channels * factor)))
    return found


def _factors(layers: Sequence[str], width: Width, head: str) -> dict[str, float]:
    """Layer -> the largest factor asked of it."""
    if not isinstance(width, Mapping):
        return dict.fromkeys(layers, _factor("width", width))
    found: dict[str, float] = {}
    for name, factor in width.items():
        number = _factor(f"width[{name!r}]", factor)
        for layer in _find_layers(name, layers, head):
            found[layer] = max(found.get(layer, 0.0), number)
    return found


def _factor(what: str, found: object) -> float:
    if not is_number(found) or not 0 < found <= MOST:
        raise ArgumentError(
            f"{what}={found!r} must be a number above 0, at most {MOST}, or a mapping from layers to such numbers, "
            f"{{'layer1': 2.0}}."
        )
    return float(found)


def _find_layers(name: str, layers: Sequence[str], head: str) -> list[str]:
    """The layers that ``name`` covers: itself, all in the container, all that fit the pattern."""
    known = dict.fromkeys(part for layer in [*layers, head] for part in _list_containers(layer))
    roots = [n for n in known if isinstance(name, str) and (n == name or fnmatchcase(n, name))]
    covered = [layer for layer in layers if any(part in roots for part in _list_containers(layer))]
    if roots and not covered:
        raise ArgumentError(f"width names {name!r}, whose width is the number of classes: set it with classes=.")
    if not covered:
        hint = suggest_name(str(name), known)
        raise ArgumentError(
            f"width names {name!r}, which is neither a layer of the network nor a container of layers.{hint}"
        )
    return covered


def _list_containers(layer: str) -> list[str]:
    """The layer and the containers it is in: ``a.b.c``, ``a.b``, ``a``."""
    parts = layer.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
