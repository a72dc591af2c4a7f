"""Write the pages, and see whether those that are there are what the records say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from sosp.errors import RunError
from sosp.experiments.definition import Experiment
from sosp.experiments.page.compose import RULE, claims, is_refuted, page
from sosp.experiments.page.figures import Figure, draw
from sosp.experiments.page.findings import FAR, departures, findings
from sosp.experiments.page.rows import orphans, rows, shortened
from sosp.experiments.page.words import table
from sosp.experiments.runner import state
from sosp.runs import write_text

INDEX = "index.md"
ABOUT = (
    "The paper's experiments, redone with this library. These pages are generated from the records in `results/` by "
    "`sosp reproduce --page docs/results`: our numbers come from records, the paper's from its source, whose line is "
    "given. Accuracies are means and standard deviations over seeds."
)


@dataclass(frozen=True)
class Pages:
    """Texts by file name, and what is drawn."""

    texts: dict[str, str]
    figures: tuple[Figure, ...]


def pages(experiments: Sequence[Experiment], results: Path) -> Pages:
    """What the pages would be."""
    if lost := orphans(experiments, results):
        raise RunError(f"{lost[0]}: is a record of no cell of these experiments. Move it away.")
    texts: dict[str, str] = {INDEX: index(experiments, results)}
    drawn: list[Figure] = []
    for experiment in experiments:
        texts[f"{experiment.name}.md"], more = page(experiment, results)
        drawn += more
    return Pages(texts, tuple(drawn))


def index(experiments: Sequence[Experiment], results: Path) -> str:
    """Which experiments there are, and where they stand."""
    lines = []
    for experiment in experiments:
        found = state(experiment, results)
        counts = [found.count(how) for how in ("done", "refused", "failed")]
        link = f"[{experiment.name}]({experiment.name}.md)"
        short = ", ".join(f"{state(v, results).count('done')} in {e} epochs" for e, v in shortened(experiment, results))
        figures = (len(experiment.cells), *counts, found.missing)
        lines.append([link, experiment.title, *map(str, figures), short or "–"])
    heads = ("experiment", "", "cells", "done", "refused", "failed", "missing", "shortened, done")
    text = ["# Results", "", ABOUT, "", *table(heads, lines, left=2), "", *_refuted(experiments, results)]
    return "\n".join(text).rstrip() + "\n"


def _refuted(experiments: Sequence[Experiment], results: Path) -> list[str]:
    """What could not be confirmed and which accuracies differ, all in one place; and whether anything is decided."""
    lines, apart, decided = ["## What we could not confirm", ""], [], 0
    for experiment in experiments:
        found = rows(experiment, results)
        said = [f for f in findings(experiment, found) if f.verdict != "undecided"]
        decided += len(said)
        link = f"[{experiment.name}]({experiment.name}.md)"
        if against := [finding for finding in said if is_refuted(finding)]:
            lines += [f"### {link}", "", *claims(against)]
        if count := len(list(departures(found, experiment.beside))):
            apart.append(f"- {link}: {count}")
    if not decided:
        lines += ["Nothing is measured with more than one seed yet, so that no claim is decided.", ""]
    elif len(lines) > 2:
        lines += [RULE, ""]
    else:
        lines += ["Of the claims that are decided, all are confirmed.", ""]
    words = f"On their pages, by {FAR}:"
    return [*lines, *(["## Accuracies that differ from the paper's", "", words, "", *apart, ""] if apart else [])]


def write(experiments: Sequence[Experiment], results: Path, folder: Path) -> list[Path]:
    """Write all pages and their index; figures that no page shows any more are removed."""
    written = _keep(pages(experiments, results), folder)
    for path in set(folder.glob("*.svg")) - set(written):
        path.unlink()
    return written


def write_one(experiment: Experiment, results: Path, folder: Path) -> list[Path]:
    """Write the page of an experiment."""
    text, drawn = page(experiment, results)
    return _keep(Pages({f"{experiment.name}.md": text}, tuple(drawn)), folder)


def _keep(found: Pages, folder: Path) -> list[Path]:
    """Figures first: they need matplotlib, and without it nothing is written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [draw(figure, folder) for figure in found.figures]
    for name, text in found.texts.items():
        write_text(folder / name, text)
    return [*(folder / name for name in found.texts), *drawn]


def check(experiments: Sequence[Experiment], results: Path, folder: Path) -> list[str]:
    """How the pages in a folder differ from what the records say; nothing where they are the same."""
    found = pages(experiments, results)
    complaints = []
    for name, text in found.texts.items():
        path = folder / name
        there = path.read_text(encoding="utf-8") if path.is_file() else ""
        if there != text:
            complaints.append(f"{path}: line {_first(there, text)} is not what the records say")
    for figure in found.figures:
        path = folder / f"{figure.name}.svg"
        if not path.is_file() or figure.digest not in path.read_text(encoding="utf-8"):
            complaints.append(f"{path}: is not drawn from these records")
    return complaints


def _first(there: str, wanted: str) -> int:
    """The first line that differs."""
    pairs = zip_longest(there.splitlines(), wanted.splitlines())
    return next((k for k, (a, b) in enumerate(pairs, 1) if a != b), 1)
