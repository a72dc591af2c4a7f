"""Put a gate on every structure's way out of its layer, for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from sosp.core.scatter import Scatter

GateFunction = Callable[[int, Any], Any]  # (index of the layer, its output) -> the gated output


class GatedLayer(Protocol):
    """A layer by name, and the normalisations that are its own."""

    @property
    def name(self) -> str: ...

    @property
    def norms(self) -> tuple[str, ...]: ...


class GateHook:
    """On the output of a layer, or of its own norm. (A class, so that masked models copy and pickle.)"""

    def __init__(self, apply: GateFunction, index: int) -> None:
        self.apply, self.index = apply, index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.apply(self.index, output)


class InputHook:
    """A GateHook on what a module is given."""

    def __init__(self, hook: GateHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: Any) -> Any:
        return (self.hook(module, (), args[0]), *args[1:])


def install_gates(model: nn.Module, layers: Sequence[GatedLayer], gate: str, apply: GateFunction) -> list[Any]:
    """Hook ``apply`` onto the outputs of ``layers``, or of their own norms; returns the handles that undo it."""
    places = [
        (i, model.get_submodule(name))
        for i, layer in enumerate(layers)
        for name in (layer.norms if gate == "features" else ()) or (layer.name,)
    ]
    return [hook_output(module, GateHook(apply, i)) for i, module in places]


def hook_output(module: nn.Module, hook: GateHook) -> Any:
    """Hook what the module computes: in a shrunk network, before its channels are scattered to their places."""
    scatter = module._modules.get("scatter")
    if isinstance(scatter, Scatter):
        return scatter.register_forward_pre_hook(InputHook(hook))
    return module.register_forward_hook(hook)


@contextmanager
def apply_gates(model: nn.Module, layers: Sequence[GatedLayer], gate: str, apply: GateFunction) -> Iterator[None]:
    """``install`` for the length of the block."""
    handles = install_gates(model, layers, gate, apply)
    try:
        yield
    finally:
        for h in handles:
            h.remove()


def align_values(values: Tensor, dim: int, axis: int) -> Tensor:
    """Shape per-channel values (C,), or per-example ones (N, C), to multiply an output with ``dim`` dimensions."""
    axis = axis % dim
    shape = [1] * dim
    shape[axis] = values.shape[-1]
    if values.dim() == 2:
        shape[0] = values.shape[0]
    return values.view(shape)
