"""From a model and an example to its channel flow."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosp.core.batches import call_model
from sosp.core.borrowed_model import check_network, refuse_uninitialised
from sosp.core.layers import is_norm
from sosp.errors import StructureError
from sosp.graph.channels import FixedAxis, Graph, Ids, ModuleCall, Pin, find_components, pair_modes
from sosp.graph.dry_run import fit_layout
from sosp.graph.forward_code import (
    PathWarning,
    clone_inputs,
    copy_to_meta,
    count_library_frames,
    find_running_rows,
    find_unused_modules,
    format_path_warning,
    isolate_forward,
    list_tensors,
    pin_other_paths,
    refuse_kept_tensors,
    shorten_example,
)
from sosp.graph.labels import OPAQUE, ZERO
from sosp.graph.layout import Layout, LayoutStyle, solve_layout
from sosp.graph.ops import find_return_line
from sosp.graph.tracer import Tracer

MODES = ("eval", "train")
REAL = 8  # rows that are run with real numbers, as many as show which layers there are


@dataclass(frozen=True)
class PinnedLayers:
    """Channels that cannot be dropped from where they flow, and the line of the user's code that is why."""

    layers: tuple[str, ...]  # whose output it is
    op: str
    where: str  # file.py:line
    why: str

    def __str__(self) -> str:
        return f"{', '.join(self.layers)}: {self.op} at {self.where}: {self.why}"


@dataclass(frozen=True)
class ChannelStream:
    """Channels that flow together: all that is added, multiplied or normalised place by place."""

    width: int
    producers: tuple[str, ...]  # layers whose output they are
    consumers: tuple[str, ...]  # layers that read them
    pinned: int  # how many cannot be dropped


@dataclass(frozen=True, eq=False)
class Flow:
    """How the channels of a network flow: streams, their producers and consumers, and what is pinned and why."""

    graph: Graph  # complete: nothing is added to it any more
    classes: Ids  # (values,) the class of each value
    parameters: dict[str, tuple[int, ...]]  # name -> shape
    untraced: dict[str, str]  # mode -> why the network could not be followed in it
    real: bool  # traced with real values, because the network does not run without
    norms: frozenset[str]  # the norms of single channels
    unused_modules: tuple[str, ...]  # layers and other modules with parameters that the example did not run
    network: nn.Module  # to try smaller ones on: a copy without values, or the network itself if real
    example: Any  # the rows of it that were followed; if real, they decide the way
    paired: tuple[Ids, Ids] | None  # the values of both modes, place by place, if the code does the same in both
    learned: tuple[Pin, ...] = ()  # pins that trying out smaller networks has shown
    fixed: tuple[FixedAxis, ...] = ()  # and axes of a size that the code requires

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes in which it was followed: ``eval`` and, if the network runs in it, ``train``."""
        return tuple(m for m in self.graph.records if m not in self.untraced)

    @cached_property
    def pins(self) -> Ids:
        """All values that must stay."""
        pins = [p.ids for p in (*self.graph.pins, *self.learned)]
        pins.append(self._find_lone_parameters())
        known = np.unique(np.concatenate([np.array([ZERO, OPAQUE]), *pins]))
        return np.union1d(known, self._idle(known))

    def modes_that_differ(self, counts: np.ndarray) -> tuple[str, ...]:
        """Return the modes to try out with these ``counts``; one if the code does the same to the same channels."""
        if self.paired is not None and np.array_equal(*(counts[ids] for ids in self.paired)):
            return self.modes[:1]
        return self.modes

    def with_pins(self, pins: Iterable[Pin], fixed: Iterable[FixedAxis] = ()) -> Flow:
        """Return this flow with more channels that must stay, as trying out a smaller network has shown."""
        return replace(self, learned=(*self.learned, *pins), fixed=(*self.fixed, *fixed))

    def without_learned(self) -> Flow:
        """Return this flow as the forward pass alone shows it."""
        return replace(self, learned=(), fixed=())

    def warn(self) -> None:
        """Warn where the code decides by values which layers run."""
        text = format_path_warning(self.graph.decisions, self.unused_modules)
        if text is not None:
            warnings.warn(text, PathWarning, stacklevel=count_library_frames())

    def _find_lone_parameters(self) -> Ids:
        """Elements of parameters and buffers that meet no channel: a longer input may read more of them (positions)."""
        parametric = np.frombuffer(self.graph.parametric, dtype=np.uint8).astype(bool)
        met = np.zeros(self.graph.count, dtype=bool)
        met[self.classes[~parametric]] = True
        for d in self.graph.dense.values():  # the rows of a weight that is computed from parameters
            met[self.classes[d.out]] = True
        return np.flatnonzero(parametric & ~met[self.classes])

    def _idle(self, pins: Ids) -> Ids:
        """What layers compute that no output needs, kept by the code in its own way: a probe, an auxiliary loss."""
        unneeded = solve_layout(self.graph, self.classes, pins, (), {}, LayoutStyle()).emptied
        return np.concatenate([pins[:0], *(d.out for d in self.graph.dense.values() if d.weight in unneeded)])

    @property
    def pinned(self) -> list[PinnedLayers]:
        """What cannot be dropped, one entry per line of code."""
        outputs, rows = self._outputs(), _calls(self)
        found: dict[tuple[str, str, str], set[str]] = {}
        for pin in (*self.graph.pins, *self.learned):
            held = np.zeros(self.graph.count, dtype=bool)
            held[self.classes[pin.ids]] = True
            layers = {n for n, classes in outputs.items() if held[classes].any()}
            layers |= {n for n, cut in rows.items() if held[self.classes[cut.given]].any()}
            found.setdefault((pin.op, pin.where, pin.why), set()).update(layers)
        order = {n: i for i, n in enumerate(outputs)}
        return [
            PinnedLayers(tuple(sorted(layers, key=order.__getitem__)), *key) for key, layers in found.items() if layers
        ]

    def _outputs(self) -> dict[str, np.ndarray]:
        """Layer -> the classes of its output channels, as it computes them and once they have left its own norm."""
        layers = {d.module for d in self.graph.dense.values()}
        found = {}
        for name, cuts in self.graph.calls.items():
            if name in layers:
                follower = self.following_norms.get(name)
                ids = [cuts[0].out, *([follower.out] if follower is not None else [])]
                found[name] = np.unique(self.classes[np.concatenate(ids)])
        return found

    @property
    def following_norms(self) -> dict[str, ModuleCall]:
        """Layer -> the norm whose input is its output."""
        by_input = {
            tuple(c.through[:, 0].tolist()): c
            for cuts in self.graph.calls.values()
            for c in cuts
            if c.through is not None and c.module in self.norms
        }
        return {
            name: by_input[key]
            for name, cuts in self.graph.calls.items()
            if (key := tuple(cuts[0].out.tolist())) in by_input
        }

    @property
    def streams(self) -> list[ChannelStream]:
        """The streams, in the order of the network."""
        together = self.graph.classes(self._list_passages())
        held = np.unique(together[self.pins])
        members: dict[int, tuple[list[str], list[str]]] = {}
        widths: dict[int, np.ndarray] = {}
        # Channels of one tensor belong to one stream: number it by the smallest class in it.
        blocks = [np.unique(together[d.out]) for d in self.graph.dense.values()]
        stream = find_components(
            self.graph.count,
            np.concatenate([np.full(len(b), b[0]) for b in blocks] or [np.zeros(0, dtype=int)]),
            np.concatenate(blocks or [np.zeros(0, dtype=int)]),
        )
        for d in self.graph.dense.values():
            key = int(stream[together[d.out[0]]])
            members.setdefault(key, ([], []))[0].append(d.module or d.weight)
            widths[key] = np.union1d(widths.get(key, np.zeros(0, dtype=int)), together[d.out])
        for d in self.graph.dense.values():
            for key in {int(k) for into in d.into for k in stream[together[into]]} & set(members):
                members[key][1].append(d.module or d.weight)
        return [
            ChannelStream(len(widths[k]), tuple(p), tuple(c), int(np.isin(widths[k], held).sum()))
            for k, (p, c) in members.items()
        ]

    def __repr__(self) -> str:
        streams = self.streams
        free = sum(s.pinned == 0 for s in streams)
        layers, pins = len(self.graph.dense), len(self.pinned)
        held = f"{pins} pin{'' if pins == 1 else 's'}"
        return f"Flow({layers} layers, {len(streams)} streams, {free} of them free, {held})"

    def __str__(self) -> str:
        """A paragraph per stream, then what is pinned and by which line."""
        lines = [repr(self)]
        for i, s in enumerate(self.streams):
            lines.append(f"stream {i}: {s.width} channels" + (f", {s.pinned} pinned" if s.pinned else ""))
            lines += [f"  from  {', '.join(s.producers)}", f"  to    {', '.join(s.consumers) or 'the output'}"]
        lines += ["pinned:", *(f"  {p}" for p in self.pinned)] if self.pinned else []
        lines += [f"did not run on the example: {', '.join(self.unused_modules)}"] if self.unused_modules else []
        lines += [f"not followed in {mode} mode: {why}" for mode, why in self.untraced.items()]
        return "\n".join(lines)

    def find_removed_outputs(
        self, removed: Mapping[str, Any], places: Mapping[str, tuple[str, ...]]
    ) -> dict[str, np.ndarray]:
        """Module -> (n,) which of its output channels are set to zero, from layer -> channels."""
        found: dict[str, np.ndarray] = {}
        for layer, channels in removed.items():
            if layer not in self.graph.calls:
                raise StructureError(
                    f"the mask removes channels of {layer!r}, but this layer does not run on the example: give the "
                    "example that the mask was made with."
                )
            for module in places.get(layer) or (layer,):
                for cut in self.graph.calls.get(module, [])[:1]:
                    gone = found.setdefault(module, np.zeros(len(cut.given), dtype=bool))
                    gone[np.asarray(channels)] = True
        return found

    def dead_norms(self, removed: Mapping[str, Any], places: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
        """The norms that see nothing but zeros in some channels (in whole groups of channels), and which."""
        gone = self.find_removed_outputs(removed, places)
        zero = self.graph.zeros(gone)
        found: dict[str, np.ndarray] = {}
        for name, cuts in self.graph.calls.items():
            seen = [zero[c.through].all(axis=1) for c in cuts if c.through is not None]
            if len(seen) == len(cuts):
                found[name] = np.logical_and.reduce(seen)
        return {n: torch.from_numpy(np.flatnonzero(dead)) for n, dead in found.items() if dead.any()}

    def coupled(self, norms: Iterable[str] = ()) -> tuple[Ids, np.ndarray]:
        """(values,) what goes together if nothing is to be scattered, and (values,) whether it can go at all.

        ``norms``: those that belong to layers, at whose output removed channels are zero.

        Tied are the two sides of a module (its channels), the channels of a group of a convolution, and what has to
        stay a box: along its shorter axes.
        """
        ties = self._list_passages()
        for d in self.graph.dense.values():
            if d.groups > 1:
                members = np.concatenate([d.out.reshape(d.groups, -1), d.into[0].reshape(d.groups, -1)], axis=1)
                ties.append((np.repeat(members[:, 0], members.shape[1]), members.reshape(-1)))
        together = self.graph.classes(ties)
        for box in self.graph.boxes:
            core = together[box.core.numpy()]
            longest = int(np.argmax(core.shape))
            rows = np.moveaxis(core, longest, 0).reshape(core.shape[longest], -1)
            if len(np.unique(rows[:, 0])) > 1:  # several channels along the longest axis
                ties.append((np.repeat(rows[:, 0], rows.shape[1]), rows.reshape(-1)))
        together = self.graph.classes(ties)
        held = np.zeros(self.graph.count, dtype=bool)
        held[together[self.pins]] = True
        held[together[self._constants(norms)]] = True
        return together, ~held[together]

    def _list_passages(self) -> list[tuple[Ids, Ids]]:
        """What is computed in a module and what leaves it; a zero that the code put there comes from nowhere."""
        cuts = [(c.into, c.out) for cuts in self.graph.calls.values() for c in cuts]
        return [(into[into != ZERO], out[into != ZERO]) for into, out in cuts]

    def _constants(self, norms: Iterable[str]) -> Ids:
        """Channels that a layer still reads when all that could feed them is gone: a zero became a constant."""
        layers = {*(d.module for d in self.graph.dense.values()), *norms}
        everything = {n: np.ones(len(c[0].given), dtype=bool) for n, c in self.graph.calls.items() if n in layers}
        zero = self.graph.zeros(everything)
        read = np.concatenate([np.zeros(0, dtype=int), *(into for d in self.graph.dense.values() for into in d.into)])
        return read[~zero[read]]

    def layout(self, removed: Mapping[str, np.ndarray], style: LayoutStyle | None = None) -> Layout:
        """What stays when these module outputs are set to zero."""
        return solve_layout(self.graph, self.classes, self.pins, self.fixed, removed, style or LayoutStyle())


def trace(model: nn.Module, example: Any) -> Flow:
    """Follow every channel of ``model`` through one forward pass on ``example``, in eval and in train mode.

    Nothing is computed: it runs on the meta device, in the user's own code. Then a network with many channels gone is
    tried out there, to find the sizes that the code itself fixes.
    """
    return learn_pins(follow_channels(model, example))


def learn_pins(flow: Flow) -> Flow:
    """Return the flow with the widths that the code fixes, as trying out large removals shows them."""
    if not flow.learned:
        for removed in _build_trial_masks(flow):
            flow = fit_layout(flow, removed).flow
    return flow


def follow_channels(model: nn.Module, example: Any) -> Flow:
    """``trace`` without trying anything out: for a mask at hand, which will be tried out itself."""
    check_network(model)
    refuse_uninitialised(model)
    try:
        return _trace(model, shorten_example(example), real=False)
    except Exception:  # code that looks at values, at the number of rows, or at tensors that are no buffers
        return _follow_values(model, find_running_rows(model, example, REAL))


def _follow_values(model: nn.Module, rows: Any) -> Flow:
    """The same with real numbers, on rows on which the model runs by itself: what fails now is not its own error."""
    try:
        return _trace(model, rows, real=True)
    except StructureError:
        raise
    except Exception as error:
        refuse_kept_tensors(model)  # it cannot even be copied
        raise StructureError(
            f"the network cannot be followed: {type(error).__name__}: {error}. The model itself runs on the example. "
            "If copy.deepcopy(model) works as well, this is a bug in sosp: please report it, with the network."
        ) from error


def _trace(model: nn.Module, inputs: Any, real: bool) -> Flow:
    twin = copy.deepcopy(model) if real else copy_to_meta(model)
    values = {n: b for n, b in model.named_buffers() if not b.is_floating_point()}
    graph = Graph()
    untraced: dict[str, str] = {}
    for mode in MODES:
        try:
            _pass(twin, inputs, mode, graph, values, real)
        except Exception as error:
            if mode == "eval" or not real:
                raise
            untraced[mode] = f"{type(error).__name__}: {error}"
    _norms_called_twice(graph)
    unused = find_unused_modules(twin, graph)
    pin_other_paths(graph, unused)
    norms = frozenset(n for n in graph.calls if is_norm(model.get_submodule(n)))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    # The network has not run: code may compute something in its first call only and keep it.
    kept = (model, inputs) if real else (copy_to_meta(model), clone_inputs(inputs, real=False))
    return Flow(graph, graph.classes(), shapes, untraced, real, norms, unused, *kept, pair_modes(graph))


def _build_trial_masks(flow: Flow) -> list[dict[str, np.ndarray]]:
    """Masks for trying out: of every layer the first third (whole heads, whole branches) and half of the rest; then
    every other channel (of every head, of every group); then the first place along an axis that a view made of them."""
    generator = np.random.default_rng(0)
    first: dict[str, np.ndarray] = {}
    second: dict[str, np.ndarray] = {}
    for name, cut in _calls(flow).items():
        width = len(cut.given)
        first[name] = (generator.random(width) < 0.5) | (np.arange(width) < width // 3)
        first[name][-1] = False
        second[name] = np.arange(width) % 2 == 1
    return [first, second, *_slices(flow)]


def _calls(flow: Flow) -> dict[str, ModuleCall]:
    """Layer -> its first call."""
    calls = {d.module: flow.graph.calls.get(d.module, [])[:1] for d in flow.graph.dense.values()}
    return {name: cut for name, cuts in calls.items() for cut in cuts}


def _slices(flow: Flow) -> Iterator[dict[str, np.ndarray]]:
    """Axis by axis, of every view at once: its first place loses all its channels, as when a whole head goes."""
    cores, calls = [flow.classes[box.core.numpy()] for box in flow.graph.boxes], _calls(flow)
    for axis in range(max((core.ndim for core in cores), default=0)):
        sliced = [core.take(0, axis).ravel() for core in cores if core.ndim > axis and core.shape[axis] > 1]
        gone = np.unique(np.concatenate([flow.pins[:0], *sliced]))
        masks = {name: np.zeros(len(cut.given), dtype=bool) for name, cut in calls.items()}
        for name, cut in calls.items():
            masks[name][cut.index[np.isin(flow.classes[cut.out], gone) & (cut.index >= 0)]] = True
        if any(mask.any() for mask in masks.values()):
            yield masks


def _pass(twin: nn.Module, inputs: Any, mode: str, graph: Graph, values: Mapping[str, Tensor], real: bool) -> None:
    """One forward pass in one mode."""
    twin.train(mode == "train")
    given = clone_inputs(inputs, real)
    tracer = Tracer(twin, graph, mode, dict(values), given, real)
    with isolate_forward(), tracer.hook_modules(), tracer:
        outputs = call_model(twin, given)
    tracer.label_unknown_tensors(list_tensors(outputs))
    for x in list_tensors(outputs):
        tracer.registry.pin_tensor(x, "return", "the model returns it", find_return_line(twin, tracer.frame))


def _norms_called_twice(graph: Graph) -> None:
    """A norm that a pass calls more than once sees several tensors: a zero in one says nothing of the others."""
    seen = Counter((c.module, c.mode) for cuts in graph.calls.values() for c in cuts)
    twice = {module for (module, _), times in seen.items() if times > 1}
    graph.steps = [
        replace(s, through=None) if isinstance(s, ModuleCall) and s.module in twice else s for s in graph.steps
    ]
    for name in twice:
        graph.calls[name] = [replace(c, through=None) for c in graph.calls[name]]
