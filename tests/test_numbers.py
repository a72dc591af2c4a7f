"""Code that computes with the width of a layer: those channels are pinned, and the result is right."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp

WHY = "the code computes with how many there are"


class Net(nn.Module):
    """Three layers, and something computed between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.between, self.fixed = between, 8**0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.between(self, self.b(self.a(x).relu()).relu()))


def made(between: Callable[[Any, Tensor], Tensor]) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(between).eval()


X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
# What is computed -> the layers whose channels are pinned by it.
COMPUTED: dict[str, tuple[Callable[[Any, Tensor], Tensor], set[str]]] = {
    "shape": (lambda m, x: x / x.shape[1] ** 0.5, {"b"}),
    "a whole number": (lambda m, x: x * x.shape[-1], {"b"}),
    "size": (lambda m, x: x * math.sqrt(x.size(1)), {"b"}),
    "out_features": (lambda m, x: x / math.sqrt(m.b.out_features), {"b"}),
    "of another layer": (lambda m, x: x / math.sqrt(m.a.out_features), {"a"}),
    "in_features": (lambda m, x: x / m.b.in_features, {"a"}),
    "of two layers": (lambda m, x: x / (m.a.out_features + m.b.out_features), {"a", "b"}),
    "of a weight": (lambda m, x: x / m.b.weight.shape[0], {"a", "b"}),
    "of a parameter": (lambda m, x: x * m.scale / len(m.scale), {"b"}),
    "a tensor of it": (lambda m, x: x / torch.sqrt(torch.tensor(m.b.out_features)), {"b"}),
    "an argument": (lambda m, x: torch.add(x, x, alpha=1 / m.b.out_features), {"b"}),
    "in two lines": (lambda m, x: x / m.a.out_features * x.shape[1], {"a", "b"}),
}
# Sizes that are only sizes, and numbers that have nothing to do with widths.
HARMLESS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "fixed": lambda m, x: x / m.fixed,
    "view": lambda m, x: x.view(len(x), m.b.out_features),
    "zeros": lambda m, x: x + x.new_zeros(len(x), x.shape[1]),
    "full": lambda m, x: x + torch.full((len(x), x.shape[1]), 0.5),
    "layer_norm of pixels": lambda m, x: F.layer_norm(x[..., None].repeat(1, 1, 4), (4,))[..., 0] + x,
    "batch": lambda m, x: x / len(x),
    "chance": lambda m, x: x * (1 + 1e-9 * random.random()),
}


def pinned(flow: sosp.Flow) -> set[str]:
    return {layer for pin in flow.pinned if pin.why == WHY for layer in pin.layers}


def check(model: Net) -> nn.Module:
    mask = sosp.Mask.from_removed(model, {"a": [0, 3], "b": [1, 2, 5]}, X)
    small, masked = sosp.shrink(model, mask, X), sosp.masked(model, mask)
    with torch.no_grad():
        torch.testing.assert_close(small(X), masked(X), atol=1e-6, rtol=0)
    return small


@pytest.mark.parametrize("what", COMPUTED)
def test_widths_that_are_computed_with_stay(what: str) -> None:
    between, layers = COMPUTED[what]
    model = made(between)
    flow = sosp.trace(model, X)
    assert pinned(flow) == layers
    assert all(pin.where.startswith("test_numbers.py:") for pin in flow.pinned if pin.why == WHY)
    check(model)


@pytest.mark.parametrize("what", HARMLESS)
def test_sizes_and_other_numbers_pin_nothing(what: str) -> None:
    model = made(HARMLESS[what])
    assert pinned(sosp.trace(model, X)) == set()
    small = check(model)
    assert small.b.weight.shape == (5, 6)
    assert small.c.in_features == (8 if what in ("zeros", "full") else 5)  # nothing is known of what is added there


def test_attention_by_hand_is_pruned() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.f = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).mT / math.sqrt(self.q.out_features)
            return self.f((scores.softmax(-1) @ self.v(x)).mean(1))

    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(12, 4, 5)
    found = sosp.prune(model, (x, torch.arange(12) % 3), ratio=0.5)
    torch.testing.assert_close(found.model(x), sosp.masked(model, found.mask)(x))
    assert found.cost_after.params < found.cost_before.params
    assert pinned(sosp.trace(model, x)) == {"q"}
