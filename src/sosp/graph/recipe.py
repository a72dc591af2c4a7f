"""A recipe: every index of a surgery, worked out before a tensor is touched; and the surgery itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosp.core.layers import (
    BypassedModule,
    Scatter,
    ZeroLayer,
    find_layer_type,
    is_group_norm,
    is_kept_part,
    is_norm,
    scatter_output,
)
from sosp.errors import CheckpointError, StructureError
from sosp.graph.channels import DenseWeight, Graph, ModuleCall
from sosp.graph.layout import Layout

Shape = tuple[int, ...]
RemovedChannels = Mapping[str, np.ndarray]  # module -> (n,) which of its output channels are set to zero


@dataclass(frozen=True)
class ScatterIndex:
    """A scatter behind a module: place j takes channel ``index[j]``, or zero for -1."""

    index: Tensor
    axis: int
    given: int  # channels it takes


@dataclass(frozen=True)
class Bypass:
    """What a module gives without most of its parts: an argument, after some of the parts; or zeros of its shape."""

    source: int | str  # the argument, by its place or by its name
    steps: tuple[str, ...] = ()  # names inside the module
    zero: bool = False


@dataclass(frozen=True)
class Recipe:
    """What to do to a network's parameters, buffers and modules, by name."""

    slices: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)  # tensor -> axis -> what stays
    grouped: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # weight -> rows (R,), columns (R, c)
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # module -> attribute -> value
    scatters: Mapping[str, ScatterIndex | None] = field(default_factory=dict)  # module -> behind it; None takes it away
    emptied: tuple[str, ...] = ()  # layers of which nothing is left
    passed: tuple[str, ...] = ()  # norms of which nothing is left
    bypassed: Mapping[str, Bypass] = field(default_factory=dict)  # module -> what it gives instead


# working it out ------------------------------------------------------------------------------------------------------


def write_recipe(model: nn.Module, graph: Graph, layout: Layout, removed: RemovedChannels) -> Recipe:
    """All indices of the surgery."""
    counts = layout.counts
    slices: dict[str, dict[int, Tensor]] = {}
    grouped: dict[str, tuple[Tensor, Tensor]] = {}
    sizes: dict[str, dict[str, int]] = {}
    scatters: dict[str, ScatterIndex | None] = {}
    emptied = tuple(d.module for d in graph.dense.values() if d.weight in layout.emptied)
    passed = tuple(n for n in graph.calls if _is_unneeded_norm(model, graph, layout, n))
    gone = tuple(f"{n}." for n in (*emptied, *passed))
    for s in graph.slices.values():
        if s.name not in graph.dense and not (gone and s.name.startswith(gone)):
            _keep(slices, s.name, s.axis, counts, s.ids)
    for d in graph.dense.values():
        if d.narrow and d.weight not in layout.emptied:
            _weight(model, d, counts, slices, grouped, sizes)
            continue
        layer: Any = model.get_submodule(d.module)
        kind = find_layer_type(layer)
        if kind is not None:  # emptied, or its weight is computed: the code may ask it for its width
            _size(sizes, d.module, layer, kind.sizes[0], int(counts[d.out].sum()))
    for name, cuts in graph.calls.items():
        placing = _placing(cuts, layout, removed.get(name))
        module: Any = model.get_submodule(name)
        if is_norm(module) and name not in passed and hasattr(module, "num_features"):
            _size(sizes, name, module, "num_features", int(counts[cuts[0].given].sum()))
        elif is_group_norm(module):
            given = counts[cuts[0].given]
            _size(sizes, name, module, "num_channels", int(given.sum()))
            groups = given.reshape(module.num_groups, -1).any(axis=1)
            _size(sizes, name, module, "num_groups", int(groups.sum()))
        if placing is not None or "scatter" in module._modules:
            scatters[name] = placing
    for name in slices:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        for attribute in ("num_parameters", "embedding_dim"):
            if key == "weight" and hasattr(module, attribute):
                _size(sizes, path, module, attribute, len(next(iter(slices[name].values()))))
    return Recipe({n: a for n, a in slices.items() if a}, grouped, sizes, scatters, emptied, passed)


def _is_unneeded_norm(model: nn.Module, graph: Graph, layout: Layout, name: str) -> bool:
    """A norm that nothing needs any more."""
    return is_norm(model.get_submodule(name)) and not layout.needed[graph.calls[name][0].given].any()


def list_bypassed_parts(model: nn.Module, bypassed: Mapping[str, Bypass]) -> set[str]:
    """Return the bypassed modules and all in them that does not run any more."""
    found = set(bypassed)
    for name, bypass in bypassed.items():
        parts = (part for part, _ in model.get_submodule(name).named_modules(remove_duplicate=False) if part)
        found |= {f"{name}.{part}" for part in parts if not is_kept_part(part, bypass.steps)}
    return found


def find_kept_positions(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which places of ``ids`` stay, in order; some several times in a widened network.

    Neighbours with one number are pixels of one channel, flattened: a copy of the channel stands behind all of them.
    """
    times = counts[ids]
    if times.max(initial=0) <= 1:
        return np.flatnonzero(times)
    runs = np.split(np.arange(len(ids)), np.flatnonzero(ids[1:] != ids[:-1]) + 1)
    return np.concatenate([np.tile(run, times[run[0]]) for run in runs])


def _keep(slices: dict[str, dict[int, Tensor]], name: str, axis: int, counts: np.ndarray, ids: np.ndarray) -> None:
    if (counts[ids] != 1).any():
        slices.setdefault(name, {})[axis] = torch.from_numpy(find_kept_positions(counts, ids))


def _size(sizes: dict[str, dict[str, int]], name: str, module: Any, attribute: str, value: int) -> None:
    if getattr(module, attribute, value) != value:
        sizes.setdefault(name, {})[attribute] = value


def _weight(model: nn.Module, d: DenseWeight, counts: np.ndarray, slices: Any, grouped: Any, sizes: Any) -> None:
    """The rows and columns of a layer's weight, and the widths it states."""
    if (counts[d.out] == 1).all() and (counts[d.into[0]] == 1).all():
        return
    groups = 1
    if d.groups == 1:
        _keep(slices, d.weight, d.out_axis, counts, d.out)
        _keep(slices, d.weight, d.in_axis, counts, d.into[0])
    else:
        grouped[d.weight], groups = _in_groups(d, counts)
    module: Any = model.get_submodule(d.module) if d.module else None
    kind = find_layer_type(module) if module is not None else None
    if kind is not None:
        widths = (int(counts[d.out].sum()), int(counts[d.into[0]].sum()))
        for attribute, value in (
            *zip(kind.sizes, widths, strict=True),
            *([("groups", groups)] if d.groups > 1 else []),
        ):
            _size(sizes, d.module, module, attribute, value)


def _in_groups(d: DenseWeight, counts: np.ndarray) -> tuple[tuple[Tensor, Tensor], int]:
    """The weight of a grouped convolution: (out, in / groups, ...), or (in, out / groups, ...) when transposed."""
    first, second = (d.into[0], d.out) if d.transposed else (d.out, d.into[0])
    first, second = first.reshape(d.groups, -1), second.reshape(d.groups, -1)
    rows = [g * first.shape[1] + find_kept_positions(counts, ids) for g, ids in enumerate(first)]
    columns = [np.tile(find_kept_positions(counts, second[g]), (len(r), 1)) for g, r in enumerate(rows) if len(r)]
    groups = len(columns)
    if d.groups == len(d.into[0]):  # one channel per group: a copy of it is a group of its own
        groups = int(counts[d.into[0]].sum())
        columns = [c[:, : second.shape[1]] for c in columns]
    return (torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(columns))), groups


def _placing(cuts: list[ModuleCall], layout: Layout, removed: np.ndarray | None) -> ScatterIndex | None:
    """Where the channels that a module still computes go among those that leave it; None where they are the same."""
    cut, counts = cuts[0], layout.counts
    if counts.max(initial=1) > 1:
        return _placing_wide(cut, counts)
    computed = find_kept_positions(counts, cut.given)
    place = np.full(len(cut.given) + 1, -1)
    place[computed] = np.arange(len(computed))
    place[-1] = -1
    zero = np.zeros(len(cut.out), dtype=bool) if layout.zeroed(cut) else find_forced_zeros(cuts, layout, removed)
    index = np.where(zero, -1, place[cut.index])[find_kept_positions(counts, cut.out)]
    if np.array_equal(index, np.arange(len(computed))):
        return None
    return ScatterIndex(torch.from_numpy(index), cut.axis, len(computed))


def _placing_wide(cut: ModuleCall, counts: np.ndarray) -> ScatterIndex | None:
    """The same for a widened network: copy k of an output takes copy k of the channel it comes from."""
    times = counts[cut.given]
    starts = np.cumsum(times) - times
    pairs = zip(cut.index, counts[cut.out], strict=True)
    index = np.concatenate([np.full(m, -1) if j < 0 else starts[j] + np.arange(m) for j, m in pairs])
    if np.array_equal(index, np.arange(times.sum())):
        return None
    return ScatterIndex(torch.from_numpy(index), cut.axis, int(times.sum()))


def find_forced_zeros(cuts: list[ModuleCall], layout: Layout, removed: np.ndarray | None) -> np.ndarray:
    """(m,) what a module's output is set to zero in, in all of its calls."""
    return np.logical_and.reduce([c.forced(removed, layout.zero) for c in cuts])


def find_zero_rows(
    model: nn.Module, graph: Graph, layout: Layout, removed: RemovedChannels, recipe: Recipe
) -> dict[str, tuple[int, Tensor]]:
    """Return parameter -> axis and rows to set to zero: channels that are removed but computed (``join="zeros"``)."""
    found: dict[str, tuple[int, Tensor]] = {}
    gone = {*recipe.emptied, *recipe.passed, *list_bypassed_parts(model, recipe.bypassed)}
    for name, cuts in graph.calls.items():
        cut = cuts[0]
        if layout.zeroed(cut) and name not in gone:
            zero = find_forced_zeros(cuts, layout, removed.get(name))[find_kept_positions(layout.counts, cut.given)]
            module: Any = model.get_submodule(name)
            kind = find_layer_type(module)
            rows = torch.from_numpy(np.flatnonzero(zero))
            for key, axis in (("weight", kind.weight_axis if kind else 0), ("bias", 0)):
                if len(rows) and module._parameters.get(key) is not None:
                    found[f"{name}.{key}"] = axis, rows
    return found


# following shapes, without touching a tensor --------------------------------------------------------------------------


def collect_shapes(model: nn.Module) -> dict[str, Shape]:
    """Return the shape of every tensor in the state dict."""
    return {name: tuple(x.shape) for name, x in model.state_dict().items() if isinstance(x, Tensor)}


def compute_new_shape(shape: Shape, recipe: Recipe, name: str) -> Shape:
    """Return the shape of a tensor after a recipe."""
    if name in recipe.grouped:
        rows, columns = recipe.grouped[name]
        _check_index(name, shape, 0, rows)
        _check_index(name, shape, 1, columns)
        shape = (len(rows), columns.shape[1], *shape[2:])
    for axis, index in recipe.slices.get(name, {}).items():
        _check_index(name, shape, axis, index)
        shape = (*shape[:axis], len(index), *shape[axis + 1 :])
    return shape


def _check_index(name: str, shape: Shape, axis: int, index: Tensor) -> None:
    if axis >= len(shape) or (index.numel() and not 0 <= int(index.min()) <= int(index.max()) < shape[axis]):
        raise CheckpointError(
            f"a recipe takes elements of {name!r} along axis {axis} that its shape {shape} does not have."
        )


# carrying it out ------------------------------------------------------------------------------------------------------


def apply_recipe(model: nn.Module, recipe: Recipe) -> None:
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
        kind = find_layer_type(layer)
        if kind is None:
            raise StructureError(f"{name!r} is not a layer that can be emptied.")
        replace_module(model, name, ZeroLayer(layer, kind.channels(layer)))
    for name in recipe.passed:
        replace_module(model, name, nn.Identity())
    for name, placing in recipe.scatters.items():
        _place(model.get_submodule(name), placing, homes[name])
    for name, bypass in recipe.bypassed.items():
        replace_module(model, name, BypassedModule(model.get_submodule(name), bypass.source, bypass.steps, bypass.zero))
    for module in model.modules():  # recurrent layers keep their weights in one block of memory
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


@torch.no_grad()
def set_rows_to_zero(model: nn.Module, rows: Mapping[str, tuple[int, Tensor]]) -> None:
    """Set rows of parameters to zero, in place."""
    for name, (axis, index) in rows.items():
        tensor = _tensor(model, name)
        tensor.index_fill_(axis, index.to(tensor.device), 0)


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


HOOKS = frozenset(
    {"_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"}
    | {"_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"}
)


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put another module in every place that holds this one; its mode, its hooks and the scatter behind it stay."""
    old = model.get_submodule(name)
    new.train(old.training)
    vars(new).update({key: hooks for key, hooks in vars(old).items() if key in HOOKS})
    if isinstance(old._modules.get("scatter"), Scatter):
        new.add_module("scatter", old._modules["scatter"])
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is old:
                module._modules[key] = new


def _device(module: nn.Module, otherwise: torch.device) -> torch.device:
    return next((x.device for x in itertools.chain(module.parameters(), module.buffers())), otherwise)


def _place(module: Any, placing: ScatterIndex | None, device: torch.device) -> None:
    """Put a scatter behind a module, in place of the one it has; or take that one away."""
    present = "scatter" in module._modules
    if placing is not None:
        scatter = Scatter(placing.index, placing.axis, placing.given).to(device).train(module.training)
        module.add_module("scatter", scatter)
        if not present:
            handle = module.register_forward_hook(scatter_output)
            module._forward_hooks.move_to_end(handle.id, last=False)  # before the user's own hooks
    elif not present:
        raise StructureError("there is no scatter to remove.")
    else:
        for key in [k for k, hook in module._forward_hooks.items() if hook is scatter_output]:
            del module._forward_hooks[key]
        del module._modules["scatter"]
