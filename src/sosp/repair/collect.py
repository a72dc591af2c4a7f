"""Collect equations: what layers are given and what is compared, at positions drawn over all inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sosp.errors import DataError
from sosp.repair.inputs import Part
from sosp.repair.layouts import inputs_at, take
from sosp.repair.ridge import Rows
from sosp.repair.trails import Point
from sosp.repair.watch import Listener, listen

ROWS = 2**16  # equations at most for a layer, however many inputs there are
BYTES = 2**29  # and what its inputs may take
TARGETS = 2**30  # bytes of the original's values that are held at once


@dataclass(frozen=True, eq=False)
class Task:
    """A layer to refit: where it is compared in both networks."""

    layer: str
    here: Point  # in the small network
    there: Point  # in the original one
    channels: Tensor  # (c,) of the layer, those that are refitted
    origin: Tensor  # (c,) the channels of the original's layer that they are
    needs: int  # the last task that must be done before, by its number
    density: float  # positions for each input
    logits: bool  # it gives the outputs of the network

    @property
    def held_bytes(self) -> float:
        return 4 * self.density * len(self.channels)


class Positions:
    """Which positions of a tensor are looked at: the same in both networks and in every pass."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drawn: dict[tuple[int, int, int], Tensor] = {}

    def of(self, part: Part, total: int, density: float, device: torch.device) -> Tensor:
        count = max(1, round(density * part.chunk.size))
        key = (part.number, total, count)
        if key not in self.drawn:
            generator = torch.Generator().manual_seed(hash((self.seed, *key)) % 2**63)
            drawn = torch.randint(total, (count,), generator=generator) if count < total else torch.arange(total)
            self.drawn[key] = drawn.to(device)
        return self.drawn[key]


Found = dict[str, list[Tensor]]  # layer -> a tensor for every part


def collect(
    model: nn.Module, parts: Sequence[Part], tasks: Sequence[Task], positions: Positions, *, small: bool
) -> tuple[Found, Found]:
    """Of every task: the layer's inputs (in the small network only) and what is compared, (rows, c)."""
    inputs: Found = {t.layer: [] for t in tasks}
    values: Found = {t.layer: [] for t in tasks}
    for part in parts:
        shapes: dict[str, Tensor] = {}
        outputs: dict[str, list[Callable[[Tensor], None]]] = {}
        sums: dict[int, list[Callable[[Tensor], None]]] = {}
        given: dict[str, Callable[[Tensor], None]] = {}
        for task in tasks:
            point = task.here if small else task.there
            places = point.trail.places[task.channels if small else task.origin]
            keep = _keeper(task, part, point, places, positions, values, shapes)
            if point.sum is None:
                outputs.setdefault(point.module, []).append(keep)
            else:
                sums.setdefault(point.sum, []).append(keep)
        del given
        listener = Listener(model, {}, {k: _each(v) for k, v in outputs.items()}, {k: _each(v) for k, v in sums.items()})
        listen(listener, part.chunk.run)
    return inputs, values
