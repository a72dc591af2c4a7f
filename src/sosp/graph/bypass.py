"""Find the modules of which a removal leaves nothing: they give an argument, zeros, or the output of one part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from sosp.core.layers import BypassedModule, Scatter, ZeroLayer, scatter_output
from sosp.graph.dataflow import ZERO_VALUE, CallFacts, Event, OpEvent, ValueFacts, ValueTracker, find_gone_events
from sosp.graph.dry_run import try_recipe
from sosp.graph.flow import Flow
from sosp.graph.labels import Labels, resize_labels
from sosp.graph.layout import Layout
from sosp.graph.recipe import Bypass, Recipe, list_bypassed_parts

FREE = (nn.Sequential, nn.Identity, BypassedModule, ZeroLayer, Scatter)  # they run no op themselves


def add_bypasses(flow: Flow, layout: Layout, recipe: Recipe) -> Recipe:
    """Return the recipe that also bypasses the modules of which it leaves nothing."""
    if not recipe.emptied and not recipe.passed:
        return recipe
    found = BypassSearch(flow, layout).find()
    if found and not _runs(flow, layout, _bypass(flow, recipe, found)):
        tried, found = found, {}
        for name, bypass in tried.items():
            more = {**found, name: bypass}
            found = more if _runs(flow, layout, _bypass(flow, recipe, more)) else found
    return _bypass(flow, recipe, found)


def _bypass(flow: Flow, recipe: Recipe, bypassed: Mapping[str, Bypass]) -> Recipe:
    """Nothing is scattered where nothing runs."""
    gone = list_bypassed_parts(flow.network, bypassed)
    return replace(
        recipe, bypassed=bypassed, scatters={n: placing for n, placing in recipe.scatters.items() if n not in gone}
    )


def _runs(flow: Flow, layout: Layout, recipe: Recipe) -> bool:
    """Whether the code finds what it asks for, and does what it did with the numbers that it had."""
    runs = [run for _, run in try_recipe(flow, layout, recipe)]
    if any(run.failed or run.asked or run.took_other_path for run in runs):
        return False
    found = {id(record) for run in runs for record in run.computed}
    if found:  # by chance, or of widths
        without = try_recipe(flow, layout, replace(recipe, bypassed={}))
        found -= {id(record) for _, run in without for record in run.computed}
    return not found


@dataclass(eq=False)
class ModeFacts:
    """The facts of one mode, and what follows from them."""

    events: list[Event]
    facts: ValueFacts

    @cached_property
    def spared(self) -> set[int]:
        return self.facts.find_spared()

    @cached_property
    def calls(self) -> dict[str, list[CallFacts]]:
        found: dict[str, list[CallFacts]] = defaultdict(list)
        for call in self.facts.calls:
            found[call.module].append(call)
        return found

    @cached_property
    def givers(self) -> dict[int, list[CallFacts]]:
        """Value -> the calls that give it, the outermost first."""
        found: dict[int, list[CallFacts]] = {}
        for call in self.facts.calls:
            if call.left is not None and call.left.alone:
                found.setdefault(call.out[0], []).append(call)
        return found


class BypassSearch:
    """Which modules to bypass, the outermost of each place."""

    def __init__(self, flow: Flow, layout: Layout) -> None:
        self.flow, self.counts = flow, layout.counts
        events = flow.graph.events
        self.modes = [ModeFacts(events[m], ValueTracker(layout.zero).follow(events[m])) for m in flow.modes]
        self.modules = dict(flow.network.named_modules())

    def find(self) -> dict[str, Bypass]:
        """Module -> what is left of it."""
        refused: set[str] = set()
        while True:
            found = self.choose(refused)
            wrong = {name for name in found if self.is_written(name, found)}
            if not wrong:
                return found
            refused |= wrong

    def choose(self, refused: set[str]) -> dict[str, Bypass]:
        found: dict[str, Bypass] = {}
        gone: set[str] = set()
        for name, module in self.modules.items():
            if not name or name in gone or name in refused or isinstance(module, FREE):
                continue
            bypass = self.explain(name)
            if bypass is not None and self.is_free(name, bypass):
                found[name] = bypass
                gone |= list_bypassed_parts(self.flow.network, {name: bypass})
        return found

    def explain(self, name: str) -> Bypass | None:
        """What a module gives, if it is the same in all its calls."""
        calls = [(mode, call) for mode in self.modes for call in mode.calls[name]]
        found = {self.explain_call(mode, call) for mode, call in calls}
        return found.pop() if len(found) == 1 else None

    def explain_call(self, mode: ModeFacts, call: CallFacts) -> Bypass | None:
        left = call.left
        if left is None or not left.alone:
            return None
        out, shape = call.out[0], self.shrink_shape(left.labels, left.shapes[0])
        fitting = [k for k, (_, labels, old) in call.event.given.items() if self.shrink_shape(labels, old) == shape]
        if out in mode.spared:
            return Bypass(fitting[0]) if fitting and shape is not None else None
        if not any(call.start < at < call.end for at in mode.facts.spared):
            return None
        same = [k for k in fitting if call.given[k] == out]
        if same and shape is not None:
            return Bypass(same[0])
        if out == ZERO_VALUE:
            return Bypass(fitting[0], zero=True) if fitting and shape is not None else None
        return self.find_steps(mode, call)

    def shrink_shape(self, labels: Labels | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a tensor in the smaller network."""
        if labels is None:
            return shape
        kept = resize_labels(labels, self.counts)
        return None if kept is None else kept.shape

    def find_steps(self, mode: ModeFacts, call: CallFacts) -> Bypass | None:
        """The parts that make the output of an argument, one after the other, if something else goes."""
        steps: list[CallFacts] = []
        value = call.out[0]
        while True:
            inside = (c for c in mode.givers.get(value, []) if call.start < c.start and c.end < call.end)
            step = next(inside, None)
            if step is None or not step.event.plain or not step.module.startswith(f"{call.module}."):
                return None
            steps.insert(0, step)
            (value,) = step.given.values()
            source = next((k for k, v in call.given.items() if v == value), None)
            if source is not None:
                break
        if len({s.module for s in steps}) < len(steps) or self.writes_input(mode, steps[0]):
            return None
        spared = [at for at in mode.facts.spared if call.start < at < call.end]
        if all(any(s.start < at < s.end for s in steps) for at in spared):
            return None
        return Bypass(source, tuple(s.module.removeprefix(f"{call.module}.") for s in steps))

    def writes_input(self, mode: ModeFacts, step: CallFacts) -> bool:
        """It writes into what it is given, and cannot be told not to."""
        ((given, _, _),) = step.event.given.values()
        writes = any(given in op.written for _, op in _list_ops(mode.events, step.start, step.end))
        return writes and not hasattr(self.modules[step.module], "inplace")

    def is_free(self, name: str, bypass: Bypass) -> bool:
        """Nothing but the module itself needs those of its parts that do not run any more."""
        parts = list_bypassed_parts(self.flow.network, {name: bypass})
        if any(d.module in parts for d in self.flow.graph.decisions):
            return False
        for part in parts - {name}:
            module = self.modules.get(part)
            if module is None or any(hook is not scatter_output for hook in _hooks(module)):
                return False
            if any(name not in call.outside for mode in self.modes for call in mode.calls[part]):
                return False
        return not self.is_used_elsewhere(parts) and not self.writes_outside(name, bypass)

    def writes_outside(self, name: str, bypass: Bypass) -> bool:
        """An op that does not run any more writes into a tensor from before the module."""
        for mode in self.modes:
            gone = find_gone_events(mode.events, {name: bypass.steps})
            for call in mode.calls[name]:
                for at, op in _list_ops(mode.events, call.start, call.end):
                    if gone[at] and any(mode.facts.first[x] < call.start for x in op.written):
                        return True
        return False

    def is_used_elsewhere(self, parts: set[str]) -> bool:
        """Other code takes their parameters."""
        used = self.flow.graph.used
        return any(key.rpartition(".")[0] in parts and modules - parts for key, modules in used.items())

    def is_written(self, name: str, found: Mapping[str, Bypass]) -> bool:
        """An op that still runs writes into what the module gave, which now is an argument or has no memory."""
        for mode in self.modes if not found[name].steps else []:
            gone = find_gone_events(mode.events, {n: bypass.steps for n, bypass in found.items()})
            for call in mode.calls[name]:
                given = set(call.left.out) if call.left is not None else set()
                after = _list_ops(mode.events, call.end, len(mode.events))
                if any(not gone[at] and op.written & given for at, op in after):
                    return True
        return False


def _list_ops(events: list[Event], start: int, end: int) -> Iterator[tuple[int, OpEvent]]:
    return ((at, e) for at, e in enumerate(events[start:end], start) if isinstance(e, OpEvent))


def _hooks(module: nn.Module) -> list[object]:
    """All that the user has put on a module."""
    stores = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for store in stores for hook in store.values()]
