"""Compare methods on one network: one scoring pass each, then a cell per ratio, before and after fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from sosp.core import distributed
from sosp.data import Dataset
from sosp.errors import DisconnectedError
from sosp.pipeline.train import train
from sosp.refit import repair
from sosp.scoring.methods import METHODS
from sosp.studies.compare.comparison_cells import ComparisonCell, ComparisonPlan, ComparisonStore
from sosp.studies.compare.ratio_pruning import RatioPruner, make_pruner
from sosp.studies.pruning_task import PruningTask, prepare_task
from sosp.surgery.fold_norms import fold_norms
from sosp.training import Schedule, Speed, evaluate, recalibrate

GROUP_SIZE = 8  # networks that are fine-tuned side by side

OnCell = Callable[[ComparisonCell], None]


def compare(
    model: nn.Module,
    data: Dataset,
    plan: ComparisonPlan,
    *,
    schedule: Schedule | None = None,
    folder: str | Path | None = None,
    device: torch.device | str | None = None,
    speed: Speed | None = None,
    on_cell: OnCell | None = None,
) -> tuple[ComparisonCell, ...]:
    """Prune one network by many methods at many ratios, and measure the pruned networks.

    Args:
        model: The network. It is not changed.
        data: A dataset of ``sosp.data``.
        plan: Methods, ratios, seeds and options, a ``sosp.studies.ComparisonPlan``.
        schedule: The schedule to fine-tune every pruned network; None does not fine-tune.
        folder: A folder for finished cells, which are not measured again.
        device: The device to compute on; by default the network's.
        speed: Options for faster fine-tuning, see ``sosp.train``.
        on_cell: A callback for every new cell.

    Returns:
        A ``ComparisonCell`` for every method, ratio and seed: accuracy after pruning, with re-estimated batch-norm
        statistics, repaired if the plan asks for it, and fine-tuned; parameters, MACs, seconds of scoring.

    Raises:
        ArgumentError: If an argument has an invalid value.
        StructureError: If the network lacks what a method needs.
    """
    work = prepare_task(model, data, plan, device)
    place = None if folder is None else Path(folder)
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    cells = ComparisonStore(place)
    distributed.wait_for_ranks()  # all ranks have read the file before one of them writes
    for seed in plan.draws:
        for method in plan.methods:
            cuts = make_pruner(work, method, seed)
            _cut(work, cuts, cells, on_cell)
            if schedule is not None:
                _tune(work, cuts, cells, on_cell, schedule, place, speed)
    wanted = [(m, r, s) for m in plan.methods for r in plan.ratios for s in plan.draws]
    return tuple(cells.known[key] for key in wanted)


def _cut(work: PruningTask, cuts: RatioPruner, cells: ComparisonStore, on_cell: OnCell | None) -> None:
    """Measure the missing cells of a method and a seed, before any training."""
    for ratio in work.plan.ratios:
        known = cells.known.get((cuts.method, ratio, cuts.seed))
        if known is None:
            cell = _measured(work, cuts, ratio)
        elif work.plan.repair and known.repaired is None and _repairable(known):
            cell = replace(known, repaired=_repaired(work, cuts.prune_to(ratio).model, cuts.seed))
        else:
            continue
        cells.keep(cell)
        if on_cell is not None:
            on_cell(cell)


def _measured(work: PruningTask, cuts: RatioPruner, ratio: float) -> ComparisonCell:
    blank = ComparisonCell(cuts.method, ratio, cuts.seed)
    try:
        cut = cuts.prune_to(ratio)
    except DisconnectedError as error:
        return replace(blank, refusal=str(error))
    again = recalibrate(cut.quick, work.data.train, examples=work.plan.recalibrate, seed=cuts.seed)
    return replace(
        blank,
        structures=cut.structures,
        removed=cut.removed,
        params=cut.exact.params,
        macs=cut.exact.macs,
        params_alternative=cut.other.params,
        macs_alternative=cut.other.macs,
        masked=_accuracy(work, cut.quick),
        recalibrated=_accuracy(work, again),
        repaired=_repaired(work, cut.model, cuts.seed) if work.plan.repair and _repairable(blank) else None,
        seconds=cut.seconds,
    )


def _accuracy(work: PruningTask, model: nn.Module) -> float:
    return evaluate(fold_norms(model, work.example), work.data.test).top1


def _repairable(cell: ComparisonCell) -> bool:
    """Return True if the pruned network has the layers of the original, with fewer channels."""
    return not cell.refusal and "rotation" not in METHODS[cell.method].needs


def _repaired(work: PruningTask, small: nn.Module, seed: int) -> float:
    fixed = repair(small, work.model, work.data.train, examples=work.plan.recalibrate, seed=seed)
    return _accuracy(work, fixed.model)


def _tune(
    work: PruningTask,
    cuts: RatioPruner,
    cells: ComparisonStore,
    on_cell: OnCell | None,
    schedule: Schedule,
    folder: Path | None,
    speed: Speed | None,
) -> None:
    """Fine-tune the cells of a method that are not fine-tuned yet, all ratios side by side."""
    keys = [(cuts.method, ratio, cuts.seed) for ratio in work.plan.ratios]
    left = [cells.known[k] for k in keys if not cells.known[k].refusal]
    if all(cell.tuned is not None for cell in left):
        return
    for start in range(0, len(left), GROUP_SIZE):
        part = {f"{c.method}-{c.ratio:g}": c for c in left[start : start + GROUP_SIZE]}
        small = {name: cuts.prune_to(c.ratio).model for name, c in part.items()}
        place = None if folder is None else folder / "checkpoints" / f"{cuts.method}-{cuts.seed}-{start}"
        trained = train(small, work.data, schedule, seed=cuts.seed, folder=place, device=work.device, speed=speed)
        for name, cell in part.items():
            history = trained[name].history
            tested = [e.test.top1 for e in history if e.test is not None]
            cell = replace(cell, tuned=tested[-1], best=max(tested))
            cells.keep(cell)
            if on_cell is not None:
                on_cell(cell)
