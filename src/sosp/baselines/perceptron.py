"""Small networks of fully connected layers, drawn from a generator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def build_perceptron(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Linear layers with ReLUs between them; the numbers are spread as torch spreads them."""
    layers = [_linear(a, b, generator) for a, b in pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


@torch.no_grad()
def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)  # torch's own would draw from everybody's numbers
    bound = inputs**-0.5
    for p in layer.parameters():
        p.uniform_(-bound, bound, generator=generator)
    return layer
