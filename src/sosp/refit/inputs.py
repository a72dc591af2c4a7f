"""Inputs to repair with: whatever the user has, labelled or not, as chunks; every tenth is held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sosp.core.batches import Chunk, check_device, read, rebatch
from sosp.errors import DataError, whole_number

HELD = 10  # one of so many inputs is held out
STRETCH = 125  # of so many in a row the last ones: data is often sorted
CACHES = 125  # inputs at once on a CPU
ROOM = 2**27  # numbers of the largest tensor at once elsewhere, where few large steps are better than many small ones


@dataclass(frozen=True, eq=False)
class Part:
    """Some inputs, all to be fitted to or all held out."""

    chunk: Chunk
    held: bool
    number: int

    @property
    def source(self) -> str:
        """The user's batches."""
        first, last = self.chunk.origin[0][0], self.chunk.origin[-1][0]
        return self.chunk.source if first == last else f"batches {first} to {last}"


def chunks_of(data: Any, examples: int | None, device: torch.device, seed: int) -> list[Chunk]:
    """The inputs, which are read once: a loader may shuffle, and all layers must see the same ones."""
    if examples is not None:
        whole_number("examples", examples, least=2)
    chunks = []
    generator = torch.Generator().manual_seed(seed)
    for chunk in read(data, examples, generator, alone=True, device=device):
        chunk = replace(chunk, targets=torch.zeros(chunk.size, device=device))  # the same for all: chunks are joined
        check_device(chunk, device)
        chunks.append(chunk)
    total = sum(c.size for c in chunks)
    if total < 2:
        raise DataError(f"{total} inputs are too few: layers are fitted to some and tested on others. Give hundreds.")
    return list(rebatch(chunks, STRETCH))


def parts_of(chunks: Sequence[Chunk], widest: int, device: torch.device) -> list[Part]:
    """Those to fit to and those held out, so many at once that a tensor of ``widest`` numbers for each has room."""
    size = CACHES if device.type == "cpu" else max(1, ROOM // widest)
    sides = [(part, held) for held in (False, True) for part in rebatch(_side(chunks, held), size)]
    return [Part(chunk, held, number) for number, (chunk, held) in enumerate(sides)]


def _side(chunks: Sequence[Chunk], held: bool) -> Iterator[Chunk]:
    """The last tenth of every chunk is held out; of single inputs, every tenth."""
    for number, chunk in enumerate(chunks):
        cut = chunk.size * (HELD - 1) // HELD if chunk.size > 1 else int(number % HELD > 0)
        start, stop = (cut, chunk.size) if held else (0, cut)
        if start < stop:
            yield chunk.rows(start, stop)
