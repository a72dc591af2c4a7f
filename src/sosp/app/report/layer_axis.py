"""Layers along an axis: their names, and the parts of the network they stand in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes

from sosp.app.report.theme import LINE, MUTED

LEAST, MOST = 0.185, 0.36  # inches for a layer with its name
NARROW = 0.085  # and without
MAX_NAMED_LAYERS = 70  # layers whose names still fit
LONGEST = 26  # letters of a name; the whole one stands in the table and under the mouse


def find_parts(names: Sequence[str]) -> list[str]:
    """The part of the network every layer is in: as much of their names as it takes to tell some apart.

    ``layer1`` for ``layer1.0.conv1``; nothing where that would set nearly every layer apart.
    """
    split = [name.split(".") for name in names]
    for depth in range(1, max(map(len, split), default=1)):
        found = [".".join(words[:depth]) for words in split]
        if len(set(found)) > 1:
            return found if 2 * len(set(found)) <= len(names) + 2 else [""] * len(names)
    return [""] * len(names)


def compute_layer_step(layers: int) -> float:
    """Inches for a layer; few have more room."""
    return NARROW if layers > MAX_NAMED_LAYERS else max(LEAST, min(MOST, 6.0 / max(layers, 1)))


def compute_figure_width(names: Sequence[str], least: float = 3.7) -> float:
    """Inches that a figure with these layers needs."""
    return max(least, 1.0 + len(names) * compute_layer_step(len(names)))


def label_layers(axes: Axes, names: Sequence[str]) -> None:
    """Layers at 0, 1, 2, ... below the axes, their parts above, with a line between two parts."""
    start, shown = 0, []
    for part, same in groupby(zip(find_parts(names), names, strict=True), key=lambda pair: pair[0]):
        inside = [name for _, name in same]
        if start:
            axes.axvline(start - 0.5, color=LINE, linewidth=1.2, zorder=0)
        above = fits(part, len(inside), len(names))
        if above:
            middle = start + (len(inside) - 1) / 2
            axes.text(middle, 1.02, part, transform=axes.get_xaxis_transform(), ha="center", va="bottom", color=MUTED)
        shown += [shorten_name(name, part if above else "") for name in inside]
        start += len(inside)
    axes.set_xlim(-0.7, len(names) - 0.3)
    axes.grid(False, axis="x")
    axes.tick_params(axis="x", length=0, labelrotation=90)
    if len(names) <= MAX_NAMED_LAYERS:
        axes.set_xticks(range(len(names)), shown)
    else:
        axes.set_xticks([])
        axes.set_xlabel(f"{len(names)} layers, in the order of the network", loc="left")


def fits(part: str, count: int, layers: int) -> bool:
    """There is room for the name of a part above its layers."""
    return bool(part) and 0.078 * len(part) <= count * compute_layer_step(layers)


def shorten_name(name: str, part: str) -> str:
    """Without the part that stands above it, and not too long."""
    rest = name.removeprefix(part).lstrip(".") or name
    return rest if len(rest) <= LONGEST else "…" + rest[1 - LONGEST :]
