"""EigenDamage (Wang et al. 2019): what rows and columns of a weight cost in its Kronecker-factored eigenbasis.

With ``A = U_A S_A U_A^T`` over input channels and ``G = U_G S_G U_G^T``, ``W' = U_G^T W U_A`` (each tap of a kernel by
itself) has a Fisher that is diagonal as far as ``A (x) G`` goes: removing entry ij costs ``1/2 S_G[i] W'_ij^2 S_A[j]``,
and a row or a column the sum of its entries, as in github.com/alecwangcq/EigenDamage-Pytorch (kfac_eigen_pruner.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from sosp.errors import ArgumentError
from sosp.scoring.kronecker_factors import KroneckerFactors
from sosp.scoring.passes import convert_to_double


@dataclass(frozen=True, eq=False)
class RemovedDirections:
    """What a layer loses: directions of its input and of its output, numbered by their eigenvalues, least first."""

    columns: Tensor
    rows: Tensor


@dataclass(frozen=True, eq=False)
class RotatedLayer:
    """A layer in its eigenbasis: ``W = out W' into^T``."""

    into: Tensor  # (c_in, c_in) U_A, a direction per column
    core: Tensor  # (c_out, c_in, taps...) W'
    out: Tensor  # (c_out, c_out) U_G
    columns: Tensor  # (c_in,)  what removing a direction of the input costs
    rows: Tensor  # (c_out,) the same of the output

    @property
    def size(self) -> int:
        """Its numbers."""
        return self.into.numel() + self.core.numel() + self.out.numel()

    def without(self, gone: RemovedDirections) -> RotatedLayer:
        """The directions that are left."""
        columns, rows = _others(self.columns, gone.columns), _others(self.rows, gone.rows)
        core = self.core[rows][:, columns]
        return RotatedLayer(self.into[:, columns], core, self.out[:, rows], self.columns[columns], self.rows[rows])

    def weight(self) -> Tensor:
        """(c_out, c_in, taps...) back in the layer's own coordinates."""
        return torch.einsum("or,rc...,ic->oi...", self.out, self.core, self.into)


def rotate_weight(weight: Tensor, factor: KroneckerFactors) -> RotatedLayer:
    """A weight (c_out, c_in, taps...) in the eigenbasis of its factors, in double precision."""
    S_A, U_A = torch.linalg.eigh(factor.A)
    S_G, U_G = torch.linalg.eigh(factor.G)
    core = torch.einsum("or,oi...,ic->rc...", U_G, convert_to_double(weight.detach()), U_A)
    # Both are sums of squares: below zero is rounding.
    costs = 0.5 * S_G.clamp_min(0)[:, None] * core.square().reshape(*core.shape[:2], -1).sum(2) * S_A.clamp_min(0)
    return RotatedLayer(U_A, core, U_G, columns=costs.sum(0), rows=costs.sum(1))


def choose_directions(rotated: Mapping[str, RotatedLayer], ratio: float, cap: float) -> dict[str, RemovedDirections]:
    """The directions that cost least, over all layers: a share of all, but of no side of a layer more than its cap."""
    sides = [x.cpu() for part in rotated.values() for x in (part.columns, part.rows)]
    total = sum(map(len, sides))
    room = [min(len(x) - 1, floor(cap * len(x) + 1e-9)) for x in sides]
    wanted = round(ratio * total)
    if wanted > sum(room):
        raise ArgumentError(
            f"ratio={ratio} asks for {wanted} of {total} directions, but only {sum(room)} can be removed: cap={cap}, "
            "and every side of a layer keeps at least one."
        )
    cheapest = [x.argsort(stable=True)[:n] for x, n in zip(sides, room, strict=True)]
    order = torch.cat([x[i] for x, i in zip(sides, cheapest, strict=True)]).argsort(stable=True)
    gone = torch.zeros(len(order), dtype=torch.bool)
    gone[order[:wanted]] = True
    lost = iter([i[g].sort().values for i, g in zip(cheapest, gone.split(room), strict=True)])
    return {name: RemovedDirections(next(lost), next(lost)) for name in rotated}


def _others(of: Tensor, gone: Tensor) -> Tensor:
    """Which are not gone."""
    return torch.ones(len(of), dtype=torch.bool, device=of.device).index_fill_(0, gone.to(of.device), False)
