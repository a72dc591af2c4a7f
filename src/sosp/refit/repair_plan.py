"""Plan a repair: which layers are refitted, where each is compared, and why some are left as they are."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.batches import Chunk
from sosp.core.outputs import find_logits
from sosp.errors import SospError, StructureError
from sosp.graph.recipe import Recipe, list_bypassed_parts
from sosp.refit.activations import FULL_RANGE, Activation
from sosp.refit.channel_map import find_original_channels
from sosp.refit.comparison_points import ChannelTracker, ComparisonPoint, track_channels
from sosp.refit.equations import NextLayer, RefitTask
from sosp.refit.hooks import listen_to_outputs
from sosp.refit.inputs import InputPart, count_needed_inputs
from sosp.refit.layer_matrix import LayerUse, find_bias, get_matrix, is_plain, take_values
from sosp.refit.least_squares import compute_outputs

ROWS = 2**15  # equations at most for a layer, however many inputs there are
BYTES = 2**28  # what their inputs may take
TRIED = 64  # rows on which a layer is tried out


class FewInputsWarning(UserWarning):
    """There are more unknowns than equations."""


@dataclass(frozen=True, eq=False)
class NetworkPair:
    """The two networks, as they were seen on a few inputs."""

    small: nn.Module
    model: nn.Module
    here: ChannelTracker
    there: ChannelTracker
    recipes: tuple[Recipe, ...]
    logits: Tensor  # what the small one gave
    chunk: Chunk

    @property
    def widest(self) -> int:
        """Numbers that the largest tensor holds for each input."""
        values = (*self.here.values.values(), *self.there.values.values())
        return max(1, max(value.tensor.numel() for value in values if not value.fixed) // self.chunk.size)

    @cached_property
    def sums(self) -> list[int] | None:
        """The number in the original network of each sum of the small one; None where they are not the same sums."""
        gone = set().union(*(list_bypassed_parts(self.model, recipe.bypassed) for recipe in self.recipes))
        left = [number for number, module in enumerate(self.there.sum_modules) if module not in gone]
        return left if [self.there.sum_modules[number] for number in left] == self.here.sum_modules else None

    def find_sum(self, point: ComparisonPoint) -> int | None:
        """The last sum of the original that the layer stands in before the next one that the small network has."""
        if self.sums is None:
            return None
        start = self.there.bases[point.layer].start if point.sum is None else self.sums[point.sum]
        end = [*self.sums, len(self.there.sums)][point.start if point.sum is None else point.sum + 1]
        return next((k for k in reversed(range(start, end)) if point.layer in self.there.sums[k]), None)


def track_networks(small: nn.Module, model: nn.Module, recipes: tuple[Recipe, ...], chunk: Chunk) -> NetworkPair:
    """Run both once."""
    try:
        there, _ = track_channels(model, chunk.run)
        here, outputs = track_channels(small, chunk.run)
    except SospError:
        raise
    except Exception as error:
        raise StructureError(f"the networks do not run on {chunk.source}: {type(error).__name__}: {error}") from error
    return NetworkPair(small, model, here, there, recipes, find_logits(outputs), chunk)


def plan_tasks(pair: NetworkPair, parts: Sequence[InputPart]) -> tuple[list[RefitTask], dict[str, str]]:
    """The layers to refit in the order of the network, and why others are left alone."""
    tasks: list[RefitTask] = []
    left: dict[str, str] = {}
    wrong, owners = _find_unfit_layers(pair), _count_owners(pair.small)
    inputs = sum(part.chunk.size for part in parts if not part.held)
    for number, name in enumerate(pair.here.order):
        reason = wrong.get(name) or _explain_skip(pair, name, owners)
        task = None if reason else _make_task(pair, name, number, inputs)
        if task is None:
            left[name] = reason or "it is not known which channels it kept"
        elif not bool(task.live.any()):
            left[name] = "none of its channels are visible where it is compared"
        else:
            tasks.append(task)
    return _attach_next_layers(pair, tasks, inputs), left


def _explain_skip(pair: NetworkPair, name: str, owners: Counter[int]) -> str:
    """Why a layer cannot be refitted."""
    layer = pair.small.get_submodule(name)
    norm = pair.here.bases[name].tracked.norm
    if pair.here.times[name] > 1:
        return "it is called several times"
    if not is_plain(layer):
        return "its weight is computed from others"
    if owners[id(layer.weight)] > 1:
        return "it shares its weight with another module"
    if pair.here.times[norm] > 1:
        return "its norm serves several layers"
    if name not in pair.there.bases or pair.there.bases[name].tracked.norm != norm:
        return "the original network calls it differently"
    return ""


def _count_owners(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    return Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)


def _make_task(pair: NetworkPair, name: str, number: int, inputs: int) -> RefitTask | None:
    here, there = _find_points(pair, name)
    layer: Any = pair.small.get_submodule(name)
    origin = find_original_channels(name, layer, pair.recipes, len(there.tracked.places))
    if origin is None:
        return None
    origin = origin.to(here.tracked.places.device)
    W = get_matrix(layer)
    live = (here.tracked.places >= 0) & (there.tracked.places[origin] >= 0) & (here.tracked.factor != 0)
    live &= W.flatten(0, 1).any(1)  # a channel that is kept as zeros stays zero
    rows = min(ROWS, BYTES // (W.element_size() * W.shape[0] * W.shape[2]))
    logits = here.sum is None and pair.here.now[name].tensor is pair.logits
    return RefitTask(name, number, here, there, live, origin, rows / inputs, logits)


def _attach_next_layers(pair: NetworkPair, tasks: list[RefitTask], inputs: int) -> list[RefitTask]:
    """The tasks, with the layer behind where it is the only one that reads."""
    readers: dict[str, NextLayer] = {}
    by_name = {task.layer: task for task in tasks}
    for reader in tasks:
        found = pair.here.find_source(reader.layer)
        source = None if found is None else by_name.get(found[0])
        next_layer = (
            None if found is None or source is None else _find_next_layer(pair, source, reader, found[1], inputs)
        )
        if source is not None and next_layer is not None:
            readers[source.layer] = next_layer
    return [replace(task, next_layer=readers.get(task.layer)) for task in tasks]


def _find_next_layer(
    pair: NetworkPair, source: RefitTask, reader: RefitTask, act: Activation, inputs: int
) -> NextLayer | None:
    """None where the two do not meet place by place, all channels and all zeros beyond the edge."""
    read, made = pair.here.given[reader.layer].tensor, pair.here.now[reader.layer].tensor
    every = torch.arange(read.shape[source.here.axis], device=source.live.device)
    if not bool(source.live.all()) or not torch.equal(source.here.tracked.places, every):
        return None
    use = pair.here.weights[reader.layer]
    if source.here.axis != reader.here.axis or use is None or use.transposed or use.x is not read:
        return None
    d = len(use.kernel)
    sizes, out = tuple(read.shape[read.dim() - d :]), tuple(made.shape[made.dim() - d :])
    W = get_matrix(pair.small.get_submodule(source.layer))
    widest = W.shape[0] * max(W.shape[2], 4 * W.shape[1])  # a dozen tensors of its outputs are alive at once
    rows = min(2 * ROWS, BYTES // (W.element_size() * widest)) / prod(use.kernel)
    other_needs = reader.here.needs if reader.here.needs != source.number else -1
    return NextLayer(reader, act, use, sizes, out, min(rows, ROWS) / inputs, other_needs)


def _find_points(pair: NetworkPair, name: str) -> tuple[ComparisonPoint, ComparisonPoint]:
    """Behind a sum where both networks have it, otherwise behind the layer's own norm."""
    here = pair.here.points[name]
    number = pair.find_sum(here)
    if number is not None:
        return here, replace(pair.there.bases[name], tracked=pair.there.sums[number][name], sum=number)
    base = pair.here.bases[name]
    return replace(base, clip=FULL_RANGE if here.sum is not None else here.clip), pair.there.bases[name]


def _find_unfit_layers(pair: NetworkPair) -> dict[str, str]:
    """The layers that compute something else than their weights times their inputs."""
    wrong: dict[str, str] = {}

    def make_check(name: str) -> Any:
        layer: Any = pair.small.get_submodule(name)
        axis, places = pair.here.bases[name].axis, _find_own_places(pair, name)

        def check(used: LayerUse | None, output: Tensor) -> None:
            rows = torch.arange(min(TRIED, output.numel() // output.shape[axis]), device=output.device)
            theirs = take_values(output, axis, places.clamp_min(0), rows)
            ours = torch.full_like(theirs, torch.nan)
            if used is not None:
                ours = compute_outputs(used.inputs(output.shape, rows), get_matrix(layer).mT)
                bias = find_bias(layer)
                ours = ours if bias is None else ours + bias
            error = (ours - theirs)[:, places >= 0].abs().sum() / theirs[:, places >= 0].abs().sum().clamp_min(1e-30)
            if not error < 1e-2:  # half precision and TF32 stay below
                wrong[name] = "its output is not its weights times its inputs"

        return check

    plain = [n for n in pair.here.order if is_plain(pair.small.get_submodule(n))]
    listen_to_outputs(pair.small, {name: [make_check(name)] for name in plain}, pair.chunk.run)
    return wrong


def _find_own_places(pair: NetworkPair, name: str) -> Tensor:
    """Where the layer's own channels are when they leave it."""
    tracked = pair.here.bases[name].tracked
    return tracked.places if tracked.norm_channels is None else tracked.norm_channels


def warn_few_inputs(pair: NetworkPair, tasks: Sequence[RefitTask], parts: Sequence[InputPart]) -> None:
    """Name the narrowed layer that lacks the most inputs, and how many would be enough."""
    fitted, held = (sum(part.chunk.size for part in parts if part.held == side) for side in (False, True))
    short: list[tuple[int, str, int, int]] = []
    for task in tasks:
        layer: Any = pair.small.get_submodule(task.layer)
        if layer.weight.shape == pair.model.get_submodule(task.layer).weight.shape:
            continue  # it lost nothing, so its old weights are a good start
        unknowns = get_matrix(layer).shape[2] + 1
        output = pair.here.now[task.layer].tensor
        positions = prod(output.shape) / output.shape[task.here.axis] / pair.chunk.size
        if fitted * positions < unknowns:
            short.append((ceil(unknowns / positions), task.layer, unknowns, int(fitted * positions)))
    if short:
        needed, name, unknowns, rows = max(short)
        warnings.warn(
            f"{name!r} has {unknowns:,} unknowns for each output. Of {fitted + held:,} inputs {held:,} are held out to "
            f"test on, and the others give only {rows:,} equations. Regularisation determines the rest. "
            f"{count_needed_inputs(needed):,} inputs would be enough.",
            FewInputsWarning,
            stacklevel=3,
        )


def group_tasks(tasks: Sequence[RefitTask]) -> Iterator[list[RefitTask]]:
    """Layers that do not wait for one another: one pass serves them all."""
    group: list[RefitTask] = []
    for task in tasks:
        if group and task.needs >= group[0].number:
            yield group
            group = []
        group.append(task)
    if group:
        yield group
