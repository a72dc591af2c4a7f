"""What widening the narrow places brought: expanded, widened and plain networks, cut to the same sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import (
    FormattedNumber,
    ReportSection,
    ReportTable,
    TableCell,
    make_large_cell,
    make_share_cell,
    make_whole_cell,
)
from sosp.app.report.sections.comparison import COSTS, plot_accuracy
from sosp.studies.compare.summary import ComparisonSummary

Points = Sequence[Mapping[str, Any]]  # as they stand in result.json
# Key of a point -> the figure of a summary.
FIGURES = {"tuned": "tuned", "params": "params", "macs": "macs"}


def build_section(facts: RunFacts) -> ReportSection | None:
    found = facts.results.get("expand")
    if not found or not (points := [p for p in found["points"] if p["tuned"] is not None]):
        return None
    words = [
        "expand: the blocks that lose least were widened, and the network was trained, pruned and fine-tuned again. "
        "vanilla: the network as it was. widen: every layer is a little wider.",
        *(describe_choice(choice) for choice in found["choices"]),
        *dict.fromkeys(f"Refused: {p['course']}: {p['refusal']}" for p in found["points"] if p["refusal"]),
    ]
    plots = tuple(plot_accuracy(average_seeds(points), "tuned", cost, None) for cost in COSTS)
    return ReportSection("expansion", "Expansion", tuple(words), plots, (table(found["points"]),))


def describe_choice(choice: Mapping[str, Any]) -> str:
    blocks = ", ".join(choice["blocks"])
    return (
        f"Seed {choice['seed']}: expand widens {blocks}; widen takes every layer × {choice['constant']['factor']:.3g}."
    )


def average_seeds(points: Points) -> list[ComparisonSummary]:
    """A course at a size, over its seeds."""
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for point in points:
        groups.setdefault((point["course"], float(point["size"])), []).append(point)
    return [_summary(course, size, group) for (course, size), group in groups.items()]


def _summary(course: str, size: float, group: Points) -> ComparisonSummary:
    values = {name: [float(point[key]) for point in group] for key, name in FIGURES.items()}
    stds = {name: stdev(found) if len(found) > 1 else 0.0 for name, found in values.items()}
    return ComparisonSummary(course, size, len(group), {name: mean(found) for name, found in values.items()}, stds)


def table(points: Points) -> ReportTable:
    head = ("network", "seed", "before pruning", "pruned to", "parameters", "MACs", "after pruning", "fine-tuned")
    return ReportTable("Every network", head, tuple(map(_row, points)))


def _row(point: Mapping[str, Any]) -> tuple[TableCell, ...]:
    start = (point["course"], FormattedNumber(str(point["seed"]), point["seed"]), make_share_cell(point["whole"]))
    size = f"{point['budget']} {point['size']:g}"
    if point["refusal"]:
        return (*start, size, "refused", "", "", "")
    return (
        *start,
        size,
        make_whole_cell(point["params"]),
        make_large_cell(point["macs"]),
        make_share_cell(point["cut"]),
        make_share_cell(point["tuned"]),
    )
