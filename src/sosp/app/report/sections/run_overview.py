"""Compare several runs: a row for each, and accuracy against MACs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter, PercentFormatter

from sosp.app.report.run_facts import RunFacts
from sosp.app.report.run_summary import FIGURE_FORMATS, format_title, list_networks, measure_way
from sosp.app.report.section import ReportSection, ReportTable, TableCell
from sosp.app.report.sections.comparison import LINE_STYLES, format_tick
from sosp.app.report.theme import MUTED, Plot, create_figure


def build_section(runs: Sequence[RunFacts]) -> ReportSection:
    """Return the last network of every run, and the run that each starts from."""
    numbers = {run.folder.resolve(): f"run {i}" for i, run in enumerate(runs, 1)}
    rows = [
        (f"{numbers[run.folder.resolve()]}: {run.name}", _name_parent(run, numbers), format_title(run), *_cells(run))
        for run in runs
    ]
    head = ("run", "starts from", "network", "state", *(name for name, _ in FIGURE_FORMATS.values()))
    if len({row[2] for row in rows}) == 1:  # the same network, which the title of each chapter names
        head, rows = (*head[:2], *head[3:]), [(*row[:2], *row[3:]) for row in rows]
    table = ReportTable("The runs", head, tuple(rows))
    measured = [run for run in runs if measure_way(run.steps)]
    plots = (points(measured),) if len(measured) > 1 else ()
    return ReportSection("runs", "The runs compared", (), plots, (table,))


def _name_parent(run: RunFacts, numbers: Mapping[Path, str]) -> str:
    return "" if run.parent is None else numbers.get(run.parent.resolve(), run.parent.name)


def _cells(run: RunFacts) -> list[TableCell]:
    rows = list_networks(run.steps)
    if not rows:
        return ["compared" if run.summaries else "not finished", *("" for _ in FIGURE_FORMATS)]
    name, figures = rows[-1]
    return [
        name,
        *("" if figures.get(key) is None else show(figures[key]) for key, (_, show) in FIGURE_FORMATS.items()),
    ]


def points(runs: Sequence[RunFacts]) -> Plot:
    """Return the way of every run, from the first network of the runs that it starts from to its last."""
    drawn, axes = create_figure(5.6, 3.3 + 0.17 * len(runs))
    for run, (colour, marker, _) in zip(runs, LINE_STYLES * (1 + len(runs) // len(LINE_STYLES)), strict=False):
        known = [figures for _, figures in list_networks(run.steps) if "top1" in figures]
        place = [(figures["macs"], figures["top1"]) for figures in known]
        axes.plot(*zip(*place, strict=True), "-", color=MUTED, linewidth=0.8, marker="o", markersize=3)
        axes.plot(*place[-1], marker, color=colour, markersize=7, linestyle="none", label=run.name)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axes.set_xlabel("MACs")
    axes.set_title("accuracy: lines connect a run's last network to those it came from")
    drawn.legend(loc="outside lower left")
    return Plot("runs", drawn, f"Accuracy against MACs of {len(runs)} runs.")
