"""From the facts of runs to one page of HTML that needs nothing else, and to PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from sosp.app.report import headline, steps
from sosp.app.report.facts import Facts
from sosp.app.report.section import Number, Section, Table
from sosp.app.report.sections import (
    bottlenecks,
    comparison,
    expansion,
    joined,
    layers,
    losses,
    origin,
    pairs,
    repair,
    saliency,
    streams,
    training,
)
from sosp.app.report.theme import Plot, as_svg, drawing, save_png

# In the order of the page; each looks at a run and says nothing where it has nothing to show.
SECTIONS: tuple[Callable[[Facts], Section | None], ...] = (
    comparison.section,
    expansion.section,
    layers.section,
    streams.section,
    saliency.section,
    losses.section,
    pairs.section,
    repair.section,
    bottlenecks.section,
    training.section,
    steps.section,
    origin.section,
)


@dataclass(frozen=True)
class Chapter:
    """One run on the page."""

    key: str
    name: str
    title: str
    story: list[str]
    cards: list[headline.Card]
    table: Table | None
    sections: list[Section]


def chapter(facts: Facts, key: str) -> Chapter:
    sections = [found for look in SECTIONS if (found := look(facts)) is not None]
    return Chapter(
        key,
        facts.name,
        headline.title(facts),
        headline.story(facts),
        headline.cards(facts),
        headline.table(facts),
        sections,
    )


def page(runs: Sequence[Facts]) -> str:
    """The HTML of one run, or of several beside each other."""
    with drawing():
        several = len(runs) > 1
        chapters = [chapter(facts, f"run{i}-" if several else "") for i, facts in enumerate(runs)]
        start = joined.section(runs) if several else None
        return _environment().get_template("page.html").render(chapters=chapters, start=start)


def pictures(runs: Sequence[Facts], folder: Path) -> list[Path]:
    """Every figure as a PNG file in the folder; of several runs with their names in front."""
    with drawing():
        found: list[tuple[str, Plot]] = []
        for facts in runs:
            front = f"{facts.name}-" if len(runs) > 1 else ""
            found += [(front + plot.name, plot) for part in chapter(facts, "").sections for plot in part.plots]
        if len(runs) > 1:
            found += [(plot.name, plot) for plot in joined.section(runs).plots]
        for name, plot in found:
            save_png(plot, folder / f"{name}.png")
    return [folder / f"{name}.png" for name, _ in found]


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("sosp.app.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["svg"] = as_svg
    made.tests["exact"] = lambda cell: isinstance(cell, Number)
    return made
