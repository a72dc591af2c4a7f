"""Batch norm statistics anew, from data alone: what pruning shifts, without training anything."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sosp.batches import call
from sosp.errors import DataError
from sosp.preserve import same_random_numbers
from sosp.training import ranks
from sosp.training.evaluation import home, moved
from sosp.training.norms import OverAllRanks

Norm = nn.modules.batchnorm._BatchNorm


def recalibrate(
    model: nn.Module, data: Any, *, examples: int | None = 2000, batch: int = 125, seed: int = 0
) -> nn.Module:
    """A copy of ``model`` whose batch norms know the mean and variance of its activations on ``data``.

    ``data``: a source of ``sosp.data``, of which ``examples`` are drawn, or (inputs, labels) batches; labels are not
    used. The statistics are averages over batches of their means and unbiased variances, weighted by their sizes. All
    else runs in eval mode.
    """
    small = copy.deepcopy(model)
    norms = [m for m in small.modules() if isinstance(m, Norm) and m.running_mean is not None]
    if not norms:
        return small
    modes = {m: m.training for m in small.modules()}
    factors = {m: m.momentum for m in norms}
    seen = 0
    with torch.no_grad(), same_random_numbers(), _together():
        small.eval()
        for x, y in _batches(data, examples, batch, seed):
            rows = _rows(len(y))
            seen += rows
            for m in norms:
                m.training, m.momentum = True, rows / seen
            call(small, moved(x, home(small)))
    if not seen:
        raise DataError("there is nothing to take statistics from: the data is empty.")
    for m in norms:
        m.momentum = factors[m]
    for module, mode in modes.items():
        module.training = mode
    return small


@contextmanager
def _together() -> Iterator[None]:
    if ranks.ranks() == 1:
        yield
        return
    with OverAllRanks():
        yield


def _rows(mine: int) -> int:
    total = torch.tensor(float(mine))
    if ranks.ranks() > 1:
        total = total.to("cuda") if torch.cuda.is_available() else total
        ranks.sum_(total)
    return int(total)


def _batches(data: Any, examples: int | None, batch: int, seed: int) -> Iterator[Any]:
    if not hasattr(data, "ordered"):
        yield from data
        return
    count = len(data) if examples is None else min(examples, len(data))
    # Not augmented, and every batch of one size where that is possible: small ones have noisy variances.
    yield from data.subset(count, seed).ordered(batch=min(batch, count), rank=ranks.rank(), ranks=ranks.ranks())
