"""What a dataset is: two sources of batches, and the rule by which an epoch falls into batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sosp.errors import ArgumentError, check_whole_number

Batch = tuple[Tensor, Tensor]  # inputs (b, C, H, W) float32 and labels (b,) int64
Device = torch.device | str


class Source(Protocol):
    """Images and labels that come as batches: shuffled and augmented for training, in order for evaluation.

    Rank r of R takes the rows r::R of every batch, so the ranks together hold exactly the batch of a single process;
    of a last batch with fewer rows than ranks, some get none (a batch of zero rows, so that all make as many steps).
    """

    def __len__(self) -> int: ...

    def steps(self, batch: int, *, drop_last: bool = False) -> int:
        """How many batches an epoch has."""
        ...

    def epoch(
        self,
        number: int,
        *,
        batch: int,
        seed: int,
        start: int = 0,
        rank: int = 0,
        ranks: int = 1,
        device: Device | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Every image once, shuffled and augmented, from batch ``start`` on.

        Order and augmentation depend on ``seed`` and ``number`` alone: the same batches on every device and after
        every restart, with no random state to save. They come on ``device``, by default where the source is.
        """
        ...

    def ordered(
        self, *, batch: int, limit: int | None = None, rank: int = 0, ranks: int = 1, device: Device | None = None
    ) -> Iterator[Batch]:
        """The images, or the first ``limit`` of them, in order and not augmented.

        Files are in the order of their classes: for a few of all classes take a ``subset``.
        """
        ...

    def to(self, device: Device) -> Source:
        """The same images, whose batches come on ``device``."""
        ...

    def subset(self, count: int, seed: int, *, start: int = 0) -> Source:
        """So many images drawn at random, in the order they had; other ones than ``subset(start, seed)``."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A training and a test set of labelled images."""

    name: str
    train: Source
    test: Source  # the validation part, where that is the part with labels
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # of one input: channels, height, width


@dataclass(frozen=True)
class Batching:
    """How ``total`` rows fall into batches, and which rows of a batch belong to this rank."""

    total: int
    batch: int
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_whole_number("batch", self.batch)
        check_whole_number("ranks", self.ranks)
        if check_whole_number("rank", self.rank, least=0) >= self.ranks:
            raise ArgumentError(f"rank={self.rank} does not exist among ranks={self.ranks}; the first is 0.")
        if self.batch < self.ranks:
            raise ArgumentError(
                f"batch={self.batch} is the total over all ranks; with ranks={self.ranks} some ranks would get no "
                "images."
            )
        if not len(self):
            raise ArgumentError(
                f"batch={self.batch} with drop_last drops all {self.total} images: they do not fill one batch."
            )

    def __len__(self) -> int:
        return self.total // self.batch if self.drop_last else -(-self.total // self.batch)

    def since(self, start: int) -> range:
        """The numbers of the batches from ``start`` on; none when the epoch is just over."""
        if check_whole_number("start", start, least=0) > len(self):
            raise ArgumentError(f"start={start} is beyond the end of the epoch, which has {len(self)} batches.")
        return range(start, len(self))

    def rows(self, k: int) -> range:
        """The rows of batch ``k`` over all ranks."""
        if check_whole_number("k", k, least=0) >= len(self):
            raise ArgumentError(f"there is no batch {k}: the epoch has {len(self)}, counted from 0.")
        return range(k * self.batch, min((k + 1) * self.batch, self.total))

    def rank_rows(self, k: int) -> range:
        """The rows of batch ``k`` that belong to this rank."""
        return self.rows(k)[self.rank :: self.ranks]


def make_slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)


def make_generator(seed: int, number: int) -> torch.Generator:
    """The random numbers of epoch ``number``, on the CPU wherever they are used.

    torch seeds this generator with 32 bits: they are a hash of both numbers, so that no epoch of one seed is an
    epoch of its neighbour.
    """
    both = check_whole_number("seed", seed, least=0), check_whole_number("number", number, least=0)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(both).generate_state(1)[0]))


def draw_rows(total: int, count: int, seed: int, start: int = 0) -> Tensor:
    """``count`` of ``total`` rows at random, sorted; none of the first ``start`` rows that this seed draws."""
    if check_whole_number("count", count) + start > total:
        raise ArgumentError(f"count={count} images cannot be drawn from {total - start}.")
    return torch.randperm(total, generator=make_generator(seed, 0))[start : start + count].sort().values


def apply_limit(total: int, limit: int | None) -> int:
    """How many of ``total`` rows a limit leaves."""
    return total if limit is None else min(total, check_whole_number("limit", limit))
