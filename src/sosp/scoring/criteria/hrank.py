"""HRank: the mean rank of a channel's feature maps."""

from __future__ import annotations

import torch
from torch import Tensor

from sosp.scoring.criteria.filters import average_channels
from sosp.scoring.example_gradients import feature_means
from sosp.scoring.passes import Options, Problem, Values


def hrank(problem: Problem, options: Options) -> Values:
    """``1/N sum_n rank(relu(o_ns))``, o the feature map behind the layer's own norm; layers are ranked one by one.

    Lin et al., HRank: Filter Pruning using High-Rank Feature Map, CVPR 2020 (github.com/lmbxmu/HRank). The authors'
    code takes the rank at the ReLU behind conv and norm, and in the last layer of a residual block behind the add; here
    every filter is judged by its own map, and the ReLU is taken whatever activation follows. A neuron's map is 1 x 1:
    its rank is 1 where it is positive, so its score is the share of examples on which it is active. The same goes for
    maps with one axis; maps with three are laid out as (first, others). A structure of several channels has their mean.
    """
    count, means = feature_means(problem, _ranks)
    return Values(average_channels(problem.structures, means), count)


def _ranks(maps: Tensor) -> Tensor:
    """(C,) the ranks of (n, C, ...), summed over n."""
    n, C, *sides = maps.shape
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32)).clamp_min(0)
    matrices = maps.reshape(n, C, sides[0] if sides else 1, -1)
    if 1 in matrices.shape[2:]:  # a row or a column: no decomposition needed
        return matrices.flatten(2).any(2).sum(0)
    return torch.linalg.matrix_rank(matrices).sum(0)
