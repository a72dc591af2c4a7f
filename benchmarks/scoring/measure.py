"""Time the lines in turn, and compare each with the plain gradient pass."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from statistics import median

import torch
from lines import METHODS, NotMeasuredError, Row, Setup, plain
from torch import nn

import sosp


def say(text: str) -> None:
    """Progress, on stderr: a run that is killed has at least said what it knew."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Give the model back in eval mode, without gradients, its running statistics as they were."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    try:
        yield
    finally:
        model.eval().zero_grad(set_to_none=True)
        for name, b in model.named_buffers():
            b.copy_(before[name])


def timed(row: Row, setup: Setup) -> tuple[float, int | None]:
    """Seconds and, on CUDA, the peak of allocated memory in bytes."""
    cuda = setup.x.is_cuda
    sync = torch.cuda.synchronize if cuda else lambda: None
    with undone(setup.model):
        state = row.prepare()
        gc.collect()
        sync()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = row.run(state)
        sync()
        middle = time.perf_counter()
        row.finish(result)
        sync()
        end = time.perf_counter()
    return row.scale * (middle - start) + (end - middle), torch.cuda.max_memory_allocated() if cuda else None


@dataclass
class Entry:
    """A line of the table while it is being measured; its first error ends it."""

    method: str
    label: str
    row: Row | None = None
    times: list[float] = field(default_factory=list)
    peak: int | None = None  # bytes, in the timed passes
    ratio: float | None = None  # time, to the plain pass in train mode
    peak_ratio: float | None = None  # memory, to a plain pass in train mode over as many examples at once
    error: str | None = None
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error is this line's alone; that a slower way was taken is noted."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except NotMeasuredError as error:
                self.error = str(error)
            except Exception as error:  # whatever it is, the other lines go on
                self.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        slow = [str(w.message) for w in caught if issubclass(w.category, sosp.SlowPathWarning)]
        self.notes = list(dict.fromkeys(self.notes + slow))
        if self.error and torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def build(self, setup: Setup) -> None:
        with self.guarded():
            self.row = METHODS[self.method](setup)
            self.label = self.row.label

    def run(self, setup: Setup, *, keep: bool) -> None:
        if self.error or self.row is None:
            return
        with self.guarded():
            seconds, peak = timed(self.row, setup)
            say(f"{setup.name:9} {self.label:60} {'' if keep else 'warm-up '}{seconds:.4g} s")
            if keep:
                self.times.append(seconds)
                self.peak = peak if self.peak is None else max(self.peak, peak or 0)


def measure(setup: Setup, methods: list[str], repeats: int, *, once: bool = False) -> list[Entry]:
    """Warm every line up, then time them in turn, so that a noisy moment hits all alike.

    ``once``: time every line but the plain pass a single time, without a warm-up or a run at equal batch.
    """
    entries = [Entry(m, m) for m in methods]
    for e in entries:
        e.build(setup)
        if not once or e.method == "plain":
            e.run(setup, keep=False)
    for i in range(repeats):
        for e in entries:
            if not once or e.method == "plain" or i == 0:
                e.run(setup, keep=True)
    _compare(entries)
    if setup.x.is_cuda and not once:
        _compare_memory(entries, setup)
    for e in entries:
        e.row = None  # it holds the model, the data and Q
    return entries


def _compare(entries: list[Entry]) -> None:
    base = next((e.times for e in entries if e.method == "plain" and not e.error), None)
    for e in entries:
        if base and e.times and not e.error:
            e.ratio = median(e.times) / median(base)


def _compare_memory(entries: list[Entry], setup: Setup) -> None:
    """Peak over as many examples as the line takes at once, to the plain pass over the same in one batch."""

    @cache
    def plain_peak(n: int) -> int:
        few = setup.head(n)
        return timed(plain(few, train=True), few)[1] or 0

    for e in entries:
        if e.row is None or e.error:
            continue
        few = setup.head(e.row.at_once)
        with e.guarded():
            e.peak_ratio = (timed(METHODS[e.method](few), few)[1] or 0) / plain_peak(e.row.at_once)
