"""Read and write one JSON file per finished cell: config, origin, figures; refuse malformed and wrong files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sosp.core.text_files import read_json, write_json
from sosp.errors import RunError
from sosp.studies.cells import KINDS, Cell, encode_cell

FORMAT = 1
STATES = ("done", "refused", "failed")  # refused: the library raised an error; failed: the training stopped with one
NETWORKS = "networks"  # folder of the networks that several experiments begin with
SHARES = ("accuracy", "zeroed", "masked", "cut", "recalibrated", "first", "final", "best")
COUNTS = ("structures", "removed", "params", "macs", "params_alternative", "macs_alternative")
# Kind of cell -> the figures that a finished cell must have.
NEEDED = {
    "trained": ("accuracy", "params", "macs"),
    "pruned": ("params", "macs", "cut"),
    "timed": ("seconds", "structures"),
}
OBJECTS = ("cell", "metrics", "history", "seconds", "start", "facts", "origin")  # fields that must be JSON objects
TUNED = ("first", "final", "best")  # figures that a fine-tuned cell must have as well


@dataclass(frozen=True)
class CellRecord:
    """The results of a cell."""

    cell: Mapping[str, Any]  # from encode_cell
    name: str
    experiment: str
    state: str
    reason: str = ""  # why the cell is not done
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Mapping[str, list[float]] = field(default_factory=dict)  # per epoch
    seconds: Mapping[str, float] = field(default_factory=dict)  # per step
    start: Mapping[str, Any] = field(default_factory=dict)  # the network it began with
    facts: Mapping[str, Any] = field(default_factory=dict)  # other information
    origin: Mapping[str, Any] = field(default_factory=dict)


def choose_folder(cell: Cell, experiment: str) -> str:
    """Return the folder of a cell's record; all experiments share the trained networks."""
    return NETWORKS if encode_cell(cell)["kind"] == "trained" else experiment


def find_record_path(results: Path, folder: str, cell: Cell) -> Path:
    return results / folder / f"{cell.name}.json"


def write_cell_record(results: Path, record: CellRecord, folder: str) -> Path:
    """Write a record atomically and return its path."""
    path = results / folder / f"{record.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    check_record(record, path)
    write_json(path, {"format": FORMAT, **asdict(record)})
    return path


def find_cell_record(results: Path, folder: str, cell: Cell) -> CellRecord | None:
    """Return the record of a cell, from its own folder or from another experiment with the same cell."""
    own = find_record_path(results, folder, cell)
    others = sorted(results.glob(f"*/{cell.name}.json")) if results.is_dir() else []
    found = {path: read_cell_record(path) for path in [own, *others] if path.is_file()}
    for path, record in found.items():
        if gap := describe_difference(encode_cell(cell), record.cell):
            raise RunError(
                f"{path}: belongs to another cell of the same name: {gap}. Move it away to measure this one."
            )
    done = [record for record in found.values() if record.state == "done"]
    return next(iter(done or found.values()), None)


def iterate_records(results: Path) -> Iterator[tuple[Path, CellRecord]]:
    """Yield the path and the record of every file."""
    for path in sorted(results.glob("*/*.json")) if results.is_dir() else []:
        yield path, read_cell_record(path)


def read_cell_record(path: Path) -> CellRecord:
    """Return the record in a file; raise RunError if it is malformed."""
    try:
        return _read(path)
    except RunError as error:
        raise RunError(f"{error} Move it away to measure that cell again.") from error


def _read(path: Path) -> CellRecord:
    found = read_json(path)
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise RunError(f"{path}: is not a record of an experiment, or was written by a newer sosp.")
    if gap := {f.name for f in fields(CellRecord)} ^ found.keys():
        raise RunError(f"{path}: is not a record of an experiment: {sorted(gap)[0]!r} is missing or unknown.")
    for name in OBJECTS:
        if not isinstance(found[name], dict):
            raise RunError(f"{path}: is not a record of an experiment: its {name!r} is {found[name]!r}.")
    record = CellRecord(**found)
    check_record(record, path)
    return record


def describe_difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first difference between two cells in words, or an empty string if they are equal."""
    gaps = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
    return f"its {gaps[0]} is {other.get(gaps[0])!r}, and here {mine.get(gaps[0])!r}" if gaps else ""


# --- well-formed ----------------------------------------------------------------------------------------


def check_record(record: CellRecord, path: Path) -> None:
    """Raise RunError unless the record is well-formed and its figures are possible."""
    for problem in find_problems(record, path.stem):
        raise RunError(f"{path}: {problem}.")


def find_problems(record: CellRecord, stem: str) -> Iterator[str]:
    """Yield what is wrong with a record; ``stem`` is the name of its file."""
    kind = record.cell.get("kind")
    if kind not in KINDS:
        yield f"its cell is of kind {kind!r}; known are {', '.join(KINDS)}"
        return
    if kind == "pruned" and not all(isinstance(n, int) for n in read_epochs(record.cell)):
        yield "its cell does not say how long the trainings are"
        return
    if record.name != stem:
        yield f"its name is {record.name!r}, which differs from the name of the file"
    if record.state not in STATES:
        yield f"its state is {record.state!r}; known are {', '.join(STATES)}"
    if record.state != "done" and not record.reason:
        yield f"it is {record.state} without a reason"
    if record.state == "done":
        tuned = TUNED if kind == "pruned" and read_epochs(record.cell)[-1] else ()
        yield from (f"it has no {name}" for name in (*NEEDED[kind], *tuned) if name not in record.metrics)
    yield from _impossible(record.metrics)
    missing = [key for key in ("commit", "torch", "hardware", "begun") if not record.origin.get(key)]
    yield from (f"its origin does not say the {key}" for key in missing)


def read_epochs(cell: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the epochs of the training before pruning, and of the fine-tuning."""
    start, tuning = cell.get("start"), cell.get("tuning")
    schedule = start.get("schedule") if isinstance(start, dict) else None
    first, last = (part.get("epochs") if isinstance(part, dict) else None for part in (schedule, tuning))
    return first, last


def _impossible(metrics: Mapping[str, Any]) -> Iterator[str]:
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            yield f"its {name} is {value!r}"
        elif name in SHARES and value > 1:
            yield f"its {name} is {value!r}, which is not a share"
        elif name in COUNTS and value != int(value):
            yield f"its {name} is {value!r}, which is not a whole number"
