"""Collaborative channel pruning: the pairs of channels within a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from sosp.graph.records import Structures
from sosp.scoring.example_gradients import gradient_products
from sosp.scoring.gauss_newton import gauss_newton
from sosp.scoring.passes import Options, Problem, Terms


def ccp(problem: Problem, options: Options) -> Terms:
    """``u_s = theta_s . g`` and ``S_ss' = theta_s . H theta_s'`` for s, s' of one layer.

    Peng et al., Collaborative Channel Pruning for Deep Networks, ICML 2019. Removing x (0 or 1 each) changes the loss
    by ``-u . x + 1/2 x . S x``; with scope="layer" ``select`` minimises that in every layer under its number of
    channels (objective "signed"): x is relaxed to 0 <= x <= 1, the convex programme solved, and the largest x go.

    H drops the second derivatives of the outputs *behind* the softmax: with ``l = -log p``,
    ``H = 1/N sum_n g_n g_n^T``, g_n the gradient of example n. A loss of one's own is taken for such a ``-log p``. For
    the squared loss it is Gauss-Newton, as in SOSP-I. The paper's auxiliary classifier is no part of this.
    """
    members = layer_members(problem.structures)
    if problem.loss == "mse":
        terms = gauss_newton(problem)
        assert terms.pairs is not None
        count, first, blocks = terms.examples, terms.first, [terms.pairs[m][:, m] for m in members]
    else:
        count, first, blocks = gradient_products(problem, members)
    pairs = first.new_zeros(len(first), len(first))
    for m, block in zip(members, blocks, strict=True):
        pairs[m[:, None], m] = block.to(pairs)
    return Terms(count, first, pairs.sum(1), pairs)


def layer_members(structures: Structures) -> list[Tensor]:
    """The structures of every layer that has some, by number."""
    owner = structures.owner()
    return [m for i in range(len(structures.layers)) if len(m := torch.nonzero(owner == i).flatten())]
