"""Follow what every layer computes to the place where it can be compared with the original network.

A layer can be compared wherever its output still stands as it was computed, up to a factor and a shift: behind its own
norm, and behind an addition, where the sum is compared and not the layer alone. A layer that is fitted to a sum makes
up for the errors of all that it is added to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sosp.core.layers import Scatter, find_channel_axis, find_layer_type
from sosp.graph.labels import IDENTITY_OPS
from sosp.graph.ops import DROPOUTS, find_op_name
from sosp.refit.activations import ACTIVATIONS, CLIPS, FULL_RANGE, Activation, Range, bind_activation, return_input
from sosp.refit.hooks import SUMS, ForwardWatcher, is_layer_or_norm
from sosp.refit.layer_matrix import LayerUse
from sosp.refit.module_activity import AttributeSnapshot, ModuleInterval, count_writes

# What can be asked of a tensor without looking at its numbers.
METADATA = frozenset({"__get__", "size", "dim", "ndimension", "numel", "stride", "is_contiguous", "__len__"})
PRODUCTS = frozenset({"mul", "__mul__", "__imul__", "__rmul__", "multiply"})


@dataclass(frozen=True, eq=False)
class TrackedChannels:
    """A layer's channels in a tensor further on: multiplied by a factor, with something added that is not theirs."""

    places: Tensor  # (C,) the channel of the tensor that holds each of them; -1: none does
    factor: Tensor  # (C,)
    norm: str = ""  # right behind the layer, where statistics of its own make it a factor and a shift
    norm_channels: Tensor | None = None  # (C,) their channels in that norm


@dataclass(frozen=True, eq=False)
class ComparisonPoint:
    """Where a layer is compared."""

    layer: str
    axis: int  # of the channels
    tracked: TrackedChannels
    start: int = 0  # so many additions had been made when the layer was done
    sum: int | None = None  # behind this addition, counted from 0; else behind its norm, or the layer itself
    clip: Range = FULL_RANGE  # what is outside of this range makes no difference to all that follows
    needs: int = -1  # the last layer that must be repaired before it: it feeds this one, or what this is added to

    @property
    def module(self) -> str:
        """Whose output it is, where it is no sum."""
        return self.tracked.norm or self.layer


@dataclass(eq=False)
class TrackedTensor:
    """What a tensor holds, until something is written into it."""

    tensor: Tensor  # kept alive, so that its number is not given to another
    age: int = -1  # the newest layer it depends on
    tracked: dict[str, TrackedChannels] = field(default_factory=dict)
    uses: list[Range | None] = field(default_factory=list)  # one for every op it was given to
    readers: list[tuple[str, list[TrackedTensor]]] = field(default_factory=list)  # in which module, and what was made
    origin: tuple[TrackedTensor, Activation] | None = None  # what an activation made it of
    fixed: bool = False  # a parameter, or made of parameters alone


class ChannelTracker(ForwardWatcher):
    """Where the layers of a network can be compared, from one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.order: list[str] = []  # layers, as they are called
        self.times: Counter[str] = Counter()  # layers and norms: how often
        self.points: dict[str, ComparisonPoint] = {}
        self.bases: dict[str, ComparisonPoint] = {}  # behind the layer's own norm, or itself: before any sum
        self.now: dict[str, TrackedTensor] = {}  # layer -> the newest value that it stands in alone
        self.given: dict[str, TrackedTensor] = {}  # layer -> what it reads
        self.made: dict[str, TrackedTensor] = {}  # layer -> what it computes
        self.weights: dict[str, LayerUse | None] = {}  # layer -> how it used its weight
        self.sums: list[dict[str, TrackedChannels]] = []  # the layers that stand in each addition
        self.sum_modules: list[str] = []  # the module each addition was made in
        self.values: dict[int, TrackedTensor] = {}
        self.intervals: dict[str, ModuleInterval] = {}  # modules that are called once
        self.entered: dict[
            str, tuple[int, AttributeSnapshot, list[int]]
        ] = {}  # sums before, what it held, versions of its inputs
        self.calls: Counter[str] = Counter()  # all modules
        self.outputs: dict[str, TrackedTensor] = {}  # module -> its newest output
        self.taken: dict[str, list[TrackedTensor]] = {}  # module -> what it was given
        self.stateful: set[str] = set()  # modules that keep something of a pass
        self.mutating: set[str] = set()  # and those that write into what they are given
        self.fixed = {id(x) for x in [*model.parameters(), *model.buffers()]}

    # -- ops -------------------------------------------------------------------------------------------------------

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [self.value(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = func(*args, **kwargs)
        made = [y for y in tree_leaves(result) if isinstance(y, Tensor)]
        if not made and func.__name__ not in METADATA:
            self.record_readers(given, [])
        if made:
            name = find_op_name(func)
            for value in given:
                value.uses.append(CLIPS[name](*args, **kwargs) if name in CLIPS else None)
            for y in made:
                self.put(y, max([-1, *(value.age for value in given)])).fixed = all(value.fixed for value in given)
            # A write into a view also changes what the view is of, which is not followed.
            lost = any(y._is_view() and any(y is value.tensor for value in given) for y in made)
            self.record_readers(given, [] if lost else [self.values[id(y)] for y in made])
            self.step(name, given, self.values[id(made[0])], kwargs)
            if name in ACTIVATIONS and len(given) == 1:
                self.values[id(made[0])].origin = (given[0], bind_activation(func, args, kwargs))
        return result

    def record_readers(self, given: list[TrackedTensor], made: list[TrackedTensor]) -> None:
        for value in given:
            value.readers.append((self.inside[-1], made))

    def value(self, x: Tensor) -> TrackedTensor:
        if id(x) not in self.values:
            self.put(x, -1).fixed = id(x) in self.fixed
        return self.values[id(x)]

    def put(self, x: Tensor, age: int) -> TrackedTensor:
        self.values[id(x)] = made = TrackedTensor(x, age)
        return made

    def step(self, name: str, given: list[TrackedTensor], y: TrackedTensor, options: Mapping[str, Any]) -> None:
        """The tracked that go on through an op."""
        if name in SUMS:
            self.add(given, y, plain="alpha" not in options)
        elif (name in DROPOUTS or name in IDENTITY_OPS) and given and given[0].tensor.shape == y.tensor.shape:
            self.carry_over(given[0], y, given[0].tracked)
        elif name in PRODUCTS and len(given) == 2:
            for value, other in (given, given[::-1]):
                if value.tracked and other.fixed:
                    found = {n: self.scale_channels(n, t, other.tensor, y.tensor) for n, t in value.tracked.items()}
                    self.carry_over(value, y, {n: t for n, t in found.items() if t is not None})

    def add(self, given: list[TrackedTensor], y: TrackedTensor, plain: bool) -> None:
        """Of the layers that stand in a sum, the one computed last is compared with it, the others before it."""
        union = {n: t for value in given for n, t in value.tracked.items()} if plain else {}
        self.sums.append(union)
        self.sum_modules.append(self.inside[-1])
        y.tracked = union
        if not union:
            return
        last = max(union, key=self.order.index)
        own = [value for value in given if last in value.tracked]
        others = [value.age for value in given if last not in value.tracked]
        alone = len(own) == 1 and own[0] is self.now[last] and own[0].tensor.shape == y.tensor.shape
        if alone and max([-1, *others]) < self.order.index(last):
            needs = max([self.points[last].needs, *others])
            number = len(self.sums) - 1
            self.move(last, y, replace(self.points[last], tracked=union[last], sum=number, needs=needs))

    def carry_over(self, x: TrackedTensor, y: TrackedTensor, tracked: dict[str, TrackedChannels]) -> None:
        """The same channels in another tensor; they are still compared where they were."""
        y.tracked = tracked
        for name in tracked:
            if self.now[name] is x:
                self.now[name] = y

    def scale_channels(self, name: str, tracked: TrackedChannels, other: Tensor, y: Tensor) -> TrackedChannels | None:
        """Behind a product with a parameter, one number for each channel or for all."""
        axis = self.points[name].axis % y.dim() - y.dim()
        wide = other.numel() > 1
        if wide and (other.dim() < -axis or other.shape[axis] != other.numel() or other.numel() != y.shape[axis]):
            return None
        numbers = other.detach().reshape(-1)
        return replace(tracked, factor=tracked.factor * (numbers[tracked.places.clamp_min(0)] if wide else numbers))

    def move(self, name: str, y: TrackedTensor, point: ComparisonPoint) -> None:
        self.points[name], self.now[name] = point, y
        if point.sum is None:
            self.bases[name] = point

    # -- modules ---------------------------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.entered[name] = len(self.sums), AttributeSnapshot.by(module), count_writes(args)
        self.taken[name] = [self.value(x) for x in tree_leaves(args) if isinstance(x, Tensor)]
        for value in self.taken[name] if is_layer_or_norm(module) else ():
            value.readers.append((name, []))

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        sums, held, old = self.entered[name]
        self.calls[name] += 1
        self.stateful.update(() if held.is_unchanged(AttributeSnapshot.by(module)) else [name])
        self.mutating.update(() if old == count_writes(args) else [name])
        x = next((a for a in args if isinstance(a, Tensor)), None)
        if is_layer_or_norm(module) and x is not None and isinstance(output, Tensor):
            self.times[name] += 1
            given = self.value(x)
            given.uses.append(None)
            y = self.put(output, given.age)
            (self.layer if find_layer_type(module) else self.norm)(name, module, given, y)
        self.intervals[name] = ModuleInterval(len(self.order), len(self.sums) - sums)
        if isinstance(output, Tensor):
            self.outputs[name] = self.value(output)

    def layer(self, name: str, module: Any, x: TrackedTensor, y: TrackedTensor) -> None:
        kind = find_layer_type(module)
        if self.times[name] > 1 or kind is None:
            return
        places = apply_scatter(module, torch.arange(kind.channels(module), device=y.tensor.device))
        tracked = TrackedChannels(places, y.tensor.new_ones(len(places)))
        y.age, y.tracked = len(self.order), {name: tracked}
        self.given[name], self.made[name], self.weights[name] = x, y, self.used
        self.order.append(name)
        self.move(
            name, y, ComparisonPoint(name, find_channel_axis(module, y.tensor), tracked, len(self.sums), needs=x.age)
        )

    def norm(self, name: str, module: Any, x: TrackedTensor, y: TrackedTensor) -> None:
        scale = compute_norm_scale(module)
        for layer, tracked in x.tracked.items():
            if scale is None or self.now[layer] is not x or self.points[layer].sum is not None or tracked.norm:
                continue
            factor = tracked.factor * scale[tracked.places.clamp_min(0)]
            y.tracked = {layer: TrackedChannels(apply_scatter(module, tracked.places), factor, name, tracked.places)}
            self.move(layer, y, replace(self.points[layer], tracked=y.tracked[layer]))

    def find_source(self, name: str) -> tuple[str, Activation] | None:
        """The layer that this one alone reads, and the activation in between."""
        value = self.given[name]
        source, act = value.origin or (value, return_input)
        layer = next((n for n in source.tracked if self.now[n] is source and self.points[n].sum is None), None)
        alone = len(value.uses) == 1 and len(source.uses) == 1
        same = layer is not None and source.tracked[layer] is self.points[layer].tracked
        return (layer, act) if layer is not None and alone and same else None

    def is_read_once(self, name: str) -> bool:
        """Nothing but one op or module sees what the layer computes: its norm, where it has one."""
        return len(self.made[name].uses) == 1

    def find_clip(self, name: str) -> Range:
        """The range that the one op behind a layer's point lets through."""
        point, value = self.points[name], self.now[name]
        same = value.tracked.get(name) is point.tracked  # nothing but the identity in between
        return value.uses[0] or FULL_RANGE if same and len(value.uses) == 1 else FULL_RANGE


def apply_scatter(module: nn.Module, places: Tensor) -> Tensor:
    """Where channels are once the module's own scatter has put them in place."""
    scatter = module._modules.get("scatter")
    if not isinstance(scatter, Scatter):
        return places
    width = len(scatter.index)
    to = torch.full((scatter.given + 1,), width, device=places.device)
    to.scatter_reduce_(0, scatter.source, scatter.places, "amin")  # the first place of a channel that has several
    return torch.where(to == width, -1, to)[places]


def compute_norm_scale(norm: Any) -> Tensor | None:
    """(C,) what a norm multiplies by, where it has statistics of its own."""
    if getattr(norm, "running_var", None) is None:
        return None
    scale = torch.rsqrt(norm.running_var + getattr(norm, "eps", 1e-5))
    return scale if norm.weight is None else scale * norm.weight.detach()


def track_channels(model: nn.Module, run: Callable[[nn.Module], Any]) -> tuple[ChannelTracker, Any]:
    """The tracked of a network that is run once, and what it returned."""
    tracker = ChannelTracker(model)
    with tracker.hooked():
        outputs = run(model)
    for y in tree_leaves(outputs):
        if isinstance(y, Tensor):
            tracker.value(y).uses.append(None)  # by whoever called the network
            tracker.value(y).readers.append(("", []))
    tracker.intervals = {n: interval for n, interval in tracker.intervals.items() if tracker.calls[n] == 1}
    tracker.points = {n: replace(point, clip=tracker.find_clip(n)) for n, point in tracker.points.items()}
    return tracker, outputs
