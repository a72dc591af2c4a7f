"""Draw the curves of a page: colours and markers, what is too far away, markers that would hide one another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from sosp.core.optional_packages import import_package
from sosp.studies.experiment import BASELINE
from sosp.studies.pages.figures import LOOKS, SECONDS, Figure, FigurePoint, Line, Panel, list_lines

STYLE = {"svg.hashsalt": "sosp", "svg.fonttype": "none", "font.size": 9}
OURS = ("sosp-h", "sosp-i", "first-order", "random")  # of one colour in all figures
DARK = ("#4d4d4d", "#7a7a7a")  # of what is trained otherwise than the baseline
GREY = 7  # of ten colours
PALE = 0.55  # of white
SMALL = 7  # type
WIDE = 10  # times as much is too far for a linear axis
STEP, HIGH = 0.018, 0.025  # of what the axes span: nearer markers hide one another


@dataclass(frozen=True)
class FigureStyle:
    """What the panels of a figure have in common."""

    colours: Mapping[str, Any]
    seconds: bool
    far: bool  # whole networks are so large that they are lines across
    floor: float  # what lies below it is told at the edge

    def level(self, line: Line) -> bool:
        return self.far and line.whole

    def marks(self, line: Line) -> list[FigurePoint]:
        return [] if self.level(line) else [p for p in line.points if p.y >= self.floor]

    def log(self, lines: Sequence[Line]) -> bool:
        sizes = [p.x for line in lines for p in self.marks(line)]
        return not self.far and max(sizes) > WIDE * min(sizes) > 0

    def look(self, line: Line) -> dict[str, Any]:
        colour, (marker, style) = self.colours[line.method], LOOKS[line.look]
        if self.level(line):
            return {"color": colour, "linewidth": 1.2, "linestyle": "-" if line.ours else "--"}
        face = {"markersize": 5} if line.ours else {"markersize": 6, "markerfacecolor": _pale(colour)}
        return {"color": colour, "linewidth": 1.2, "marker": marker, "linestyle": style, **face}


def _pale(colour: Any) -> tuple[float, ...]:
    return tuple(PALE + (1 - PALE) * part for part in import_package("matplotlib.colors").to_rgb(colour))


def _plan(figure: Figure) -> FigureStyle:
    lines = list_lines(figure.panels)
    seconds = any(up == SECONDS for _, up, _ in figure.panels)
    far = any(_far(some) for *_, some in figure.panels)
    floor = -math.inf if seconds else _floor(p.y for line in lines for p in line.points)
    return FigureStyle(_colours(lines), seconds, far, floor)


def _far(lines: Sequence[Line]) -> bool:
    """Would the whole network press all others together?"""
    whole = [p.x for line in lines if line.whole for p in line.points]
    rest = [p.x for line in lines if not line.whole for p in line.points]
    return bool(whole) and min(whole) > WIDE * max(rest)


def _floor(ys: Iterable[float]) -> float:
    """The lowest, without at most a tenth: those further below the others than these are apart."""
    found = sorted(ys)
    for k in range(len(found) // 10, 0, -1):
        if found[k] - found[k - 1] > found[-1] - found[k]:
            return found[k]
    return found[0]


def _colours(lines: Sequence[Line]) -> dict[str, Any]:
    """One colour per method, ours and the paper's alike; black and dark ones for what nothing was removed from."""
    shades = import_package("matplotlib").colormaps["tab20"].colors  # ten pairs, strong and light
    colours = [shade for k, shade in enumerate((*shades[::2], *shades[1::2])) if k % 10 != GREY]
    fixed = {**dict(zip(OURS, colours, strict=False)), BASELINE: "black"}
    used = {line.method: line.whole for line in lines}
    unused = [colour for name, colour in fixed.items() if name not in used and name != BASELINE]
    dark, free = cycle(DARK), cycle((*colours[len(OURS) : 9], *unused, *colours[9:]))
    return fixed | {name: next(dark if whole else free) for name, whole in used.items() if name not in fixed}


Key = tuple[str, FigurePoint]  # the label of its line, and a point


class Mark(NamedTuple):
    """A point, and where it is in parts of what the axes span."""

    key: Key
    x: float
    y: float


def _place_marks(lines: Sequence[Line], plan: FigureStyle) -> dict[Key, tuple[float, float]]:
    """The x of points, ours or the paper's, that are set side by side because they would hide one another; and how far
    that is from their own, of what the axis spans."""
    shown = [(line, p) for line in lines for p in plan.marks(line)]
    to, back = (math.log, math.exp) if plan.log(lines) else (float, float)
    xs, ys = [to(p.x) for _, p in shown], [p.y for _, p in shown]
    width, height = (max(xs) - min(xs)) or 1.0, (max(ys) - min(ys)) or 1.0
    found: dict[Key, tuple[float, float]] = {}
    for ours in () if plan.seconds else (True, False):
        marks = [Mark((line.label, p), to(p.x) / width, p.y / height) for line, p in shown if line.ours is ours]
        own = {mark.key: mark.x for mark in marks}
        found |= {mark.key: (back(mark.x * width), abs(mark.x - own[mark.key])) for mark in _separate_marks(marks)}
    return found


def _separate_marks(marks: Iterable[Mark]) -> list[Mark]:
    """From left to right; those that touch keep their order and the middle, and those that they would then touch, or
    pass, join them."""
    groups: list[list[Mark]] = []
    for mark in sorted(marks, key=lambda mark: mark.x):
        group = [mark]
        while (near := next((some for some in groups if _touch(some, group)), None)) is not None:
            groups.remove(near)
            group = sorted(near + group, key=lambda mark: mark.x)
        groups.append(group)
    return [mark for group in groups if len(group) > 1 for mark in _spread(group)]


def _touch(some: list[Mark], others: list[Mark]) -> bool:
    """Would they, or change places, once they are spread?"""
    both = (list(zip(group, _spread(group), strict=True)) for group in (some, others))
    for (old, new), (their_old, their_new) in product(*both):
        away = new.x - their_new.x
        if (abs(away) < 0.99 * STEP and abs(new.y - their_new.y) < HIGH) or (old.x - their_old.x) * away < 0:
            return True
    return False


def _spread(group: list[Mark]) -> list[Mark]:
    left = mean(mark.x for mark in group) - STEP * (len(group) - 1) / 2
    return [mark._replace(x=left + k * STEP) for k, mark in enumerate(group)]


def _caption(figure: Figure, plan: FigureStyle) -> str:
    """How it is to be read."""
    points = [p for line in list_lines(figure.panels) for p in plan.marks(line)]
    away = max((share for *_, lines in figure.panels for _, share in _place_marks(lines, plan).values()), default=0.0)
    words = {
        "hollow: a single run": any(p.runs == 1 for p in points),
        "pale: the paper's": any(p.runs == 0 for p in points),
        "bars: standard deviations": any(p.std for p in points),
        f"what would hide one another stands side by side, by up to {away:.1%} of the axis": away > 0,
    }
    return "; ".join(said for said, holds in words.items() if holds)


# --- drawing --------------------------------------------------------------------------------------------


def draw_figure(figure: Figure, folder: Path) -> Path:
    """As SVG, the same bytes from the same records with one version of matplotlib."""
    path = folder / f"{figure.name}.svg"
    with import_package("matplotlib").rc_context(STYLE):
        make_canvas(figure).savefig(path, metadata={"Date": None, "Description": figure.digest})
    return path


def make_canvas(figure: Figure) -> Any:
    """As matplotlib has it: one scale of y, a legend beside each row of panels."""
    across = min(len(figure.panels), 2)
    down = len(figure.panels) // across
    made = import_package("matplotlib.figure").Figure(figsize=(5.2 * across, 0.7 + 3.6 * down), layout="constrained")
    plan = _plan(figure)
    made.suptitle(figure.title)
    made.supxlabel(_caption(figure, plan), fontsize=SMALL)
    grid = made.subplots(down, across, squeeze=False, sharex="col", sharey=True)
    for k, (axes, panel) in enumerate(zip(grid.flat, figure.panels, strict=True)):
        _panel(axes, panel, plan)
        if k % across == across - 1:
            _legend(axes, list_lines(figure.panels[k + 1 - across : k + 1]), plan)
    return made


def _panel(axes: Any, panel: Panel, plan: FigureStyle) -> None:
    across, up, lines = panel
    axes.set(xlabel=across, ylabel=up)
    axes.label_outer()
    axes.grid(alpha=0.3)
    places = {key: x for key, (x, _) in _place_marks(lines, plan).items()}
    sizes = [p.x for line in lines for p in plan.marks(line)]
    for line in sorted(lines, key=lambda line: line.ours):  # ours in front
        if plan.level(line):
            _draw_baselines(axes, line, plan)
        else:
            _points(axes, line, plan, places)
            _annotate_below(axes, line, plan, sizes)
    if plan.seconds:
        _format_width_axes(axes, sizes)
    else:
        _format_size_axis(axes, log=plan.log(lines))


def _points(axes: Any, line: Line, plan: FigureStyle, places: Mapping[Key, float]) -> None:
    shown, look = plan.marks(line), plan.look(line)
    across = [places.get((line.label, p), p.x) for p in shown]
    axes.plot(across, [p.y for p in shown], **look | {"marker": "none"})
    for x, p in zip(across, shown, strict=True):
        axes.plot(x, p.y, **look | _face([p]))
        if p.std:
            axes.errorbar(x, p.y, p.std, fmt="none", ecolor=look["color"], capsize=2, zorder=1.9)


def _face(points: Sequence[FigurePoint]) -> dict[str, str]:
    return {"markerfacecolor": "white"} if all(p.runs == 1 for p in points) else {}


def _draw_baselines(axes: Any, line: Line, plan: FigureStyle) -> None:
    side, at = ("right", 0.98) if line.ours else ("left", 0.02)
    place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points", "ha": side}
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    for p in line.points:
        axes.axhline(p.y, **plan.look(line))
        axes.annotate(f"{line.label}, {_short(p.x)}: {p.y:.2f}", (at, p.y), fontsize=SMALL, bbox=behind, **place)


def _annotate_below(axes: Any, line: Line, plan: FigureStyle, sizes: Sequence[float]) -> None:
    """An arrow at the lower edge, and in words what the axis does not reach."""
    place = {"xycoords": ("data", "axes fraction"), "xytext": (-2, 3), "textcoords": "offset points"}
    for p in line.points:
        if p.y < plan.floor:
            x = min(max(p.x, min(sizes)), max(sizes))
            words = f"↓ {line.label}{'' if x == p.x else f', {_short(p.x)}'}: {p.y:.2f}"
            axes.annotate(words, (x, 0), fontsize=SMALL, color=plan.colours[line.method], **place)
            axes.margins(y=0.1)


def _short(x: float) -> str:
    return str(import_package("matplotlib.ticker").EngFormatter(places=1)(x))


def _format_size_axis(axes: Any, *, log: bool) -> None:
    ticker = import_package("matplotlib.ticker")
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.EngFormatter())


def _format_width_axes(axes: Any, sizes: Iterable[float]) -> None:
    ticker = import_package("matplotlib.ticker")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sorted(set(sizes)))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")


def _legend(axes: Any, lines: Iterable[Line], plan: FigureStyle) -> None:
    """Everything that is drawn, once, as it is drawn."""
    handles = []
    for line in {line.label: line for line in lines if plan.level(line) or plan.marks(line)}.values():
        look = plan.look(line)
        if not plan.level(line):
            look |= _face(line.points) | ({"linestyle": "none"} if len(plan.marks(line)) == 1 else {})
        handles.append(import_package("matplotlib.lines").Line2D([], [], label=line.label, **look))
    axes.legend(handles=handles, fontsize=SMALL, loc="upper left", bbox_to_anchor=(1.01, 1.0))
