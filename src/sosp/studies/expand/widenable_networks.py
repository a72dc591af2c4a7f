"""Make wider networks with fresh weights, from a function of the width or any module, and count their cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from sosp.core.layers import find_layer_type, find_width
from sosp.errors import ArgumentError, is_number
from sosp.graph import trace
from sosp.graph.layout import Layout
from sosp.graph.plan import Cost, compute_cost, count
from sosp.graph.wiring import trace_layers as wiring
from sosp.nets import Width
from sosp.surgery.widen import make_wide_layout, widen_to_layout
from sosp.training.user_data import move_to_device

Factors = Mapping[str, float]  # layer -> factor; layers that are not named keep their width
NetworkFunction = Callable[[Width], nn.Module]


class WidenableNetwork(Protocol):
    """A network that can be made again with other widths."""

    layers: tuple[str, ...]  # all layers except those that give the output

    def make(self, factors: Factors, seed: int) -> nn.Module:
        """Return the network with these widths and fresh weights, which depend on the seed alone."""
        ...

    def cost(self, factors: Factors) -> Cost:
        """Return the exact cost without running the network; factors may also be below 1."""
        ...

    def params(self, factors: Factors) -> int:
        """Return the number of parameters, which is faster than ``cost``."""
        ...


def make_widenable(network: nn.Module | NetworkFunction, example: Any, base: Width = 1.0) -> WidenableNetwork:
    """Make ``network`` widenable: a function of ``width=``, such as those of ``sosp.nets``, or any module.

    ``base``: the width at which the function makes the original network.
    """
    example = move_to_device(example, torch.device("cpu"))
    if isinstance(network, nn.Module):
        return WidenableModule(copy.deepcopy(network).cpu(), example)
    if not callable(network):
        raise ArgumentError(
            f"{network!r:.80} is neither a torch.nn.Module nor a function of the width that returns one."
        )
    return WidenableFunction(network, example, base)


def check_widths(growth: WidenableNetwork, factor: float) -> None:
    """Raise StructureError, before hours of training, if a width is fixed; name the layer and the reason."""
    growth.params(dict.fromkeys(growth.layers, factor))


def list_layer_widths(model: nn.Module, example: Any) -> dict[str, int]:
    """Return layer -> number of channels, for every layer except those that give the output."""
    seen = wiring(model, example, lambda m: find_layer_type(m) is not None)
    return {n: find_width(model, n, "filters") or 0 for n in seen.order if n not in seen.output_layers}


class WidenableFunction:
    """A network that a function of ``width=`` makes."""

    def __init__(self, function: NetworkFunction, example: Any, base: Width = 1.0) -> None:
        self.function, self.example, self.base = function, example, base
        with torch.random.fork_rng(devices=[]):
            self.widths = list_layer_widths(function(base), example)
        plain = self._empty(1.0)
        self.plain = {n: find_width(plain, n, "filters") or 0 for n in self.widths}  # of the network of width 1
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
        """Return the argument of the function: for a base width other than 1, the width of every layer."""
        if not factors or self.base == 1.0:
            return dict(factors) or self.base
        return {n: round(w * factors.get(n, 1.0)) / self.plain[n] for n, w in self.widths.items()}

    def _empty(self, width: Width) -> nn.Module:
        """Return the network on the meta device: shapes without values."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return self.function(width)


class WidenableModule:
    """A module that ``sosp.widen`` widens and whose layers are initialised again.

    Custom initialisation by the module's constructor is not repeated. Parameters outside torch's layers keep their
    values.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model, self.example = model, example
        self.flow = trace(model, example)
        self.layers = tuple(list_layer_widths(model, example))

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
        return compute_cost(self.flow, self._layout(factors))

    def params(self, factors: Factors) -> int:
        return self.cost(factors).params

    def _layout(self, factors: Factors) -> Layout:
        """Return the wider layout; refuse fixed widths by name, and round the widths of groups to whole groups."""
        return make_wide_layout(self.flow, factors, frozenset(factors))

    def _wide(self, factors: Factors) -> nn.Module:
        return widen_to_layout(self.model, self.flow, self._layout(factors), self.example, "random")


def check_factors(factors: Factors) -> None:
    for name, factor in factors.items():
        check_factor(factor, f"the factor for {name!r}")


def check_factor(factor: object, what: str = "factor") -> float:
    """Return the factor as a float; raise ArgumentError unless it is a number from 1 to 64."""
    if not is_number(factor) or not 1 <= factor <= 64:
        raise ArgumentError(f"{what} is {factor!r}; to widen a network it must be a number from 1 to 64.")
    return float(factor)
