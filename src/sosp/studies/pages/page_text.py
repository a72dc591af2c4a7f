"""The text of an experiment's page, from its records and the paper's data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sosp.errors import RunError
from sosp.studies.cells import PrunedCell, TrainedCell
from sosp.studies.experiment import Experiment
from sosp.studies.pages.figures import Figure, make_figures
from sosp.studies.pages.page_tables import make_tables
from sosp.studies.pages.result_rows import ResultRow, collect_rows, find_short_variants
from sosp.studies.pages.verdicts import (
    FAR,
    GOOD,
    LOST,
    OPEN,
    RULE,
    RUNS,
    WORDS,
    ClaimFinding,
    find_deviations,
    judge_claims,
)

REMARKS = "remarks.txt"  # beside the records of an experiment, by hand
DIGITS = re.compile(r"\d")
NAMES = re.compile(r"`[^`]*`")  # may have digits, as in the address of weights
DIRTY = "`-dirty`: with changes that were not committed."
FULL = re.compile(r"^([0-9a-f]{7})[0-9a-f]{33}")  # git's name of a commit, of which seven characters are enough


def make_page(experiment: Experiment, results: Path) -> tuple[str, list[Figure]]:
    """The text, and what is drawn for it."""
    found = collect_rows(experiment, results)
    drawn = make_figures(experiment, found)
    lines = [f"# {experiment.title}", "", f"In the paper: {experiment.where}.", "", *_bullets(experiment.notes)]
    lines += [f"Command: `sosp reproduce {experiment.command}{_given(found)}`.", "", *_origin(experiment, found), ""]
    lines += [
        "## Ours and the paper's",
        "",
        *make_tables(found, experiment.published, experiment.compared_metric),
        *_shown(drawn),
    ]
    lines += _verdicts(experiment, found)
    for epochs, variant in find_short_variants(experiment, results):
        some = [row for row in collect_rows(variant, results) if row.records]
        more = make_figures(variant, some, f"-e{epochs}")
        what = "fine-tuning" if _given(some) else "training"
        lines += [f"## In {epochs} epochs", "", f"Every {what} has {epochs} epochs (`--epochs {epochs}`).", ""]
        tables = make_tables(some, (), variant.compared_metric, legend=False)
        lines += [*_origin(variant, some), "", *tables, *_shown(more)]
        lines += _verdicts(variant, some, ruled=RULE in lines)
        drawn += more
    lines += [*_remarks(experiment, results), *_missing(experiment, found)]
    return "\n".join(lines).rstrip() + "\n", drawn


def _bullets(words: Iterable[str]) -> list[str]:
    found = [f"- {word}" for word in words]
    return [*found, ""] if found else []


def _shown(drawn: Sequence[Figure]) -> list[str]:
    return [line for figure in drawn for line in (f"![{figure.title}]({figure.name}.svg)", "")]


def _given(found: Sequence[ResultRow]) -> str:
    """The option with which weights were given."""
    given = [
        row.cell.network
        for row in found
        if isinstance(row.cell, TrainedCell) and any(str(r.facts.get("source")).startswith("given") for r in row.done)
    ]
    return "".join(f" --weights {network}=FILE" for network in dict.fromkeys(given))


def _origin(experiment: Experiment, found: Sequence[ResultRow]) -> list[str]:
    """What the figures were measured with, device by device."""
    if not any(row.records for row in found if row.cell in experiment.cells):
        return ["Nothing is measured yet."]
    records = [record for row in found for record in row.records]
    places = [place for record in records for place in (*record.facts.get("parts", ()), record.origin)]
    lines = []
    for hardware in dict.fromkeys(str(place["hardware"]) for place in places):
        mine = [place for place in places if str(place["hardware"]) == hardware]
        commits = _all(FULL.sub(r"\1", str(place["commit"])) for place in mine)
        lines.append(f"{hardware}: torch {_all(str(place['torch']) for place in mine)}, commit {commits}")
    dirty = any(str(place["commit"]).endswith("-dirty") for place in places)
    return ["Measured on", "", *_bullets(lines), *([DIRTY, ""] if dirty else [])][:-1]


def _all(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


# --- what the records say -------------------------------------------------------------------------------


def _verdicts(experiment: Experiment, found: Sequence[ResultRow], *, ruled: bool = False) -> list[str]:
    """What is confirmed, what is not, by which rule unless it stands above, and numbers that differ."""
    said = list(judge_claims(experiment, found))
    lines = []
    for title, chosen in SAID.items():
        part = [finding for finding in said if chosen(finding)]
        lines += [f"### {title}", "", *format_claims(part)] if part else []
    lines += [RULE, ""] if said and not ruled else []
    if apart := list(find_deviations(found, experiment.compared_metric)):
        lines += ["### Accuracies that differ from the paper's", ""]
        lines += [f"By {FAR}:", "", *_bullets(apart)]
    return lines + _starts(found)


def is_refuted(finding: ClaimFinding) -> bool:
    """Enough runs, and they do not say what the paper says."""
    return finding.verdict not in (GOOD, LOST, OPEN)


SAID: dict[str, Callable[[ClaimFinding], bool]] = {
    "What we could confirm": lambda finding: finding.verdict == GOOD,
    "What we could not confirm": is_refuted,
    "Near guessing: nothing can be said": lambda finding: finding.verdict == LOST,
    f"Undecided: fewer than {RUNS} seeds on both sides": lambda finding: finding.verdict == OPEN,
}


def format_claims(said: Sequence[ClaimFinding]) -> list[str]:
    """Every sentence of the paper with the findings on it; one may compare several pairs of methods."""
    found: dict[str, list[str]] = {}
    for finding in said:
        claim = finding.claim
        said_by = "Not said in the paper" if claim.line is None else f"In the paper (line {claim.line})"
        sentence = f"{said_by}: {claim.text}. By {WORDS[claim.by]}:"
        found.setdefault(sentence, []).append(str(finding))
    return [line for sentence, pairs in found.items() for line in (sentence, "", *_bullets(pairs))]


def _starts(found: Sequence[ResultRow]) -> list[str]:
    """Runs that began with a network of one name but did not begin with the same one."""
    begun: dict[str, dict[str, tuple[float, list[str]]]] = {}
    for row in found:
        for record in row.done:
            if isinstance(row.cell, PrunedCell) and "sha256" in record.start:
                name, sha = str(record.start.get("name", row.cell.start.name)), str(record.start["sha256"])
                whole = begun.setdefault(name, {}).setdefault(sha, (record.start.get("accuracy", 0.0), []))
                whole[1].append(row.cell.label)
    lines = [
        f"{name} with {100 * accuracy:.2f}: {_all(labels)}"
        for name, networks in begun.items()
        if len(networks) > 1
        for accuracy, labels in networks.values()
    ]
    words = "A network was trained more than once; what began with which one:"
    return [words, "", *_bullets(lines)] if lines else []


# --- by hand, and what is missing -----------------------------------------------------------------------


def _remarks(experiment: Experiment, results: Path) -> list[str]:
    """Words without numbers: those come from records only."""
    path = results / experiment.name / REMARKS
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8").strip()
    words = NAMES.sub("", text)
    if (digit := DIGITS.search(words)) is not None:
        near = words[max(digit.start() - 30, 0) : digit.end() + 10]
        raise RunError(f"{path}: has a number ({near!r}). Numbers come from records; say it in words.")
    return ["## Remarks", "", text, ""]


def _missing(experiment: Experiment, found: Sequence[ResultRow]) -> list[str]:
    """Network by network how many cells are missing, and what was refused or failed."""
    lines, cells = [], [row for row in found if row.cell in experiment.cells]
    for place in dict.fromkeys(row.cell.place for row in cells):
        mine = [row for row in cells if row.cell.place == place]
        wanted, done = sum(row.wanted for row in mine), sum(len(row.done) for row in mine)
        lines += [f"{place}: {wanted - done} of {wanted} cells"] if done < wanted else []
    lines += [f"{r.name} was {r.state}: {r.reason}" for row in found for r in row.records if r.state != "done"]
    return ["## Missing", "", *_bullets(lines)] if lines else []
