"""What to say when a batch does not fit into memory: which one would."""

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
    """torch has an exception of its own on GPUs, and a sentence on CPUs."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error).lower() for s in SIGNS)


@contextmanager
def explain_out_of_memory(batch: int, attempt: Callable[[int], Any]) -> Iterator[None]:
    """Turn running out of memory into a sentence with the largest power of two less that fits, found by trying."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        traceback.clear_frames(error.__traceback__)  # they hold what the batch has filled the memory with
    else:
        return
    if distributed.count_ranks() > 1:  # the others did not fail, and would have to try along
        advice = "try a smaller one"
    else:
        fits = find_largest_batch(batch, attempt)
        advice = f"batch={fits} fits" if fits else "nor does one example: use a smaller input or another device"
    raise OutOfMemoryError(f"a batch of {batch} examples does not fit into memory; {advice}. ({reason})")


def find_largest_batch(batch: int, attempt: Callable[[int], Any]) -> int:
    """The largest of batch / 2, batch / 4, ... that does not fail; 0 where none does."""
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
    """What the network says to ``rows`` examples."""
    with explain_out_of_memory(rows, lambda size: call_model(model, take_examples(x, size))):
        return call_model(model, x)
