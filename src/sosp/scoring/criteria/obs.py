"""SOSP-I's pairs in the sense of Optimal Brain Surgeon: what a removal costs once all that stays has made up for it."""

from __future__ import annotations

import torch
from torch import Tensor

from sosp.scoring.gauss_newton import gauss_newton
from sosp.scoring.passes import Options, Problem, Values

DAMPING = 0.1  # of the mean of the diagonal: gates that stay may not move far
BLOCK = 64  # removals after which the inverse is brought up to date, all at once


def sosp_obs(problem: Problem, options: Options) -> Values:
    """``1/2 g_s^2 / [Q_KK^-1]_ss``, one structure after the other: the loss once the other gates are at their best.

    K are the structures still there and g their gates, which have moved to make up for those that are gone; Q are the
    pairs and DAMPING of the mean of their diagonal, a price for moving. The value of a structure is the loss when it
    goes, with all that went before it and that price. Of the loss only the curvature is used: labels do not matter.
    """
    found = gauss_newton(problem, classes=options.classes, generator=options.generator)
    assert found.pairs is not None
    order, costs = eliminate_structures(found.pairs, DAMPING)
    values = torch.empty_like(costs)
    values[order] = costs.cumsum(0)
    return Values(values, found.examples)


def eliminate_structures(Q: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """(S,) the structures in the order in which they go, and what each one then costs."""
    S = len(Q)
    H = Q.double()
    H = H + damping * H.diagonal().mean().clamp_min(1e-300) * torch.eye(S, dtype=H.dtype, device=H.device)
    P = torch.cholesky_inverse(torch.linalg.cholesky(H))
    gates = torch.ones_like(P[0])
    gone = torch.zeros_like(gates, dtype=torch.bool)
    order: list[Tensor] = []
    costs: list[Tensor] = []
    for k in range(0, S, BLOCK):
        P, gates = _block(P, gates, gone, min(BLOCK, S - k), order, costs)
    return torch.cat(order), torch.cat(costs)


def _block(
    P: Tensor, gates: Tensor, gone: Tensor, count: int, order: list[Tensor], costs: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The next structures: rows of the inverse are brought up to date as they are needed, all of it at the end.

    Structures are tensors of one number: a GPU is not waited for.
    """
    U = P.new_zeros(count, len(P))
    diagonal = P.diagonal().clone()
    for k in range(count):
        cost = (gates.square() / diagonal).masked_fill(gone, torch.inf)
        s = cost.argmin(0, keepdim=True)
        row = P.index_select(0, s)[0] - U[:k].index_select(1, s)[:, 0] @ U[:k]
        pivot = row.index_select(0, s)
        gates = gates - gates.index_select(0, s) / pivot * row
        U[k] = row / pivot.sqrt()
        diagonal = diagonal - U[k].square()
        gone.index_fill_(0, s, True)
        order.append(s)
        costs.append(cost.index_select(0, s) / 2)
    return P - U.T @ U, gates
