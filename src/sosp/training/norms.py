"""Batch norms over the batch of all ranks together, whatever module calls them: what a single process would see."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.overrides import TorchFunctionMode

from sosp.errors import TrainingError


class OverAllRanks(TorchFunctionMode):
    """Takes the place of ``F.batch_norm`` in train mode; torch's own would normalise each rank's rows by themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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
    """As ``F.batch_norm``; a rank may have no rows at all."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    axes, shape = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    count = all_reduce(wide.new_tensor(x.numel() / max(x.shape[1], 1)))
    if count <= 1:
        raise TrainingError("a batch norm sees one number per channel in the whole batch; use a larger batch.")
    mean = all_reduce(wide.sum(axes)) / count
    centred = wide - mean.view(shape)
    variance = all_reduce(centred.square().sum(axes)) / count
    _remember(running_mean, mean, momentum)
    _remember(running_var, variance * count / (count - 1), momentum)
    y = centred * torch.rsqrt(variance + eps).view(shape)
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


@torch.no_grad()
def _remember(running: Tensor | None, found: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(found.to(running.dtype), momentum)
