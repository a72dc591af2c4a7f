"""Give repaired filters the length they had: the network computes the same, and learns at the rate it is used to.

In training a batch norm takes the length of a filter out again, and the longer the filter, the less a step of gradient
descent turns it. Least squares makes filters up to twice as long, which is a rate up to four times smaller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sosp.refit.comparison_points import ChannelTracker, TrackedChannels
from sosp.refit.layer_matrix import find_bias, get_matrix, set_matrix


@torch.no_grad()
def restore_filter_lengths(small: nn.Module, repaired: nn.Module, tracker: ChannelTracker, layers: list[str]) -> None:
    """The filters of some layers of ``repaired`` become as long as in ``small``, where batch norms make up for it."""
    for name in layers:
        tracked = tracker.bases[name].tracked
        norm: Any = repaired.get_submodule(tracked.norm) if tracked.norm else None
        layer = repaired.get_submodule(name)
        fits = isinstance(norm, nn.modules.batchnorm._NormBase) and norm.weight is not None
        if fits and tracker.is_read_once(name) and not _has_repeated_channels(layer):
            _scale_filters(layer, norm, tracked, _compute_lengths(small.get_submodule(name)) / _compute_lengths(layer))


def _has_repeated_channels(layer: nn.Module) -> bool:
    """One of its channels stands in several places of what it gives."""
    scatter: Any = layer._modules.get("scatter")
    return scatter is not None and len(scatter.source.unique()) < len(scatter.source)


def _compute_lengths(layer: Any) -> Tensor:
    """(C,) of the filters."""
    return get_matrix(layer).flatten(0, 1).double().norm(dim=1)


def _scale_filters(layer: Any, norm: Any, tracked: TrackedChannels, by: Tensor) -> None:
    """Filters times positive numbers, (C,); the norm computes what it did. Numbers that are none mean nothing."""
    assert tracked.norm_channels is not None
    good = (by > 0) & by.isfinite() & (tracked.norm_channels >= 0)
    by, channels = torch.where(good, by, 1), tracked.norm_channels[good]
    old = get_matrix(layer)
    set_matrix(layer, (by.reshape(*old.shape[:2], 1) * old).to(old.dtype))
    if (bias := find_bias(layer)) is not None:
        bias.mul_(by)
    by, variance = by[good], norm.running_var[channels].double()
    norm.running_mean[channels] *= by.to(norm.running_mean.dtype)
    norm.running_var[channels] = (by**2 * variance).to(norm.running_var.dtype)
    factor = ((by**2 * variance + norm.eps) / (variance + norm.eps)).sqrt() / by
    norm.weight[channels] *= factor.to(norm.weight.dtype)
