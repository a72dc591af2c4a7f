"""Measure what pruning changed: bytes of the file, memory and milliseconds of a call, agreement on unused inputs."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sosp.core.batches import call_model, copy_inputs, find_batch_size
from sosp.core.borrowed_model import find_device, preserve_random_state, preserve_state
from sosp.errors import SospError
from sosp.graph.latency import Latency, latency
from sosp.graph.mask import Mask
from sosp.pipeline.held_out import Comparison, HeldOut
from sosp.surgery.checkpoint import describe_model
from sosp.surgery.checkpoint.model_record import encode_record
from sosp.surgery.checkpoint.model_state import read_state_dict

SECONDS, MOST_RUNS, LEAST_RUNS = 1.0, 30, 3  # for the passes of all networks that take turns
TENSOR_HEADER = 100  # bytes of a file that say where a tensor lies

T = TypeVar("T")
Pair = tuple[T, T]  # before and after


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured before and after pruning; what could not be measured is None, and ``missing`` says why."""

    bytes: Pair[int] | None = None  # of the saved file
    memory: Pair[int] | None = None  # bytes: the largest that weights and activations of one call need together
    latency: Pair[Latency] | None = None  # of one call, in turns
    rows: int = 0  # inputs of that call
    answers: Comparison | None = None  # on inputs used neither for scoring nor for repair
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def slower(self) -> bool:
        """Return whether the pruned network takes more than 5 % longer, and beyond the spread of the runs."""
        if self.latency is None:
            return False
        before, after = self.latency
        return after.median > 1.05 * before.median and after.low > before.high

    def list_lines(self) -> list[str]:
        """Return what was measured, line by line."""
        lines = []
        for name, pair in (("file size", self.bytes), ("peak memory", self.memory)):
            if pair is not None:
                lines.append(format_change(name, format_bytes(pair[0]), format_bytes(pair[1]), pair[1] / pair[0]))
        if self.latency is not None:
            before, after = self.latency
            times = f"{1e3 * before.median:.3g} ms", f"{1e3 * after.median:.3g} ms"
            where = f"{self.rows} inputs on {describe_device(before.device)}, {before.runs} runs in turns"
            lines.append(f"{format_change('latency', *times, after.median / before.median)}, {where}")
        if self.answers is not None:
            lines += [str(x) for x in (self.answers.agreement, self.answers.accuracy) if x is not None]
        return [*lines, *(f"{name} not measured: {why}" for name, why in self.missing.items())]


def measure_pruning(
    before: nn.Module,
    after: nn.Module,
    example: Any,
    mask: Mask,
    hold_out: Callable[[], HeldOut],
    timed: Pair[Latency] | None = None,
    answers: Comparison | None = None,
) -> Measured:
    """Measure both networks on an example, and compare them on the inputs held out.

    What was measured already may be given: ``timed`` and ``answers``.
    """
    missing: dict[str, str] = {}

    def attempt(name: str, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except Exception as error:  # a network that was pruned is worth more than a number about it
            what = "" if isinstance(error, SospError) else f"{type(error).__name__}: "
            missing[name] = what + str(error).partition("\n")[0][:200]
            return None

    if timed is None:
        found = attempt("latency", lambda: measure_in_turns({"before": before, "after": after}, example))
        timed = None if found is None else (found["before"], found["after"])
    return Measured(
        attempt("file size", lambda: (count_file_bytes(before), count_file_bytes(after, mask))),
        attempt("peak memory", lambda: (measure_memory(before, example), measure_memory(after, example))),
        timed,
        find_batch_size(example) or 1,
        answers or attempt("agreement", lambda: hold_out().compare(after)),
        missing,
    )


def measure_in_turns(models: Mapping[str, nn.Module], example: Any) -> dict[str, Latency]:
    """Return the latencies of several networks, with as many runs as fit into about a second, and at least three."""
    started = time.perf_counter()
    latency(models, example, runs=1, warmup=0)
    runs = int(SECONDS / max(time.perf_counter() - started, 1e-9))
    found: dict[str, Latency] = latency(models, example, runs=min(MOST_RUNS, max(LEAST_RUNS, runs)), warmup=1)
    return found


# Memory ---------------------------------------------------------------------------------------------------------------


def measure_memory(model: nn.Module, example: Any) -> int:
    """Return the bytes of the weights and the most activations that are alive at once in one call."""
    modes = {m: m.training for m in model.modules()}
    device, weights = find_device(model), count_storage_bytes([*model.parameters(), *model.buffers()])
    with preserve_random_state(), preserve_state(model), torch.no_grad():
        for m in modes:
            m.training = False
        inputs = copy_inputs(example)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            start = torch.cuda.memory_allocated(device)
            call_model(model, inputs)
            return weights + torch.cuda.max_memory_allocated(device) - start
        with StorageCounter([*model.parameters(), *model.buffers(), *tree_leaves(inputs)]) as counter:
            call_model(model, inputs)
        return weights + counter.peak


def count_storage_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of the memory that tensors lie in, that of shared ones once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


class StorageCounter(TorchDispatchMode):
    """Count the bytes of the storages that operations make and that are still alive."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen = {id(s): s for x in known if isinstance(x, Tensor) for s in [x.untyped_storage()]}
        self.counted: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.seen or key in self.counted:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def forget(_: Any) -> None:
            self.live -= size
            del self.counted[key]

        self.counted[key] = weakref.ref(storage, forget)


# Files, and words -----------------------------------------------------------------------------------------------------


def count_file_bytes(model: nn.Module, mask: Mask | None = None) -> int:
    """Return the bytes of the file that ``sosp.save`` writes, within a few per cent."""
    state = read_state_dict(model)
    saved = describe_model(model, state, mask)
    document, indices = encode_record(saved)
    tensors = [*(state[name] for name in saved.tensors), *indices.values()]
    return len(json.dumps(document)) + sum(x.numel() * x.element_size() + TENSOR_HEADER for x in tensors)


def format_change(name: str, before: str, after: str, share: float) -> str:
    """``MACs  100 -> 50  (50.0% left)``."""
    return f"{name:<11} {before:>15} -> {after:>15}  ({share:.1%} {'left' if share <= 1 else 'of the original'})"


def format_bytes(count: float) -> str:
    """``12.3 MB``."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def describe_device(name: str) -> str:
    """``the CPU with 2 threads``, or the name of a GPU."""
    device = torch.device(name)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"the {name.upper()} with {threads} thread{'s' * (threads > 1)}"
