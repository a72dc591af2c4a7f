"""The norm of a filter's weights: what a filter weighs, whatever it does."""

from __future__ import annotations

from torch import Tensor

from sosp.scoring.criteria.filters import flatten_filters, sum_channels
from sosp.scoring.passes import Options, Problem, convert_to_double


def l1(problem: Problem, options: Options) -> Tensor:
    """``|w_s|_1``, the sum of the absolute weights of a filter (Li et al. 2017); ``|w|`` of a single weight (Han 2015).

    Biases are not counted. A structure of several channels has the sum of their norms.
    """
    return _norms(problem, 1.0)


def l2(problem: Problem, options: Options) -> Tensor:
    """``|w_s|_2``, the Euclidean norm of a filter, otherwise as ``magnitude-l1``."""
    return _norms(problem, 2.0)


def _norms(problem: Problem, p: float) -> Tensor:
    model, structures = problem.model, problem.structures
    if structures.kind == "weights":
        weights = [model.get_parameter(layer.name).detach() for layer in structures.layers]
        return sum_channels(structures, [convert_to_double(w).abs().flatten() for w in weights])
    return sum_channels(structures, [flatten_filters(model, layer.name).norm(p, dim=1) for layer in structures.layers])
