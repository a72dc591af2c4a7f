"""Refit a small network to the original one, layer by layer in the order of the network."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.borrow import borrowed, home
from sosp.core.losses import NAMES as LOSSES
from sosp.core.progress import track
from sosp.errors import one_of, whole_number
from sosp.refit.activations import EVERYTHING
from sosp.refit.agreement import Likeness, answers
from sosp.refit.block_cache import Memory
from sosp.refit.channel_map import recipes_between
from sosp.refit.comparison_points import Trails
from sosp.refit.equations import Collector, Positions, Seen, Task, chains, equations
from sosp.refit.filter_scale import level
from sosp.refit.inputs import Part, chunks_of, parts_of
from sosp.refit.layer_errors import Measure, divergence, squares
from sosp.refit.layer_matrix import matrix
from sosp.refit.least_squares import Fit, Standardised, fit
from sosp.refit.plan import run_both, tasks_of, together
from sosp.refit.result import LayerError, Repaired
from sosp.refit.two_layer_fit import Through
from sosp.refit.write_back import takes_shift, write

TARGETS = 2**30  # bytes of the original's values that are held at once
UNSTEADY = "it, or what it is compared by, does not run on all of the inputs"


def repair(
    small: nn.Module,
    model: nn.Module,
    data: Any,
    *,
    examples: int | None = 5000,
    loss: str = "cross_entropy",
    sweeps: int = 1,
    seed: int = 0,
) -> Repaired:
    """A copy of ``small`` that computes what ``model`` does, as far as its size allows: no labels, no training.

    ``small`` is what ``sosp.shrink``, ``sosp.prune`` or ``sosp.load`` made of ``model``. In the order of the network,
    every layer is fitted by least squares to what the original computes in its place, given what the small network
    really feeds it, so that it also makes up for errors of the layers before. ``data``: inputs, of which ``examples``
    are used: a tensor, a source of ``sosp.data``, or a loader of inputs or of (inputs, labels); nobody looks at labels.
    A tenth is held out: it decides about the regularisation, and about every layer, which keeps its weights unless
    the new ones are better there. ``loss`` says what outputs are: ``"cross_entropy"`` for logits, of which only the
    probabilities count, or ``"mse"`` for numbers. ``sweeps``: how often to go through the network. ``seed`` draws the
    positions of feature maps that are looked at. Both networks are left as they were.
    """
    one_of("loss", loss, LOSSES)
    whole_number("sweeps", sweeps)
    whole_number("seed", seed, least=0)
    started = time.perf_counter()
    recipes = recipes_between(small, model)
    chunks = chunks_of(data, examples, home(small), seed)
    twin = copy.deepcopy(small)
    with borrowed(model), borrowed(twin), torch.no_grad():
        pair = run_both(twin, model, recipes, chunks[0].rows(0, min(4, chunks[0].size)))
        parts = parts_of(chunks, pair.widest, home(small))
        tasks, left = tasks_of(pair, parts)
        found = _repaired(Work(twin, model, parts, loss, Positions(seed), pair.here), tasks, sweeps)
    twin.load_state_dict(found.state)  # borrowing gave the old statistics back
    level(small, twin, pair.here, [task.layer for task in tasks])
    known = {error.layer: error for error in found.errors}
    layers = [known.get(n) or LayerError(n, 0.0, 0.0, None, 0, 0, left[n]) for n in pair.here.order]
    total, seconds = sum(part.chunk.size for part in parts), time.perf_counter() - started
    return Repaired(twin, tuple(layers), found.before, found.after, total, seconds, found.classes)


@dataclass(frozen=True, eq=False)
class Work:
    """Both networks, borrowed, and what they are given."""

    small: nn.Module
    model: nn.Module
    parts: list[Part]
    loss: str
    positions: Positions
    trails: Trails  # of the small one

    @property
    def inputs(self) -> int:
        return sum(part.chunk.size for part in self.parts)

    def measure(self, task: Task) -> Measure:
        """How wrong a layer is."""
        return _outputs(self.loss, len(task.live)) if task.logits else squares(task.here.clip)


def _outputs(loss: str, width: int) -> Measure:
    return divergence() if _are_classes(loss, width) else squares(EVERYTHING)


def _are_classes(loss: str, width: int) -> bool:
    """Whether outputs are the logits of classes, and not numbers by themselves."""
    return loss == "cross_entropy" and width > 1


@dataclass(frozen=True, eq=False)
class Done:
    """What came out: the numbers of the network, the errors of its layers, how many answers are the original's."""

    state: dict[str, Tensor]
    errors: list[LayerError]
    before: float
    after: float
    classes: bool


def _repaired(work: Work, tasks: Sequence[Task], sweeps: int) -> Done:
    """Go through the network; back to the start if all of it together is no better for it."""
    theirs = answers(work.model, work.parts)
    measure, classes = _outputs(work.loss, theirs.shape[1]), _are_classes(work.loss, theirs.shape[1])
    old = {name: x.clone() for name, x in work.small.state_dict().items()}
    before = Likeness.of(answers(work.small, work.parts), theirs, measure, classes=classes)
    for _ in range(sweeps):
        errors = list(_sweep(work, tasks))
    after = Likeness.of(answers(work.small, work.parts), theirs, measure, classes=classes)
    if after.error < before.error:
        state = {n: x.clone() for n, x in work.small.state_dict().items()}
        return Done(state, errors, before.agreement, after.agreement, classes)
    why = "all layers together did not help"
    kept = [replace(e, after=e.before, ridge=None, why=e.why or why) for e in errors]
    return Done(old, kept, before.agreement, before.agreement, classes)


def _sweep(work: Work, tasks: Sequence[Task]) -> Iterator[LayerError]:
    """All layers once, each with all before it repaired."""
    memory = Memory(work.small, work.trails)
    for some in _within(tasks, work.inputs):
        targets = Collector(work.model, work.parts, work.positions).values(some, small=False)
        for group in track(list(together(some)), "repair"):
            now = Collector(work.small, work.parts, work.positions, memory).values(group, small=True)
            for task in group:
                seen, target = now.pop(task.layer, None), targets.pop(task.layer, None)
                if seen is None or target is None:
                    yield LayerError(task.layer, 0.0, 0.0, None, 0, 0, UNSTEADY)
                else:
                    yield _refit(work, task, seen, target)


def _within(tasks: Sequence[Task], inputs: int) -> Iterator[list[Task]]:
    """As many at a time as their targets have room."""
    some: list[Task] = []
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


def _refit(work: Work, task: Task, now: Seen, target: Seen) -> LayerError:
    """Fit one layer, and write it down if that makes it better."""
    unknowns = matrix(work.small.get_submodule(task.layer)).shape[2] + 1
    rows, held = equations(work.parts, now, target)
    measure, inputs = work.measure(task), Standardised(rows.X, takes_shift(work.small, task))
    error, found = float(measure.error(held.now, held.target)), fit(rows, held, measure, inputs)
    if task.feed is not None:
        error, found = _through(work, task, now, target, inputs, found)
    if found is None or not found.after < error:
        return LayerError(task.layer, error, error, None, unknowns, len(rows.now))
    write(work.small, task, found, rows.X)
    return LayerError(task.layer, error, found.after, found.ridge, unknowns, len(rows.now))


def _through(
    work: Work, task: Task, now: Seen, target: Seen, inputs: Standardised, own: Fit | None
) -> tuple[float, Fit | None]:
    """The error of the layer that reads this one, and the fit that is best for it."""
    assert task.feed is not None
    fitted, held = chains(work.small, task.feed, work.parts, now, target)
    measure = work.measure(task.feed.task)
    found = None if own is None else Through(fitted, held, measure, inputs).best(own)
    return float(measure.error(held.present, held.target)), found
