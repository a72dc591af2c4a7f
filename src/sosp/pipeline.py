"""From a trained network, data and a budget to a smaller network, in one call; and its training. Read this first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sosp.core.batches import open_data_once
from sosp.core.borrowed_model import check_network, find_device
from sosp.core.losses import LossLike
from sosp.errors import ArgumentError, check_whole_number
from sosp.graph.flow import follow_channels
from sosp.graph.layout import LayoutStyle
from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, Plan, compute_whole_cost, plan_removal
from sosp.graph.records import Saliency
from sosp.graph.structures import Exclude, find_excluded_names, find_structures
from sosp.refit import RemovalHistory, Repaired
from sosp.refit import repair as repair_network
from sosp.scoring.score import score
from sosp.selection.select import SelectionOptions, select_and_plan
from sosp.surgery.checkpoint import save
from sosp.surgery.shrink import shrink

if TYPE_CHECKING:  # who prunes need not train
    from sosp.training import Companion, Epoch, Moment, Schedule, Speed


@dataclass(frozen=True, eq=False)
class Pruned:
    """A smaller network, and how it came about."""

    model: nn.Module
    mask: Mask
    saliency: Saliency
    cost_before: Cost
    cost_after: Cost
    plan: Plan | None = None  # how the mask was removed; None after several rounds, each of which had its own
    repaired: Repaired | None = None

    def __str__(self) -> str:
        before, after = self.cost_before, self.cost_after
        return "\n".join(
            [
                f"{self.saliency.method}: {self.mask.chosen:,} of {self.mask.structures:,} structures removed",
                f"parameters  {before.params:>15,} -> {after.params:>15,}  ({after.params / before.params:.1%} left)",
                f"MACs        {before.macs:>15,} -> {after.macs:>15,}  ({after.macs / max(before.macs, 1):.1%} left)",
                *([] if self.repaired is None else [self.repaired.summary]),
            ]
        )

    def save(self, path: str | Path) -> None:
        """One safetensors file with the network, the mask and how to rebuild it: ``sosp.load(path, model)``."""
        save(path, self.model, self.mask)


def prune(
    model: nn.Module,
    data: Any,
    *,
    ratio: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    cap: float | None = None,
    scope: str | None = None,
    method: str = "sosp-h",
    loss: LossLike = "cross_entropy",
    groups: str = "independent",
    exclude: Exclude = (),
    examples: int | None = 1000,
    repair: bool = False,
    rounds: int = 1,
) -> Pruned:
    """Score, select and shrink: the network without what it needs least, ready to be fine-tuned.

    ``data`` as ``sosp.score`` takes it. How much goes: ``ratio`` of the structures (half, if nothing is said), or until
    at most ``params`` of the parameters or ``macs`` of the multiply-accumulates are left (a share, or a number).
    ``cap`` bounds the share removed from any layer, so that none is emptied; ``scope="layer"`` removes the same share
    from every layer. ``groups="coupled"`` removes channels of whole streams: fewer choices, faster to run. For
    everything else take the steps one by one: ``find_structures``, ``score``, ``select``, ``shrink``. The model itself
    is left as it was.

    ``repair=True`` refits what is left to what the whole network computes, see ``sosp.repair``: most of the accuracy
    back without labels and without training; outputs are fitted as ``loss`` takes them, with a loss of your own as
    numbers. With ``rounds`` it is cut and repaired bit by bit, and scored anew each time: the more is removed, the more
    that helps; ``cap`` is then a share of what each round finds.
    """
    check_network(model)
    _refuse_inference(model)
    check_whole_number("rounds", rounds)
    example, data = open_data_once(data, find_device(model), keep=repair)
    keep = find_excluded_names(model, exclude, parameters=False)

    def scored(network: nn.Module) -> Saliency:
        left = keep & dict(network.named_modules()).keys()
        structures = find_structures(network, example, groups=groups, exclude=sorted(left))
        return score(network, data, method=method, loss=loss, structures=structures, examples=examples)

    choice = {"ratio": ratio, "params": params, "macs": macs, "cap": cap, "scope": scope}
    if repair:
        outputs = loss if isinstance(loss, str) else "mse"  # nothing is known of what a loss of their own makes of them
        return prune_and_repair(model, data, example, choice, scored, rounds, outputs=outputs)
    if rounds > 1:
        raise ArgumentError(f"rounds={rounds} needs repair=True: the network is repaired between the rounds.")
    return select_and_shrink(model, scored(model), example, choice)


def _refuse_inference(model: nn.Module) -> None:
    """Scores are derivatives, and nothing can be differentiated that inference mode has made."""
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "torch.inference_mode() is on, and scoring differentiates the network: call it outside of it."
        )
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_inference():
            raise ArgumentError(
                f"{name!r} was made under torch.inference_mode(), and scoring differentiates the network. Make the "
                "model outside of it, or give a copy: copy.deepcopy(model)."
            )


def prune_and_repair(
    model: nn.Module,
    data: Any,
    example: Any,
    choice: Mapping[str, Any],
    scored: Callable[[nn.Module], Saliency],
    rounds: int,
    outputs: str = "cross_entropy",
) -> Pruned:
    """Cut and repair, in rounds: all but the first score and cut what the one before has left."""
    network, first = model, scored(model)
    saliency, history = first, RemovalHistory(first.structures)
    for k in range(1, rounds):
        found = select_and_shrink(network, saliency, example, _budget_of_round(choice, k / rounds, first, saliency))
        assert found.plan is not None
        history.record(found.plan)
        network = repair_network(found.model, model, data, loss=outputs).model
        saliency = scored(network)
    found = select_and_shrink(network, saliency, example, _budget_of_round(choice, 1.0, first, saliency))
    fixed = repair_network(found.model, model, data, loss=outputs)
    if network is model:
        return replace(found, model=fixed.model, repaired=fixed)
    assert found.plan is not None
    history.record(found.plan)
    before = compute_whole_cost(first.structures.flow or follow_channels(model, example))
    return Pruned(fixed.model, history.mask(), first, before, found.cost_after, None, fixed)


def _budget_of_round(choice: Mapping[str, Any], share: float, first: Saliency, now: Saliency) -> dict[str, Any]:
    """The budget of a round, when a ``share`` of the rounds will be done: every round takes as large a share."""
    if share == 1 and first is now:
        return dict(choice)
    for name in ("params", "macs"):
        if choice.get(name) is not None and first.structures.flow is not None:
            whole = getattr(compute_whole_cost(first.structures.flow), name)
            wanted = choice[name] / whole if choice[name] > 1 else choice[name]
            return {**choice, name: max(2, floor(whole * wanted**share * (1 + 1e-12)))}
    ratio = 0.5 if choice.get("ratio") is None else choice["ratio"]
    left = len(first.structures) * (1 - ratio) ** share
    return {**choice, "ratio": max(0.0, 1 - left / len(now.structures))}


def select_and_shrink(model: nn.Module, saliency: Saliency, example: Any, choice: Mapping[str, Any]) -> Pruned:
    """Select by ``choice``, the arguments of ``select``, and shrink. A budget is met by the network that is built."""
    options = SelectionOptions(**choice)
    mask, plan = select_and_plan(saliency, options)
    if plan is None:
        flow = saliency.structures.flow or follow_channels(model, example)
        plan = plan_removal(flow, mask, LayoutStyle(options.join, options.round_to))
    small = shrink(model, plan, example)
    return Pruned(small, mask, saliency, compute_whole_cost(plan.flow), plan.cost, plan)


def train(
    model: nn.Module | Mapping[str, nn.Module],
    data: Any,
    schedule: Schedule | str = "cifar",
    *,
    folder: str | Path | None = None,
    seed: int | Mapping[str, int] = 0,
    device: torch.device | str | None = None,
    speed: Speed | None = None,
    teacher: nn.Module | None = None,
    companion: Companion | None = None,
    on_epoch: Callable[[str, Epoch], None] | None = None,
    on_step: Callable[[int, int, Moment], None] | None = None,
    save_every: float = 600.0,
) -> Any:
    """Train a copy of a network, or of several side by side; pruned layers are padded meanwhile (``Speed.pad_widths``).

    Several networks are trained as each would be alone, except that they draw the random numbers of dropout in turn.
    On a CPU, a training that continues from a checkpoint gives the same bits as one that never stopped.

    Args:
        model: The network, or several by name, ``{"a": model, "b": other}``. It is not changed.
        data: A dataset of ``sosp.data``, a pair of tensors (inputs, labels), a loader, or (training data, test data)
            of any of these.
        schedule: A ``sosp.Schedule`` or the name of one in ``sosp.SCHEDULES``.
        folder: Where checkpoints are written, after every epoch (large ones at most twice a minute), every
            ``save_every`` seconds and on Ctrl-C. Training continues from the newest one.
        seed: Seed of all random numbers; for several networks it may be a dict.
        device: Where the network is trained; by default where it is.
        speed: Precision, memory layout, CUDA graphs, compilation; by default what suits the device.
        teacher: The network whose outputs ``schedule.distill`` compares with.
        companion: A callback with its own loss terms, parameters and steps, see ``sosp.training.Companion``.
        on_epoch: Called with the network's name and the ``Epoch`` after every epoch.
        on_step: Called with the steps done, all steps and the ``Moment`` during an epoch.
        save_every: Seconds between checkpoints within an epoch.

    Returns:
        A ``sosp.Trained``, or a dict of them if ``model`` is a dict.

    Raises:
        ArgumentError: If an argument has a wrong value, or no parameter can be trained.
        DataError: If the data is empty or does not fit the network.
        TrainingError: If the loss becomes infinite or NaN.
    """
    from sosp import training
    from sosp.surgery.pad_widths import pad_model

    return training.train(
        model,
        data,
        schedule,
        folder=folder,
        seed=seed,
        device=device,
        speed=speed,
        teacher=teacher,
        companion=companion,
        on_epoch=on_epoch,
        on_step=on_step,
        save_every=save_every,
        pad=pad_model,
    )
