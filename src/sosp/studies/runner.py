"""Carry an experiment out: only the cells that are missing, each kept as soon as it is done."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosp.errors import OutOfMemoryError, SospError, TrainingError
from sosp.studies import starting_networks, timing, train_groups
from sosp.studies.cells import Cell, Pruned, Timed, Trained, document
from sosp.studies.cut import Cut, Cutter, unsuited
from sosp.studies.experiment import Experiment, data_of, pruned, starts_of
from sosp.studies.setting import Bench, Setting
from sosp.studies.store import Record, find, folder_of, write
from sosp.studies.train_groups import Group, Training
from sosp.training import Epoch, Moment
from sosp.training.watcher import Watcher


@dataclass(frozen=True)
class State:
    """Where an experiment stands."""

    records: Mapping[str, Record | None]  # cell -> its record, None where it is missing

    def count(self, state: str) -> int:
        return sum(record is not None and record.state == state for record in self.records.values())

    @property
    def missing(self) -> int:
        return sum(record is None for record in self.records.values())


class Nobody:
    """Is told nothing."""

    def event(self, name: str, facts: Mapping[str, Any]) -> None: ...

    def step(self, stage: str, done: int, total: int, moment: Moment) -> None: ...


def state(experiment: Experiment, results: Path) -> State:
    """Of every cell, what is there."""
    return State({c.name: find(results, folder_of(c, experiment.name), c) for c in experiment.cells})


def missing(experiment: Experiment, cells: Sequence[Cell], results: Path, retry: bool) -> list[Cell]:
    """Those of the cells that are not there, or, with ``retry``, not done."""
    known = state(experiment, results).records
    return [c for c in cells if (r := known[c.name]) is None or (retry and r.state != "done")]


def run(
    experiment: Experiment,
    setting: Setting,
    watch: Watcher | None = None,
    *,
    cells: Sequence[Cell] | None = None,
    retry: bool = False,
) -> State:
    """Measure what is missing of all cells, or of these, several networks side by side; then where it stands.

    ``watch`` is told how it goes. Killed at any time, the same call goes on where it was.
    """
    bench, watch = Bench(setting), watch or Nobody()
    with bench.locked():
        wanted = experiment.cells if cells is None else cells
        todo = missing(experiment, wanted, setting.results, retry)
        if todo and not any(isinstance(cell, Timed) or bench.has(data_of(cell)) for cell in wanted):
            raise bench.refusals[data_of(todo[0])]
        todo = _with_data(bench, todo, watch)
        watch.event("plan", {"experiment": experiment.name, "missing": len(todo)})
        for cell in todo:
            if isinstance(cell, Timed):
                _keep(bench, timing.measured(bench, cell, experiment.name), experiment, watch)
        left = _suited(bench, experiment, [cell for cell in todo if isinstance(cell, Pruned)], watch)
        begun = starts_of([*(cell for cell in todo if isinstance(cell, Trained)), *left])
        starting_networks.provide(bench, begun, experiment.together, watch)
        _prune(bench, experiment, left, watch)
    return state(experiment, setting.results)


def _with_data(bench: Bench, cells: list[Cell], watch: Watcher) -> list[Cell]:
    """Those whose data is there; of the others somebody is told. Times can be taken without any."""
    absent = [cell for cell in cells if not isinstance(cell, Timed) and not bench.has(data_of(cell))]
    for name, waiting in Counter(map(data_of, absent)).items():
        watch.event("absent", {"data": name, "cells": waiting, "reason": str(bench.refusals[name])})
    return [cell for cell in cells if cell not in absent]


def _suited(bench: Bench, experiment: Experiment, cells: list[Pruned], watch: Watcher) -> list[Pruned]:
    """Without the cells whose method the network does not allow: that is kept before the network is trained."""
    refusals: dict[tuple[Trained, str, str], SospError | None] = {}
    for cell in cells:
        key = (cell.start, cell.method, cell.gate)
        if key not in refusals and starting_networks.must_be_trained(bench, cell.start):
            refusals[key] = unsuited(bench, cell)
    left = []
    for cell in cells:
        error = refusals.get((cell.start, cell.method, cell.gate))
        if error is None:
            left.append(cell)
        else:
            _keep(bench, _without(bench, cell, experiment, "refused", error), experiment, watch)
    return left


# --- pruning and fine-tuning ----------------------------------------------------------------------------


def _prune(bench: Bench, experiment: Experiment, cells: list[Pruned], watch: Watcher) -> None:
    """Group by group: cut, fine-tune, keep. A network that breaks off is kept as failed and the others begin anew."""
    place, most = bench.setting.work / experiment.name, bench.together(experiment.together)
    every = {cell.name: cell for cell in pruned(experiment)}
    known = {name: _training(cell) for name, cell in every.items()}
    left = {cell.name: known[cell.name] for cell in cells}
    cutters: dict[Trained, Cutter] = {}
    while left:
        group = train_groups.grouped(left, known, place, most)[0]
        mine = {name: every[name] for name in group.names}
        cutters |= {c.start: Cutter(bench, c.start) for c in mine.values() if c.start not in cutters}
        cuts = _cut(bench, experiment, mine, cutters, watch)
        gone = set(mine) - set(cuts)  # refused: the others find new company
        if not gone:
            try:
                _tune(bench, experiment, group, mine, cuts, watch)
                gone = set(mine)
            except TrainingError as error:
                gone = {name for name in mine if repr(name) in str(error)} or set(mine)
                for name in sorted(gone):
                    _keep(bench, _without(bench, mine[name], experiment, "failed", error), experiment, watch)
            except OutOfMemoryError:
                if len(mine) == 1:
                    raise
                most = len(mine) // 2
        train_groups.forget(group, place)
        left = {name: training for name, training in left.items() if name not in gone}


def _training(cell: Pruned) -> Training:
    return Training(cell.start.data, cell.tuning, cell.cycles)


def _cut(
    bench: Bench,
    experiment: Experiment,
    cells: Mapping[str, Pruned],
    cutters: Mapping[Trained, Cutter],
    watch: Watcher,
) -> dict[str, Cut]:
    """The smaller networks; a refusal is kept, and that cell left out. Equal saliencies come one after the other."""
    found: dict[str, Cut] = {}
    for cell in sorted(cells.values(), key=lambda c: (c.method, c.gate, c.seed, c.examples)):
        try:
            found[cell.name] = cutters[cell.start].cut(cell, bench.setting.work / experiment.name / cell.name)
        except SospError as error:
            _keep(bench, _without(bench, cell, experiment, "refused", error), experiment, watch)
        else:
            watch.event("cut", {"cell": cell.name, **found[cell.name].metrics})
    return found


def _tune(
    bench: Bench,
    experiment: Experiment,
    group: Group,
    cells: Mapping[str, Pruned],
    cuts: Mapping[str, Cut],
    watch: Watcher,
) -> None:
    place = bench.setting.work / experiment.name
    if epochs := group.training.schedule.epochs * group.training.cycles:
        watch.event("begin", {"cells": list(cells), "epochs": epochs})
    small = {name: cut.model for name, cut in cuts.items()}
    done = train_groups.trained(bench, group, small, {n: c.seed for n, c in cells.items()}, place, watch)
    parts = train_groups.parts(group, place, bench.setting.origin)
    for name, (_, history) in done.items():
        _keep(bench, _finished(bench, cells[name], experiment, cuts[name], history, parts), experiment, watch)
    for name in done:  # only now: killed before, all of the group would be needed again
        shutil.rmtree(place / name, ignore_errors=True)


def _finished(
    bench: Bench,
    cell: Pruned,
    experiment: Experiment,
    cut: Cut,
    history: tuple[Epoch, ...],
    parts: Mapping[str, Any],
) -> Record:
    tested = [e.test.top1 for e in history if e.test is not None]
    tuned = {"first": tested[0], "final": tested[-1], "best": max(tested)} if tested else {}
    return Record(
        document(cell),
        cell.name,
        experiment.name,
        "done",
        metrics={**cut.metrics, **tuned},
        history={"test": tested, "loss": [e.loss for e in history], "seconds": [e.seconds for e in history]},
        seconds={**cut.seconds, "tune": sum(e.seconds for e in history)},
        start=starting_networks.begun_with(bench, cell.start),
        facts={**cut.facts, **parts},
        origin=bench.setting.origin,
    )


def _without(bench: Bench, cell: Cell, experiment: Experiment, how: str, error: SospError) -> Record:
    """The record of a cell that has no figures."""
    return Record(document(cell), cell.name, experiment.name, how, reason=str(error), origin=bench.setting.origin)


def _keep(bench: Bench, record: Record, experiment: Experiment, watch: Watcher) -> None:
    write(bench.setting.results, record, experiment.name)
    watch.event("cell", {"cell": record.name, "state": record.state, "reason": record.reason, **record.metrics})
