"""From widths to a larger network: the channel flow run backwards, a channel becomes several."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosp.errors import ArgumentError, StructureError, SurgeryError, check_choice, is_number
from sosp.graph.channels import DenseWeight, Ids
from sosp.graph.dry_run import try_recipe
from sosp.graph.flow import Flow, trace
from sosp.graph.layout import Layout, make_full_layout
from sosp.graph.recipe import Recipe, write_recipe
from sosp.graph.structures import find_excluded_names
from sosp.surgery.shrink import apply_recipe_to_copy, check_same_outputs

INITS = ("random", "copy")


def widen(model: nn.Module, factors: Mapping[str, float], example: Any, *, init: str = "random") -> nn.Module:
    """Return a copy of a network whose layers have more output channels.

    Args:
        model: The network. It is not changed.
        factors: Layer, container or pattern -> factor, ``{"layer1": 2.0, "conv1": 1.5}``. Layers that feed one stream
            have one width, the largest that is asked of any of them.
        example: Inputs for one forward pass.
        init: ``"random"`` keeps the old weights and draws the new ones as the layer itself does when it is made;
            ``"copy"`` repeats channels and divides the weights that read them, so that the network computes the same
            function (Net2Net, Chen et al. 2016).

    Raises:
        ArgumentError: If a factor is no number from 1.
        StructureError: If a name holds no layer, or a layer cannot have the width that is asked for.
        SurgeryError: If the wider network does not run.
    """
    check_choice("init", init, INITS)
    flow = trace(model, example)
    found = _factors(model, flow, factors)
    layout = make_wide_layout(flow, found, frozenset(factors) & frozenset(found))
    _check_widths(flow, layout, found, factors)
    return widen_to_layout(model, flow, layout, example, init)


def widen_to_layout(model: nn.Module, flow: Flow, layout: Layout, example: Any, init: str) -> nn.Module:
    """``widen`` with the channel flow at hand, and how often every value occurs."""
    recipe = write_recipe(model, flow.graph, layout, {})
    _check_dry_run(flow, layout, recipe)
    wide = apply_recipe_to_copy(model, recipe)
    if init == "copy":
        _share_out(wide, flow, layout.counts)
        check_same_outputs(wide, model, example, flow.modes)
    else:
        _draw(wide, model, recipe)
    return wide


def _factors(model: nn.Module, flow: Flow, factors: Mapping[str, float]) -> dict[str, float]:
    """Layer -> factor."""
    if not isinstance(factors, Mapping) or not factors:
        raise ArgumentError("give the widths as {layer: factor}, for instance {'layer1': 2.0}.")
    layers = {d.module for d in flow.graph.dense.values() if d.module in flow.graph.calls}
    found: dict[str, float] = {}
    for name, factor in factors.items():
        if not is_number(factor) or not 1 <= factor <= 64:
            raise ArgumentError(f"the factor for {name!r} is {factor!r}; it must be a number from 1 to 64.")
        named = find_excluded_names(model, [name], parameters=False, what="factors") & layers
        if not named:
            raise StructureError(
                f"{name!r} contains no layer whose channels can be traced, so there is nothing to widen."
            )
        for layer in named:
            found[layer] = max(found.get(layer, 1.0), float(factor))
    return found


def make_wide_layout(flow: Flow, factors: Mapping[str, float], named: frozenset[str] = frozenset()) -> Layout:
    """How often every value occurs, never where a factor is below 1; tied channels occur equally often."""
    together = flow.graph.classes(find_ties(flow))
    held = np.zeros(flow.graph.count, dtype=bool)
    held[together[flow.pins]] = True
    counts = np.full(flow.graph.count, -1, dtype=np.int64)  # where nothing was asked for
    stuck = []
    for name, factor in sorted(factors.items(), key=lambda item: list(flow.graph.calls).index(item[0])):
        ids = together[flow.graph.calls[name][0].out]
        if held[ids].any():
            stuck.append(name)
            continue
        ids = ids[np.sort(np.unique(ids, return_index=True)[1])]  # channels that are tied to each other grow once
        counts[ids] = np.maximum(counts[ids], _copies(len(ids), factor, _period(flow, together, ids)))
    stuck = [n for n in stuck if n in named] or (stuck if len(stuck) == len(factors) else [])
    if stuck:
        reasons = [str(p) for p in flow.pinned if set(p.layers) & set(stuck)]
        reasons = reasons or ["they are added to channels whose number the code fixes: zeros that pad other channels."]
        raise StructureError(
            f"{', '.join(map(repr, stuck))} cannot be widened: the width is fixed.\n  " + "\n  ".join(reasons)
        )
    whole_ = make_full_layout(flow.graph.count)
    counts = np.where(counts < 0, 1, counts)
    return Layout(counts[together], whole_.zero, whole_.needed, frozenset())


def _check_widths(flow: Flow, layout: Layout, found: Mapping[str, float], factors: Mapping[str, float]) -> None:
    """A layer that is named and cannot have the width that was asked for is not left as it is without a word."""
    for name in (n for n in factors if n in found):
        ids = flow.graph.calls[name][0].out
        wanted, width = round(found[name] * len(ids)), int(layout.counts[ids].sum())
        if width < wanted:
            raise StructureError(
                f"{name!r} cannot have {wanted} channels instead of {len(ids)}: they form groups of equal size. "
                "Choose a whole factor."
            )


def find_ties(flow: Flow) -> list[tuple[Ids, Ids]]:
    """What leaves a module was computed in it; a depthwise convolution has as many channels out as in."""
    cuts = [c for cuts in flow.graph.calls.values() for c in cuts]
    found = [(c.into[c.index >= 0], c.out[c.index >= 0]) for c in cuts]  # what is scattered to zeros comes from nowhere
    for d in flow.graph.dense.values():
        if is_depthwise(d):
            found.append((np.repeat(d.into[0], len(d.out) // d.groups), d.out))
    return found


def is_depthwise(d: DenseWeight) -> bool:
    return 1 < d.groups == len(d.into[0])


def _period(flow: Flow, together: Ids, ids: Ids) -> int:
    """The groups that these channels fall into, if a grouped convolution gives or reads them: all must grow alike."""
    found = 1
    mine = set(ids.tolist())
    for d in flow.graph.dense.values():
        for side in (d.out, *d.into[:1]):
            if 1 < d.groups < len(d.into[0]) and mine & set(together[side].tolist()):
                found = lcm(found, d.groups)
    return found


def _copies(width: int, factor: float, groups: int) -> np.ndarray:
    """(width,) how often each channel occurs, so that there are ``factor`` times as many in all."""
    inside = width // groups
    wanted = max(1, round(inside * factor))
    one = np.full(inside, wanted // inside)
    one[: wanted % inside] += 1
    return np.tile(one, groups)


def _check_dry_run(flow: Flow, layout: Layout, recipe: Recipe) -> None:
    for mode, run in try_recipe(flow, layout, recipe):
        for record in run.failed:
            raise SurgeryError(
                f"the wider network does not run in {mode} mode: {record.name} at {record.where} needs the current "
                "widths. Leave the layers around it as they are, or choose a whole factor."
            )


@torch.no_grad()
def _share_out(wide: nn.Module, flow: Flow, counts: np.ndarray) -> None:
    """A channel that occurs m times is read m times: each copy gets 1/m of the weight."""
    for d in flow.graph.dense.values():
        times = counts[d.into[0]]
        if d.narrow and (times > 1).any() and d.groups != len(d.into[0]):
            weight = wide.get_parameter(d.weight)
            weight.div_(_per_column(d, times, weight))


def _per_column(d: DenseWeight, times: np.ndarray, weight: Tensor) -> Tensor:
    """How often the channel of each column occurs, shaped to divide the (already widened) weight."""
    inside = np.repeat(times, times).reshape(d.groups, -1)  # (groups, columns)
    shape = [1] * weight.dim()
    if d.transposed and d.groups > 1:
        shape[d.in_axis] = -1
        return torch.from_numpy(inside.reshape(-1)).to(weight).view(shape)
    shape[d.in_axis] = inside.shape[1]
    return torch.from_numpy(inside[0]).to(weight).view(shape)


@torch.no_grad()
def _draw(wide: nn.Module, model: nn.Module, recipe: Recipe) -> None:
    """What is new is drawn as its module does when it is made; first occurrences keep their numbers."""
    changed = {name.rpartition(".")[0] for name in (*recipe.slices, *recipe.grouped)}
    for path in sorted(changed):
        module: Any = wide.get_submodule(path)
        if not hasattr(module, "reset_parameters"):
            continue
        fresh = copy.deepcopy(module)
        fresh.reset_parameters()
        for store in ("_parameters", "_buffers"):
            for key, x in getattr(module, store).items():
                name = f"{path}.{key}" if path else key
                if (x is not None and name in recipe.slices) or name in recipe.grouped:
                    x.copy_(torch.where(_old(recipe, name, x), x, getattr(fresh, store)[key]))


def _old(recipe: Recipe, name: str, x: Tensor) -> Tensor:
    """True where an element of the widened tensor stands for one that was there before."""
    old = torch.ones([1] * x.dim(), dtype=torch.bool)
    for axis, index in recipe.slices.get(name, {}).items():
        shape = [1] * x.dim()
        shape[axis] = len(index)
        old = old & _first(index).view(shape)
    if name in recipe.grouped:
        rows, columns = recipe.grouped[name]
        first = _first(rows)[:, None] & torch.stack([_first(c) for c in columns])
        old = old & first.view(*first.shape, *[1] * (x.dim() - 2))
    return old.expand(x.shape).to(x.device)


def _first(index: Tensor) -> Tensor:
    """(n,) whether it is the first time that this number occurs."""
    first = torch.zeros(len(index), dtype=torch.bool)
    first[torch.from_numpy(np.unique(index.numpy(), return_index=True)[1])] = True
    return first
