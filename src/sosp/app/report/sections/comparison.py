"""Many methods on the same network: accuracy against parameters and MACs, with the spread over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.ticker import FuncFormatter, PercentFormatter

from sosp.app.report.facts import Facts
from sosp.app.report.section import Cell, Number, Section, Table, large, many, whole
from sosp.app.report.theme import BLUE, GREEN, INK, MUTED, PURPLE, SMALL, VERMILLION, Plot, blank
from sosp.studies.compare.summary import Summary, states

# Accuracy -> how it came about.
STATES = {
    "tuned": "fine-tuned",
    "repaired": "repaired, not trained",
    "recalibrated": "with batch norm statistics taken anew, not trained",
    "masked": "right after the cut",
}
COSTS = {"params": "parameters", "macs": "MACs"}
TONES, MARKS = (BLUE, VERMILLION, GREEN, PURPLE, INK), "osD^vPX<>ph*dH8sD^vo"
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
CYCLE = [(TONES[k % 5], mark, DASHES[k // 5]) for k, mark in enumerate(MARKS)]  # 20 that can be told apart


def section(facts: Facts) -> Section | None:
    found = facts.summaries
    if not found:
        return None
    shown = states(s.means for s in found)[:2]
    before: Mapping[str, Any] | None = facts.results.get("compare", {}).get("before")
    seeds = max(s.seeds for s in found)
    words = [f"{many(len({s.method for s in found}), 'method')} on the same network, data and budget."]
    if seeds > 1:
        words.append(f"Means over {seeds} seeds, each with other examples to score with; bars are standard deviations.")
    words += dict.fromkeys(f"Refused: {s.method} at {s.ratio:g}: {s.refusal}" for s in found if s.refusal)
    plots = tuple(curve(found, state, cost, before) for state in shown for cost in COSTS)
    tables = tuple(replace(table(found, state), folded=state != shown[0]) for state in shown)
    return Section("comparison", "Methods compared", tuple(words), plots, tables)


def curve(found: Sequence[Summary], state: str, cost: str, before: Mapping[str, Any] | None) -> Plot:
    methods = list(dict.fromkeys(s.method for s in found))
    drawn, axes = blank(SMALL, 3.2 + 0.17 * -(-len(methods) // 3))
    for method, (colour, marker, dash) in zip(methods, CYCLE * (1 + len(methods) // len(CYCLE)), strict=False):
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
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel(COSTS[cost])
    axes.set_title(f"accuracy, {STATES[state].split(',')[0]}", wrap=True)
    drawn.legend(loc="outside lower left", ncols=3)
    return Plot(f"{state}-{cost}", drawn, says(found, state, cost))


def short(value: float) -> str:
    """``125 k``, for an axis."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def says(found: Sequence[Summary], state: str, cost: str) -> str:
    best = [max(group, key=lambda s: s.means[state]) for group in _by_ratio(found, state)]
    words = ", ".join(f"{s.method} at {s.ratio:g} with {s.means[state]:.2%}" for s in best)
    return f"Accuracy {STATES[state]}, against {COSTS[cost]}, a line per method. Best: {words}."


def _by_ratio(found: Sequence[Summary], state: str) -> list[list[Summary]]:
    ratios = sorted({s.ratio for s in found})
    groups = [[s for s in found if s.ratio == ratio and state in s.means] for ratio in ratios]
    return [group for group in groups if group]


def table(found: Sequence[Summary], state: str) -> Table:
    """A row per method and ratio, the best accuracy of a ratio marked."""
    best = {
        s.ratio: max(group, key=lambda s: s.means[state]).method for group in _by_ratio(found, state) for s in group
    }
    rows = tuple(_row(s, state, best.get(s.ratio) == s.method) for s in found)
    return Table(
        f"Accuracy {STATES[state]}; ★ the best at its ratio",
        ("method", "ratio", "accuracy", "parameters", "MACs", "scoring"),
        rows,
    )


def _row(s: Summary, state: str, best: bool) -> tuple[Cell, ...]:
    if state not in s.means:
        return (s.method, Number(f"{s.ratio:g}", s.ratio), "refused" if s.refusal else "missing", "", "", "")
    spread = f" ± {100 * s.stds[state]:.2f}" if s.seeds > 1 else ""
    accuracy = Number(f"{100 * s.means[state]:.2f}{spread} %{' ★' if best else ''}", s.means[state])
    seconds = Number(f"{s.means['seconds']:.2f} s", s.means["seconds"])
    return (
        s.method,
        Number(f"{s.ratio:g}", s.ratio),
        accuracy,
        whole(s.means["params"]),
        large(s.means["macs"]),
        seconds,
    )
