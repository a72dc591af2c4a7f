"""FPGM: how far a filter is from the other filters of its layer."""

from __future__ import annotations

import torch
from torch import Tensor

from sosp.scoring.criteria.filters import flatten_filters, sum_channels
from sosp.scoring.passes import Options, Problem


def fpgm(problem: Problem, options: Options) -> Tensor:
    """``sum_{s' in the layer of s} |w_s - w_s'|_2``: the filters nearest to the geometric median go first.

    He et al., Filter Pruning via Geometric Median for Deep Convolutional Neural Networks Acceleration, CVPR 2019
    (github.com/he-y/filter-pruning-geometric-median), without the mixed-in norm criterion. Biases are not counted.
    Distances of different layers do not compare: layers are ranked one by one.
    """
    structures = problem.structures
    return sum_channels(
        structures, [_distances(flatten_filters(problem.model, layer.name)) for layer in structures.layers]
    )


def _distances(W: Tensor) -> Tensor:
    """(C,) from (C, d). By differences: the shortcut over inner products loses half the digits where filters agree."""
    return torch.cdist(W, W, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
