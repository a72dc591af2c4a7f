"""From a model and an example to its channel flow."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sosp.data import call
from sosp.errors import StructureError
from sosp.flow.graph import ZERO, Cut, Graph, Ids, Pin
from sosp.flow.layout import Layout, solve
from sosp.flow.tracer import Tracer
from sosp.preserve import layer_by_layer, refuse_uninitialised, same_random_numbers

MODES = ("eval", "train")


@dataclass(eq=False)
class Flow:
    """How the channels of a network flow: streams, their producers and consumers, and what is pinned and why."""

    graph: Graph
    untraced: dict[str, str]  # mode -> why the network could not be followed in it
    real: bool  # traced with real numbers, because the network does not run without
    classes: Ids = field(init=False)
    _pinned: Ids | None = None

    def __post_init__(self) -> None:
        self.classes = self.graph.classes()

    @property
    def pinned_ids(self) -> Ids:
        if self._pinned is None:
            self._pinned = np.concatenate([np.array([0, ZERO]), *(p.ids for p in self.graph.pins)])
        return self._pinned

    def pin(self, pins: list[Pin]) -> None:
        """More channels that must stay, found when the smaller network was tried out."""
        self.graph.pins.extend(pins)
        self._pinned = None

    def removed(self, removed: Mapping[str, Any], places: Mapping[str, tuple[str, ...]]) -> dict[str, np.ndarray]:
        """Module -> (n,) which of its output channels are set to zero, from layer -> channels."""
        found: dict[str, np.ndarray] = {}
        for layer, channels in removed.items():
            for module in places.get(layer) or (layer,):
                for cut in self.graph.calls.get(module, [])[:1]:
                    gone = found.setdefault(module, np.zeros(len(cut.given), dtype=bool))
                    gone[np.asarray(channels)] = True
        return found

    def dead_norms(self, removed: Mapping[str, Any], places: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
        """The norms of single channels that see nothing but zeros in some channels, and which."""
        gone = self.removed(removed, places)
        zero = self.graph.zeros(gone)
        found: dict[str, np.ndarray] = {}
        for name, cuts in self.graph.calls.items():
            if all(c.through is not None for c in cuts):
                found[name] = np.logical_and.reduce([zero[c.through] for c in cuts])
        return {n: torch.from_numpy(np.flatnonzero(dead)) for n, dead in found.items() if dead.any()}

    def layout(self, removed: Mapping[str, np.ndarray]) -> Layout:
        """What stays when these module outputs are set to zero."""
        return solve(self.graph, self.classes, self.pinned_ids, removed)


def trace(model: nn.Module, example: Any) -> Flow:
    """Follow every channel of ``model`` through one forward pass on ``example``, in eval and in train mode."""
    refuse_uninitialised(model)
    inputs = few(example)
    try:
        return _trace(model, inputs, real=False)
    except Exception:  # code that looks at values, tensors that are no buffers: run it with real numbers
        return _trace(model, inputs, real=True)


def _trace(model: nn.Module, inputs: Any, real: bool) -> Flow:
    twin = copy.deepcopy(model) if real else meta_copy(model)
    values = {n: b for n, b in model.named_buffers() if not b.is_floating_point()}
    graph = Graph()
    untraced: dict[str, str] = {}
    for mode in MODES:
        mark = copy.copy(graph)
        try:
            follow(twin, inputs, mode, graph, values, real)
        except Exception as error:
            if mode == "eval":
                if real:
                    raise StructureError(f"the model does not run on the example: {type(error).__name__}: {error}") from error
                raise
            if not real and not isinstance(error, ValueError):
                raise
            untraced[mode] = f"{type(error).__name__}: {error}"
            del mark
    _norms_called_twice(graph)
    return Flow(graph, untraced, real)


def follow(twin: nn.Module, inputs: Any, mode: str, graph: Graph, values: Mapping[str, Tensor], real: bool) -> None:
    """One forward pass in one mode."""
    twin.train(mode == "train")
    given = tree_map(lambda x: (x.clone() if real else x.to("meta")) if isinstance(x, Tensor) else x, inputs)
    tracer = Tracer(twin, graph, mode, dict(values), rows(inputs))
    with quiet(), tracer.hooked(), tracer:
        outputs = call(twin, given)
    for x in tensors_of(outputs):
        tracer.pin_tensor(x, "return", "the model returns it")


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing differentiated, no fused transformer, the caller's random numbers."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(layer_by_layer())
        stack.enter_context(same_random_numbers())
        yield


def tensors_of(outputs: Any) -> list[Tensor]:
    """All tensors a model returned, also in a class of the user's."""
    leaves = tree_leaves(outputs)
    leaves += [x for leaf in leaves if hasattr(leaf, "__dict__") for x in tree_leaves(vars(leaf))]
    return [x for x in leaves if isinstance(x, Tensor)]


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy without numbers: the same modules, parameters and buffers that take no memory."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=False)
    for b in model.buffers():
        memo[id(b)] = b.detach().to("meta")
    return copy.deepcopy(model, memo)


def rows(inputs: Any) -> int:
    """How many examples these are."""
    return next((x.shape[0] for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()), 1) or 1


def few(example: Any) -> Any:
    """Two rows of the example, if it can be cut: batch norms in train mode need more than one."""
    count = rows(example)
    return tree_map(lambda x: _two(x) if isinstance(x, Tensor) and x.dim() and x.shape[0] == count else x, example)


def _two(x: Tensor) -> Tensor:
    return x[:2] if x.shape[0] > 1 else torch.cat([x, x])


def _norms_called_twice(graph: Graph) -> None:
    """A norm that is called more than once in a pass sees several tensors: a zero in one says nothing of the others."""
    twice = {
        name
        for name, cuts in graph.calls.items()
        if len(cuts) > len({mode for mode in graph.records})
    }
    for i, step in enumerate(graph.steps):
        if isinstance(step, Cut) and step.module in twice:
            graph.steps[i] = replace(step, through=None)
    for name, cuts in graph.calls.items():
        if name in twice:
            graph.calls[name] = [replace(c, through=None) for c in cuts]
