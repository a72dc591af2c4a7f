"""What to say when a batch does not fit into memory: which one would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sosp.errors import OutOfMemoryError

SIGNS = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """torch has an exception of its own on GPUs, and a sentence on CPUs."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error).lower() for s in SIGNS)


@contextmanager
def explained(batch: int, attempt: Callable[[int], None]) -> Iterator[None]:
    """Turn running out of memory into a sentence with the largest power of two less that fits, found by trying."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0][:200]
    else:
        return
    fits = largest(batch, attempt)
    advice = f"batch={fits} fits" if fits else "not even a single example fits: use a smaller input or another device"
    raise OutOfMemoryError(f"a batch of {batch} examples does not fit into memory; {advice}. ({reason})")


def largest(batch: int, attempt: Callable[[int], None]) -> int:
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
