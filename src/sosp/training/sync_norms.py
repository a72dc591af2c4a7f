"""Compute batch norms over the batch of all ranks, as a single process would, in any module that calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sosp.core import distributed
from sosp.errors import TrainingError
from sosp.training.speed import upcast_half

SINGLE_VALUE = (
    "a batch norm sees one value per channel; choose a batch size that does not leave a single example "
    "for the last batch."
)


class RankSum(torch.autograd.Function):
    """The sum over all ranks, with gradients: the loss of each rank depends on the values of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


class SyncNormMode(TorchFunctionMode):
    """A mode that replaces ``F.batch_norm`` in train mode, which would normalise the rows of each rank separately."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def sync_batch_norms(split: bool) -> AbstractContextManager[Any]:
    """Compute batch norms over all ranks, if there are several and the batch is ``split`` among them."""
    return SyncNormMode() if split and distributed.count_ranks() > 1 else nullcontext()


@contextmanager
def explain_small_batch() -> Iterator[None]:
    """Turn the error of a batch norm that cannot compute a variance into a TrainingError with advice."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise TrainingError(SINGLE_VALUE) from error
        raise


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``F.batch_norm`` over the rows of all ranks."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    axes, shape = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
    full = upcast_half(x)
    count = RankSum.apply(full.new_tensor(x.numel() / max(x.shape[1], 1)))
    if count <= 1:
        raise TrainingError(SINGLE_VALUE)
    mean = RankSum.apply(full.sum(axes)) / count
    centred = full - mean.view(shape)
    variance = RankSum.apply(centred.square().sum(axes)) / count
    _update_running(running_mean, mean, momentum)
    _update_running(running_var, variance * count / (count - 1), momentum)
    y = centred * torch.rsqrt(variance + eps).view(shape)
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


@torch.no_grad()
def _update_running(running: Tensor | None, found: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(found.to(running.dtype), momentum)
