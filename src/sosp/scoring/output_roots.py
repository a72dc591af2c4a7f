"""Roots of the curvature R of a loss in one tensor of outputs: cotangents v with ``sum_v v v^T = R``, all or a few.

``R = B B^T`` for a known B per position. All columns of B are exact. k cotangents per example are cheaper: each adds up
every k-th column under a random sign, in the order of their size. The signs make it unbiased. That the largest columns
are kept apart makes it more accurate than k independent draws, and exact where k is the number of columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEADING = 4  # times k columns are kept apart by size; the order of the small ones does not matter

Back = Callable[[Tensor], Tensor]  # (N, positions, D) in the order of the outputs
Draw = Callable[[int, torch.Generator], Iterator[Tensor]]


@dataclass(frozen=True)
class OutputRoot:
    """``R = B B^T`` of N examples with several positions each."""

    apply: Callable[[Tensor], Tensor]  # s (N, positions, D) -> B s, like the outputs
    size: Tensor  # (N, positions, D) which columns of B matter most
    columns: Callable[[], Iterator[Tensor]]  # all of them, or as many of another root
    draw: Draw  # k gradients of the loss with targets drawn from the outputs themselves, divided by sqrt(k)

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.size[0].numel()

    def sample(self, k: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Yield k cotangents whose outer products sum to R on average."""
        size = self.size.flatten(1)
        n, D = size.shape
        generator = generator or torch.Generator(size.device).manual_seed(0)
        coins = torch.randint(0, 2, (n, D), generator=generator, device=generator.device, dtype=torch.int8)
        signs = coins.to(size.device) * 2 - 1
        turn = (torch.arange(D, device=size.device, dtype=torch.int32) % k).repeat(n, 1)
        largest = size.topk(min(D, LEADING * k), 1).indices
        turn.scatter_(1, largest, turn[:, : largest.shape[1]].clone())
        for i in range(k):
            yield self.apply((signs * (turn == i)).view(self.size.shape).to(size.dtype))


def root_of_numbers(f: Tensor, weight: Tensor, back: Back, scale: Tensor | None = None) -> OutputRoot:
    """``R = diag(weight scale)``: the squared error of numbers f, (N, positions, D)."""
    root = (weight.unsqueeze(-1) * (1.0 if scale is None else scale)).sqrt().expand(f.shape)

    def draw(k: int, generator: torch.Generator) -> Iterator[Tensor]:
        for _ in range(k):
            coins = torch.randint(0, 2, f.shape, generator=generator, device=generator.device)
            yield back((coins.to(f) * 2 - 1) * root / math.sqrt(k))

    return _diagonal_root(root, back, draw)


def root_of_sigmoid(p: Tensor, weight: Tensor, back: Back) -> OutputRoot:
    """``R = weight diag(p (1 - p)) / D``: the mean binary cross-entropy of ``p = sigmoid(f)``."""
    share = (weight.unsqueeze(-1) / p.shape[-1]).sqrt()

    def draw(k: int, generator: torch.Generator) -> Iterator[Tensor]:
        for _ in range(k):
            yield back((p - torch.bernoulli(p.to(generator.device), generator=generator).to(p)) * share / math.sqrt(k))

    return _diagonal_root((p * (1 - p)).sqrt() * share, back, draw)


def _diagonal_root(root: Tensor, back: Back, draw: Draw) -> OutputRoot:
    return OutputRoot(lambda s: back(root * s), root, lambda: (back(root * s) for s in _list_units(root)), draw)


def root_of_softmax(p: Tensor, weight: Tensor, back: Back) -> OutputRoot:
    """``R = weight (diag p - p p^T) = A A^T`` with ``A = diag(sqrt p) - p sqrt(p)^T``: the cross-entropy.

    ``A sqrt(p) = 0``: the reflection that turns sqrt(p) into the last axis empties the last column, which saves one of
    D backward passes. The others are ``sqrt(p_j) ((e_j - p) - c (e_D - p))``, ``c = sqrt(p_D) / (1 + sqrt(p_D))``.
    """
    root, share = p.sqrt(), weight.sqrt().unsqueeze(-1)
    c = root[..., -1:] / (1 + root[..., -1:])

    def apply(s: Tensor) -> Tensor:
        a = root * s * share
        return back(a - p * a.sum(-1, keepdim=True))

    def columns() -> Iterator[Tensor]:
        for unit in _list_units(p[..., :-1]):
            a = root[..., :-1] * unit * share
            total = a.sum(-1, keepdim=True)
            v = (c - 1) * p * total
            v[..., :-1] += a
            v[..., -1:] -= c * total
            yield back(v)

    def draw(k: int, generator: torch.Generator) -> Iterator[Tensor]:
        drawn = torch.multinomial(p.flatten(0, 1).to(generator.device), k, replacement=True, generator=generator)
        for label in drawn.to(p.device).T:
            yield back((p - F.one_hot(label.view(p.shape[:2]), p.shape[-1]).to(p)) * share / math.sqrt(k))

    return OutputRoot(apply, p * weight.unsqueeze(-1), columns, draw)


def _list_units(like: Tensor) -> Iterator[Tensor]:
    """Yield the unit vectors of every position, the same for all examples."""
    for position in range(like.shape[1]):
        for j in range(like.shape[2]):
            unit = like.new_zeros(like.shape[1:])
            unit[position, j] = 1
            yield unit
