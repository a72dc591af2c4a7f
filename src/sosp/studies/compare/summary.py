"""Summarise cells over their seeds by mean and standard deviation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, stdev

from sosp.studies.compare.comparison_cells import ComparisonCell


@dataclass(frozen=True)
class ComparisonSummary:
    """Mean and standard deviation (0 for a single seed) of every figure of a method at a ratio."""

    method: str
    ratio: float
    seeds: int
    means: Mapping[str, float]
    stds: Mapping[str, float]
    refusal: str = ""


STATES = (
    "tuned",
    "repaired",
    "recalibrated",
    "masked",
)  # of a network when its accuracy is measured, the most important first


def list_states(means: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the states that have an accuracy, in the order of ``STATES``."""
    known = {name for some in means for name in some}
    return [state for state in STATES if state in known]


FIGURES = (
    "masked",
    "recalibrated",
    "repaired",
    "tuned",
    "best",
    "params",
    "macs",
    "params_alternative",
    "macs_alternative",
    "seconds",
)


def summarise_cells(cells: tuple[ComparisonCell, ...]) -> list[ComparisonSummary]:
    """Average cells over their seeds.

    Args:
        cells: Cells of one comparison.

    Returns:
        A summary for every method and ratio, in the order of the cells.
    """
    groups: dict[tuple[str, float], list[ComparisonCell]] = {}
    for cell in cells:
        groups.setdefault((cell.method, cell.ratio), []).append(cell)
    return [_summary(method, ratio, group) for (method, ratio), group in groups.items()]


def _summary(method: str, ratio: float, group: list[ComparisonCell]) -> ComparisonSummary:
    good = [c for c in group if not c.refusal]
    refusal = "" if good else group[0].refusal
    values = {name: [v for c in good if (v := getattr(c, name)) is not None] for name in FIGURES}
    means = {name: mean(found) for name, found in values.items() if found}
    stds = {name: stdev(found) if len(found) > 1 else 0.0 for name, found in values.items() if found}
    return ComparisonSummary(method, ratio, len(good), means, stds, refusal)
