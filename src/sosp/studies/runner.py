"""Run the missing cells of an experiment; write each record as soon as its cell is done."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosp.errors import OutOfMemoryError, SospError, TrainingError
from sosp.studies import starting_networks, timing, training_groups
from sosp.studies.cell_pruning import CellPruner, CellPruningResult, find_refusal
from sosp.studies.cell_records import CellRecord, choose_folder, find_cell_record, write_cell_record
from sosp.studies.cells import Cell, PrunedCell, TimedCell, TrainedCell, encode_cell
from sosp.studies.experiment import Experiment, collect_starts, find_dataset, list_pruned_cells
from sosp.studies.training_groups import SharedTraining, TrainingGroup
from sosp.studies.workspace import ExperimentSettings, Workspace
from sosp.training import Epoch, Moment
from sosp.training.watcher import Watcher


@dataclass(frozen=True)
class ExperimentState:
    """The records of an experiment so far."""

    records: Mapping[str, CellRecord | None]  # cell -> its record, None if it is missing

    def count(self, state: str) -> int:
        return sum(record is not None and record.state == state for record in self.records.values())

    @property
    def missing(self) -> int:
        return sum(record is None for record in self.records.values())


class SilentWatcher:
    """A watcher that ignores all events."""

    def event(self, name: str, facts: Mapping[str, Any]) -> None: ...

    def step(self, stage: str, done: int, total: int, moment: Moment) -> None: ...


def read_experiment_state(experiment: Experiment, results: Path) -> ExperimentState:
    """Return the records of all cells that have one."""
    return ExperimentState(
        {c.name: find_cell_record(results, choose_folder(c, experiment.name), c) for c in experiment.cells}
    )


def list_missing(experiment: Experiment, cells: Sequence[Cell], results: Path, retry: bool) -> list[Cell]:
    """Return the cells without a record and, with ``retry``, those that are not done."""
    known = read_experiment_state(experiment, results).records
    return [c for c in cells if (r := known[c.name]) is None or (retry and r.state != "done")]


def run_experiment(
    experiment: Experiment,
    setting: ExperimentSettings,
    watch: Watcher | None = None,
    *,
    cells: Sequence[Cell] | None = None,
    retry: bool = False,
) -> ExperimentState:
    """Measure the missing cells, several networks side by side.

    If the process is killed, the same call resumes the experiment.

    Args:
        experiment: The cells to measure.
        setting: Folders, device and data, an ``ExperimentSettings``.
        watch: A watcher that receives the progress.
        cells: The cells of the experiment to measure; by default all.
        retry: Measure refused and failed cells again.

    Returns:
        The records of all cells of the experiment.

    Raises:
        DataError: If no dataset of the missing cells is available.
        RunError: If a folder is in use by another process or not writable, or a record is malformed.
    """
    bench, watch = Workspace(setting), watch or SilentWatcher()
    with bench.lock_folders():
        wanted = experiment.cells if cells is None else cells
        todo = list_missing(experiment, wanted, setting.results, retry)
        if todo and not any(isinstance(cell, TimedCell) or bench.has_data(find_dataset(cell)) for cell in wanted):
            raise bench.refusals[find_dataset(todo[0])]
        todo = _with_data(bench, todo, watch)
        watch.event("plan", {"experiment": experiment.name, "missing": len(todo)})
        for cell in todo:
            if isinstance(cell, TimedCell):
                _keep(bench, timing.measure_cell(bench, cell, experiment.name), experiment, watch)
        left = _keep_prunable(bench, experiment, [cell for cell in todo if isinstance(cell, PrunedCell)], watch)
        begun = collect_starts([*(cell for cell in todo if isinstance(cell, TrainedCell)), *left])
        starting_networks.prepare_networks(bench, begun, experiment.group_size, watch)
        _prune(bench, experiment, left, watch)
    return read_experiment_state(experiment, setting.results)


def _with_data(bench: Workspace, cells: list[Cell], watch: Watcher) -> list[Cell]:
    """Return the cells whose data is available and report the others; timing needs no data."""
    absent = [cell for cell in cells if not isinstance(cell, TimedCell) and not bench.has_data(find_dataset(cell))]
    for name, waiting in Counter(map(find_dataset, absent)).items():
        watch.event("absent", {"data": name, "cells": waiting, "reason": str(bench.refusals[name])})
    return [cell for cell in cells if cell not in absent]


def _keep_prunable(
    bench: Workspace, experiment: Experiment, cells: list[PrunedCell], watch: Watcher
) -> list[PrunedCell]:
    """Return the cells whose method the network allows; record the others before their network is trained."""
    refusals: dict[tuple[TrainedCell, str, str], SospError | None] = {}
    for cell in cells:
        key = (cell.start, cell.method, cell.gate)
        if key not in refusals and starting_networks.is_missing(bench, cell.start):
            refusals[key] = find_refusal(bench, cell)
    left = []
    for cell in cells:
        error = refusals.get((cell.start, cell.method, cell.gate))
        if error is None:
            left.append(cell)
        else:
            _keep(bench, _record_refusal(bench, cell, experiment, "refused", error), experiment, watch)
    return left


# --- pruning and fine-tuning ----------------------------------------------------------------------------


def _prune(bench: Workspace, experiment: Experiment, cells: list[PrunedCell], watch: Watcher) -> None:
    """Prune, fine-tune and record the cells by groups; after a failed training, the other members start again."""
    place, most = bench.setting.work / experiment.name, bench.group_size(experiment.group_size)
    every = {cell.name: cell for cell in list_pruned_cells(experiment)}
    known = {name: _training(cell) for name, cell in every.items()}
    left = {cell.name: known[cell.name] for cell in cells}
    cutters: dict[TrainedCell, CellPruner] = {}
    while left:
        group = training_groups.form_groups(left, known, place, most)[0]
        mine = {name: every[name] for name in group.names}
        cutters |= {c.start: CellPruner(bench, c.start) for c in mine.values() if c.start not in cutters}
        cuts = _cut(bench, experiment, mine, cutters, watch)
        gone = set(mine) - set(cuts)  # refused: the others form new groups
        if not gone:
            try:
                _tune(bench, experiment, group, mine, cuts, watch)
                gone = set(mine)
            except TrainingError as error:
                gone = {name for name in mine if repr(name) in str(error)} or set(mine)
                for name in sorted(gone):
                    _keep(bench, _record_refusal(bench, mine[name], experiment, "failed", error), experiment, watch)
            except OutOfMemoryError:
                if len(mine) == 1:
                    raise
                most = len(mine) // 2
        training_groups.delete_checkpoints(group, place)
        left = {name: training for name, training in left.items() if name not in gone}


def _training(cell: PrunedCell) -> SharedTraining:
    return SharedTraining(cell.start.data, cell.tuning, cell.cycles)


def _cut(
    bench: Workspace,
    experiment: Experiment,
    cells: Mapping[str, PrunedCell],
    cutters: Mapping[TrainedCell, CellPruner],
    watch: Watcher,
) -> dict[str, CellPruningResult]:
    """Return the pruned networks without refused cells, which are recorded; cells of one saliency are consecutive."""
    found: dict[str, CellPruningResult] = {}
    for cell in sorted(cells.values(), key=lambda c: (c.method, c.gate, c.seed, c.examples)):
        try:
            found[cell.name] = cutters[cell.start].prune(cell, bench.setting.work / experiment.name / cell.name)
        except SospError as error:
            _keep(bench, _record_refusal(bench, cell, experiment, "refused", error), experiment, watch)
        else:
            watch.event("cut", {"cell": cell.name, **found[cell.name].metrics})
    return found


def _tune(
    bench: Workspace,
    experiment: Experiment,
    group: TrainingGroup,
    cells: Mapping[str, PrunedCell],
    cuts: Mapping[str, CellPruningResult],
    watch: Watcher,
) -> None:
    place = bench.setting.work / experiment.name
    if epochs := group.training.schedule.epochs * group.training.cycles:
        watch.event("begin", {"cells": list(cells), "epochs": epochs})
    small = {name: cut.model for name, cut in cuts.items()}
    done = training_groups.train_group(bench, group, small, {n: c.seed for n, c in cells.items()}, place, watch)
    parts = training_groups.describe_parts(group, place, bench.setting.origin)
    for name, (_, history) in done.items():
        _keep(bench, _record_result(bench, cells[name], experiment, cuts[name], history, parts), experiment, watch)
    for name in done:  # only now: a killed training needs all networks of the group to resume
        shutil.rmtree(place / name, ignore_errors=True)


def _record_result(
    bench: Workspace,
    cell: PrunedCell,
    experiment: Experiment,
    cut: CellPruningResult,
    history: tuple[Epoch, ...],
    parts: Mapping[str, Any],
) -> CellRecord:
    tested = [e.test.top1 for e in history if e.test is not None]
    tuned = {"first": tested[0], "final": tested[-1], "best": max(tested)} if tested else {}
    return CellRecord(
        encode_cell(cell),
        cell.name,
        experiment.name,
        "done",
        metrics={**cut.metrics, **tuned},
        history={"test": tested, "loss": [e.loss for e in history], "seconds": [e.seconds for e in history]},
        seconds={**cut.seconds, "tune": sum(e.seconds for e in history)},
        start=starting_networks.describe_start(bench, cell.start),
        facts={**cut.facts, **parts},
        origin=bench.setting.origin,
    )


def _record_refusal(bench: Workspace, cell: Cell, experiment: Experiment, how: str, error: SospError) -> CellRecord:
    """Return the record of a cell that has no figures."""
    return CellRecord(
        encode_cell(cell), cell.name, experiment.name, how, reason=str(error), origin=bench.setting.origin
    )


def _keep(bench: Workspace, record: CellRecord, experiment: Experiment, watch: Watcher) -> None:
    write_cell_record(bench.setting.results, record, experiment.name)
    watch.event("cell", {"cell": record.name, "state": record.state, "reason": record.reason, **record.metrics})
