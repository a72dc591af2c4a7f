"""The curves of a page: accuracy over parameters and over MACs, ours and everybody's; seconds over width."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosp.experiments.cells import Pruned, Timed, Trained
from sosp.experiments.definition import Experiment, Published
from sosp.experiments.page.findings import WORDS
from sosp.experiments.page.rows import Row
from sosp.experiments.page.words import examples
from sosp.models.source import package

AXES = {"params": "parameters", "macs": "MACs"}
SHARED = "{}; the paper's are its share of our whole network"  # where it prints what percentage is gone
WIDE = 10  # times the least x is so far that the axis becomes logarithmic
OURS = ("sosp-h", "sosp-i", "first-order", "random")


@dataclass(frozen=True)
class Line:
    """Points of one method: x, y, and the deviation of y."""

    label: str
    points: tuple[tuple[float, float, float], ...]
    ours: bool


@dataclass(frozen=True)
class Figure:
    """What is drawn: panels side by side."""

    name: str  # of its file, without the ending
    title: str
    panels: tuple[tuple[str, str, tuple[Line, ...]], ...]  # what x is, what y is, the lines

    @property
    def digest(self) -> str:
        """Of everything that is drawn; it stands in the file."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def figures(experiment: Experiment, rows: Sequence[Row], suffix: str = "") -> list[Figure]:
    """A figure per network that has records."""
    pruned = [row for row in rows if isinstance(row.cell, Pruned) and row.done]
    places = dict.fromkeys(row.cell.place for row in pruned)
    whole = [row for row in rows if isinstance(row.cell, Trained) and row.cell.schedule.epochs and row.done]
    found = [
        _curves(experiment, place, [r for r in (*pruned, *whole) if r.cell.place == place], suffix) for place in places
    ]
    timed = [row for row in rows if isinstance(row.cell, Timed) and row.done]
    return found + ([_times(experiment, timed, suffix)] if timed else [])


def _curves(experiment: Experiment, place: str, rows: list[Row], suffix: str) -> Figure:
    published = [p for p in experiment.published if f"{p.network}-{p.data}" == place]
    panels = []
    for axis, name in AXES.items():
        whole = next((r.start[axis] for row in rows for r in row.done if axis in r.start), None)
        shared = whole is not None and any(getattr(p, f"{axis}_cut") is not None for p in published)
        theirs = _theirs(published, axis, experiment.beside, whole if shared else None)
        lines = (*_mine(rows, axis, experiment.beside), *theirs)
        panels.append((SHARED.format(name) if shared else name, "accuracy in percent", lines))
    return Figure(f"{experiment.name}-{place}{suffix}", f"{place}, {WORDS[experiment.beside]}", tuple(panels))


def _mine(rows: list[Row], axis: str, beside: str) -> tuple[Line, ...]:
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        x, y = row.stat(axis), row.stat(beside if isinstance(row.cell, Pruned) else "accuracy")
        if x is not None and y is not None:
            groups.setdefault(_label(row), []).append((x.mean, 100 * y.mean, 100 * y.std))
    return tuple(Line(label, tuple(sorted(points)), True) for label, points in groups.items())


def _label(row: Row) -> str:
    cell = row.cell
    if not isinstance(cell, Pruned):
        return cell.label
    return f"{cell.label}{'' if cell.gate == 'weights' else f', {cell.gate}'}{examples(cell)}"


def _theirs(published: list[Published], axis: str, beside: str, whole: float | None) -> tuple[Line, ...]:
    """``whole``: the x of our whole network, where the paper prints shares of its own."""
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for row in published:
        y, std = (row.before, row.before_std) if beside == "zeroed" else (row.accuracy, row.std)
        x = getattr(row, axis)
        if x is None and whole is not None:
            x = _left(row, axis, whole)
        if x is not None and y is not None:
            groups.setdefault(row.method, []).append((x, y, std or 0.0))
    return tuple(Line(f"{label} (paper)", tuple(sorted(points)), False) for label, points in groups.items())


def _left(row: Published, axis: str, whole: float) -> float | None:
    """Of our whole network, as much as the paper left of its own."""
    cut = 0.0 if row.method == "baseline" else getattr(row, f"{axis}_cut")
    return None if cut is None else (1 - cut / 100) * whole


def _times(experiment: Experiment, rows: list[Row], suffix: str) -> Figure:
    """Seconds of the network that is measured at most widths, over its number of structures."""
    networks = [row.cell.network for row in rows if isinstance(row.cell, Timed)]
    most = max(networks, key=networks.count)
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        x, y = row.stat("structures"), row.stat("seconds")
        if isinstance(row.cell, Timed) and row.cell.network == most and x is not None and y is not None:
            groups.setdefault(row.cell.label, []).append((x.mean, y.mean, y.std))
    lines = tuple(Line(label, tuple(sorted(points)), True) for label, points in groups.items())
    panel = (f"structures of {most}, wider and wider", "seconds", lines)
    return Figure(f"{experiment.name}-width{suffix}", "the pruning step over width", (panel,))


# --- drawing --------------------------------------------------------------------------------------------


def draw(figure: Figure, folder: Path) -> Path:
    """As SVG, the same bytes from the same records with one version of matplotlib."""
    style = {"svg.hashsalt": "sosp", "svg.fonttype": "none", "font.size": 9}
    with package("matplotlib").rc_context(style):
        width = 5.2 * len(figure.panels)
        canvas = package("matplotlib.figure").Figure(figsize=(width, 4.0), layout="constrained")
        canvas.suptitle(figure.title)
        for k, (across, up, lines) in enumerate(figure.panels):
            axes = canvas.add_subplot(1, len(figure.panels), k + 1)
            _panel(axes, lines, seconds=up == "seconds", last=k + 1 == len(figure.panels))
            axes.set_xlabel(across)
            axes.set_ylabel(up)
        path = folder / f"{figure.name}.svg"
        canvas.savefig(path, metadata={"Date": None, "Description": figure.digest})
    return path


def _panel(axes: Any, lines: Sequence[Line], *, seconds: bool, last: bool) -> None:
    """The legend of all panels stands beside the last one."""
    colours = _colours(lines)
    for line in lines:
        x, y, spread = zip(*line.points, strict=True)
        look: Mapping[str, Any] = {"fmt": "o-"} if line.ours else {"fmt": "s", "mfc": "none", "alpha": 0.7}
        colour = colours[line.label.removesuffix(" (paper)")]
        axes.errorbar(x, y, spread, label=line.label, color=colour, capsize=2, markersize=4, **look)
    if seconds:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sorted({x for line in lines for x, _, _ in line.points}))
        axes.xaxis.set_minor_locator(package("matplotlib.ticker").NullLocator())
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        across = [x for line in lines for x, _, _ in line.points]
        if max(across) > WIDE * min(across) > 0:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(package("matplotlib.ticker").NullFormatter())
        axes.xaxis.set_major_formatter(package("matplotlib.ticker").EngFormatter())
    axes.grid(alpha=0.3)
    if last:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _colours(lines: Sequence[Line]) -> dict[str, Any]:
    """One colour per method, ours and the paper's alike; black for what nothing was removed from."""
    names = list(dict.fromkeys([*OURS, *(line.label.removesuffix(" (paper)") for line in lines)]))
    dark_and_light = package("matplotlib").colormaps["tab20"].colors
    colours = [*dark_and_light[::2], *dark_and_light[1::2]]
    return {name: "black" if name == "baseline" else colours[k % 20] for k, name in enumerate(names)}
