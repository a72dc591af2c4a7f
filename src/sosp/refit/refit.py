"""Refit a small network to the original one, layer by layer in the order of the network."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.borrowed_model import borrow_model, find_device
from sosp.core.loss_names import LOSS_NAMES as LOSSES
from sosp.core.loss_names import LossLike, name_loss
from sosp.core.progress import track_progress
from sosp.errors import check_choice, check_whole_number
from sosp.refit.activations import FULL_RANGE
from sosp.refit.agreement import OutputAgreement, collect_outputs, describe_change
from sosp.refit.block_cache import BlockCache
from sosp.refit.channel_map import find_recipes_between
from sosp.refit.comparison_points import ChannelTracker
from sosp.refit.equations import (
    LayerObservations,
    ObservationCollector,
    PositionSampler,
    RefitTask,
    build_equations,
    build_two_layer_equations,
)
from sosp.refit.filter_scale import restore_filter_lengths
from sosp.refit.inputs import InputPart, read_chunks, split_chunks
from sosp.refit.layer_errors import ErrorMeasure, build_divergence, build_squared_error
from sosp.refit.layer_matrix import get_matrix
from sosp.refit.least_squares import LayerFit, StandardisedInputs, fit_weights
from sosp.refit.norm_statistics import reestimate_norms
from sosp.refit.repair_plan import group_tasks, plan_tasks, track_networks, warn_few_inputs
from sosp.refit.result import LayerRepair, Repaired
from sosp.refit.two_layer_fit import TwoLayerSearch
from sosp.refit.write_back import has_bias_or_norm, write_fit

TARGETS = 2**30  # bytes of the original's values that are held at once
UNUSED = "refitting all layers did not improve the outputs"
FAILED_ON_SOME_INPUTS = "it or its comparison point does not run on all inputs"


def repair(
    small: nn.Module,
    model: nn.Module,
    data: Any,
    *,
    examples: int | None = 5000,
    loss: LossLike = "cross_entropy",
    sweeps: int = 1,
    seed: int = 0,
) -> Repaired:
    """A copy of ``small`` that computes what ``model`` does, as far as its size allows: no labels, no training.

    ``small`` is what ``sosp.shrink``, ``sosp.prune`` or ``sosp.load`` made of ``model``. In the order of the network,
    every layer is fitted by least squares to what the original computes in its place, given what the small network
    really feeds it, so that it also makes up for errors of the layers before. ``data``: inputs, of which ``examples``
    are used: a tensor or an array, several inputs (x1, x2), a list of images, a Dataset, a source of ``sosp.data``, or
    a loader of inputs or of (inputs, labels); nobody looks at labels. A tenth is held out: it decides about the
    regularisation, and about every layer, which keeps its weights unless the new ones are better there. ``loss`` says
    what outputs are: ``"cross_entropy"`` for logits, of which only the probabilities count, or ``"mse"`` for numbers;
    ``nn.CrossEntropyLoss()`` and ``nn.MSELoss()`` say the same. ``"bce"`` and ``nn.BCEWithLogitsLoss()`` are for
    independent logits, which are fitted as numbers. ``sweeps``: how often to go through the network. ``seed`` draws the
    positions of feature maps that are looked at. Both networks are left as they were.
    """
    outputs = name_loss(loss) or loss
    check_choice("loss", outputs, LOSSES)
    check_whole_number("sweeps", sweeps)
    check_whole_number("seed", seed, least=0)
    started = time.perf_counter()
    recipes = find_recipes_between(small, model)
    chunks = read_chunks(data, examples, find_device(small), seed, model)
    repaired = copy.deepcopy(small)
    with borrow_model(model), borrow_model(repaired), torch.no_grad():
        pair = track_networks(repaired, model, recipes, chunks[0].rows(0, min(4, chunks[0].size)))
        parts = split_chunks(chunks, pair.widest, find_device(small))
        tasks, left = plan_tasks(pair, parts)
        total = sum(part.chunk.size for part in parts)
        if examples is None or total < examples:  # more would have been used
            warn_few_inputs(pair, tasks, parts)
        found = _run_sweeps(
            RepairSetup(repaired, model, parts, str(outputs), PositionSampler(seed), pair.here), tasks, sweeps
        )
    repaired.load_state_dict(found.state)  # borrowing gave the old statistics back
    restore_filter_lengths(small, repaired, pair.here, [task.layer for task in tasks])
    known = {error.layer: error for error in found.errors}
    layers = [known.get(n) or LayerRepair(n, 0.0, 0.0, None, 0, 0, left[n]) for n in pair.here.order]
    seconds = time.perf_counter() - started
    return Repaired(repaired, tuple(layers), found.before, found.after, total, seconds, found.classes, found.note)


@dataclass(frozen=True, eq=False)
class RepairSetup:
    """Both networks, borrowed, and what they are given."""

    small: nn.Module
    model: nn.Module
    parts: list[InputPart]
    loss: str
    positions: PositionSampler
    tracker: ChannelTracker  # of the small one

    @property
    def inputs(self) -> int:
        return sum(part.chunk.size for part in self.parts)

    def measure(self, task: RefitTask) -> ErrorMeasure:
        """How wrong a layer is."""
        return _output_measure(self.loss, len(task.live)) if task.logits else build_squared_error(task.here.clip)


def _output_measure(loss: str, width: int) -> ErrorMeasure:
    return build_divergence() if _are_classes(loss, width) else build_squared_error(FULL_RANGE)


def _are_classes(loss: str, width: int) -> bool:
    """Whether outputs are the logits of classes, and not numbers by themselves."""
    return loss == "cross_entropy" and width > 1


@dataclass(frozen=True, eq=False)
class RepairOutcome:
    """What came out: the numbers of the network, the errors of its layers, how many answers are the original's."""

    state: dict[str, Tensor]
    errors: list[LayerRepair]
    before: float
    after: float
    classes: bool
    note: str = ""


def _run_sweeps(work: RepairSetup, tasks: Sequence[RefitTask], sweeps: int) -> RepairOutcome:
    """Go through the network; something simpler is returned if it is better on the inputs held out."""
    theirs = collect_outputs(work.model, work.parts)
    measure, classes = _output_measure(work.loss, theirs.shape[1]), _are_classes(work.loss, theirs.shape[1])

    def judge() -> tuple[OutputAgreement, dict[str, Tensor]]:
        agreement = OutputAgreement.of(collect_outputs(work.small, work.parts), theirs, measure, classes=classes)
        return agreement, {name: x.clone() for name, x in work.small.state_dict().items()}

    before, old = judge()
    for _ in range(sweeps):
        errors = list(_sweep_layers(work, tasks))
    after, state = judge()
    work.small.load_state_dict(old)
    best, simpler = before, "the weights are unchanged"
    if reestimate_norms(work.small, [n for n in work.tracker.times if n not in work.tracker.order], work.parts):
        norms, new = judge()
        if norms.is_better(before):
            best, old, simpler = norms, new, "only batch-norm statistics are re-estimated"
    change = describe_change(best, after, classes=classes)
    if after.is_better(best):
        note = f"Fewer answers agree than without refitting, but the outputs are closer: {change}"
        fewer = after.agreement < best.agreement
        return RepairOutcome(state, errors, before.agreement, after.agreement, classes, note if fewer else "")
    unchanged = best is before and after == before  # no layer was refitted, or none had to be
    note = "" if unchanged else f"Refitting did not improve the outputs ({change}), so {simpler}"
    kept = [replace(e, after=e.before, ridge=None, why=e.why or UNUSED) for e in errors]
    return RepairOutcome(old, kept, before.agreement, best.agreement, classes, note)


def _sweep_layers(work: RepairSetup, tasks: Sequence[RefitTask]) -> Iterator[LayerRepair]:
    """All layers once, each with all before it repaired."""
    cache = BlockCache(work.small, work.tracker)
    for some in _split_by_memory(tasks, work.inputs):
        targets = ObservationCollector(work.model, work.parts, work.positions).values(some, small=False)
        for group in track_progress(list(group_tasks(some)), "repair"):
            now = ObservationCollector(work.small, work.parts, work.positions, cache).values(group, small=True)
            for task in group:
                seen, target = now.pop(task.layer, None), targets.pop(task.layer, None)
                if seen is None or target is None:
                    yield LayerRepair(task.layer, 0.0, 0.0, None, 0, 0, FAILED_ON_SOME_INPUTS)
                else:
                    yield _refit_layer(work, task, seen, target)


def _split_by_memory(tasks: Sequence[RefitTask], inputs: int) -> Iterator[list[RefitTask]]:
    """As many at a time as their targets have room."""
    some: list[RefitTask] = []
    size = 0.0
    for task in tasks:
        more = 4 * inputs * task.values
        if some and size + more > TARGETS:
            yield some
            some, size = [], 0.0
        some.append(task)
        size += more
    if some:
        yield some


def _refit_layer(work: RepairSetup, task: RefitTask, now: LayerObservations, target: LayerObservations) -> LayerRepair:
    """Fit one layer, and write it down if that makes it better."""
    unknowns = get_matrix(work.small.get_submodule(task.layer)).shape[2] + 1
    rows, held = build_equations(work.parts, now, target)
    if task.next_layer is None and torch.equal(rows.now, rows.target):  # nothing was lost so far
        return LayerRepair(task.layer, 0.0, 0.0, None, unknowns, len(rows.now))
    measure, inputs = work.measure(task), StandardisedInputs(rows.X, has_bias_or_norm(work.small, task))
    error, found = float(measure.error(held.now, held.target)), fit_weights(rows, held, measure, inputs)
    if task.next_layer is not None:
        error, found = _fit_two_layers(work, task, now, target, inputs, found)
    if found is None or not found.after < error:
        return LayerRepair(task.layer, error, error, None, unknowns, len(rows.now))
    write_fit(work.small, task, found, rows.X)
    return LayerRepair(task.layer, error, found.after, found.ridge, unknowns, len(rows.now))


def _fit_two_layers(
    work: RepairSetup,
    task: RefitTask,
    now: LayerObservations,
    target: LayerObservations,
    inputs: StandardisedInputs,
    own: LayerFit | None,
) -> tuple[float, LayerFit | None]:
    """The error of the layer that reads this one, and the fit that is best for it."""
    assert task.next_layer is not None
    fitted, held = build_two_layer_equations(work.small, task.next_layer, work.parts, now, target)
    measure = work.measure(task.next_layer.task)
    found = None if own is None else TwoLayerSearch(fitted, held, measure, inputs).best(own)
    return float(measure.error(held.present, held.target)), found
