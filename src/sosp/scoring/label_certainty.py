"""How many examples decide a score: a network that knows its training labels by heart is certain of nearly all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sosp.core import distributed
from sosp.core.batches import Chunk, ExampleRange
from sosp.core.outputs import are_numbers, find_class_axis, find_logits
from sosp.errors import OutputError
from sosp.scoring.jets import get_primal

FEW, SHARE = 30, 0.25  # with fewer effective examples, and a smaller share, scores depend on which were drawn


class FewEffectiveExamplesWarning(UserWarning):
    """Few examples decide the scores, because the network is certain of all others."""


def measure_uncertainty(f: Tensor, weight: Tensor, loss: str) -> Tensor:
    """(N,) ``r = sum_c p_c (1 - p_c)`` of logits f, (N, positions, D): the mean over positions by ``weight``.

    The curvature of the loss in the outputs has the size of r. For a softmax, ``r = 1 - sum_c p_c^2``.
    """
    f = f.to(torch.promote_types(f.dtype, torch.float32))
    p = f.sigmoid() if loss == "bce" else f.softmax(-1)
    return ((p * (1 - p)).sum(-1) * weight).sum(1)


def count_effective(r: Tensor) -> float:
    """Return the effective number of examples, ``(sum r)^2 / sum r^2``."""
    r = r.double()
    return float(r.sum().square() / r.square().sum().clamp_min(1e-300))


class LabelCertainty:
    """The uncertainty r of every example that was scored with its label, collected as the losses are computed."""

    def __init__(self, loss: str) -> None:
        self.loss = loss
        self.found: dict[tuple[ExampleRange, ...], list[float]] = {}

    def record(self, outputs: Any, chunk: Chunk) -> None:
        """Keep the uncertainties of these examples; a pass may see the same ones again, or each of them twice."""
        key = tuple(dict.fromkeys(chunk.origin))
        try:
            f = get_primal(find_logits(outputs)).detach()
        except OutputError:
            return
        if key in self.found or are_numbers(self.loss, f):
            return
        f = f.movedim(find_class_axis(f), -1).reshape(f.shape[0], -1, f.shape[find_class_axis(f)])
        r = measure_uncertainty(f, f.new_ones(f.shape[:2]) / f.shape[1], self.loss)
        self.found[key] = r[: sum(count for _, _, count in key)].tolist()

    def explain_noise(self, device: torch.device, own: bool) -> str | None:
        """Return a sentence if few examples decide the scores; ``own``: the method takes targets="own"."""
        r = torch.tensor([x for values in self.found.values() for x in values], device=device)
        sums = torch.stack([r.sum(), r.square().sum(), r.new_tensor(len(r))])
        distributed.sum_tensors(sums)
        total, squares, count = sums.tolist()
        effective = total**2 / max(squares, 1e-30)
        if count < FEW or effective >= min(FEW, SHARE * count):
            return None
        remedy = "the network's own outputs (targets='own')" if own else "more examples"
        return (
            f"{max(1, round(effective))} of {count:,.0f} examples decide these scores: the network is certain of the "
            f"others. Score on {remedy}, or on examples that it was not trained on."
        )
