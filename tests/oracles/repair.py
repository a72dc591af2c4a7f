"""What a repair should find, slow and obvious: least squares by hand, Optimal Brain Surgeon by trying everything."""

import torch
from torch import Tensor


def ridge(X: Tensor, y: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Weights (K, C) and shift (C,): least squares on standardised columns, by stacking the penalty as more rows."""
    mean, spread = X.mean(0), X.std(0, correction=0)
    Z = (X - mean) / spread
    more = (len(X) * strength) ** 0.5 * torch.eye(X.shape[1], dtype=X.dtype)
    rows = torch.cat([Z, more])
    goals = torch.cat([y - y.mean(0), torch.zeros(X.shape[1], y.shape[1], dtype=y.dtype)])
    weights = torch.linalg.lstsq(rows, goals).solution / spread[:, None]
    return weights, y.mean(0) - mean @ weights


def least_loss(Q: Tensor, gone: list[int]) -> Tensor:
    """``min 1/2 d^T Q d`` over gates of which those that are gone have moved by -1 and the others are free."""
    left = [s for s in range(len(Q)) if s not in gone]
    d = torch.zeros(len(Q), dtype=Q.dtype)
    d[gone] = -1
    if left:
        d[left] = -torch.linalg.solve(Q[left][:, left], Q[left][:, gone] @ d[gone])
    return d @ Q @ d / 2


def surgeon(Q: Tensor, damping: float) -> tuple[list[int], list[float]]:
    """One after the other, the structure whose removal leaves the least loss; and that loss each time."""
    Q = Q + damping * Q.diagonal().mean() * torch.eye(len(Q), dtype=Q.dtype)
    gone: list[int] = []
    losses: list[float] = []
    while len(gone) < len(Q):
        tried = {s: float(least_loss(Q, [*gone, s])) for s in range(len(Q)) if s not in gone}
        best = min(tried, key=lambda s: tried[s])
        gone.append(best)
        losses.append(tried[best])
    return gone, losses
