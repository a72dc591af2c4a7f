"""Images held as one tensor on the device: crops, flips and normalisation of a whole batch at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sosp.data.batch_source import Batch, Batching, Device, apply_limit, draw_rows, make_generator, make_slice
from sosp.data.scale import Scale
from sosp.errors import ArgumentError, DataError, check_whole_number

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class ResidentAugmentation:
    """What chance decides about an epoch, row by row."""

    order: Tensor  # (N,) which image
    top: Tensor  # (N,) where its crop starts in the padded image
    left: Tensor  # (N,)
    mirrored: Tensor  # (N,) 0 or 1


def draw_augmentation(total: int, *, pad: int, flip: bool, random: torch.Generator) -> ResidentAugmentation:
    order = torch.randperm(total, generator=random)
    top, left = torch.randint(0, 2 * pad + 1, (2, total), generator=random)
    mirrored = torch.randint(0, 1 + flip, (total,), generator=random)
    return ResidentAugmentation(order, top, left, mirrored)


@dataclass(frozen=True, eq=False, repr=False)
class Resident:
    """Images of one size and their labels, whole on one device. Made by ``Resident.of``."""

    images: Tensor  # (N, C, H + 2 pad, W + 2 pad) uint8 or float32, zeros around
    labels: Tensor  # (N,) int64
    scale: Scale
    pad: int = 0  # crops start anywhere from 0 to 2 pad
    flip: bool = False

    @classmethod
    def of(
        cls,
        images: Tensor,
        labels: Tensor,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        pad: int = 0,
        flip: bool = False,
    ) -> Resident:
        """Images (N, C, H, W) and labels (N,). Bytes are divided by 255 first, floats are taken as they are.

        In training every image is padded by ``pad`` zeros on each side and cut to its size at a random place, then,
        with ``flip``, mirrored with probability 1/2; all of it before normalisation.
        """
        check_images(images, labels)
        channels = images.shape[1]
        check_whole_number("pad", pad, least=0)
        unit = 255.0 if images.dtype == torch.uint8 else 1.0
        scale = Scale.of((0.0,) * channels if mean is None else mean, (1.0,) * channels if std is None else std, unit)
        if scale.mean.shape[1] != channels:
            raise ArgumentError(
                f"mean and std have {scale.mean.shape[1]} values, but the images have {channels} channels."
            )
        stored = F.pad(images if images.dtype == torch.uint8 else images.detach().float(), (pad,) * 4).contiguous()
        return cls(stored, labels.to(images.device).long(), scale.to(images.device), pad, flip)

    def __repr__(self) -> str:
        return f"Resident({len(self)} images of {self.shape} on {self.images.device}, pad={self.pad}, flip={self.flip})"

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        _, channels, height, width = self.images.shape
        return channels, height - 2 * self.pad, width - 2 * self.pad

    @cached_property
    def windows(self) -> Tensor:
        """(M, C, H, W): a crop for every element at which one may start. A view; neighbours share their elements."""
        _, *inner = self.images.stride()
        reach = sum(step * (size - 1) for step, size in zip(inner, self.shape, strict=True))
        return self.images.as_strided((self.images.numel() - reach, *self.shape), (1, *inner))

    def steps(self, batch: int, *, drop_last: bool = False) -> int:
        return len(Batching(len(self), batch, drop_last=drop_last))

    def plan(
        self, number: int, *, batch: int, seed: int, rank: int = 0, ranks: int = 1, drop_last: bool = False
    ) -> EpochPlan:
        """Everything about epoch ``number`` before it starts, on the device; its batches in any order."""
        batching = Batching(len(self), batch, rank, ranks, drop_last)
        draws = draw_augmentation(len(self), pad=self.pad, flip=self.flip, random=make_generator(seed, number))
        image, _, line, step = self.images.stride()
        corner = draws.order * image + draws.top * line + draws.left * step
        table = torch.stack([draws.order, corner, draws.mirrored], 1)
        return EpochPlan(self, table.to(self.images.device), batching)

    def prepare(self, rows: Tensor) -> Batch:
        """The images and labels of some rows of a plan; nothing waits for the GPU, so a CUDA graph may hold it."""
        image, corner, mirrored = rows.unbind(1)
        x = self.windows.index_select(0, corner)
        if self.flip:
            x = torch.where(mirrored.bool().view(-1, 1, 1, 1), x.flip(3), x)
        return self.scale(x), self.labels.index_select(0, image)

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
        plan = self.plan(number, batch=batch, seed=seed, rank=rank, ranks=ranks, drop_last=drop_last)
        return (move_batch(plan.batch(k), device) for k in plan.batching.since(start))

    def ordered(
        self, *, batch: int, limit: int | None = None, rank: int = 0, ranks: int = 1, device: Device | None = None
    ) -> Iterator[Batch]:
        batching = Batching(apply_limit(len(self), limit), batch, rank, ranks)
        _, height, width = self.shape
        inside = self.images[:, :, self.pad : self.pad + height, self.pad : self.pad + width]
        slices = (make_slice(batching.rank_rows(k)) for k in range(len(batching)))
        return (move_batch((self.scale(inside[rows]), self.labels[rows]), device) for rows in slices)

    def to(self, device: Device) -> Resident:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device), scale=self.scale.to(device))

    def subset(self, count: int, seed: int, *, start: int = 0) -> Resident:
        rows = draw_rows(len(self), count, seed, start).to(self.labels.device)
        return replace(self, images=self.images[rows], labels=self.labels[rows])


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """One epoch of a ``Resident``: what every batch will hold."""

    source: Resident
    table: Tensor  # (N, 3) int64 on the device: image, element at which its crop starts, 1 if mirrored
    batching: Batching

    def __len__(self) -> int:
        return len(self.batching)

    def rows(self, k: int) -> Tensor:
        """What ``Resident.prepare`` takes for batch ``k``: (b, 3), a view."""
        return self.table[make_slice(self.batching.rank_rows(k))]

    def batch(self, k: int, out: Batch | None = None) -> Batch:
        """Batch ``k``, or this rank's part of it, written into ``out`` where given."""
        made = self.source.prepare(self.rows(k))
        if out is None:
            return made
        for given, new in zip(out, made, strict=True):
            if given.shape != new.shape:
                raise ArgumentError(f"out has shape {tuple(given.shape)}, batch {k} has {tuple(new.shape)}.")
            given.copy_(new)
        return out


def move_batch(batch: Batch, device: Device | None) -> Batch:
    return batch if device is None else (batch[0].to(device), batch[1].to(device))


def check_images(images: object, labels: object) -> None:
    """Refuse what is no tensor of images with a label each."""
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor):
        raise DataError(f"images and labels must be tensors, not {type(images).__name__} and {type(labels).__name__}.")
    if images.dim() != 4 or not images.numel():
        raise DataError(f"images have shape {tuple(images.shape)}; give (images, channels, height, width), not empty.")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise DataError(f"images are {images.dtype}; give uint8 (0 to 255) or floating point.")
    if labels.shape != images.shape[:1]:
        raise DataError(f"labels have shape {tuple(labels.shape)} for {len(images)} images; give one label for each.")
    if labels.dtype not in WHOLE:
        raise DataError(f"labels are {labels.dtype}; give whole numbers, the first class is 0.")
    if labels.min() < 0:
        raise DataError(f"labels go down to {labels.min().item()}; the first class is 0.")
