"""Inputs to repair with: whatever the user has, labelled or not, as chunks; every tenth is held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import nn

from sosp.core.batches import Chunk, check_device, iterate_chunks, resize_chunks
from sosp.errors import DataError, check_whole_number

HOLDOUT_PERIOD = 10  # one of so many inputs is held out
CHUNK_INPUTS = 125  # of so many in a row the last ones: data is often sorted
CPU_BATCH = 125  # inputs at once on a CPU
MAX_TENSOR_NUMBERS = (
    2**27
)  # numbers of the largest tensor at once elsewhere, where few large steps are better than many small ones


@dataclass(frozen=True, eq=False)
class InputPart:
    """Some inputs, all to be fitted to or all held out."""

    chunk: Chunk
    held: bool
    number: int

    @property
    def source(self) -> str:
        """The user's batches."""
        first, last = self.chunk.origin[0][0], self.chunk.origin[-1][0]
        return self.chunk.source if first == last else f"batches {first} to {last}"


def read_chunks(
    data: Any, examples: int | None, device: torch.device, seed: int, model: nn.Module | None = None
) -> list[Chunk]:
    """The inputs, which are read once: a loader may shuffle, and all layers must see the same ones."""
    if examples is not None:
        check_whole_number("examples", examples, least=2)
    chunks = []
    generator = torch.Generator().manual_seed(seed)
    for chunk in iterate_chunks(data, examples, generator, alone=True, device=device, model=model):
        chunk = replace(chunk, targets=torch.zeros(chunk.size, device=device))  # the same for all: chunks are joined
        check_device(chunk, device)
        chunks.append(chunk)
    total = sum(c.size for c in chunks)
    if total < 2:
        raise DataError(f"{total} inputs are too few: layers are fitted to some and tested on others. Give hundreds.")
    return list(resize_chunks(chunks, CHUNK_INPUTS))


def split_chunks(chunks: Sequence[Chunk], widest: int, device: torch.device) -> list[InputPart]:
    """Those to fit to and those held out, so many at once that a tensor of ``widest`` numbers for each has room."""
    size = CPU_BATCH if device.type == "cpu" else max(1, MAX_TENSOR_NUMBERS // widest)
    sides = [(part, held) for held in (False, True) for part in resize_chunks(_side(chunks, held), size)]
    return [InputPart(chunk, held, number) for number, (chunk, held) in enumerate(sides)]


def count_needed_inputs(fitted: int) -> int:
    """Return how many inputs leave so many to fit to, when those held out are put aside."""
    whole, rest = divmod(fitted, CHUNK_INPUTS * (HOLDOUT_PERIOD - 1) // HOLDOUT_PERIOD)
    return whole * CHUNK_INPUTS + ceil(rest * HOLDOUT_PERIOD / (HOLDOUT_PERIOD - 1))


def _side(chunks: Sequence[Chunk], held: bool) -> Iterator[Chunk]:
    """The last tenth of every chunk is held out; of single inputs and of batches that cannot be cut, every tenth."""
    for number, chunk in enumerate(chunks):
        if chunk.size == 1 or not chunk.divisible:
            if held == (number % HOLDOUT_PERIOD == 0):
                yield chunk
            continue
        cut = chunk.size * (HOLDOUT_PERIOD - 1) // HOLDOUT_PERIOD
        start, stop = (cut, chunk.size) if held else (0, cut)
        if start < stop:
            yield chunk.rows(start, stop)
