"""From a trained network, data and a budget to a smaller network, in one call; and its training. Read this first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sosp.core.batches import Chunk, has_two_parts, open_data_once
from sosp.core.borrowed_model import check_network, find_device
from sosp.core.loss_names import LossLike, name_loss
from sosp.errors import ArgumentError, BudgetError, StructureError, check_choice, check_whole_number
from sosp.graph.flow import Flow, follow_channels
from sosp.graph.layout import LayoutStyle
from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, Plan, compute_whole_cost, plan_removal
from sosp.graph.records import Saliency, Structures
from sosp.graph.structures import Exclude, find_excluded_names, find_structures
from sosp.refit import RemovalHistory, Repaired
from sosp.refit import repair as repair_network
from sosp.scoring.methods import METHODS
from sosp.scoring.score import score
from sosp.selection.select import SelectionOptions, select_and_plan
from sosp.surgery.checkpoint import save
from sosp.surgery.shrink import shrink

if TYPE_CHECKING:  # who prunes need not train
    from sosp.training import Companion, Epoch, Moment, Schedule, Speed


PRESETS = ("default", "paper")
OWN_EXAMPLES, LABELLED_EXAMPLES = 256, 1000  # scores on own outputs repeat with a quarter of the examples
REPAIR_EXAMPLES, LEAST_REPAIR_EXAMPLES = 1000, 64
REPAIR_MACS = 4e11  # of all inputs in one pass on a CPU: repair runs the network several times per layer
MOST_PAIRED = 8192  # structures: their pairs have 256 MiB in single precision
MOST_OUTPUTS = 16  # with more, SAMPLED labels are drawn per example in place of all outputs
SAMPLED = 4  # ResNet-20 at half of the MACs: 87.9 %, with all ten outputs 87.5 %


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
    method: str | None = None,
    loss: LossLike = "cross_entropy",
    groups: str | None = None,
    exclude: Exclude = (),
    examples: int | str | None = "auto",
    repair: bool | None = None,
    rounds: int = 1,
    preset: str = "default",
) -> Pruned:
    """Return a smaller network that computes nearly what the original computes.

    Score all structures, remove the least important ones, and refit the remaining weights to the outputs of the
    original. No labels are needed. The model is not changed.

    Args:
        model: The trained network.
        data: Inputs, or (inputs, labels), as ``sosp.score`` takes them: a tensor, a pair of tensors, a loader, batches.
        ratio: Share of the structures to remove; half by default. Give one of ``ratio``, ``params`` and ``macs``.
        params: Largest number of parameters to keep: a share up to 1, or a whole number.
        macs: Largest number of multiply-accumulates to keep, likewise.
        cap: Largest share of structures to remove from one layer.
        scope: ``"layer"`` removes the same share from every layer; ``"global"`` ranks all structures together.
        method: A name in ``sosp.METHODS``. By default SOSP-I on the network's own outputs, or SOSP-H where the network
            has too many structures for their pairs or the loss is a function of your own.
        loss: What the outputs are: ``"cross_entropy"`` or ``nn.CrossEntropyLoss()`` for logits of classes,
            ``"bce"`` for independent logits, ``"mse"`` for numbers; or a function of (outputs, targets), see
            ``sosp.score``.
        groups: ``"coupled"`` removes channels of whole streams, which makes the network faster. ``"independent"``
            chooses for every layer by itself. By default coupled, or independent where no channel can go as a whole.
        exclude: Layers to keep: names, patterns or modules.
        examples: Number of examples to score with; None for all. ``"auto"``: 256 of the network's own outputs, 1000 of
            labels.
        repair: Refit the remaining weights to the outputs of the original, see ``sosp.repair``.
        rounds: Number of rounds of scoring, removing and repair.
        preset: ``"paper"`` for the settings of the paper: SOSP-H with labels, gates at the weights, independent
            groups, the order of the saliencies, no repair.

    Returns:
        The pruned network, with the mask, the saliency and the cost before and after.

    Raises:
        ArgumentError: An argument has an invalid value, or the budget cannot be met.
        StructureError: The network has nothing that can be removed.
        DataError: The data is empty or cannot be read as examples.
    """
    check_network(model)
    _refuse_inference(model)
    check_whole_number("rounds", rounds)
    check_choice("preset", preset, PRESETS)
    paper = preset == "paper"
    head, data = open_data_once(data, find_device(model), keep=repair is not False or groups is None, model=model)
    if repair is None:  # a layer is fitted to some inputs and tested on others
        repair = not paper and has_two_parts(data, model)
    keep = find_excluded_names(model, exclude, parameters=False)
    ways = (groups,) if groups is not None else ("independent",) if paper else ("coupled", "independent")

    def scored(network: nn.Module, way: str) -> Saliency:
        left, gate = keep & dict(network.named_modules()).keys(), "weights" if paper else "features"
        structures = find_structures(network, head.inputs, groups=way, exclude=sorted(left), gate=gate)
        scoring = _choose_scoring(structures, method, loss, paper or _needs_labels(method, loss), head, examples)
        return score(network, data, loss=loss, structures=structures, **scoring)

    rule = "saliency" if paper else "auto"
    choice = {"ratio": ratio, "params": params, "macs": macs, "cap": cap, "scope": scope, "rule": rule}
    if rounds > 1 and not repair:
        raise ArgumentError(f"rounds={rounds} needs repair=True: the network is repaired between the rounds.")
    outputs = name_loss(loss) or "mse"  # nothing is known of what a loss of their own makes of them

    def attempt(way: str) -> Pruned:
        if not repair:
            return select_and_shrink(model, scored(model, way), head.inputs, choice)
        score_way = partial(scored, way=way)
        return prune_and_repair(model, data, head.inputs, choice, score_way, rounds, outputs, None)

    return _first_that_works(attempt, ways)


def _first_that_works(attempt: Callable[[str], Pruned], ways: Sequence[str]) -> Pruned:
    """Return the result of the first way; of the next one where no channel, or too few, can be removed as a whole."""
    first, *others = ways
    try:
        return attempt(first)
    except (StructureError, BudgetError):
        if not others:
            raise
        return _first_that_works(attempt, others)


def _needs_labels(method: str | None, loss: LossLike) -> bool:
    """Return whether labels must be read: for a loss of the user's own, or a method that needs a slope."""
    return name_loss(loss) is None or (method in METHODS and not METHODS[method].own)


def _choose_scoring(
    structures: Structures, method: str | None, loss: LossLike, labels: bool, head: Chunk, examples: int | str | None
) -> dict[str, Any]:
    """Return the options of ``score``: the method that the network's size allows, its targets and examples."""
    if method is not None:
        check_choice("method", method, METHODS)
    affordable = structures.outputs > 0 and len(structures) <= MOST_PAIRED and head.divisible
    method = method or ("sosp-i" if affordable and not labels else "sosp-h")
    labels = labels or (method == "sosp-h" and head.targets is not None)
    if isinstance(examples, str):
        check_choice("examples", examples, ("auto",))
        examples = LABELLED_EXAMPLES if labels else OWN_EXAMPLES
    sampled = not labels and METHODS[method].samples and structures.outputs > MOST_OUTPUTS
    return {
        "method": method,
        "targets": "labels" if labels else "own",
        "examples": examples,
        "classes": SAMPLED if sampled else None,
    }


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
    inputs: int | None = 5000,
) -> Pruned:
    """Cut and repair, in rounds: all but the first score and cut what the one before has left."""
    network, first = model, scored(model)
    inputs = _count_repair_inputs(model, first.structures.flow) if inputs is None else inputs
    saliency, history = first, RemovalHistory(first.structures)
    for k in range(1, rounds):
        found = select_and_shrink(network, saliency, example, _budget_of_round(choice, k / rounds, first, saliency))
        assert found.plan is not None
        history.record(found.plan)
        network = repair_network(found.model, model, data, examples=inputs, loss=outputs).model
        saliency = scored(network)
    found = select_and_shrink(network, saliency, example, _budget_of_round(choice, 1.0, first, saliency))
    fixed = repair_network(found.model, model, data, examples=inputs, loss=outputs)
    if network is model:
        return replace(found, model=fixed.model, repaired=fixed)
    assert found.plan is not None
    history.record(found.plan)
    before = compute_whole_cost(first.structures.flow or follow_channels(model, example))
    return Pruned(fixed.model, history.mask(), first, before, found.cost_after, None, fixed)


def _count_repair_inputs(model: nn.Module, flow: Flow | None) -> int:
    """Return the number of inputs to repair with: fewer for a network with large inputs, on a CPU."""
    if flow is None or find_device(model).type != "cpu":
        return REPAIR_EXAMPLES
    affordable = int(REPAIR_MACS / max(compute_whole_cost(flow).macs, 1))
    return max(LEAST_REPAIR_EXAMPLES, min(REPAIR_EXAMPLES, affordable))


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
    structures = saliency.structures
    options = SelectionOptions(**choice)
    if options.rule == "auto":  # a method that ranks every layer by itself has no use for a price
        priced = structures.flow is not None and "layer" not in (options.scope, saliency.scope)
        options = replace(options, rule="priced" if priced else "saliency")
    mask, plan = select_and_plan(saliency, options)
    if plan is None:
        flow = structures.flow or follow_channels(model, example)
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
        data: A dataset of ``sosp.data``, a pair of tensors or arrays (inputs, labels), a Dataset of torch or of
            Hugging Face, a loader, or (training data, test data) of any of these.
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
