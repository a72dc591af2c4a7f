"""From the facts of runs to one page of HTML that needs nothing else, and to PNG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from sosp.app.report import next_steps, run_summary
from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import FormattedNumber, ReportSection, ReportTable
from sosp.app.report.sections import (
    bottlenecks,
    comparison,
    expansion,
    layers,
    losses,
    origin,
    pairs,
    repair,
    run_overview,
    saliency,
    streams,
    training,
)
from sosp.app.report.theme import Plot, render_svg, save_png, use_plot_settings

# In the order of the page; each looks at a run and says nothing where it has nothing to show.
SECTIONS: tuple[Callable[[RunFacts], ReportSection | None], ...] = (
    comparison.build_section,
    expansion.build_section,
    layers.build_section,
    streams.build_section,
    saliency.build_section,
    losses.build_section,
    pairs.build_section,
    repair.build_section,
    bottlenecks.build_section,
    training.build_section,
    next_steps.build_section,
    origin.build_section,
)
NOTES = (
    "Accuracy: on the test data. Parameters and MACs: counted exactly, for one input. Latency: of one call on 8 "
    "inputs; a pruning measures the networks before and after it in turns. Size: of the tensors; a file adds some "
    "kilobytes of names."
)


@dataclass(frozen=True)
class RunReport:
    """One run on the page."""

    key: str
    name: str
    title: str
    story: list[str]
    warning: list[str]
    parent: tuple[str, str] | None  # the run that this one starts from: its name, and its key on this page
    cards: list[run_summary.FigureCard]
    table: ReportTable | None
    sections: list[ReportSection]


def build_run_report(facts: RunFacts, key: str, keys: Mapping[Path, str] | None = None) -> RunReport:
    """Return what the page says of a run; ``keys`` are those of all runs on the page, by their folders."""
    parent = None if facts.parent is None else (facts.parent.name, (keys or {}).get(facts.parent.resolve(), ""))
    sections = [found for look in SECTIONS if (found := look(facts)) is not None]
    return RunReport(
        key,
        facts.name,
        run_summary.format_title(facts),
        run_summary.summarize_run(facts),
        run_summary.explain_large_loss(facts.steps, facts.folder),
        parent,
        run_summary.build_cards(facts),
        run_summary.build_networks_table(facts),
        sections,
    )


def render_page(runs: Sequence[RunFacts]) -> str:
    """The HTML of one run, or of several that are compared."""
    with use_plot_settings():
        several = len(runs) > 1
        keys = {facts.folder.resolve(): f"run{i}-" for i, facts in enumerate(runs)}
        chapters = [build_run_report(facts, f"run{i}-" if several else "", keys) for i, facts in enumerate(runs)]
        start = run_overview.build_section(runs) if several else None
        return render_chapters(chapters, start)


def render_chapters(chapters: Sequence[RunReport], start: ReportSection | None = None, notes: str = NOTES) -> str:
    """Return the page with a chapter per run and, above several, the section ``start``."""
    return create_environment().get_template("page.html").render(chapters=chapters, start=start, notes=notes)


def save_figures(runs: Sequence[RunFacts], folder: Path) -> list[Path]:
    """Every figure as a PNG file in the folder; of several runs with their names in front."""
    with use_plot_settings():
        found: list[tuple[str, Plot]] = []
        for facts in runs:
            front = f"{facts.name}-" if len(runs) > 1 else ""
            found += [(front + plot.name, plot) for part in build_run_report(facts, "").sections for plot in part.plots]
        if len(runs) > 1:
            found += [(plot.name, plot) for plot in run_overview.build_section(runs).plots]
        for name, plot in found:
            save_png(plot, folder / f"{name}.png")
    return [folder / f"{name}.png" for name, _ in found]


def create_environment() -> Environment:
    """Return the templates with their filters; what they insert is escaped."""
    made = Environment(
        loader=PackageLoader("sosp.app.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["svg"] = render_svg
    made.tests["exact"] = lambda cell: isinstance(cell, FormattedNumber)
    return made
