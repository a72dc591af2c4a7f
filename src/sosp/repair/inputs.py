"""Inputs to repair with: whatever the user has, labelled or not, as chunks; every tenth is held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sosp.batches import Chunk, check_device, read, rebatch
from sosp.errors import DataError, whole_number

HELD = 10  # one of so many inputs is held out
SIZES = {"cpu": 125, "cuda": 1000}  # inputs at once: what the caches like on a CPU, what fills a GPU


@dataclass(frozen=True, eq=False)
class Part:
    """Some inputs, all to be fitted to or all held out."""

    chunk: Chunk
    held: bool
    number: int


def parts_of(data: Any, examples: int | None, device: torch.device) -> list[Part]:
    """The inputs, which are read once: a loader may shuffle, and all layers must see the same ones."""
    if examples is not None:
        whole_number("examples", examples, least=2)
    chunks = []
    for chunk in read(_labelled(_opened(data, examples, device)), examples, None):
        check_device(chunk, device)
        chunks.append(replace(chunk, targets=None))
    total = sum(c.size for c in chunks)
    if total < 2:
        raise DataError(f"{total} inputs are too few: layers are fitted to some and tested on others. Give hundreds.")
    size = max(2, min(SIZES.get(device.type, SIZES["cuda"]), total))
    return list(_split(rebatch(chunks, size)))


def _split(chunks: Iterable[Chunk]) -> Iterator[Part]:
    """The last tenth of every chunk is held out."""
    number = 0
    for chunk in chunks:
        cut = chunk.size - (-(-chunk.size // HELD) if chunk.size > 1 else 0)
        for start, stop, held in ((0, cut, False), (cut, chunk.size, True)):
            if start < stop:
                yield Part(chunk.rows(start, stop), held, number)
                number += 1


def _opened(data: Any, examples: int | None, device: torch.device) -> Any:
    """A source of ``sosp.data`` in batches on the device; all else as it is."""
    if not callable(getattr(data, "ordered", None)):
        return data
    count = len(data) if examples is None else min(examples, len(data))
    return data.subset(count, 0).to(device).ordered(batch=SIZES["cpu"])


def _labelled(data: Any) -> Any:
    """Inputs alone get labels that nobody looks at."""
    if isinstance(data, Tensor):
        return data, torch.zeros(len(data) if data.dim() else 0, device=data.device)
    if isinstance(data, (tuple, list, dict, str)) or not isinstance(data, Iterable):
        return data
    return ((b, torch.zeros(len(b), device=b.device)) if isinstance(b, Tensor) else b for b in data)
