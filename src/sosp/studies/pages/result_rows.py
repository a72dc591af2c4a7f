"""Records over their seeds: a row for what the seeds of a cell have in common, beside the paper's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from sosp.studies.cell_records import NETWORKS, TUNED, CellRecord, iterate_records, read_epochs
from sosp.studies.cells import Cell, PrunedCell, TimedCell
from sosp.studies.experiment import Experiment, PublishedRow, list_starts, set_epochs
from sosp.studies.runner import read_experiment_state


@dataclass(frozen=True)
class Stat:
    """Mean and standard deviation (0 for a single one) over seeds or repeats."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Stat | None:
        found = list(values)
        return cls(mean(found), stdev(found) if len(found) > 1 else 0.0, len(found)) if found else None


@dataclass(frozen=True)
class ResultRow:
    """Cells that differ in their seed alone, those that are measured, and what the paper has for them."""

    cell: Cell
    wanted: int  # cells
    records: tuple[CellRecord, ...]  # all that are there, also those without figures
    beside: PublishedRow | None
    whole: PublishedRow | None = None  # what the paper has for the network that is pruned

    @property
    def done(self) -> tuple[CellRecord, ...]:
        return tuple(record for record in self.records if record.state == "done")

    def stat(self, name: str) -> Stat | None:
        """Over the seeds; times have a deviation of their own."""
        if isinstance(self.cell, TimedCell) and name == "seconds":
            repeats = [s for record in self.done for s in record.history["seconds"]]
            return Stat.of(repeats)
        return Stat.of(record.metrics[name] for record in self.done if name in record.metrics)

    def by_seed(self, name: str) -> dict[int, float]:
        return {record.cell["seed"]: record.metrics[name] for record in self.done if name in record.metrics}

    def lost(self, name: str) -> Stat | None:
        """By how much an accuracy is below the one that the network that was pruned ended with, if it was trained."""
        if not isinstance(self.cell, PrunedCell) or not self.cell.start.schedule.epochs:
            return None
        pairs = [
            (r.start["accuracy"], r.metrics[name]) for r in self.done if "accuracy" in r.start and name in r.metrics
        ]
        return Stat.of(whole - pruned for whole, pruned in pairs)

    def left(self, name: str) -> float | None:
        """The share of the first network's parameters or MACs that is left."""
        shares = [record.metrics[name] / record.start[name] for record in self.done if name in record.start]
        return mean(shares) if shares else None


def collect_rows(experiment: Experiment, results: Path) -> list[ResultRow]:
    """In the order of the cells; first the networks that they begin with."""
    known: dict[str, CellRecord | None] = dict(read_experiment_state(experiment, results).records)
    first = replace(experiment, cells=tuple(s for s in list_starts(experiment) if s not in experiment.cells))
    known |= read_experiment_state(first, results).records
    groups: dict[Cell, list[Cell]] = {}
    for cell in (*first.cells, *experiment.cells):
        groups.setdefault(cell.seeded(0), []).append(cell)
    return [_row(cells, known, experiment) for cells in groups.values()]


def _row(cells: list[Cell], known: Mapping[str, CellRecord | None], experiment: Experiment) -> ResultRow:
    found = tuple(record for cell in cells if (record := known[cell.name]) is not None)
    first = cells[0]
    whole = match_published(first.start, experiment.published) if isinstance(first, PrunedCell) else None
    return ResultRow(first, len(cells), found, match_published(first, experiment.published), whole)


def match_published(cell: Cell, published: Iterable[PublishedRow]) -> PublishedRow | None:
    """The first row of the paper of that network, method and budget; the only one of a method that has one budget."""
    key = (*_place(cell), cell.published if isinstance(cell, PrunedCell) else cell.label)
    mine = [p for p in published if (p.network, p.data, p.method) == key]
    if not isinstance(cell, PrunedCell):
        return next(iter(mine), None) if cell.width == 1.0 else None
    same = [p for p in mine if p.budget == cell.budget]
    alone = mine if len(mine) == 1 and mine[0].ratio is None else []
    return next(iter(same or alone), None)


def _place(cell: Cell) -> tuple[str, str]:
    start = cell.start if isinstance(cell, PrunedCell) else cell
    return start.network, start.data


# --- other lengths --------------------------------------------------------------------------------------


def find_short_variants(experiment: Experiment, results: Path) -> Iterator[tuple[int, Experiment]]:
    """The lengths, other than the paper's, for which there are records; with the experiment of that length.

    Of its claims those about what fine-tuning ends with: the others are about the time before it.
    """
    own = {cell.name for cell in experiment.cells}
    found = {
        max(read_epochs(record.cell))
        for path, record in iterate_records(results)
        if path.parent.name == experiment.name and record.cell["kind"] == "pruned" and record.name not in own
    }
    ends = tuple(claim for claim in experiment.claims if claim.by in TUNED)
    for epochs in sorted(found):
        yield epochs, replace(set_epochs(experiment, epochs), claims=ends)


def find_unknown_records(experiments: Iterable[Experiment], results: Path) -> list[Path]:
    """Records that belong to no cell of any of these experiments, at any length."""
    known: dict[str, set[str]] = {NETWORKS: set()}
    for experiment in experiments:
        for variant in (experiment, *(e for _, e in find_short_variants(experiment, results))):
            known.setdefault(experiment.name, set()).update(cell.name for cell in variant.cells)
            known[NETWORKS] |= {start.name for start in list_starts(variant)}
    return [path for path, record in iterate_records(results) if record.name not in known.get(path.parent.name, ())]
