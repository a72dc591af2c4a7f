"""A recipe: every index of a surgery, worked out before a tensor is touched; and the surgery itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.layers import layer_type
from sosp.core.scatter import Nothing, Scatter, scatter_output
from sosp.errors import StructureError


@dataclass(frozen=True)
class Placing:
    """A scatter behind a module: place j takes channel ``index[j]``, or zero for -1."""

    index: Tensor
    axis: int
    given: int  # channels it takes


@dataclass(frozen=True)
class Recipe:
    """What to do to a network's parameters, buffers and modules, by name."""

    slices: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)  # tensor -> axis -> what stays
    grouped: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # weight -> rows (R,), columns (R, c)
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # module -> attribute -> value
    scatters: Mapping[str, Placing | None] = field(default_factory=dict)  # module -> behind it; None takes it away
    emptied: tuple[str, ...] = ()  # layers of which nothing is left
    passed: tuple[str, ...] = ()  # norms of which nothing is left


def apply(model: nn.Module, recipe: Recipe) -> None:
    """Do it, in place."""
    owners = _owners(model)
    home = next((x.device for x in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))
    homes = {name: _device(model.get_submodule(name), home) for name in recipe.scatters}
    for name in {*recipe.slices, *recipe.grouped}:
        old = _tensor(model, name)
        new = old.detach()
        if name in recipe.grouped:
            rows, columns = (i.to(new.device) for i in recipe.grouped[name])
            new = new[rows[:, None], columns]
        for axis, index in recipe.slices.get(name, {}).items():
            new = new.index_select(axis, index.to(new.device))
        _replace(owners[id(old)], old, new)
    for name, attributes in recipe.sizes.items():
        for key, value in attributes.items():
            setattr(model.get_submodule(name), key, value)
    for name in recipe.emptied:
        layer = model.get_submodule(name)
        kind = layer_type(layer)
        if kind is None:
            raise StructureError(f"{name!r} is no layer that could be emptied.")
        exchange(model, name, Nothing(layer, kind.channels(layer)))
    for name in recipe.passed:
        exchange(model, name, nn.Identity())
    for name, placing in recipe.scatters.items():
        _place(model.get_submodule(name), placing, homes[name])
    for module in model.modules():  # recurrent layers keep their weights in one block of memory
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _owners(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Every parameter and buffer, and all the places that hold it."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for key, x in store.items():
                if x is not None:
                    found.setdefault(id(x), []).append((store, key))
    return found


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    found: Tensor | None = module._parameters.get(key)
    if found is None:
        found = module._buffers.get(key)
    if found is None:
        raise StructureError(f"the model has no parameter or buffer {name!r}.")
    return found


def _replace(places: list[tuple[dict[str, Any], str]], old: Tensor, new: Tensor) -> None:
    if old.dim() == 4 and old.is_contiguous(memory_format=torch.channels_last) and not old.is_contiguous():
        new = new.contiguous(memory_format=torch.channels_last)
    else:
        new = new.contiguous()
    made = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    for store, key in places:
        store[key] = made


def exchange(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put another module in every place that holds this one; its mode, its hooks and the scatter behind it stay."""
    old = model.get_submodule(name)
    new.train(old.training)
    new._forward_hooks, new._forward_pre_hooks = old._forward_hooks, old._forward_pre_hooks
    if isinstance(old._modules.get("scatter"), Scatter):
        new.add_module("scatter", old._modules["scatter"])
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is old:
                module._modules[key] = new


def _device(module: nn.Module, otherwise: torch.device) -> torch.device:
    return next((x.device for x in itertools.chain(module.parameters(), module.buffers())), otherwise)


def _place(module: Any, placing: Placing | None, device: torch.device) -> None:
    """Put a scatter behind a module, in place of the one it has; or take that one away."""
    present = "scatter" in module._modules
    if placing is not None:
        scatter = Scatter(placing.index, placing.axis, placing.given).to(device).train(module.training)
        module.add_module("scatter", scatter)
        if not present:
            handle = module.register_forward_hook(scatter_output)
            module._forward_hooks.move_to_end(handle.id, last=False)  # before the user's own hooks
    elif not present:
        raise StructureError("there is no scatter to take away.")
    else:
        for key in [k for k, hook in module._forward_hooks.items() if hook is scatter_output]:
            del module._forward_hooks[key]
        del module._modules["scatter"]
