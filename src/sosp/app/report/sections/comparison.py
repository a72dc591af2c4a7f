"""Many methods on the same network: accuracy against parameters and MACs, with the spread over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.ticker import FuncFormatter, PercentFormatter

from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import (
    FormattedNumber,
    ReportSection,
    ReportTable,
    TableCell,
    format_count,
    make_large_cell,
    make_whole_cell,
)
from sosp.app.report.theme import BLUE, GREEN, INK, MUTED, PURPLE, SMALL, VERMILLION, Plot, create_figure
from sosp.studies.compare.summary import ComparisonSummary, list_states

# Accuracy -> how it came about.
STATES = {
    "tuned": "fine-tuned",
    "repaired": "repaired, not trained",
    "recalibrated": "with re-estimated batch-norm statistics, not trained",
    "masked": "right after pruning",
}
COSTS = {"params": "parameters", "macs": "MACs"}
TONES, MARKS = (BLUE, VERMILLION, GREEN, PURPLE, INK), "osD^vPX<>ph*dH8sD^vo"
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
LINE_STYLES = [(TONES[k % 5], mark, DASHES[k // 5]) for k, mark in enumerate(MARKS)]  # 20 that can be told apart


def build_section(facts: RunFacts) -> ReportSection | None:
    found = facts.summaries
    if not found:
        return None
    shown = list_states(s.means for s in found)[:2]
    before: Mapping[str, Any] | None = facts.results.get("compare", {}).get("before")
    seeds = max(s.seeds for s in found)
    words = [f"{format_count(len({s.method for s in found}), 'method')} on the same network, data and budget."]
    if seeds > 1:
        words.append(f"Means over {seeds} seeds, each with other scoring examples; bars are standard deviations.")
    words += dict.fromkeys(f"Refused: {s.method} at {s.ratio:g}: {s.refusal}" for s in found if s.refusal)
    plots = tuple(plot_accuracy(found, state, cost, before) for state in shown for cost in COSTS)
    tables = tuple(replace(table(found, state), folded=state != shown[0]) for state in shown)
    return ReportSection("comparison", "Methods compared", tuple(words), plots, tables)


def plot_accuracy(found: Sequence[ComparisonSummary], state: str, cost: str, before: Mapping[str, Any] | None) -> Plot:
    methods = list(dict.fromkeys(s.method for s in found))
    drawn, axes = create_figure(SMALL, 3.2 + 0.17 * -(-len(methods) // 3))
    for method, (colour, marker, dash) in zip(
        methods, LINE_STYLES * (1 + len(methods) // len(LINE_STYLES)), strict=False
    ):
        mine = sorted((s for s in found if s.method == method and state in s.means), key=lambda s: s.ratio)
        if mine:
            axes.errorbar(
                [s.means[cost] for s in mine], [s.means[state] for s in mine],
                yerr=[s.stds[state] for s in mine], xerr=[s.stds[cost] for s in mine],
                color=colour, marker=marker, linestyle=dash, label=method, elinewidth=1, capsize=2,
            )  # fmt: skip
    if before is not None:
        axes.axhline(before["top1"], color=MUTED, linewidth=1, linestyle=(0, (1, 1.5)))
        axes.plot(before[cost], before["top1"], "*", color=INK, markersize=9, label="before")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axes.set_xlabel(COSTS[cost])
    axes.set_title(f"accuracy, {STATES[state].split(',')[0]}", wrap=True)
    drawn.legend(loc="outside lower left", ncols=3)
    return Plot(f"{state}-{cost}", drawn, describe_plot(found, state, cost))


def format_tick(value: float) -> str:
    """``125 k``, for an axis."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def describe_plot(found: Sequence[ComparisonSummary], state: str, cost: str) -> str:
    best = [max(group, key=lambda s: s.means[state]) for group in _by_ratio(found, state)]
    words = ", ".join(f"{s.method} at {s.ratio:g} with {s.means[state]:.2%}" for s in best)
    return f"Accuracy {STATES[state]}, against {COSTS[cost]}, a line per method. Best: {words}."


def _by_ratio(found: Sequence[ComparisonSummary], state: str) -> list[list[ComparisonSummary]]:
    ratios = sorted({s.ratio for s in found})
    groups = [[s for s in found if s.ratio == ratio and state in s.means] for ratio in ratios]
    return [group for group in groups if group]


def table(found: Sequence[ComparisonSummary], state: str) -> ReportTable:
    """A row per method and ratio, the best accuracy of a ratio marked."""
    best = {
        s.ratio: max(group, key=lambda s: s.means[state]).method for group in _by_ratio(found, state) for s in group
    }
    rows = tuple(_row(s, state, best.get(s.ratio) == s.method) for s in found)
    return ReportTable(
        f"Accuracy {STATES[state]}; ★ the best at its ratio",
        ("method", "ratio", "accuracy", "parameters", "MACs", "scoring"),
        rows,
    )


def _row(s: ComparisonSummary, state: str, best: bool) -> tuple[TableCell, ...]:
    if state not in s.means:
        return (s.method, FormattedNumber(f"{s.ratio:g}", s.ratio), "refused" if s.refusal else "missing", "", "", "")
    spread = f" ± {100 * s.stds[state]:.2f}" if s.seeds > 1 else ""
    accuracy = FormattedNumber(f"{100 * s.means[state]:.2f}{spread} %{' ★' if best else ''}", s.means[state])
    seconds = FormattedNumber(f"{s.means['seconds']:.2f} s", s.means["seconds"])
    return (
        s.method,
        FormattedNumber(f"{s.ratio:g}", s.ratio),
        accuracy,
        make_whole_cell(s.means["params"]),
        make_large_cell(s.means["macs"]),
        seconds,
    )
