"""What the records say about the paper's claims and numbers: rules, not opinions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean

from sosp.studies.cells import PrunedCell, TrainedCell
from sosp.studies.experiment import BASELINE, Claim, Experiment, find_dataset
from sosp.studies.pages.number_format import (
    NONE,
    format_cell_budget,
    format_example_suffix,
    format_gate,
    format_percent,
    format_published,
    format_seconds,
    format_size,
)
from sosp.studies.pages.result_rows import ResultRow, Stat

TOLERANCE = 0.3  # percentage points by which a single run may differ from a number of the paper
FAR = f"more than both deviations together and more than {TOLERANCE} points"
LESS = ("seconds",)  # metrics of which less is better
RUNS = 3  # seeds that both sides have: with fewer nothing is decided
BEYOND = 2  # standard deviations: with three seeds chance gives a mean difference beyond them once in 27 times
MARGIN = 0.5  # percentage points by which two methods that are on par may differ
PLAIN = 10  # times as long: needs no repetition
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "imagenet": 1000}
LUCK = 2  # times what guessing gives: below it two accuracies say nothing about each other
GOOD, OPEN, LOST = "confirmed", "undecided", "near guessing"
NOISE, AGAINST, APART = "within the noise", "contradicted", "different"
VERDICTS = (GOOD, NOISE, AGAINST, APART, LOST, OPEN)
WORDS = {
    "final": "the final accuracy",
    "best": "the best accuracy",
    "zeroed": "the accuracy of θ∖M",
    "cut": "the accuracy of the network that is built, before fine-tuning",
    "recalibrated": "the accuracy with batch norm statistics taken anew, before fine-tuning",
    "seconds": "seconds",
}
SHORT = {**{name: name for name in WORDS}, "zeroed": "θ∖M", "recalibrated": "renewed"}  # as tables call them
RULE = (
    "Two methods are compared seed by seed, which gives both the same examples and the same order of training. A claim "
    f"that one is better is confirmed where the mean of the differences is larger than {BEYOND} of their standard "
    "deviations, contradicted where it is so the other way round, and within the noise else. Two methods are on par "
    f"where mean and deviation of the differences are both at most {MARGIN} points, different where the mean is larger "
    f"than that and than {BEYOND} deviations; so of two that are on par one can still be the better one. With fewer "
    f"than {RUNS} seeds on both sides nothing is decided. Where even the better of the two is below {LUCK} times the "
    "accuracy of guessing, nothing is read into the difference. Times are compared by their means, with "
    f"{BEYOND} times the larger of their deviations; a single measurement decides if it is more than {PLAIN}-fold."
)


@dataclass(frozen=True)
class ClaimFinding:
    """A claim on one network at one budget."""

    claim: Claim
    where: str
    verdict: str
    mine: Stat
    other: Stat
    differences: tuple[float, ...] = ()  # in points, seed by seed
    more: tuple[str, ...] = ()  # sizes, the paper's own numbers

    def __str__(self) -> str:
        show = format_seconds if self.claim.by in LESS else format_percent
        found = f"{self.claim.method} {show(self.mine)}, {self.claim.other} {show(self.other)}"
        seeds = ", ".join(f"{points:+.2f}" for points in self.differences)
        notes = [*([f"by seed {seeds}"] if seeds else []), *self.more]
        more = f" ({'; '.join(notes)})" if notes else ""
        return f"{self.where}: {found}{more}: {self.verdict}"


def judge_claims(experiment: Experiment, rows: Sequence[ResultRow]) -> Iterator[ClaimFinding]:
    """Every claim wherever both of its sides are measured."""
    for claim in experiment.claims:
        if claim.other == BASELINE:
            found = [_compare_with_baseline(claim, row) for row in rows if _is_about(claim, row)]
        else:
            pairs = [(row, other) for row, other in product(rows, rows) if _is_pair(claim, row, other)]
            found = [_compare_rows(claim, *pair, experiment.compared_metric) for pair in pairs]
        yield from (finding for finding in found if finding is not None)


def _is_about(claim: Claim, row: ResultRow) -> bool:
    """Is it the row of the method that a claim is made for?"""
    cell = row.cell
    if isinstance(cell, TrainedCell) or cell.label != claim.method or (claim.places and cell.place not in claim.places):
        return False
    return claim.budget is None or (isinstance(cell, PrunedCell) and cell.budget == claim.budget)


def _is_pair(claim: Claim, row: ResultRow, other: ResultRow) -> bool:
    """The two sides of a claim on one network, that differ in nothing else."""
    mine, theirs = row.cell, other.cell
    if not _is_about(claim, row) or isinstance(theirs, TrainedCell) or type(mine) is not type(theirs):
        return False
    if theirs.label != claim.other or mine.place != theirs.place:
        return False
    if not isinstance(mine, PrunedCell) or not isinstance(theirs, PrunedCell):
        return True
    same = (mine.budget, mine.examples) == (theirs.budget, theirs.examples)
    return mine.gate == theirs.gate and (same or not claim.same_terms)


def _compare_rows(claim: Claim, row: ResultRow, other: ResultRow, beside: str) -> ClaimFinding | None:
    mine, theirs = row.stat(claim.by), other.stat(claim.by)
    if mine is None or theirs is None:
        return None
    if claim.by in LESS:
        return ClaimFinding(claim, _where(row), judge_seconds(mine, theirs), mine, theirs)
    first, second = row.by_seed(claim.by), other.by_seed(claim.by)
    pairs = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
    more = [*_sizes(row, other), *_begun(row, other), *_theirs(claim, row, other, beside)]
    found = judge_pairs(claim, pairs, _guess_accuracy(row))
    return ClaimFinding(claim, _where(row), found, mine, theirs, _differences(pairs), tuple(more))


def _compare_with_baseline(claim: Claim, row: ResultRow) -> ClaimFinding | None:
    """Beside the network that was pruned."""
    pairs = [(record.metrics[claim.by], record.start["accuracy"]) for record in row.done if claim.by in record.metrics]
    mine, whole = Stat.of(a for a, _ in pairs), Stat.of(b for _, b in pairs)
    if mine is None or whole is None:
        return None
    found = judge_pairs(claim, pairs, _guess_accuracy(row))
    return ClaimFinding(claim, _where(row), found, mine, whole, _differences(pairs))


def _differences(pairs: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    return tuple(100 * (mine - other) for mine, other in pairs)


def _sizes(row: ResultRow, other: ResultRow) -> list[str]:
    """Of both sides, where they are networks."""
    shown = []
    for name, words in {"params": "parameters", "macs": "MACs"}.items():
        sides = [stat for side in (row, other) if (stat := side.stat(name)) is not None]
        shown += [f"{' and '.join(format_size(stat.mean) for stat in sides)} {words}"] if len(sides) == 2 else []
    return shown


def _begun(row: ResultRow, other: ResultRow) -> list[str]:
    """The accuracies of the networks that were pruned, where the two sides did not begin with the same ones."""
    starts = [
        {record.start.get("sha256"): record.start.get("accuracy") for record in side.done} for side in (row, other)
    ]
    if starts[0].keys() == starts[1].keys():
        return []
    whole = [Stat.of(share for share in side.values() if share is not None) for side in starts]
    return [f"of networks that had {' and '.join(format_percent(stat) for stat in whole)}"] if all(whole) else []


def _theirs(claim: Claim, row: ResultRow, other: ResultRow, beside: str) -> list[str]:
    """What the paper has for both sides, by the same accuracy."""
    paper = (row.beside, other.beside)
    if claim.by == "zeroed":
        shown = [format_published(p.before, p.before_std) for p in paper if p is not None and p.before is not None]
    else:
        same = claim.by == beside
        shown = [
            format_published(p.accuracy, p.std) for p in paper if same and p is not None and p.accuracy is not None
        ]
    return [f"the paper has {' and '.join(shown)}"] if len(shown) == 2 else []


def _guess_accuracy(row: ResultRow) -> float:
    """The accuracy of guessing."""
    return 1 / CLASSES.get(find_dataset(row.cell), math.inf)


def _where(row: ResultRow) -> str:
    if not isinstance(row.cell, PrunedCell):
        return row.cell.place
    gated = "" if format_gate(row.cell) == NONE else f", gate {format_gate(row.cell)}"
    return f"{row.cell.place}, {format_cell_budget(row.cell)}{gated}{format_example_suffix(row.cell)}"


def judge_pairs(claim: Claim, pairs: Sequence[tuple[float, float]], guessed: float) -> str:
    """Of two accuracies seed by seed; ``guessed`` is that of guessing."""
    if len(pairs) < RUNS:
        return OPEN
    if max(mean(side) for side in zip(*pairs, strict=True)) < LUCK * guessed:
        return LOST
    ahead = Stat.of(_differences(pairs))
    assert ahead is not None
    clear = abs(ahead.mean) > BEYOND * ahead.std
    if claim.relation == "equal":
        if abs(ahead.mean) <= MARGIN:
            return GOOD if ahead.std <= MARGIN else NOISE
        return APART if clear else NOISE
    if not clear:
        return NOISE
    return GOOD if ahead.mean > 0 else AGAINST


def judge_seconds(mine: Stat, other: Stat) -> str:
    """Is the first one?"""
    large, small = max(mine.mean, other.mean), min(mine.mean, other.mean)
    if min(mine.count, other.count) < 2 and large <= PLAIN * small:
        return OPEN
    if large - small <= BEYOND * max(mine.std, other.std):
        return NOISE
    return GOOD if mine.mean < other.mean else AGAINST


# --- numbers --------------------------------------------------------------------------------------------


def find_deviations(rows: Sequence[ResultRow], beside: str) -> Iterator[str]:
    """Accuracies further from the paper's than both deviations together, and than the tolerance."""
    for row in rows:
        paper = row.beside
        if paper is None or not isinstance(row.cell, PrunedCell):
            continue
        pairs = [(beside, paper.accuracy, paper.std), ("zeroed", paper.before, paper.before_std)]
        for name, value, std in pairs:
            ours = row.stat(name)
            if ours is not None and value is not None and _differs(ours, value, std):
                words = "before fine-tuning (θ∖M)" if name == "zeroed" else name
                once = " with a single run" if ours.count == 1 else ""
                yield (
                    f"{_where(row)}, {row.cell.label}, {words}: {format_percent(ours)}{once}, the paper has "
                    f"{format_published(value, std)} (line {paper.line})"
                )


def _differs(ours: Stat, value: float, std: float | None) -> bool:
    return abs(100 * ours.mean - value) > max(100 * ours.std + (std or 0.0), TOLERANCE)
