"""Images in files: decoded by threads a few batches ahead, normalised on the device."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sosp.data.batch_source import Batch, Batching, Device, apply_limit, draw_rows, make_generator
from sosp.data.image_decoding import TRIES, Crop, decode_test_image, decode_training_image, try_decoding
from sosp.data.scale import Scale
from sosp.errors import DataError

AHEAD = 3  # batches being decoded while one is used
CPU = torch.device("cpu")
NAMED = 10  # files that a warning lists

Found = np.ndarray | str  # the pixels (size, size, 3), or why there are none
Decode = Callable[[int], Found]  # of a row of the epoch


class UnreadableWarning(UserWarning):
    """Image files that cannot be read: which, and what is done without them."""


def warn_unreadable(broken: Sequence[tuple[str, str]], total: int, consequence: str) -> None:
    """Warn of (file, reason) pairs."""
    names = ", ".join(f"{file} ({reason})" for file, reason in broken[:NAMED])
    more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
    warnings.warn(
        f"{len(broken)} of {total} images cannot be read and {consequence}: {names}{more}.",
        UnreadableWarning,
        stacklevel=3,
    )


@dataclass(frozen=True)
class FolderAugmentation:
    """What chance decides about an epoch, row by row."""

    order: Tensor  # (N,) which file
    tries: np.ndarray  # (N, TRIES, 2) from 0 to below 1
    place: np.ndarray  # (N, 2)
    mirrored: np.ndarray  # (N,) bool

    def crop(self, row: int) -> Crop:
        return Crop(self.tries[row].tolist(), self.place[row].tolist(), bool(self.mirrored[row]))


def draw_augmentation(total: int, random: torch.Generator) -> FolderAugmentation:
    order = torch.randperm(total, generator=random)
    tries = torch.rand(total, TRIES, 2, generator=random)
    place = torch.rand(total, 2, generator=random)
    mirrored = torch.rand(total, generator=random) < 0.5
    return FolderAugmentation(order, tries.numpy(), place.numpy(), mirrored.numpy())


@dataclass(frozen=True, eq=False, repr=False)
class Folder:
    """Image files and their labels. Made by ``sosp.data.folder``.

    A file that turns out to be damaged while it is decoded is reported once, and the next row of the same batch (after
    the last, the first) stands in for it, with its own label and its own crop; the same on every rank.
    """

    files: tuple[str, ...]
    labels: Tensor  # (N,) int64, on the CPU
    size: int
    resize: int  # of the shorter side, for evaluation
    scale: Scale
    workers: int
    device: torch.device = CPU
    reported: set[str] = field(default_factory=set)  # files that a warning has named

    def __repr__(self) -> str:
        return f"Folder({len(self)} images, size={self.size}, on {self.device})"

    def __len__(self) -> int:
        return len(self.files)

    def steps(self, batch: int, *, drop_last: bool = False) -> int:
        return len(Batching(len(self), batch, drop_last=drop_last))

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
        batching = Batching(len(self), batch, rank, ranks, drop_last)
        draws = draw_augmentation(len(self), make_generator(seed, number))
        stream = DecodingPass(
            source=self if device is None else self.to(device),
            order=draws.order,
            batching=batching,
            decode=lambda row: try_decoding(
                decode_training_image, self.files[draws.order[row]], self.size, draws.crop(row)
            ),
        )
        return stream.batches(batching.since(start))

    def ordered(
        self, *, batch: int, limit: int | None = None, rank: int = 0, ranks: int = 1, device: Device | None = None
    ) -> Iterator[Batch]:
        batching = Batching(apply_limit(len(self), limit), batch, rank, ranks)
        stream = DecodingPass(
            source=self if device is None else self.to(device),
            order=torch.arange(len(self)),
            batching=batching,
            decode=lambda row: try_decoding(decode_test_image, self.files[row], self.size, self.resize),
        )
        return stream.batches(batching.since(0))

    def to(self, device: Device) -> Folder:
        return replace(self, device=torch.device(device), scale=self.scale.to(device))

    def subset(self, count: int, seed: int, *, start: int = 0) -> Folder:
        rows = draw_rows(len(self), count, seed, start)
        return replace(self, files=tuple(self.files[row] for row in rows.tolist()), labels=self.labels[rows])


@dataclass(frozen=True)
class DecodingPass:
    """One pass over the files of a source."""

    source: Folder
    order: Tensor  # (N,) the file of each row
    batching: Batching
    decode: Decode

    def batches(self, numbers: range) -> Iterator[Batch]:
        """Yield these batches while the following ones are decoded."""
        pool = ThreadPoolExecutor(self.source.workers, thread_name_prefix="sosp-decode")
        waiting: deque[tuple[int, list[Future[Found]]]] = deque()
        try:
            for k in numbers:
                waiting.append((k, [pool.submit(self.decode, row) for row in self.batching.rank_rows(k)]))
                if len(waiting) > AHEAD:
                    yield self.finish(*waiting.popleft())
            while waiting:
                yield self.finish(*waiting.popleft())
        finally:  # also when the caller stops in the middle
            pool.shutdown(cancel_futures=True)

    def finish(self, k: int, decoded: list[Future[Found]]) -> Batch:
        """The pixels of batch ``k`` on the device, with the labels of what they show."""
        source, size = self.source, self.source.size
        pixels = torch.empty(len(decoded), size, size, 3, dtype=torch.uint8, pin_memory=source.device.type == "cuda")
        rows, view = list(self.batching.rank_rows(k)), pixels.numpy()
        for i, future in enumerate(decoded):
            rows[i], view[i] = self.readable(k, rows[i], future.result())
        x = pixels.to(source.device, non_blocking=True).permute(0, 3, 1, 2).contiguous()
        return source.scale(x), source.labels[self.order[rows]].to(source.device)

    def readable(self, k: int, row: int, found: Found) -> tuple[int, np.ndarray]:
        """A row and its pixels, or those of the next row of the batch that has any."""
        whole = self.batching.rows(k)
        for _ in whole:
            if not isinstance(found, str):
                return row, found
            self.report(row, found)
            row = whole[(row - whole.start + 1) % len(whole)]
            found = self.decode(row)
        raise DataError(
            f"none of the {len(whole)} images of batch {k} can be read; the first is {self.file(whole[0])}."
        )

    def file(self, row: int) -> str:
        return self.source.files[self.order[row]]

    def report(self, row: int, reason: str) -> None:
        file, known = self.file(row), self.source.reported
        if file not in known:
            known.add(file)
            warn_unreadable([(file, reason)], len(self.source), "are replaced by other images of the batch")
