"""Write a change of a layer's outputs into its weights and its norm; the norm's statistics become those it will see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sosp.refit.comparison_points import compute_norm_scale
from sosp.refit.equations import RefitTask
from sosp.refit.layer_matrix import count_groups, find_bias, get_matrix, set_matrix
from sosp.refit.least_squares import LayerFit, compute_outputs


def has_bias_or_norm(model: nn.Module, task: RefitTask) -> bool:
    """Something behind the layer's weights can take up a constant."""
    return bool(task.here.tracked.norm) or find_bias(model.get_submodule(task.layer)) is not None


@torch.no_grad()
def write_fit(model: nn.Module, task: RefitTask, fit: LayerFit, X: Tensor) -> None:
    """Change the layer; ``X``, (G, R, K), are inputs of it."""
    layer: Any = model.get_submodule(task.layer)
    tracked, live = task.here.tracked, task.live
    factor = torch.where(live, tracked.factor, 1)
    delta = torch.where(live, 1 / factor, 0).reshape(count_groups(layer), -1, 1) * fit.delta
    set_matrix(layer, get_matrix(layer) + delta)
    bias = find_bias(layer)
    if not tracked.norm:
        if bias is not None:
            bias += torch.where(live, fit.shift / factor, 0)
        return
    assert tracked.norm_channels is not None
    norm: Any = model.get_submodule(tracked.norm)
    scale = compute_norm_scale(norm)
    assert scale is not None
    channels = tracked.norm_channels[live]
    outputs = compute_outputs(X, get_matrix(layer).mT)[:, live].double()
    outputs = outputs if bias is None else outputs + bias[live]
    later = (factor / scale[tracked.norm_channels.clamp_min(0)])[live]  # what comes behind the norm
    _renormalise(norm, channels, fit.shift[live] / later, outputs)


def _renormalise(norm: Any, channels: Tensor, shift: Tensor, outputs: Tensor) -> None:
    """Statistics of the (R, c) outputs for the norm, and a scale and shift such that it computes what it did."""
    scale = compute_norm_scale(norm)
    assert scale is not None
    scale = scale[channels].double()
    if norm.bias is None:
        norm.running_mean[channels] -= (shift / scale).to(norm.running_mean.dtype)
        return
    looks = isinstance(norm, nn.modules.batchnorm._NormBase)
    if not looks:  # at a batch, ever
        norm.bias[channels] += shift.to(norm.bias.dtype)
        return
    mean, variance = outputs.mean(0), outputs.var(0, correction=0)
    changed = {
        "bias": norm.bias[channels] + shift + scale * (mean - norm.running_mean[channels]),
        "weight": scale * (variance + norm.eps).sqrt(),
        "running_mean": mean,
        "running_var": variance,
    }
    for key, values in changed.items():
        getattr(norm, key)[channels] = values.to(norm.bias.dtype)
