"""SNIP: how strongly the loss answers to a structure, at initialisation or later."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sosp.scoring.derivatives import compute_weight_terms, gradient
from sosp.scoring.passes import Options, Problem, Terms


def snip(problem: Problem, options: Options) -> Terms:
    """``|c_s| / sum_s' |c_s'|``, ``c_s = sum_{w in s} w dL/dw``: the gradient of a gate on the weights of a structure.

    Lee et al., SNIP: Single-shot Network Pruning based on Connection Sensitivity, ICLR 2019
    (github.com/namhoonlee/snip-public), for single weights; van Amersfoort et al., Single Shot Structured Pruning
    Before Training, 2020 (arXiv 2007.00389), for channels. Meant for networks as they are initialised; their variant
    that counts the cost of a channel is ``select(..., scale="macs")``. SNIP takes the gradient of one minibatch, here
    it is the mean over all examples. As everywhere the network is in eval mode: an untrained batch norm is near the
    identity.
    """
    structures = problem.structures
    if structures.kind == "weights":
        terms = compute_weight_terms(problem, second_order=False)
    else:
        terms = gradient(replace(problem, structures=replace(structures, gate="weights")))
    return replace(terms, first=_normalised(terms.first))


def _normalised(first: Tensor) -> Tensor:
    total = first.abs().sum()
    return first / total if bool(total > 0) else first
