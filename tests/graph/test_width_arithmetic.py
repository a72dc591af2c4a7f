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

WHY = "the code uses the number of channels as a value"


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
    assert all(pin.where.startswith("test_width_arithmetic.py:") for pin in flow.pinned if pin.why == WHY)
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
    found = sosp.prune(model, (x, torch.arange(12) % 3), ratio=0.5, preset="paper")
    torch.testing.assert_close(found.model(x), sosp.masked(model, found.mask)(x))
    assert found.cost_after.params < found.cost_before.params
    assert pinned(sosp.trace(model, x)) == {"q"}


def kept(model: nn.Module, removed: dict[str, list[int]], x: Tensor) -> set[str]:
    """The layers that are pinned; the smaller network is the masked one."""
    mask = sosp.Mask.from_removed(model, removed, x)
    small, masked = sosp.shrink(model, mask, x), sosp.masked(model, mask)
    with torch.no_grad():
        torch.testing.assert_close(small(x), masked(x), atol=1e-6, rtol=0)
    return pinned(sosp.trace(model, x))


class Reads(Net):
    """Reads two widths, and computes with one."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        y = self.b(y.view(len(y), y.shape[1])).relu()
        return self.c(y / y.shape[1] ** 0.5)


class Size(nn.Module):
    def forward(self, x: Tensor) -> int:
        return x.shape[1]


class Elsewhere(Net):
    """Another module reads the width."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(between)
        self.size = Size()

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu()).relu()
        return self.c(y / self.size(y) ** 0.5)


class Sum(Net):
    """Reads the width of one of two that are added."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(between)
        self.d = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        x = x.view(len(x), x.shape[1])
        y = self.b(x)
        return self.c((y + self.d(x)) / y.shape[1] ** 0.5)


class Inner(nn.Module):
    """Reads the widths of its own layer."""

    def __init__(self, of_weight: bool) -> None:
        super().__init__()
        self.layer, self.of_weight = nn.Linear(8, 8), of_weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).relu()
        return x.view(len(x), self.layer.weight.shape[0] if self.of_weight else x.shape[1])


class Around(Net):
    """Computes with the width of its first layer."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], of_weight: bool = False) -> None:
        super().__init__(between)
        self.b = Inner(of_weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c(self.b(x) / x.shape[1] ** 0.5)


class AroundWeight(Around):
    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(between, of_weight=True)


MEANT: dict[type[Net], set[str]] = {
    Reads: {"b"},
    Sum: {"b", "d"},
    Around: {"a"},
    AroundWeight: {"a"},
    Elsewhere: {"a", "b", "c"},
}


@pytest.mark.parametrize(("cls", "layers"), MEANT.items())
def test_a_width_is_told_from_others_where_its_own_module_reads_it(cls: type[Net], layers: set[str]) -> None:
    """Where another one does, any width may be meant."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(lambda m, x: x).eval()
    second = "b.layer" if isinstance(model, Around) else "b"
    assert kept(model, {"a": [0, 3], second: [1, 2, 5]}, X) == layers


class Images(nn.Module):
    """A layer, a depthwise one, and a norm without parameters behind the third."""

    def __init__(self, number: Callable[[Any], int]) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.project, self.norm, self.head = nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8, affine=False), nn.Linear(8, 3)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.project(self.deep(self.stem(x).relu()).relu()))
        return self.head(x.relu().mean((2, 3)) / self.number(self))


IMAGES = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
# What is computed with -> the layers whose channels are pinned by it.
COUNTED: dict[str, tuple[Callable[[Any], int], set[str]]] = {
    "behind a depthwise layer": (lambda m: m.project.out_channels, {"project"}),
    "of the depthwise layer": (lambda m: m.deep.out_channels, {"deep"}),
}


@pytest.mark.parametrize("what", COUNTED)
def test_only_the_width_that_is_computed_with_stays_in_a_network_of_images(what: str) -> None:
    number, layers = COUNTED[what]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Images(number).eval()
    assert kept(model, {"stem": [0, 3], "project": [1, 2, 5]}, IMAGES) == layers


def test_where_the_width_of_a_norm_is_computed_with_its_channels_go_behind_it() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Images(lambda m: m.norm.num_features).eval()
    mask = sosp.Mask.from_removed(model, {"project": [1, 2, 5]}, IMAGES)
    small = sosp.shrink(model, mask, IMAGES)
    assert (small.project.out_channels, small.norm.num_features, small.head.in_features) == (8, 8, 5)
    with torch.no_grad():
        torch.testing.assert_close(small(IMAGES), sosp.masked(model, mask)(IMAGES), atol=1e-6, rtol=0)
    (why,) = [p for p in sosp.trace(model, IMAGES).pinned if "number of channels" in p.why]
    assert why.layers == ("project",)
