"""The curves of a page: accuracy over parameters and over MACs, ours and everybody's; seconds over width."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sosp.studies.cells import PrunedCell, TimedCell, TrainedCell
from sosp.studies.experiment import BASELINE, Experiment, PublishedRow
from sosp.studies.pages.number_format import format_example_suffix
from sosp.studies.pages.result_rows import ResultRow
from sosp.studies.pages.verdicts import WORDS

AXES = {"params": "parameters", "macs": "MACs"}
SHARED = "{}; the paper's are its share of our whole network"  # where it prints what percentage is gone
ACCURACY, SECONDS = "accuracy in percent", "seconds"
LOOKS = {  # marker, and the line between points
    "weights": ("o", "-"),
    "features": ("^", "--"),
    "weights, other terms": ("P", "none"),
    "features, other terms": ("X", "none"),
    "expand": (">", "none"),
    "widen": ("<", "none"),
    "paper": ("s", "none"),
    "paper, other table": ("D", "none"),
}


class FigurePoint(NamedTuple):
    """What was reached at one size."""

    x: float
    y: float
    std: float  # 0: there is none
    runs: int  # 0: the paper's


@dataclass(frozen=True)
class Line:
    """Points of one method on the same terms."""

    label: str
    method: str  # has a colour
    look: str  # of LOOKS
    points: tuple[FigurePoint, ...]

    @property
    def ours(self) -> bool:
        return not self.look.startswith("paper")

    @property
    def whole(self) -> bool:
        """Was nothing removed?"""
        return self.method.startswith(BASELINE)


Panel = tuple[str, str, tuple[Line, ...]]  # what x is, what y is, the lines


@dataclass(frozen=True)
class Figure:
    """What is drawn: panels, two side by side."""

    name: str  # of its file, without the ending
    title: str
    panels: tuple[Panel, ...]

    @property
    def digest(self) -> str:
        """Of everything that is drawn; it stands in the file."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def make_figures(experiment: Experiment, rows: Sequence[ResultRow], suffix: str = "") -> list[Figure]:
    """A figure per network of which there is something to compare; ``suffix`` tells another length: ``-e20``."""
    pruned = [row for row in rows if isinstance(row.cell, PrunedCell) and row.done]
    places = dict.fromkeys(row.cell.place for row in pruned)
    whole = [row for row in rows if isinstance(row.cell, TrainedCell) and row.cell.schedule.epochs and row.done]
    found = [
        _curves(experiment, place, [r for r in (*pruned, *whole) if r.cell.place == place], suffix) for place in places
    ]
    timed = [row for row in rows if isinstance(row.cell, TimedCell) and row.done]
    found += [_times(experiment, timed, suffix)] if timed else []
    return [figure for figure in found if _compares(figure)]


def _compares(figure: Figure) -> bool:
    """Two methods of ours, or one and the paper's."""
    return len({(line.method, line.ours) for line in list_lines(figure.panels) if not line.whole}) > 1


def list_lines(panels: Iterable[Panel]) -> list[Line]:
    return [line for *_, lines in panels for line in lines]


def _title(experiment: Experiment, what: str, suffix: str) -> str:
    return f"{experiment.title} – {what}" + (f", {suffix.removeprefix('-e')} epochs" if suffix else "")


# --- accuracies -----------------------------------------------------------------------------------------


def _curves(experiment: Experiment, place: str, rows: list[ResultRow], suffix: str) -> Figure:
    published = [p for p in experiment.published if f"{p.network}-{p.data}" == place]
    metric = experiment.compared_metric
    panels = tuple(_accuracies(up, axis, metric, some, published) for up, some in _by_gate(rows) for axis in AXES)
    title = _title(experiment, f"{place}, {WORDS[metric]}", suffix)
    return Figure(f"{experiment.name}-{place}{suffix}", title, panels)


def _by_gate(rows: list[ResultRow]) -> list[tuple[str, list[ResultRow]]]:
    """What y is, and its rows: gates have panels of their own where each is measured at several budgets."""
    budgets: dict[str, set[tuple[str, float]]] = {}
    for row in rows:
        if isinstance(row.cell, PrunedCell):
            budgets.setdefault(row.cell.gate, set()).add(row.cell.budget)
    if len(budgets) == 1 or min(map(len, budgets.values())) == 1:
        return [(ACCURACY, rows)]
    return [
        (f"gate {gate}: {ACCURACY}", [r for r in rows if not isinstance(r.cell, PrunedCell) or r.cell.gate == gate])
        for gate in budgets
    ]


def _accuracies(up: str, axis: str, beside: str, rows: list[ResultRow], published: list[PublishedRow]) -> Panel:
    whole = next((r.start[axis] for row in rows for r in row.done if axis in r.start), None)
    shared = whole is not None and any(getattr(p, f"{axis}_cut") is not None for p in published)
    lines = (
        *_measured_lines(rows, axis, beside),
        *_published_lines(published, axis, beside, whole if shared else None),
    )
    return SHARED.format(AXES[axis]) if shared else AXES[axis], up, lines


Series = tuple[str, str, str]  # label, method, look


def _lines(found: Mapping[Series, list[FigurePoint]]) -> tuple[Line, ...]:
    return tuple(Line(*series, tuple(sorted(points))) for series, points in found.items())


def _measured_lines(rows: list[ResultRow], axis: str, beside: str) -> tuple[Line, ...]:
    found: dict[Series, list[FigurePoint]] = {}
    for row in rows:
        x, y = row.stat(axis), row.stat(beside if isinstance(row.cell, PrunedCell) else "accuracy")
        if x is not None and y is not None:
            found.setdefault(_series(row), []).append(FigurePoint(x.mean, 100 * y.mean, 100 * y.std, y.count))
    return _lines(found)


def _series(row: ResultRow) -> Series:
    cell = row.cell
    if isinstance(cell, PrunedCell):
        gate = "" if cell.gate == "weights" else f", {cell.gate}"
        other = format_example_suffix(cell) or cell.other_rate
        return (
            f"{cell.label}{gate}{format_example_suffix(cell)}",
            cell.published,
            f"{cell.gate}{', other terms' if other else ''}",
        )
    grown = cell.grown if isinstance(cell, TrainedCell) else None
    return cell.label, cell.label, grown.how if grown else "weights"


def _published_lines(published: list[PublishedRow], axis: str, beside: str, whole: float | None) -> tuple[Line, ...]:
    """``whole``: the x of our whole network, where the paper prints shares of its own."""
    found: dict[Series, list[FigurePoint]] = {}
    for row in published:
        y, std = (row.before, row.before_std) if beside == "zeroed" else (row.accuracy, row.std)
        x = getattr(row, axis)
        if x is None and whole is not None:
            x = _left(row, axis, whole)
        if x is not None and y is not None:
            where, look = (f"paper, {row.table}", "paper, other table") if row.table else ("paper", "paper")
            found.setdefault((f"{row.method} ({where})", row.method, look), []).append(FigurePoint(x, y, std or 0.0, 0))
    return _lines(found)


def _left(row: PublishedRow, axis: str, whole: float) -> float | None:
    """Of our whole network, as much as the paper left of its own."""
    cut = 0.0 if row.method == BASELINE else getattr(row, f"{axis}_cut")
    return None if cut is None else (1 - cut / 100) * whole


# --- seconds --------------------------------------------------------------------------------------------


def _times(experiment: Experiment, rows: list[ResultRow], suffix: str) -> Figure:
    """Seconds of the network that is measured at most widths, over its number of structures."""
    networks = [row.cell.network for row in rows if isinstance(row.cell, TimedCell)]
    most = max(networks, key=networks.count)
    found: dict[Series, list[FigurePoint]] = {}
    for row in rows:
        x, y = row.stat("structures"), row.stat("seconds")
        if isinstance(row.cell, TimedCell) and row.cell.network == most and x is not None and y is not None:
            found.setdefault(_series(row), []).append(FigurePoint(x.mean, y.mean, y.std, y.count))
    title = _title(experiment, f"{most}, wider and wider", suffix)
    return Figure(f"{experiment.name}-width{suffix}", title, (("structures", SECONDS, _lines(found)),))
