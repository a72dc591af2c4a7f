"""Put a gate on every structure's way out of its layer, for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from sosp.records import Layer

Apply = Callable[[int, Any], Any]  # (index of the layer, its output) -> the gated output


class Site:
    """Knows where a layer's gate sits: on its own output, or behind the normalisation that takes that output.

    A norm is asked which layer's output it was given, not which layer it belongs to, so that a norm behind two
    layers, or a layer in front of two norms, is gated call by call.
    """

    def __init__(self, apply: Apply) -> None:
        self.apply = apply
        self.waiting: dict[int, tuple[int, Any]] = {}  # id of an output -> (layer, that output, kept alive)

    def layer(self, index: int, normed: bool) -> LayerHook:
        return LayerHook(self, index, normed)

    def clear(self) -> None:
        self.waiting.clear()


class LayerHook:
    """On a layer's output: gate it now, or remember it for the norm that comes next. (A class, so that it pickles.)"""

    def __init__(self, site: Site, index: int, normed: bool) -> None:
        self.site, self.index, self.normed = site, index, normed

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.normed:
            return self.site.apply(self.index, output)
        self.site.waiting[id(output)] = (self.index, output)
        return None


class NormHook:
    """Behind a norm: gate the output if its input came straight from a gated layer."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        found = self.site.waiting.pop(id(args[0]), None) if args else None
        return None if found is None else self.site.apply(found[0], output)


def install(model: nn.Module, layers: Sequence[Layer], gate: str, apply: Apply) -> list[Any]:
    """Hook ``apply`` onto the outputs of ``layers``; returns the handles that undo it."""
    site = Site(apply)
    behind = gate == "features"
    handles = [
        model.get_submodule(layer.name).register_forward_hook(site.layer(i, behind and bool(layer.norms)))
        for i, layer in enumerate(layers)
    ]
    norms = dict.fromkeys(name for layer in layers for name in layer.norms) if behind else {}
    handles += [model.get_submodule(name).register_forward_hook(NormHook(site)) for name in norms]
    return handles


@contextmanager
def gated(model: nn.Module, layers: Sequence[Layer], gate: str, apply: Apply) -> Iterator[None]:
    """``install`` for the length of the block."""
    handles = install(model, layers, gate, apply)
    try:
        yield
    finally:
        for h in handles:
            h.remove()


def along(values: Tensor, dim: int, axis: int) -> Tensor:
    """Shape per-channel values (C,), or per-example ones (N, C), to multiply an output with ``dim`` dimensions."""
    axis = axis % dim
    shape = [1] * dim
    shape[axis] = values.shape[-1]
    if values.dim() == 2:
        shape[0] = values.shape[0]
    return values.view(shape)
