"""Every method on the same work: one scoring pass each, then a cell for every ratio, before and after fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from sosp import ranks
from sosp.comparison.cells import Cell, Cells, Plan
from sosp.comparison.work import Masks, Work, prepared
from sosp.cost import alternative
from sosp.data import Dataset
from sosp.errors import DisconnectedError
from sosp.flow import Flow
from sosp.flow.layout import Style
from sosp.mask import Mask
from sosp.surgery import shrink, shrink_along
from sosp.training import Schedule, Speed, evaluate, recalibrate, train

TOGETHER = 8  # networks that are fine-tuned side by side

OnCell = Callable[[Cell], None]


def compare(
    model: nn.Module,
    data: Dataset,
    plan: Plan,
    *,
    schedule: Schedule | None = None,
    folder: str | Path | None = None,
    device: torch.device | str | None = None,
    speed: Speed | None = None,
    on_cell: OnCell | None = None,
) -> tuple[Cell, ...]:
    """A cell for every method, ratio and seed of the plan: accuracy after the cut alone, with batch norm statistics
    taken anew, and, with a ``schedule``, after fine-tuning; parameters and MACs; seconds to score.

    With ``folder`` every cell that is done is kept there and not measured again. ``on_cell`` is told of each one that
    is new. The model is left as it was.
    """
    work = prepared(model, data, plan, device)
    place = None if folder is None else Path(folder)
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    cells = Cells(place)
    ranks.wait()  # all have read what is there before one of them writes
    for seed in plan.draws:
        for method in plan.methods:
            masks = Masks(work, method, seed)
            _cut(work, masks, cells, on_cell)
            if schedule is not None:
                _tune(work, masks, cells, on_cell, schedule, place, speed)
    wanted = [(m, r, s) for m in plan.methods for r in plan.ratios for s in plan.draws]
    return tuple(cells.known[key] for key in wanted)


def _cut(work: Work, masks: Masks, cells: Cells, on_cell: OnCell | None) -> None:
    """The cells of a method and a seed that are not there yet, before any training."""
    for ratio in work.plan.ratios:
        if (masks.method, ratio, masks.seed) not in cells.known:
            cell = _measured(work, masks, ratio)
            cells.keep(cell)
            if on_cell is not None:
                on_cell(cell)


def _measured(work: Work, masks: Masks, ratio: float) -> Cell:
    blank = Cell(masks.method, ratio, masks.seed)
    try:
        mask, seconds = masks.at(ratio)
    except DisconnectedError as error:
        return replace(blank, refusal=str(error))
    flow = work.structures(masks.method).flow
    other = alternative(flow, flow.removed(mask.removed, {layer.name: layer.norms for layer in mask.layers}))
    small, exact = shrink_along(work.model, mask, work.example, flow, verify=False)  # computes what the masked one does
    cut = _quick(work, mask, flow, small)
    again = recalibrate(cut, work.data.train, examples=work.plan.recalibrate, seed=masks.seed)
    return replace(
        blank,
        structures=mask.structures,
        removed=mask.chosen,
        params=exact.params,
        macs=exact.macs,
        params_alternative=other.params,
        macs_alternative=other.macs,
        masked=evaluate(cut, work.data.test).top1,
        recalibrated=evaluate(again, work.data.test).top1,
        seconds=seconds,
    )


def _quick(work: Work, mask: Mask, flow: Flow, small: nn.Module) -> nn.Module:
    """The same in the form that runs fastest: channels last, and on a CPU without scatters (0.8 of the time)."""
    if work.device.type == "cpu":
        small, _ = shrink_along(work.model, mask, work.example, flow, Style("zeros"), verify=False)
    return small.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _tune(
    work: Work,
    masks: Masks,
    cells: Cells,
    on_cell: OnCell | None,
    schedule: Schedule,
    folder: Path | None,
    speed: Speed | None,
) -> None:
    """Fine-tune what is not yet, all ratios of a method side by side."""
    keys = [(masks.method, ratio, masks.seed) for ratio in work.plan.ratios]
    left = [cells.known[k] for k in keys if not cells.known[k].refusal]
    if all(cell.tuned is not None for cell in left):
        return
    for start in range(0, len(left), TOGETHER):
        part = {f"{c.method}-{c.ratio:g}": c for c in left[start : start + TOGETHER]}
        small = {name: shrink(work.model, masks.at(c.ratio)[0], work.example) for name, c in part.items()}
        place = None if folder is None else folder / "checkpoints" / f"{masks.method}-{masks.seed}-{start}"
        trained = train(small, work.data, schedule, seed=masks.seed, folder=place, device=work.device, speed=speed)
        for name, cell in part.items():
            history = trained[name].history
            tested = [e.test.top1 for e in history if e.test is not None]
            cell = replace(cell, tuned=tested[-1], best=max(tested))
            cells.keep(cell)
            if on_cell is not None:
                on_cell(cell)
