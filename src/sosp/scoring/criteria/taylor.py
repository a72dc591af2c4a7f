"""First-order Taylor expansion, squared: of a filter's weights, or of its batch norm."""

from __future__ import annotations

from dataclasses import replace

from sosp.scoring.example_gradients import minibatch_gradients
from sosp.scoring.passes import Options, Problem, Values

MINIBATCH = 64  # examples: the default of the authors' code


def taylor(problem: Problem, options: Options) -> Values:
    """``1/B sum_b (sum_{w in s} w dL_b/dw)^2``: the weights of a filter, its bias among them, as one group.

    Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019 (github.com/NVlabs/Taylor_pruning).
    L_b is the mean loss of minibatch b: the gradient is averaged within a minibatch, then squared, then the squares
    are averaged over minibatches, as the authors' code does. Here a minibatch is 64 examples in the order of the data,
    however the loader cuts it; the last one counts by its size. For weights their code squares first and sums over
    the filter then; the sum before the square is the filter as a group, which is what removing it does.
    """
    return _squares(problem, "weights")


def taylor_bn(problem: Problem, options: Options) -> Values:
    """``1/B sum_b (gamma dL_b/dgamma + beta dL_b/dbeta)^2``: the gate behind the batch norm, the paper's best variant.

    Otherwise as ``taylor``. The sum is the gradient of a gate that scales what leaves the norm.
    """
    return _squares(problem, "features")


def _squares(problem: Problem, gate: str) -> Values:
    structures = replace(problem.structures, gate=gate)
    sums, sizes = minibatch_gradients(replace(problem, structures=structures), MINIBATCH)
    # sum_b n_b (G_b / n_b)^2 / N
    return Values((sums.square() / sizes.clamp_min(1)[:, None]).sum(0) / sizes.sum(), int(sizes.sum()))
