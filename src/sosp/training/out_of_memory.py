"""Explain that a batch does not fit into memory, and find the largest batch that does."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sosp.core import distributed
from sosp.core.batches import call_model, take_examples
from sosp.errors import OutOfMemoryError

SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory: torch has an exception for it on GPUs, a message on CPUs."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error).lower() for s in SIGNS)


@contextmanager
def explain_out_of_memory(batch: int, attempt: Callable[[int], Any]) -> Iterator[None]:
    """Turn an out-of-memory error into an OutOfMemoryError that names the largest batch that fits, found by trying."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        traceback.clear_frames(error.__traceback__)  # the frames hold the tensors that filled the memory
    else:
        return
    if distributed.count_ranks() > 1:  # the other ranks did not fail, but would have to take part in the attempts
        advice = "try a smaller one"
    else:
        fits = find_largest_batch(batch, attempt)
        advice = (
            f"batch={fits} fits"
            if fits
            else "even a single example does not fit: use a smaller input or another device"
        )
    raise OutOfMemoryError(f"a batch of {batch} examples does not fit into memory; {advice}. ({reason})")


def find_largest_batch(batch: int, attempt: Callable[[int], Any]) -> int:
    """Return the largest of batch / 2, batch / 4, ... that does not fail; 0 if all fail."""
    size = batch // 2
    while size:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            attempt(size)
            return size
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        size //= 2
    return 0


def compute_outputs(model: nn.Module, x: Any, rows: int) -> Any:
    """Return the outputs of the network for ``rows`` examples."""
    with explain_out_of_memory(rows, lambda size: call_model(model, take_examples(x, size))):
        return call_model(model, x)
