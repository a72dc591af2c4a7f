"""What can be removed from a network: filters, neurons, blocks, weights, and groups that share a gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosp.core.borrowed_model import check_network
from sosp.core.layers import LAYERS, find_channel_axis, find_layer_type
from sosp.errors import ArgumentError, StructureError, check_choice, suggest_name
from sosp.graph.flow import Flow, follow_channels
from sosp.graph.flow import trace as trace_flow
from sosp.graph.forward_code import format_names
from sosp.graph.records import Layer, Structures
from sosp.graph.wiring import LayerTrace, trace_layers

KINDS = ("filters", "blocks", "weights")
GATES = ("features", "weights")
Group = Mapping[str, Sequence[int]] | Sequence[str]  # one structure, or channel-wise ties of whole layers
Exclude = Iterable[str | nn.Module]


def find_structures(
    model: nn.Module,
    example: Any,
    *,
    kind: str = "filters",
    gate: str = "features",
    groups: str | Sequence[Group] = "independent",
    exclude: Exclude = (),
) -> Structures:
    """Everything ``model`` can lose, found by running ``example`` through it once.

    ``kind``: ``"filters"`` (filters of convolutions and neurons of linear layers), ``"blocks"`` (whole residual
    branches and other parallel layers: one gate for all channels of the layer a branch ends in), ``"weights"`` (single
    parameters of those layers). The output layer is never pruned, except for single weights.
    ``gate``: where a structure is scaled: ``"features"`` after the layer's own normalisation, ``"weights"`` on the
    layer's own output, the paper's definition.
    ``groups``: ``"independent"``; ``"coupled"``, one structure per channel of a stream (all that adds and other ops
    tie together, so that removing it needs no scatter); or a list of groups. ``{"conv1": [0], "conv2": [0, 1]}`` makes
    those channels one structure; ``["conv1", "conv2"]`` ties channel i of one layer to channel i of the other.
    ``exclude``: names, glob patterns or modules; a container's name excludes everything in it.

    A layer that runs but does not reach the output differentiably (a pooler that nothing reads, an index, a detached
    feature) has no structures: no derivative says what removing its channels would do. Neither have layers that share
    a parameter, unless all but one of them are excluded. One module that is called several times is an ordinary layer.
    """
    check_network(model)
    check_choice("kind", kind, KINDS)
    check_choice("gate", gate, GATES)
    _check_groups(groups, kind)
    excluded = find_excluded_names(model, exclude, parameters=kind == "weights")
    seen = trace_layers(model, example, lambda m: find_layer_type(m) is not None)
    _refuse_unreached(seen)
    if kind == "weights":
        return _weights(model, seen, excluded | seen.cut_off)
    left = [n for n in seen.order if n not in excluded | seen.cut_off | seen.output_layers]
    if not left:
        raise StructureError(
            "the model has no prunable structure: no convolution or linear layer was called before the output layer"
            + (", or exclude= leaves none" if excluded else "")
            + f". Supported layers: {', '.join(t if isinstance(t, str) else t.__name__ for t in LAYERS)}."
        )
    left = _leave_shared(model, left)
    flow = _flow(model, example, tried_out=groups == "coupled")
    if flow is not None:  # what ran by chance of a few more rows is not known to the surgery
        flow.warn()
        left = [n for n in left if n in flow.graph.calls]
    layers = {name: _layer(model, seen, name) for name in left}
    if kind == "blocks":
        return _blocks(layers, seen, gate, flow)
    if groups == "coupled":
        ids = _coupled_ids(layers, flow)
    else:
        ids = _group_ids(layers, [] if isinstance(groups, str) else groups)
    branches = None  # in a branch that is pruned by itself, the last layer has structures of its own
    if groups == "coupled":
        branches = tuple(b for b in seen.branches if all(n in layers for n in b))
    return Structures(
        *("filters", gate, tuple(layers.values()), ids, seen.wiring, seen.footprint, flow, seen.outputs), branches
    )


def _flow(model: nn.Module, example: Any, tried_out: bool) -> Flow | None:
    """Return the channel flow, or None where it cannot be followed: scoring works without.

    Only coupled structures need to know before scoring which widths the code fixes. For all others the plan of the
    removal finds out.
    """
    try:
        return trace_flow(model, example) if tried_out else follow_channels(model, example)
    except StructureError:
        return None


def downsampling(model: nn.Module) -> tuple[str, ...]:
    """Return the layers on the skip paths where a ResNet changes its width, which the paper does not prune.

    Layers are found by name, as torchvision, timm and Hugging Face spell it: ``downsample``, ``shortcut``, ``skip``.

    Args:
        model: The network.

    Returns:
        Names for ``exclude``: ``find_structures(model, x, exclude=sosp.downsampling(model))``.
    """
    words = {"downsample", "shortcut", "skip"}
    return tuple(n for n, m in model.named_modules() if find_layer_type(m) and words & set(n.split(".")))


def _layer(model: nn.Module, seen: LayerTrace, name: str) -> Layer:
    module: Any = model.get_submodule(name)
    kind = find_layer_type(module)
    assert kind is not None
    channels = kind.channels(module)
    call = seen.calls[name]
    weights = call.weights / channels
    positions = sum(kind.positions(x, y) for x, y in call.shapes) / seen.examples
    # A norm's channels are on axis 1: behind a linear layer over tokens it normalises the tokens.
    axis = find_channel_axis(module, call.shapes[0][1])
    norms = call.norms if all(axis % y.dim() == 1 for _, y in call.shapes) else ()
    return Layer(
        name, channels, axis, norms, kind.kernel(module), weights + call.biased, weights * positions,
        kind.depthwise(module),
    )  # fmt: skip


def find_excluded_names(
    model: nn.Module, exclude: Exclude, *, parameters: bool = True, what: str = "exclude"
) -> set[str]:
    """Every module (and parameter) path that ``exclude`` covers; each entry must cover something."""
    things: dict[str, Any] = {n: m for n, m in model.named_modules(remove_duplicate=False) if n}
    things |= model.named_parameters(remove_duplicate=False) if parameters else {}
    covered: set[int] = set()
    for entry in _entries(exclude):
        if isinstance(entry, nn.Module):
            roots = [n for n, m in things.items() if m is entry]
        else:
            roots = [n for n in things if fnmatchcase(n, entry) or n == entry]
        if not roots:
            shown = type(entry).__name__ if isinstance(entry, nn.Module) else repr(entry)
            hint = "" if isinstance(entry, nn.Module) else suggest_name(entry, things)
            raise StructureError(f"{what} names {shown}, which matches no layer of the model.{hint}")
        covered.update(id(m) for n, m in things.items() for r in roots if n == r or n.startswith(r + "."))
    return {n for n, m in things.items() if id(m) in covered}  # a shared layer has several names


def _entries(exclude: Exclude) -> list[str | nn.Module]:
    entries: list[Any] = [exclude]
    if isinstance(exclude, Iterable) and not isinstance(exclude, (str, nn.Module)):
        entries = list(exclude)
    for entry in entries:
        if not isinstance(entry, (str, nn.Module)):
            raise ArgumentError(f"exclude holds {entry!r}; it takes names, patterns ('layer1.*') and modules.")
    return entries


def _refuse_unreached(seen: LayerTrace) -> None:
    """Refuse a network none of whose layers reaches the output differentiably."""
    if seen.order and seen.cut_off.issuperset(seen.order):
        raise StructureError(
            f"{format_names(tuple(map(repr, seen.order)))} run, but the model's output does not depend on any layer "
            "differentiably. Look for torch.no_grad, .detach() or an integer conversion (argmax) after them."
        )


def _leave_shared(model: nn.Module, names: list[str]) -> list[str]:
    """Return the layers that share no parameter with another: a weight belongs to one structure (the paper, Sec. 2).

    The channels of the others could only be removed from all of them at once.
    """
    owners: dict[int, list[str]] = {}
    for name in names:
        for key, p in model.get_submodule(name).named_parameters(recurse=False):
            owners.setdefault(id(p), []).append(f"{name}.{key}")
    shared = [paths for paths in owners.values() if len(paths) > 1]
    layers = {path.rpartition(".")[0] for paths in shared for path in paths}
    if names and layers.issuperset(names):
        pairs = format_names(tuple(" = ".join(map(repr, paths)) for paths in shared))
        raise StructureError(
            f"every layer that could be pruned shares a parameter with another one ({pairs}): a channel of one cannot "
            f"be removed without the other's. Give each layer its own copy, or exclude one, exclude=[{names[-1]!r}]."
        )
    return [n for n in names if n not in layers]


def _refuse_computed(model: nn.Module, name: str) -> None:
    """Single weights that another parameter determines cannot be removed by themselves."""
    if "weight" not in model.get_submodule(name)._parameters:
        raise StructureError(
            f"the weight of {name!r} is computed from other parameters (weight_norm, a parametrization). Exclude it "
            f"with exclude=[{name!r}], make it an ordinary parameter (remove_parametrizations), or use kind='filters'."
        )


def _group_ids(layers: dict[str, Layer], groups: Sequence[Group]) -> tuple[Tensor, ...]:
    """Number the structures in the order of their first channel."""
    leader: dict[tuple[str, int], tuple[str, int]] = {}
    for members in _members(layers, groups):
        for m in members:
            if m in leader:
                raise StructureError(f"channel {m[1]} of {m[0]!r} is in two groups; a channel has one gate.")
            leader[m] = members[0]
    numbers: dict[tuple[str, int], int] = {}
    ids = []
    for name, layer in layers.items():
        own = [leader.get((name, c), (name, c)) for c in range(layer.channels)]
        ids.append(torch.tensor([numbers.setdefault(key, len(numbers)) for key in own]))
    return tuple(ids)


def _coupled_ids(layers: dict[str, Layer], flow: Flow | None) -> tuple[Tensor, ...]:
    """One structure per channel of a stream: all that has to go together for nothing to be scattered.

    Channels that cannot go (pinned, or tied to a layer that is excluded or the output) have no structure, -1.
    """
    if flow is None:
        raise StructureError(
            "groups='coupled' needs to trace the network's channels, but this network cannot be traced "
            "(sosp.trace(model, example) says why). Name the groups: groups=[['layer1.0.conv2', 'layer1.1.conv2'], "
            "...]."
        )
    together, free = flow.coupled([norm for layer in layers.values() for norm in layer.norms])
    places = {n: flow.graph.calls[n][0].out for n in layers if n in flow.graph.calls}
    others = [d.out for d in flow.graph.dense.values() if d.module not in places]
    for ids in others:
        free[np.isin(together, together[ids])] = False
    numbers: dict[int, int] = {}
    found = []
    for name, layer in layers.items():
        out = places.get(name)
        if out is None or len(out) != layer.channels:
            found.append(torch.full((layer.channels,), -1))
            continue
        found.append(
            torch.tensor(
                [
                    numbers.setdefault(int(c), len(numbers)) if f else -1
                    for c, f in zip(together[out], free[out], strict=True)
                ]
            )
        )
    if not numbers:
        raise StructureError("no channel can be removed from all layers of its stream: use groups='independent'.")
    return tuple(found)


def _check_groups(groups: str | Sequence[Group], kind: str) -> None:
    if groups == "coupled" and kind != "filters":
        raise ArgumentError(f"groups='coupled' ties channels, and kind={kind!r} has none to tie. Use kind='filters'.")
    if isinstance(groups, str):
        return check_choice("groups", groups, ("independent", "coupled"))
    if kind != "filters":
        raise ArgumentError(f"groups= ties channels, and kind={kind!r} has none to tie. Use kind='filters'.")
    if not isinstance(groups, Sequence) or not all(_is_group(g) for g in groups):
        raise ArgumentError(
            f"groups={groups!r} must be a list of groups, each {{'conv1': [0], 'conv2': [0, 1]}} or ['conv1', 'conv2']."
        )
    return None


def _is_group(group: Any) -> bool:
    return isinstance(group, (Mapping, Sequence)) and not isinstance(group, str)


def _members(layers: dict[str, Layer], groups: Sequence[Group]) -> list[list[tuple[str, int]]]:
    """Every group as its channels, (layer, channel)."""
    found: list[list[tuple[str, int]]] = []
    for group in groups:
        for name in group:
            if name not in layers:
                raise StructureError(
                    f"groups name {name!r}, which is not a prunable layer.{suggest_name(str(name), layers)}"
                )
        if isinstance(group, Mapping):
            found.append([(name, _whole(name, c)) for name, channels in group.items() for c in channels])
        else:
            widths = {name: layers[name].channels for name in group}
            if len(set(widths.values())) > 1:
                raise StructureError(f"channels can be tied one to one only between layers of equal width: {widths}.")
            found += [[(name, c) for name in group] for c in range(next(iter(widths.values()), 0))]
    for name, c in (m for members in found for m in members):
        if not 0 <= c < layers[name].channels:
            raise StructureError(f"groups name channel {c} of {name!r}, which has {layers[name].channels}.")
    return [members for members in found if members]


def _whole(name: str, channel: Any) -> int:
    try:
        return index(channel)
    except TypeError:
        raise ArgumentError(f"groups name channel {channel!r} of {name!r}; channels are whole numbers.") from None


def _blocks(layers: dict[str, Layer], seen: LayerTrace, gate: str, flow: Flow | None) -> Structures:
    """One structure per branch: all channels of the layers it ends in."""
    ends = [e for e in seen.branches if all(n in layers for n in e)]
    if not ends:
        raise StructureError(
            "the model has no removable block: no residual add or concatenation of parallel layers was found"
            " among the layers that exclude= leaves. Use kind='filters'."
        )
    block = {name: i for i, names in enumerate(ends) for name in names}
    kept = {n: layer for n, layer in layers.items() if n in block}
    numbers = {old: new for new, old in enumerate(dict.fromkeys(block[n] for n in kept))}
    ids = tuple(torch.full((layer.channels,), numbers[block[n]]) for n, layer in kept.items())
    return Structures("blocks", gate, tuple(kept.values()), ids, seen.wiring, seen.footprint, flow, seen.outputs)


def _weights(model: nn.Module, seen: LayerTrace, excluded: set[str]) -> Structures:
    """Every parameter of the layers, one structure each; a parameter shared by two layers counts once."""
    layers: list[Layer] = []
    owners: set[int] = set()
    for name in (n for n in seen.order if n not in excluded):
        per_channel = _layer(model, seen, name)
        _refuse_computed(model, name)
        for key, p in model.get_submodule(name).named_parameters(recurse=False):
            if f"{name}.{key}" in excluded or id(p) in owners:
                continue
            owners.add(id(p))
            macs = per_channel.macs * per_channel.channels / p.numel() if key == "weight" else 0.0
            layers.append(Layer(f"{name}.{key}", p.numel(), 0, (), per_channel.kernel, 1.0, macs))
    if not layers:
        raise StructureError("the model has no prunable weight: no convolution or linear layer remains to prune.")
    start = 0
    ids = []
    for layer in layers:
        ids.append(torch.arange(start, start + layer.channels))
        start += layer.channels
    return Structures("weights", "weights", tuple(layers), tuple(ids), seen.wiring, seen.footprint)
