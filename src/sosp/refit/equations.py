"""Collect equations: what layers are given and what they are compared by, at positions drawn over all inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from sosp.errors import DataError
from sosp.refit.activations import Activation
from sosp.refit.block_cache import BlockCache
from sosp.refit.comparison_points import ComparisonPoint
from sosp.refit.hooks import OutputCallback, OutputListener
from sosp.refit.inputs import InputPart
from sosp.refit.layer_matrix import LayerUse, count_groups, get_matrix, take_values
from sosp.refit.least_squares import LayerEquations, compute_outputs
from sosp.refit.two_layer_fit import TwoLayerEquations


@dataclass(frozen=True, eq=False)
class RefitTask:
    """A layer to refit, and where it is compared in both networks."""

    layer: str
    number: int  # of the layer, in the order of the network
    here: ComparisonPoint  # in the small network
    there: ComparisonPoint  # in the original one
    live: Tensor  # (C,) bool, the channels that can be refitted
    origin: Tensor  # (C,) the channels of the original's layer that they are
    density: float  # positions for each input
    logits: bool  # it gives the outputs of the network
    next_layer: NextLayer | None = None

    @property
    def needs(self) -> int:
        """The last layer that has to be repaired before."""
        return self.here.needs if self.next_layer is None else max(self.here.needs, self.next_layer.other_needs)

    @property
    def values(self) -> float:
        """Numbers of the original network that are held for each input."""
        if self.next_layer is None:
            return self.density * len(self.live)
        return self.next_layer.density * (self.next_layer.taps * len(self.live) + len(self.next_layer.task.live))


@dataclass(frozen=True, eq=False)
class NextLayer:
    """The one layer that reads what another one gives, through an activation."""

    task: RefitTask  # of the layer that reads
    act: Activation
    use: LayerUse  # of its weight
    sizes: tuple[int, ...]  # of what it reads and of what it gives for an example, without channels
    out: tuple[int, ...]
    density: float  # positions of what it gives for each input
    other_needs: int  # the last layer, but the one that it reads, that it depends on

    @property
    def taps(self) -> int:
        """Positions that it reads for one that it gives."""
        return prod(self.use.kernel)


class PositionSampler:
    """Which positions of a tensor are looked at: the same in both networks and in every pass."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drawn: dict[tuple[int, int, int], Tensor] = {}
        self.read: dict[tuple[int, int, str], tuple[Tensor, Tensor]] = {}

    def of(self, part: InputPart, density: float, total: int, device: torch.device) -> Tensor:
        count = max(1, round(density * part.chunk.size))
        key = (part.number, total, count)
        if key not in self.drawn:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + part.number)
            drawn = torch.randint(total, (count,), generator=generator) if count < total else torch.arange(total)
            self.drawn[key] = drawn.to(device)
        return self.drawn[key]

    def of_inputs(self, part: InputPart, reader: NextLayer, total: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The positions that a layer reads for its own ones, and their places among all of these, edges included."""
        key = (part.number, total, reader.task.layer)
        if key not in self.read:
            read = reader.use.read_positions(reader.sizes, reader.out, self.of(part, reader.density, total, device))
            assert read is not None
            where = (read.flatten() >= 0).nonzero().flatten()
            self.read[key] = read.flatten()[where], where
        return self.read[key]


class ObservationCollector:
    """Look at one network while it runs."""

    def __init__(
        self, model: nn.Module, parts: Sequence[InputPart], positions: PositionSampler, cache: BlockCache | None = None
    ) -> None:
        self.model, self.parts, self.positions, self.cache = model, parts, positions, cache

    def values(self, tasks: Sequence[RefitTask], small: bool) -> dict[str, LayerObservations]:
        """Of every task, what is compared; in the small network, also what the layers are given.

        Where the code looks at its inputs to decide what it does, a layer may not run on some of them: it is left out.
        """
        found = {task.layer: LayerObservations([], [], [], []) for task in tasks}
        listener = OutputListener(self.model)
        with listener.hooked():
            for part in self.parts:
                with self._reuse_blocks(tasks[0].number, part, listener):
                    listener.listen(self._plan_callbacks(tasks, part, found, small, listener), part.chunk.run)
        whole = [task for task in tasks if found[task.layer].is_whole(task, len(self.parts), small)]
        try:
            _check_finite(self.parts, whole, found)
        except DataError:
            if self.cache is None or not self.cache.skips:
                raise
            self.cache.skips = False  # perhaps something was read that had not been computed
            return self.values(tasks, small)
        return {task.layer: found[task.layer] for task in whole}

    def _reuse_blocks(self, layer: int, part: InputPart, listener: OutputListener) -> AbstractContextManager[None]:
        return nullcontext() if self.cache is None else self.cache.reuse_blocks(layer, part.number, listener)

    def _plan_callbacks(
        self,
        tasks: Sequence[RefitTask],
        part: InputPart,
        found: Mapping[str, LayerObservations],
        small: bool,
        listener: OutputListener,
    ) -> dict[str | int, list[OutputCallback]]:
        wanted: dict[str | int, list[OutputCallback]] = {}
        for task in tasks:
            seen = found[task.layer]
            self._request_outputs(wanted, task, seen.values, self._position_rule(task, part), small, listener)
            if small:
                wanted.setdefault(task.layer, []).append(self._record_inputs(task, part, seen))
            if task.next_layer is not None:
                self._request_outputs(
                    wanted, task.next_layer.task, seen.next_values, self._draw_positions(task, part), small, listener
                )
        return wanted

    def _request_outputs(
        self,
        wanted: dict[str | int, list[OutputCallback]],
        task: RefitTask,
        found: list[Tensor],
        rows: PositionRule,
        small: bool,
        listener: OutputListener,
    ) -> None:
        point = task.here if small else task.there
        places = point.tracked.places if small else point.tracked.places[task.origin]
        starts: list[
            int
        ] = []  # additions made when the layer was done: with another number of them, other_needs follow

        def mark_start(used: LayerUse | None, output: Tensor) -> None:
            starts.append(listener.sums)

        def record(used: LayerUse | None, output: Tensor) -> None:
            if point.sum is None or starts == [point.start]:
                values = take_values(output, point.axis, places.clamp_min(0), rows(output, point.axis)[0])
                found.append(values.masked_fill(~task.live, 0))

        if point.sum is not None:
            wanted.setdefault(point.layer, []).append(mark_start)
        wanted.setdefault(point.module if point.sum is None else point.sum, []).append(record)

    def _record_inputs(self, task: RefitTask, part: InputPart, found: LayerObservations) -> OutputCallback:
        rule = self._position_rule(task, part)

        def record(used: LayerUse | None, output: Tensor) -> None:
            assert used is not None
            rows, where = rule(output, task.here.axis)
            found.inputs.append(used.inputs(output.shape, rows))
            found.where.append(where)

        return record

    def _position_rule(self, task: RefitTask, part: InputPart) -> PositionRule:
        """Where the layer is looked at: anywhere, or where the layer behind it reads."""
        next_layer = task.next_layer
        if next_layer is None:
            return self._draw_positions(task, part)

        def rule(output: Tensor, axis: int) -> tuple[Tensor, Tensor]:
            total = output.numel() // output.shape[axis] // prod(next_layer.sizes) * prod(next_layer.out)
            return self.positions.of_inputs(part, next_layer, total, output.device)

        return rule

    def _draw_positions(self, task: RefitTask, part: InputPart) -> PositionRule:
        density = task.density if task.next_layer is None else task.next_layer.density

        def rule(output: Tensor, axis: int) -> tuple[Tensor, Tensor]:
            total = output.numel() // output.shape[axis]
            rows = self.positions.of(part, density, total, output.device)
            return rows, rows

        return rule


PositionRule = Callable[
    [Tensor, int], tuple[Tensor, Tensor]
]  # output, axis of channels -> positions, places among those read


@dataclass(frozen=True, eq=False)
class LayerObservations:
    """Of one layer, a tensor for every part."""

    inputs: list[Tensor]  # (G, R, K)
    values: list[Tensor]  # (R, C)
    where: list[Tensor]  # (R,)
    next_values: list[Tensor]  # (R', C') of the layer that reads it

    def is_whole(self, task: RefitTask, parts: int, small: bool) -> bool:
        """Every part has given what the task wants."""
        wanted = [
            self.values,
            *([self.inputs] if small else []),
            *([] if task.next_layer is None else [self.next_values]),
        ]
        return all(len(values) == parts for values in wanted)

    def rows(self, target: LayerObservations, chosen: list[int]) -> LayerEquations:
        """Equations of some parts."""
        now, wanted = (torch.cat([x.values[k] for k in chosen]) for x in (self, target))
        return LayerEquations(torch.cat([self.inputs[k] for k in chosen], 1), now, wanted)


def _check_finite(
    parts: Sequence[InputPart], tasks: Sequence[RefitTask], found: Mapping[str, LayerObservations]
) -> None:
    """All at once: a GPU would wait for every single answer."""
    named = [pair for task in tasks for pair in _list_values(task, found[task.layer])]
    if not named:
        return
    fine = [torch.isfinite(values[k]).all() for k in range(len(parts)) for _, values in named]
    for number, good in enumerate(torch.stack(fine).tolist()):
        if not good:
            part, layer = parts[number // len(named)], named[number % len(named)][0]
            raise DataError(
                f"the input or output of {layer!r} is not finite on {part.source}, so the layer cannot be fitted. "
                "Check those inputs, and the weights of both networks (diverged training?)."
            )


def _list_values(task: RefitTask, seen: LayerObservations) -> list[tuple[str, list[Tensor]]]:
    """Whose values they are; the original's layers are not asked for their inputs."""
    reader = task.layer if task.next_layer is None else task.next_layer.task.layer
    every = [(task.layer, seen.inputs), (task.layer, seen.values), (reader, seen.next_values)]
    return [(layer, values) for layer, values in every if values]


def build_equations(
    parts: Sequence[InputPart], now: LayerObservations, target: LayerObservations
) -> tuple[LayerEquations, LayerEquations]:
    """Those to fit to, and those held out."""
    fitted, held = _split_parts(parts)
    return now.rows(target, fitted), now.rows(target, held)


def _split_parts(parts: Sequence[InputPart]) -> tuple[list[int], list[int]]:
    fitted, held = ([k for k, part in enumerate(parts) if part.held == which] for which in (False, True))
    return fitted, held


def build_two_layer_equations(
    model: nn.Module,
    next_layer: NextLayer,
    parts: Sequence[InputPart],
    now: LayerObservations,
    target: LayerObservations,
) -> tuple[TwoLayerEquations, TwoLayerEquations]:
    """The same with the layer that reads it."""
    fitted, held = (_build_two_layer_side(model, next_layer, now, target, chosen) for chosen in _split_parts(parts))
    return fitted, held


def _build_two_layer_side(
    model: nn.Module, next_layer: NextLayer, now: LayerObservations, target: LayerObservations, chosen: list[int]
) -> TwoLayerEquations:
    reader = model.get_submodule(next_layer.task.layer)
    W, factor = get_matrix(reader), next_layer.task.here.tracked.factor * next_layer.task.live
    taps = next_layer.taps
    sizes = [len(now.next_values[k]) * taps for k in chosen]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    where = torch.cat([now.where[k] + start for k, start in zip(chosen, starts, strict=True)])
    next_values, goal = (torch.cat([x.next_values[k] for k in chosen]) for x in (now, target))
    chain = TwoLayerEquations(
        now.rows(target, chosen), where, taps, count_groups(reader), next_layer.act, goal, next_values, next_values
    )
    given = compute_outputs(chain.inputs(next_layer.act(chain.first.now)), W.mT) * factor
    return replace(chain, rest=next_values - given)
