"""How long a network takes for one call: warm-up, the median and the spread of many, several networks in one run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sosp.core.batches import call_model
from sosp.core.borrowed_model import find_device, preserve_state, refuse_record, refuse_uninitialised
from sosp.errors import ArgumentError, StructureError, check_whole_number


@dataclass(frozen=True)
class Latency:
    """Seconds for one call on one device."""

    median: float
    low: float  # the 10th percentile
    high: float  # the 90th
    runs: int
    device: str

    def __str__(self) -> str:
        low, middle, high = (f"{1e3 * t:.3g}" for t in (self.low, self.median, self.high))
        return f"{middle} ms ({low} to {high}, {self.runs} runs, {self.device})"


def latency(
    model: nn.Module | Mapping[str, nn.Module],
    example: Any,
    *,
    device: torch.device | str | None = None,
    runs: int = 30,
    warmup: int = 5,
) -> Any:
    """Measure the time of one forward pass in eval mode, without gradients.

    Several networks take turns, so that a disturbance affects all of them alike. On a GPU its own clock is read.

    Args:
        model: The network, or several by name, ``{"before": model, "after": small}``.
        example: The inputs.
        device: Where to run, on copies of the networks; by default where they are.
        runs: Number of timed passes.
        warmup: Number of passes before those.

    Returns:
        A ``Latency`` in seconds, or a dict of them if ``model`` is a dict.

    Raises:
        ArgumentError: If an argument has a wrong value.
        StructureError: If a network does not run on the example.
    """
    check_whole_number("runs", runs)
    check_whole_number("warmup", warmup, least=0)
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    for m in models.values():
        refuse_record(m)
    if not models or not all(isinstance(m, nn.Module) for m in models.values()):
        raise ArgumentError("latency takes a module, or a dict of names and modules.")
    where = _device(device) if device is not None else find_device(next(iter(models.values())))
    if where.type == "cuda":
        where = torch.empty(0, device=where).device  # with its number
    for m in models.values():
        refuse_uninitialised(m)
    calls = {name: _prepare_call(m, example, where) for name, m in models.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with ExitStack() as stack:
        for m in models.values():
            stack.enter_context(preserve_state(m))
        stack.enter_context(torch.inference_mode())
        for run in range(warmup + runs):
            for name, once in calls.items():
                seconds = _run_checked(name, once, example)
                if run >= warmup:
                    times[name].append(seconds)
    found = {name: _summary(t, str(where)) for name, t in times.items()}
    return found if isinstance(model, Mapping) else found[""]


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device={device!r} is not a device: {str(error).splitlines()[0]}") from error


def _prepare_call(model: nn.Module, example: Any, where: torch.device) -> Callable[[], float]:
    """One timed call, of the model itself if it is there and in eval mode (compiled ones cannot be copied)."""
    ready = find_device(model) == where and not any(m.training for m in model.modules())
    twin = model if ready else copy.deepcopy(model).eval().to(where)
    inputs = tree_map(lambda x: x.to(where, copy=True) if isinstance(x, Tensor) else x, example)
    return lambda: (_on_gpu if where.type == "cuda" else _on_cpu)(lambda: call_model(twin, inputs))


def _run_checked(name: str, once: Callable[[], float], example: Any) -> float:
    try:
        return once()
    except Exception as error:
        which = f"the model {name!r}" if name else "the model"
        shapes = tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, example)
        raise StructureError(
            f"{which} does not run on the example (shapes {shapes}): {type(error).__name__}: {error}"
        ) from error


def _on_cpu(once: Callable[[], Any]) -> float:
    start = time.perf_counter()
    once()
    return time.perf_counter() - start


def _on_gpu(once: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    once()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def _summary(times: list[float], device: str) -> Latency:
    ordered = sorted(times)
    last = len(ordered) - 1
    return Latency(median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered), device)
