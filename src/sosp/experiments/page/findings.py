"""What the records say about the paper's claims and numbers: rules, not opinions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sosp.experiments.cells import Pruned, Trained
from sosp.experiments.definition import Claim, Experiment, data_of
from sosp.experiments.page.rows import Row, Stat
from sosp.experiments.page.words import asked, examples, percent, printed, time

TOLERANCE = 0.3  # percentage points by which a single run may differ from a number of the paper
FAR = f"more than both deviations together and more than {TOLERANCE} points"
LESS = ("seconds",)  # metrics of which less is better
PLAIN = 10  # times as long: needs no repetition
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "imagenet": 1000}
LUCK = 2  # times what guessing gives: below it two accuracies say nothing about each other
WORDS = {
    "final": "the final accuracy",
    "best": "the best accuracy",
    "zeroed": "the accuracy of θ∖M",
    "cut": "the accuracy of the network that is built, before fine-tuning",
    "recalibrated": "the accuracy with batch norm statistics taken anew, before fine-tuning",
    "seconds": "seconds",
}


@dataclass(frozen=True)
class Finding:
    """A claim on one network at one budget."""

    claim: Claim
    where: str
    verdict: str
    mine: Stat
    other: Stat

    def __str__(self) -> str:
        show = time if self.claim.by in LESS else percent
        found = f"{self.claim.method} {show(self.mine)}, {self.claim.other} {show(self.other)}"
        return f"{self.where}: {found}: {self.verdict}"


def findings(experiment: Experiment, rows: Sequence[Row]) -> Iterator[Finding]:
    """Every claim wherever both of its sides are measured."""
    for claim in experiment.claims:
        for row in rows:
            for other in rows:
                if _opposed(claim, row, other):
                    mine, theirs = row.stat(claim.by), other.stat(claim.by)
                    if mine is not None and theirs is not None:
                        guessed = 1 / CLASSES.get(data_of(row.cell), math.inf)
                        yield Finding(claim, _where(row), verdict(claim, mine, theirs, guessed), mine, theirs)


def _opposed(claim: Claim, row: Row, other: Row) -> bool:
    """The two sides of a claim on one network, that differ in nothing else."""
    mine, theirs = row.cell, other.cell
    if isinstance(mine, Trained) or type(mine) is not type(theirs):
        return False
    if (mine.label, theirs.label) != (claim.method, claim.other) or mine.place != theirs.place:
        return False
    if not isinstance(mine, Pruned) or not isinstance(theirs, Pruned):
        return True
    same = (mine.gate, mine.cycles) == (theirs.gate, theirs.cycles)
    return same and ((mine.budget, mine.examples) == (theirs.budget, theirs.examples) or not claim.same_terms)


def _where(row: Row) -> str:
    if not isinstance(row.cell, Pruned):
        return row.cell.place
    return f"{row.cell.place}, {asked(row.cell)}, gate {row.cell.gate}{examples(row.cell)}"


def verdict(claim: Claim, mine: Stat, other: Stat, guessed: float) -> str:
    """By the larger of the two deviations; a single run on a side decides nothing but times of another order.

    ``guessed``: the accuracy of guessing.
    """
    large, small = max(mine.mean, other.mean), min(mine.mean, other.mean)
    if min(mine.count, other.count) < 2 and not (claim.by in LESS and large > PLAIN * small):
        return "undecided"
    if claim.by not in LESS and large < LUCK * guessed:
        return "near chance"
    ahead = (other.mean - mine.mean) if claim.by in LESS else (mine.mean - other.mean)
    noise = max(mine.std, other.std)
    if claim.relation == "equal":
        return "confirmed" if abs(ahead) <= noise else "different"
    if abs(ahead) <= noise:
        return "within the noise"
    return "confirmed" if ahead > 0 else "contradicted"


# --- numbers --------------------------------------------------------------------------------------------


def departures(rows: Sequence[Row], beside: str) -> Iterator[str]:
    """Accuracies further from the paper's than both deviations together, and than the tolerance."""
    for row in rows:
        paper = row.beside
        if paper is None or not isinstance(row.cell, Pruned):
            continue
        pairs = [(beside, paper.accuracy, paper.std), ("zeroed", paper.before, paper.before_std)]
        for name, value, std in pairs:
            ours = row.stat(name)
            if ours is not None and value is not None and _apart(ours, value, std):
                words = "before fine-tuning (θ∖M)" if name == "zeroed" else name
                yield (
                    f"{_where(row)}, {row.cell.label}, {words}: {percent(ours)}, the paper has {printed(value, std)} "
                    f"(line {paper.line})"
                )


def _apart(ours: Stat, value: float, std: float | None) -> bool:
    return abs(100 * ours.mean - value) > max(100 * ours.std + (std or 0.0), TOLERANCE)
