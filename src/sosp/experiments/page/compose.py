"""The text of an experiment's page, from its records and the paper's data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sosp.errors import RunError
from sosp.experiments.definition import Experiment
from sosp.experiments.page.figures import Figure, figures
from sosp.experiments.page.findings import FAR, LUCK, PLAIN, WORDS, Finding, departures, findings
from sosp.experiments.page.rows import Row, rows, shortened
from sosp.experiments.page.tables import tables

REMARKS = "remarks.txt"  # beside the records of an experiment, by hand
DIGITS = re.compile(r"\d")
FULL = re.compile(r"^([0-9a-f]{7})[0-9a-f]{33}")  # git's name of a commit, of which seven characters are enough
RULE = (
    "A claim is confirmed where the difference of the means is larger than the larger of the two standard deviations, "
    "contradicted where it is so the other way round; two methods are as good where it is not larger. With a single "
    f"run on one side nothing is decided, except by times that differ more than {PLAIN}-fold. Accuracies below {LUCK} "
    "times that of guessing are near chance, and nothing is read into their difference."
)


def page(experiment: Experiment, results: Path) -> tuple[str, list[Figure]]:
    """The text, and what is drawn for it."""
    found = rows(experiment, results)
    drawn = figures(experiment, found)
    lines = [f"# {experiment.title}", "", f"In the paper: {experiment.where}.", "", *_bullets(experiment.notes)]
    lines += [f"Command: `sosp reproduce {experiment.command}`.", "", *_origin(found), ""]
    lines += ["## Ours and the paper's", "", *tables(found, experiment.published, experiment.beside), *_shown(drawn)]
    lines += _verdicts(experiment, found)
    for epochs, variant in shortened(experiment, results):
        some = [row for row in rows(variant, results) if row.records]
        more = figures(variant, some, f"-e{epochs}")
        lines += [f"## In {epochs} epochs", "", f"Every training has {epochs} epochs (`--epochs {epochs}`).", ""]
        lines += [*_origin(some), "", *tables(some, (), variant.beside), *_shown(more), *_verdicts(variant, some)]
        drawn += more
    lines += [*_remarks(experiment, results), *_missing(found)]
    return "\n".join(lines).rstrip() + "\n", drawn


def _bullets(words: Iterable[str]) -> list[str]:
    found = [f"- {word}" for word in words]
    return [*found, ""] if found else []


def _shown(drawn: Sequence[Figure]) -> list[str]:
    return [line for figure in drawn for line in (f"![{figure.title}]({figure.name}.svg)", "")]


def _origin(found: Sequence[Row]) -> list[str]:
    """What the figures were measured with."""
    records = [record for row in found for record in row.records]
    if not records:
        return ["Nothing is measured yet."]
    places = [place for record in records for place in (*record.facts.get("parts", ()), record.origin)]
    hardware, torch = (_all(str(place[key]) for place in places) for key in ("hardware", "torch"))
    commit = _all(FULL.sub(r"\1", str(place["commit"])) for place in places)
    return [f"Measured on {hardware}, torch {torch}, commit {commit}."]


def _all(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


# --- what the records say -------------------------------------------------------------------------------


def _verdicts(experiment: Experiment, found: Sequence[Row]) -> list[str]:
    """What is confirmed, what is not, and numbers that differ."""
    said = list(findings(experiment, found))
    good = [finding for finding in said if finding.verdict == "confirmed"]
    rest = [finding for finding in said if is_refuted(finding)]
    open_ = [finding for finding in said if finding.verdict == "undecided"]
    lines = ["### What we could confirm", "", *claims(good)] if good else []
    lines += ["### What we could not confirm", "", *claims(rest)] if rest else []
    lines += ["### Undecided: one run on a side", "", *claims(open_)] if open_ else []
    lines += [RULE, ""] if said else []
    if apart := list(departures(found, experiment.beside)):
        lines += ["### Accuracies that differ from the paper's", ""]
        lines += [f"By {FAR}:", "", *_bullets(apart)]
    return lines + _starts(found)


def is_refuted(finding: Finding) -> bool:
    """Enough runs, and they do not say what the paper says."""
    return finding.verdict not in ("confirmed", "undecided")


def claims(said: Sequence[Finding]) -> list[str]:
    """Every sentence of the paper with the findings on it; one may compare several pairs of methods."""
    found: dict[str, list[str]] = {}
    for finding in said:
        claim = finding.claim
        sentence = f'"{_capital(claim.text)}" (line {claim.line} of the paper), by {WORDS[claim.by]}:'
        found.setdefault(sentence, []).append(str(finding))
    return [line for sentence, pairs in found.items() for line in (sentence, "", *_bullets(pairs))]


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _starts(found: Sequence[Row]) -> list[str]:
    """Runs that began with a network of one name must have begun with the same one."""
    mixed = [row for row in found if len(_shas(row)) > len({name for name, _ in _shas(row)})]
    words = "Runs of one row began with different networks of the same name:"
    return [words, "", *_bullets(row.cell.name for row in mixed)] if mixed else []


def _shas(row: Row) -> set[tuple[object, object]]:
    return {(record.start.get("name"), record.start.get("sha256")) for record in row.done}


# --- by hand, and what is missing -----------------------------------------------------------------------


def _remarks(experiment: Experiment, results: Path) -> list[str]:
    """Words without numbers: those come from records only."""
    path = results / experiment.name / REMARKS
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8").strip()
    if (digit := DIGITS.search(text)) is not None:
        near = text[max(digit.start() - 30, 0) : digit.end() + 10]
        raise RunError(f"{path}: has a number ({near!r}). Numbers come from records; say it in words.")
    return ["## Remarks", "", text, ""]


def _missing(found: Sequence[Row]) -> list[str]:
    """Network by network how many cells are missing, and what was refused or failed."""
    lines = []
    for place in dict.fromkeys(row.cell.place for row in found):
        mine = [row for row in found if row.cell.place == place]
        wanted, done = sum(row.wanted for row in mine), sum(len(row.done) for row in mine)
        lines += [f"{place}: {wanted - done} of {wanted} cells"] if done < wanted else []
    lines += [f"{r.name} was {r.state}: {r.reason}" for row in found for r in row.records if r.state != "done"]
    return ["## Missing", "", *_bullets(lines)] if lines else []
