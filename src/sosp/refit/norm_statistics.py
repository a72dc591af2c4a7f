"""Re-estimate batch-norm statistics, without changing any weight: the simplest alternative to a repair."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from sosp.refit.inputs import InputPart

INPUTS = 100  # are enough for means and variances over positions


def reestimate_norms(model: nn.Module, names: Collection[str], parts: Sequence[InputPart]) -> bool:
    """Average the statistics of some batches in the batch norms of these names; return whether there are any."""
    modules = dict(model.named_modules())
    norms: list[Any] = [modules[n] for n in names if isinstance(modules[n], nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    batches = _take_batches(parts)
    if not norms or not batches:
        return False
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum, norm.training = None, True  # no momentum: all batches count the same
            norm.num_batches_tracked = norm.running_mean.new_zeros((), dtype=before[0][1].dtype)
        for part in batches:
            part.chunk.run(model)
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.training, norm.num_batches_tracked = momentum, False, count
    return True


def _take_batches(parts: Sequence[InputPart]) -> list[InputPart]:
    """Of the parts to fit to. One input may be one position, which has no variance."""
    found: list[InputPart] = []
    for part in parts:
        if not part.held and part.chunk.size > 1 and sum(p.chunk.size for p in found) < INPUTS:
            found.append(part)
    return found
