"""Wider networks with fresh weights, made by a function of their width or widened whatever they are; their cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from sosp.core.layers import layer_type, width_of
from sosp.errors import ArgumentError, is_number
from sosp.graph import trace
from sosp.graph.cost import Cost, cost_of
from sosp.graph.layout import Layout
from sosp.graph.plan import count
from sosp.graph.wiring import trace as wiring
from sosp.nets import Width
from sosp.surgery.widen import widen_along, widened
from sosp.training.user_data import moved

Factors = Mapping[str, float]  # layer -> factor; layers that are not named keep their width
Make = Callable[[Width], nn.Module]


class Growth(Protocol):
    """A network that can be made again, with other widths."""

    layers: tuple[str, ...]  # all whose width is not the number of outputs

    def make(self, factors: Factors, seed: int) -> nn.Module:
        """The network with these widths and fresh weights, which depend on the seed alone."""
        ...

    def cost(self, factors: Factors) -> Cost:
        """What it costs, exactly; nothing is computed, and factors may also be below 1."""
        ...

    def params(self, factors: Factors) -> int:
        """Its parameters alone, which is quicker."""
        ...


def growth_of(network: nn.Module | Make, example: Any, base: Width = 1.0) -> Growth:
    """How to make ``network`` wider: a function of ``width=``, as those of ``sosp.nets`` are, or any module.

    ``base``: the width of the network as it is, where the function makes another one of width 1.
    """
    example = moved(example, torch.device("cpu"))
    if isinstance(network, nn.Module):
        return Widened(copy.deepcopy(network).cpu(), example)
    if not callable(network):
        raise ArgumentError(f"{network!r:.80} is neither a torch.nn.Module nor a function that makes one of its width.")
    return Made(network, example, base)


def check_growth(growth: Growth, factor: float) -> None:
    """Refuse a network of which a width is fixed by name, with what fixes it, before hours are spent on training."""
    growth.params(dict.fromkeys(growth.layers, factor))


def widths_of(model: nn.Module, example: Any) -> dict[str, int]:
    """Layer -> its channels, for every layer but those that give the output."""
    seen = wiring(model, example, lambda m: layer_type(m) is not None)
    return {n: width_of(model, n, "filters") or 0 for n in seen.order if n not in seen.output_layers}


class Made:
    """Through ``width=``."""

    def __init__(self, function: Make, example: Any, base: Width = 1.0) -> None:
        self.function, self.example, self.base = function, example, base
        with torch.random.fork_rng(devices=[]):
            self.widths = widths_of(function(base), example)
        plain = self._empty(1.0)
        self.plain = {n: width_of(plain, n, "filters") or 0 for n in self.widths}  # of the network of width 1
        self.layers = tuple(self.widths)

    def make(self, factors: Factors, seed: int) -> nn.Module:
        check_factors(factors)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.function(self._width(factors))

    def cost(self, factors: Factors) -> Cost:
        return count(self._empty(self._width(factors)), self.example)

    def params(self, factors: Factors) -> int:
        return sum(p.numel() for p in self._empty(self._width(factors)).parameters())

    def _width(self, factors: Factors) -> Width:
        """What the function is told; beside a width of its own, that of every layer."""
        if not factors or self.base == 1.0:
            return dict(factors) or self.base
        return {n: round(w * factors.get(n, 1.0)) / self.plain[n] for n, w in self.widths.items()}

    def _empty(self, width: Width) -> nn.Module:
        """Shapes without numbers."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return self.function(width)


class Widened:
    """Through ``sosp.widen``, and every layer drawn anew; what the constructor of the user's network did to them is
    not known. Parameters that belong to no layer of torch's keep the values they were given."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model, self.example = model, example
        self.flow = trace(model, example)
        self.layers = tuple(widths_of(model, example))

    def make(self, factors: Factors, seed: int) -> nn.Module:
        check_factors(factors)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            wide = self._wide(factors) if factors else copy.deepcopy(self.model)
            for module in wide.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()  # type: ignore[operator]
        return wide

    def cost(self, factors: Factors) -> Cost:
        return cost_of(self.flow, self._layout(factors))

    def params(self, factors: Factors) -> int:
        return self.cost(factors).params

    def _layout(self, factors: Factors) -> Layout:
        """Widths that are fixed are refused by name; those that go in groups are rounded to whole groups."""
        return widened(self.flow, factors, frozenset(factors))

    def _wide(self, factors: Factors) -> nn.Module:
        return widen_along(self.model, self.flow, self._layout(factors), self.example, "random")


def check_factors(factors: Factors) -> None:
    for name, factor in factors.items():
        check_factor(factor, f"the factor for {name!r}")


def check_factor(factor: object, what: str = "factor") -> float:
    """Refuse what does not widen."""
    if not is_number(factor) or not 1 <= factor <= 64:
        raise ArgumentError(f"{what} is {factor!r}; to widen a network it must be a number from 1 to 64.")
    return float(factor)
