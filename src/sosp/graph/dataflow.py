"""Record which tensor each op and module takes and gives, and find equal tensors once some are known to be zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sosp.graph.labels import IDENTITY_OPS, Labels
from sosp.graph.ops import DROPOUTS

SUMS = frozenset({"add", "__add__", "__iadd__", "__radd__"})
CUT = "cut"  # no op of the network: what leaves a layer or a norm, with its removed channels at zero
IDLE_DROPOUT = "idle dropout"
CLAMPS = frozenset(
    {"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "abs", "threshold"}
)  # f(f(x)) = f(x)
POSITIVE = frozenset({"relu", "relu6", "sigmoid", "hardsigmoid", "softmax", "exp", "abs", "square", "softplus"})
POOLS = frozenset(
    {f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)} | {"mean", "sum"}
)
KEEP_SIGN = SUMS | IDENTITY_OPS | DROPOUTS | POOLS | {"mul", "__mul__", CUT}

T = TypeVar("T")
TensorId = int
Form = tuple[tuple[int, ...], torch.dtype]
Source = int | str  # an argument by its place or by its name


@dataclass(frozen=True)
class OpEvent:
    """An op: the tensors it took, gave and wrote into."""

    name: str
    given: tuple[TensorId, ...]
    out: tuple[TensorId, ...]
    given_forms: tuple[Form, ...]
    forms: tuple[Form, ...]  # of the outputs
    labels: tuple[Labels | None, ...]  # of the outputs
    numbers: tuple[Any, ...]  # its other arguments
    written: frozenset[TensorId]  # all tensors in the memory that it wrote into
    moves: bool  # each element that it gives is one that it took, or zero


@dataclass(frozen=True)
class EnterEvent:
    """A module is called."""

    module: str
    given: Mapping[Source, tuple[TensorId, Labels | None, tuple[int, ...]]]  # the tensors among its arguments
    plain: bool  # one tensor is all that it is given


@dataclass(frozen=True)
class LeaveEvent:
    """A module returns."""

    module: str
    out: tuple[TensorId, ...]
    shapes: tuple[tuple[int, ...], ...]
    labels: Labels | None  # of the one tensor that it returns
    alone: bool  # it returns one tensor, and nothing around it


Event = OpEvent | EnterEvent | LeaveEvent


def find_form(x: Tensor) -> Form:
    """The shape and the type of a tensor."""
    return tuple(x.shape), x.dtype


def is_idle_dropout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Dropout that is switched off: ``F.dropout(input, p, training)``."""
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    return given.get("training", True) is False or given.get("p", 0.5) == 0


def list_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Source, Tensor]:
    """The tensors among the arguments of a module."""
    given: dict[Source, Tensor] = {k: x for k, x in enumerate(args) if isinstance(x, Tensor)}
    return given | {k: x for k, x in kwargs.items() if isinstance(x, Tensor)}


def find_gone_events(events: Sequence[Event], bypassed: Mapping[str, Sequence[str]]) -> np.ndarray:
    """(events,) true for those in bypassed modules, but not in the last call of each of their steps."""
    gone = np.zeros(len(events), dtype=bool)
    started: list[int] = []
    last: dict[str, tuple[int, int]] = {}
    for at, event in enumerate(events):
        if isinstance(event, EnterEvent):
            started.append(at)
        elif isinstance(event, LeaveEvent):
            start = started.pop()
            last[event.module] = start, at
            if event.module in bypassed:
                kept = [last[f"{event.module}.{step}"] for step in bypassed[event.module]]
                before = [gone[a:b].copy() for a, b in kept]
                gone[start : at + 1] = True
                for (a, b), old in zip(kept, before, strict=True):
                    gone[a:b] = old
    return gone


def list_running_records(records: Sequence[T], events: Sequence[Event], gone: np.ndarray) -> list[T]:
    """Return the records of the ops that are not gone: one for each event of an op that gives tensors."""
    made = [at for at, e in enumerate(events) if isinstance(e, OpEvent) and e.out and e.name != CUT]
    return [record for record, at in zip(records, made, strict=True) if not gone[at]]


# Equal tensors --------------------------------------------------------------------------------------------------------

ZERO_VALUE = 0  # the number of every tensor that is zero


@dataclass(eq=False)
class CallFacts:
    """One call of a module: the values it was given and gave, by number; equal numbers are equal tensors."""

    module: str
    start: int  # its first event
    outside: tuple[str, ...]  # the modules around it
    given: dict[Source, int]
    event: EnterEvent
    end: int = 0
    out: tuple[int, ...] = ()
    left: LeaveEvent | None = None


@dataclass(eq=False)
class ValueFacts:
    """All tensors of a forward pass by number."""

    calls: list[CallFacts] = field(default_factory=list)  # in the order in which they begin
    made: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)  # values: taken, given
    spared: dict[int, tuple[int, ...]] = field(default_factory=dict)  # event whose result is known -> values it took
    used: list[int] = field(default_factory=list)  # what the network returns, and the values its code looks at
    first: dict[TensorId, int] = field(default_factory=dict)  # tensor -> the event that it is first seen in

    def find_live(self) -> set[int]:
        """The values that the network's outputs depend on."""
        live = set(self.used)
        for taken, given in reversed(self.made):
            if live.intersection(given):
                live.update(taken)
        return live

    def find_spared(self) -> set[int]:
        """The values that are needed for nothing but results that are known."""
        found = {v for taken in self.spared.values() for v in taken}
        for taken, given in reversed(self.made):
            if found.intersection(given):
                found.update(taken)
        return found - self.find_live() - {ZERO_VALUE}


class ValueTracker:
    """Number the values of a recorded forward pass, given which labels are zero."""

    def __init__(self, zero: np.ndarray) -> None:
        self.zero = zero
        self.facts = ValueFacts()
        self.now: dict[TensorId, int] = {}
        self.count = ZERO_VALUE
        self.positive: set[int] = {ZERO_VALUE}
        self.origin: dict[int, tuple[str, tuple[Any, ...]]] = {}  # value -> the op that made it
        self.stack: list[CallFacts] = []

    def follow(self, events: Sequence[Event]) -> ValueFacts:
        """Return the facts."""
        for at, event in enumerate(events):
            if isinstance(event, OpEvent):
                self.op(at, event)
            elif isinstance(event, EnterEvent):
                given = {key: self.value(at, x) for key, (x, _, _) in event.given.items()}
                outside = tuple(call.module for call in self.stack)
                self.stack.append(CallFacts(event.module, at, outside, given, event))
                self.facts.calls.append(self.stack[-1])
            else:
                call = self.stack.pop()
                call.end, call.left, call.out = at, event, tuple(self.value(at, x) for x in event.out)
                if not self.stack:
                    self.facts.used += call.out
        return self.facts

    def value(self, at: int, x: TensorId) -> int:
        self.facts.first.setdefault(x, at)
        if x not in self.now:
            self.count += 1
            self.now[x] = self.count
        return self.now[x]

    def op(self, at: int, event: OpEvent) -> None:
        taken = tuple(self.value(at, x) for x in event.given)
        if not event.out and not event.written:  # the code looks at numbers
            self.facts.used += taken
        given = []
        for x in event.written - set(event.out):  # other views of the memory hold something new
            self.now.pop(x, None)
            given.append(self.value(at, x))
        known = []
        for x, labels, form in zip(event.out, event.labels, event.forms, strict=True):
            found = self.find_known(event, taken, labels, form)
            self.facts.first.setdefault(x, at)
            if found is None:
                self.count += 1
                found = self.count
                given.append(found)
                self.describe(found, event, taken)
            else:
                known.append(found)
            self.now[x] = found
        if given:
            self.facts.made.append((taken, tuple(given)))
        elif known and (ZERO_VALUE in known or ZERO_VALUE in taken):
            self.facts.spared[at] = tuple(v for v in taken if v not in known)

    def find_known(self, event: OpEvent, taken: tuple[int, ...], labels: Labels | None, form: Form) -> int | None:
        """The number of the value that an op gives back; None where it makes a new one."""
        zero = self.zero[labels.core.numpy()] if labels is not None else np.zeros(1, dtype=bool)
        if zero.all():
            return ZERO_VALUE
        if event.name in SUMS and len(taken) == 2 and ZERO_VALUE in taken and event.numbers in ((), (1,)):
            other = taken.index(ZERO_VALUE) ^ 1
            return taken[other] if event.given_forms[other] == form else None
        if len(taken) != 1:
            return None
        same = event.name in IDENTITY_OPS or event.name == IDLE_DROPOUT or (event.name == CUT and not zero.any())
        again = event.name in CLAMPS and self.origin.get(taken[0]) == (event.name, event.numbers)
        if same or again or (event.name in ("relu", "abs") and taken[0] in self.positive):
            return taken[0]
        return None

    def describe(self, value: int, event: OpEvent, taken: tuple[int, ...]) -> None:
        self.origin[value] = (event.name, event.numbers)
        keeps = (event.moves or event.name in KEEP_SIGN) and all(v in self.positive for v in taken)
        if event.name in POSITIVE or keeps:
            self.positive.add(value)
