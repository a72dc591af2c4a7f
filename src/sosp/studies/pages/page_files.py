"""Write the pages, and see whether those that are there are what the records say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from sosp.core.text_files import write_text
from sosp.errors import RunError
from sosp.studies.experiment import Experiment
from sosp.studies.pages.drawing import draw_figure
from sosp.studies.pages.figures import Figure
from sosp.studies.pages.number_format import format_table
from sosp.studies.pages.page_text import format_claims, is_refuted, make_page
from sosp.studies.pages.result_rows import collect_rows, find_short_variants, find_unknown_records
from sosp.studies.pages.verdicts import (
    FAR,
    GOOD,
    LOST,
    OPEN,
    RULE,
    SHORT,
    VERDICTS,
    ClaimFinding,
    find_deviations,
    judge_claims,
)
from sosp.studies.runner import read_experiment_state

INDEX = "index.md"
ABOUT = (
    "The paper's experiments, redone with this library. These pages are generated from the records in `results/` by "
    "`sosp reproduce --page docs/results`: our numbers come from records, the paper's from its source, whose line is "
    "given. Accuracies are means and standard deviations over seeds."
)

READ = """## How to read it

- **Methods** are called as in [the list of methods](../reference/methods.md): `obd-diagonal` is C-OBD, `slimming` is NN
  Slimming, `slimming-l1` the same on a network trained for it, `sosp-h*` is scaled by kernel size. *shuffled*: as many
  structures of every layer, but others; *init*: pruned before any training; *twice*: trained in two cycles; *expand*,
  *widen*: of a network made wider where it is too narrow, or everywhere; *rate*: fine-tuned at that rate, where the
  network was trained at another.
- **Gate**: what is scaled to ask what a removal does. `weights` are those that lead into a structure, as in the paper;
  `features` is what comes out of it, behind its batch norm ([gates](../ideas/gates.md)).
- **Asked for** is what was to be removed, as a share of all structures, or to be left; **examples** is how many
  training images a method scored with; **cap** is the largest share that one layer may lose.
- **Accuracies**: *final* after fine-tuning and the *best* on the way; before it, *θ∖M* with the weights of removed
  structures zeroed, *cut* of the network that is built, *renewed* of the same with batch norm statistics taken anew.
- **Random** is pruning at random; **guessing** is what a network does that knows nothing.
- **A seed** draws the examples and the order of the fine-tuning; all seeds of a row begin with the same network unless
  the page says otherwise. Scores on a GPU and on a CPU differ in their last digits, and with them a few of the
  structures that are chosen: cells of the same name on two pages may have been measured on different devices.
- **Lines** are those of the source of the paper (arXiv 2110.11395).
""".splitlines()


@dataclass(frozen=True)
class ResultsPages:
    """Texts by file name, and what is drawn."""

    texts: dict[str, str]
    figures: tuple[Figure, ...]


def make_pages(experiments: Sequence[Experiment], results: Path) -> ResultsPages:
    """What the pages would be."""
    if lost := find_unknown_records(experiments, results):
        raise RunError(f"{lost[0]}: is a record of no cell of these experiments. Move it away.")
    texts: dict[str, str] = {INDEX: make_index(experiments, results)}
    drawn: list[Figure] = []
    for experiment in experiments:
        texts[f"{experiment.name}.md"], more = make_page(experiment, results)
        drawn += more
    return ResultsPages(texts, tuple(drawn))


def make_index(experiments: Sequence[Experiment], results: Path) -> str:
    """Which experiments there are, and where they stand."""
    lines = []
    for experiment in experiments:
        found = read_experiment_state(experiment, results)
        counts = [found.count(how) for how in ("done", "refused", "failed")]
        link = _link(experiment)
        short = ", ".join(
            f"{read_experiment_state(v, results).count('done')} in {e} epochs"
            for e, v in find_short_variants(experiment, results)
        )
        figures = (len(experiment.cells), *counts, found.missing)
        lines.append([link, experiment.title, *map(str, figures), short or "–"])
    heads = ("experiment", "", "cells", "done", "refused", "failed", "missing", "shortened, done")
    text = [
        "# Results",
        "",
        ABOUT,
        "",
        *format_table(heads, lines, left=2),
        "",
        *_summarise_claims(experiments, results),
        *READ,
    ]
    return "\n".join(text).rstrip() + "\n"


def _link(experiment: Experiment) -> str:
    return f"[{experiment.name}]({experiment.name}.md)"


def _summarise_claims(experiments: Sequence[Experiment], results: Path) -> list[str]:
    """How often every claim holds, where it does and where not, and which accuracies differ: all in one place."""
    counted: list[list[str]] = []
    decided = False
    apart: list[str] = []
    good: list[str] = []
    against: list[str] = []
    for experiment, link in _list_variants(experiments, results):
        found = collect_rows(experiment, results)
        said = list(judge_claims(experiment, found))
        counted += _counted(link, said)
        decided |= any(finding.verdict != OPEN for finding in said)
        for lines, chosen in ((good, lambda f: f.verdict == GOOD), (against, is_refuted)):
            part = [finding for finding in said if chosen(finding)]
            lines += [f"### {link}", "", *format_claims(part)] if part else []
        if count := len(list(find_deviations(found, experiment.compared_metric))):
            apart.append(f"- {link}: {count}")
    if not decided:
        against = ["Nothing is measured with enough seeds yet, so that no claim is decided.", ""]
    lines = ["## What the paper claims", "", *format_table(HEADS, counted, left=5), "", RULE, ""] if counted else []
    lines += ["## What we could confirm", "", *good] if good else []
    lines += ["## What we could not confirm", "", *(against or ["Of the claims that are decided, all hold.", ""])]
    words = f"On their pages, by {FAR}:"
    return [*lines, *(["## Accuracies that differ from the paper's", "", words, "", *apart, ""] if apart else [])]


def _list_variants(experiments: Sequence[Experiment], results: Path) -> Iterator[tuple[Experiment, str]]:
    """Every experiment, and the shorter ones there are records of, each with a link to its part of a page."""
    for experiment in experiments:
        yield experiment, _link(experiment)
        for epochs, variant in find_short_variants(experiment, results):
            yield variant, f"[{experiment.name}, in {epochs} epochs]({experiment.name}.md#in-{epochs}-epochs)"


HEADS = ("claim", "methods", "by", "experiment", "found", "seeds in favour")


def _counted(link: str, said: Sequence[ClaimFinding]) -> list[list[str]]:
    """A line for every claim of an experiment on two methods: how many comparisons have which verdict."""
    groups: dict[tuple[str, str, str], list[ClaimFinding]] = {}
    for finding in said:
        claim = finding.claim
        text = claim.text if claim.line is None else f"{claim.text} (line {claim.line})"
        groups.setdefault((text, f"{claim.method}; {claim.other}", SHORT[claim.by]), []).append(finding)
    return [[*key, link, *_counts(found)] for key, found in groups.items()]


def _counts(found: Sequence[ClaimFinding]) -> list[str]:
    """Of every verdict; and of how many pairs of runs that are above guessing the first is the better one."""
    verdicts = Counter(finding.verdict for finding in found)
    better = [f for f in found if f.claim.relation == "better" and f.verdict != LOST]
    points = [points for finding in better for points in finding.differences]
    ahead = f"{sum(p > 0 for p in points)} of {len(points)}" if points else "–"
    return [", ".join(f"{verdicts[v]} {v}" for v in VERDICTS if verdicts[v]), ahead]


def write_pages(experiments: Sequence[Experiment], results: Path, folder: Path) -> list[Path]:
    """Write all pages and their index; figures that no page shows any more are removed."""
    written = _keep(make_pages(experiments, results), folder)
    for path in set(folder.glob("*.svg")) - set(written):
        path.unlink()
    return written


def write_page(experiment: Experiment, results: Path, folder: Path) -> list[Path]:
    """Write the page of an experiment."""
    text, drawn = make_page(experiment, results)
    return _keep(ResultsPages({f"{experiment.name}.md": text}, tuple(drawn)), folder)


def _keep(found: ResultsPages, folder: Path) -> list[Path]:
    """Figures first: they need matplotlib, and without it nothing is written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [draw_figure(figure, folder) for figure in found.figures]
    for name, text in found.texts.items():
        write_text(folder / name, text)
    return [*(folder / name for name in found.texts), *drawn]


def check_pages(experiments: Sequence[Experiment], results: Path, folder: Path) -> list[str]:
    """How the pages in a folder differ from what the records say; nothing where they are the same."""
    found = make_pages(experiments, results)
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
