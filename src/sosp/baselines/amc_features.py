"""What an agent sees of a layer before it decides: 11 numbers between 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sosp.baselines.amc_budget import AmcBudget
from sosp.core.batches import call_model
from sosp.core.borrowed_model import borrow_model

STATE_SIZE = 11


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """``(t, n, c, h, w, stride, k, MACs, reduced, rest, last action)`` of He et al. 2018, Eq. 1.

    The first eight are those of the layers, each scaled to 0..1 over all of them; ``reduced`` and ``rest`` are the MACs
    saved (as their code counts: by the layers before, the others at their fewest) and those of the layers behind, as
    shares of all.
    """

    fixed: Tensor  # (L, 8)
    rest: Tensor  # (L,)

    def state(self, t: int, reduced: float, action: float) -> Tensor:
        return torch.cat([self.fixed[t], torch.tensor([reduced, float(self.rest[t]), action])])


def extract_features(model: nn.Module, example: Any, budget: AmcBudget) -> LayerFeatures:
    """Of the layers that have structures, in order."""
    layers = [budget.structures.layers[i] for i in budget.layers]
    sizes = _input_sizes(model, example, [layer.name for layer in layers])
    work = torch.tensor([layer.macs * layer.channels for layer in layers], dtype=torch.float64)
    rows = []
    for t, layer in enumerate(layers):
        module: Any = model.get_submodule(layer.name)
        inputs = getattr(module, "in_channels", getattr(module, "in_features", 0))
        stride = getattr(module, "stride", (0,))[0]  # a linear layer has none
        rows.append([t, layer.channels, inputs, *sizes[layer.name], stride, layer.kernel, float(work[t])])
    behind = work.flip(0).cumsum(0).flip(0) - work
    return LayerFeatures(_scaled(torch.tensor(rows, dtype=torch.float64)).float(), (behind / budget.whole).float())


def _scaled(columns: Tensor) -> Tensor:
    """Every column from 0 to 1; one that is the same everywhere is 0."""
    low, high = columns.amin(0), columns.amax(0)
    return (columns - low) / (high - low).where(high > low, torch.ones_like(high))


def _input_sizes(model: nn.Module, example: Any, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Height and width of what each layer is given; 1 where there is none."""
    found: dict[str, tuple[int, int]] = {}

    def note(name: str, x: Any) -> None:
        spatial = [*x.shape[2:], 1, 1] if hasattr(model.get_submodule(name), "kernel_size") else [1, 1]
        found[name] = (spatial[0], spatial[1])

    handles = [model.get_submodule(n).register_forward_pre_hook(lambda m, args, n=n: note(n, args[0])) for n in names]
    try:
        with borrow_model(model), torch.no_grad():
            call_model(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return found
