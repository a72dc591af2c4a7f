"""Optimal Brain Damage of whole filters (Wang et al. 2019): ``1/2 theta_s^T F theta_s``, F the Fisher.

theta_s is the filter's row of the weight and its bias, wherever the gate sits; different structures are taken to be
independent. Two approximations of F inside a structure:

``obd``: ``F = A (x) G`` from K-FAC, with all correlations within the structure: ``1/2 G_ss w_s^T A w_s`` for a filter.
This is what the SOSP paper says of C-OBD; Wang et al. call it Kron-OBD. As ``w_s^T A w_s = E_nt[z_s^2]``, the mean
square of the filter's own output, no patches and no A are needed, and any type of layer will do. Their published code
(github.com/alecwangcq/EigenDamage-Pytorch, kfac_OBD_F2.py) has ``sum_jk w_sj^2 A_jk`` there: no quadratic form.

``obd-diagonal``: F diagonal, ``1/2 sum_j w_sj^2 E_n[(dl_n/dw_sj)^2]``. This is what that code calls C-OBD
(fisher_diag_pruner.py), and so what the SOSP paper's tables quote under that name.

Gradients are of labels drawn from the network's own outputs, one per example as in that code, or ``classes=`` many.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sosp.errors import DataError, StructureError
from sosp.graph.records import Structures
from sosp.scoring.gauss_newton import has_examples_first
from sosp.scoring.kronecker_factors import (
    CurvatureMeasure,
    check_layer_types,
    extract_patches,
    flatten_positions,
    measure_curvature,
    sum_outer_products,
)
from sosp.scoring.passes import Options, Problem, Values

BLOCK = 2**24  # elements of per-example gradients and patches at once


def obd(problem: Problem, options: Options) -> Values:
    """``1/2 sum_ij G_ij E[z_i z_j]`` over the channels i, j that a structure has in a layer, summed over its layers."""
    measure = DIAGONAL_MEASURE if _has_single_channels(problem.structures) else MATRIX_MEASURE
    count, found = measure_curvature(problem, measure, generator=options.generator, labels=options.classes)
    return Values(_per_structure(problem.structures, [A * G for A, G in found.values() if A is not None]), count)


def obd_diagonal(problem: Problem, options: Options) -> Values:
    """``1/2 sum_j w_sj^2 E_n[(dl_n/dw_sj)^2]`` over the weights and the bias of a structure."""
    check_layer_types(problem, "method='obd-diagonal'", grouped=True)
    problem = _check_examples_first(problem)
    measure = CurvatureMeasure(_weight_squares, once=True)
    count, found = measure_curvature(problem, measure, generator=options.generator, labels=options.classes)
    return Values(_per_structure(problem.structures, [F for _, F in found.values()]), count)


# One number per channel where a structure has one channel in a layer, else a matrix.
DIAGONAL_MEASURE = CurvatureMeasure(
    lambda layer, x: lambda g: flatten_positions(layer, g).square().sum(0),
    lambda layer, x, z: flatten_positions(layer, z).square().sum(0),
)
MATRIX_MEASURE = CurvatureMeasure(
    lambda layer, x: lambda g: sum_outer_products(flatten_positions(layer, g)),
    lambda layer, x, z: sum_outer_products(flatten_positions(layer, z)),
)


def _has_single_channels(structures: Structures) -> bool:
    """Whether no structure has two channels in one layer."""
    return all(len(own := ids[ids >= 0]) == len(own.unique()) for ids in structures.ids)


def _per_structure(structures: Structures, curvatures: list[Tensor]) -> Tensor:
    """(S,) half the sum of a layer's curvature, (channels,) or (channels, channels), within every structure."""
    total = curvatures[0].new_zeros(len(structures))
    for ids, Q in zip(structures.ids, curvatures, strict=True):
        ids = ids.to(Q.device)
        own = Q if Q.dim() == 1 else (Q * (ids[:, None] == ids)).sum(1)
        total.index_add_(0, ids[ids >= 0], own[ids >= 0])
    return 0.5 * total


def _weight_squares(layer: Any, x: Tensor) -> Callable[[Tensor], Tensor]:
    """(channels,) ``sum_nj (w_sj dl_n/dw_sj)^2``, the gradient of each example by itself."""
    x = x.clone()
    w, b = layer.weight.flatten(1), layer.bias

    def slope(g: Tensor) -> Tensor:
        total = torch.zeros((), device=g.device)
        for seen, back in _blocks(layer, x, g):  # (n, t, groups, inputs) and (n, t, groups, channels)
            slopes = torch.einsum("ntgc,ntgk->ngck", back, seen).flatten(1, 2)
            total = total + (slopes * w).square().sum((0, 2))
            if b is not None:
                total = total + (back.sum(1).flatten(1) * b).square().sum(0)
        return total

    return slope


def _blocks(layer: Any, x: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A few examples at a time: what each group of filters sees, and the gradient of what it gives."""
    groups = getattr(layer, "groups", 1)
    back = flatten_positions(layer, g).view(len(g), -1, groups, len(layer.weight) // groups)
    each = layer.weight.numel() + back.shape[1] * layer.weight[0].numel() * groups
    few = max(1, BLOCK // each)
    for i in range(0, len(g), few):
        seen = extract_patches(layer, x[i : i + few])
        yield seen.unflatten(-1, (groups, -1)), back[i : i + few]


def _check_examples_first(problem: Problem) -> Problem:
    """The same problem, unless a layer's first dimension is not the example: gradients could not be told apart."""
    chunks = iter(problem.chunks)
    head = next(chunks, None)
    if head is None:
        raise DataError("the data is empty: it contains no examples to score with.")
    if not has_examples_first(problem, head if head.size > 2 else head.twice().twice()):
        raise StructureError(
            "method='obd-diagonal' squares the gradient of every example, and a layer of this network mixes examples "
            "with positions in its first dimension. Exclude such layers, or use method='obd'."
        )
    return dataclasses.replace(problem, chunks=itertools.chain([head], chunks))
