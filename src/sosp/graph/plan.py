"""Plan a removal: what stays, how to get there and what it costs, before a tensor is touched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from torch import Tensor, nn

from sosp.errors import StructureError, check_choice
from sosp.graph.bypass import add_bypasses
from sosp.graph.channels import DenseWeight, ModuleCall
from sosp.graph.dry_run import fit_layout
from sosp.graph.flow import Flow, follow_channels
from sosp.graph.forward_code import count_input_examples
from sosp.graph.labels import ZERO
from sosp.graph.layout import Layout, LayoutStyle, make_full_layout
from sosp.graph.mask import Mask, check_mask
from sosp.graph.ops import RECURRENT
from sosp.graph.recipe import Bypass, Recipe, find_zero_rows, list_bypassed_parts

CONVENTIONS = ("exact", "alternative")


@dataclass(frozen=True, eq=False)
class Plan:
    """One removal, complete: ``shrink`` carries it out without a decision."""

    mask: Mask
    flow: Flow  # with the pins that trying the removal out has shown
    layout: Layout
    recipe: Recipe
    zeroed: Mapping[str, tuple[int, Tensor]]  # parameter -> axis and rows set to zero (``join="zeros"``)
    cost: Cost


def plan_removal(flow: Flow, mask: Mask, style: LayoutStyle | None = None) -> Plan:
    """Return the plan to remove the channels of ``mask`` from the network of ``flow``.

    Pins that ``flow`` has learned from other removals do not count: whatever this one cannot lose is found again.
    """
    removed = flow.find_removed_outputs(mask.removed, mask.own_norms)
    fit = fit_layout(flow.without_learned(), removed, style)
    recipe = add_bypasses(fit.flow, fit.layout, fit.recipe)
    zeroed = find_zero_rows(flow.network, flow.graph, fit.layout, removed, recipe)
    return Plan(mask, fit.flow, fit.layout, recipe, zeroed, compute_cost(fit.flow, fit.layout, recipe.bypassed))


def count(model: nn.Module, example: Any, mask: Mask | None = None, *, convention: str = "exact") -> Cost:
    """Return the parameters and MACs of ``model``, or of what ``sosp.shrink(model, mask, example)`` makes of it.

    Args:
        model: The network.
        example: Inputs as ``model(...)`` takes them: a tensor, a tuple of arguments or a dict of keyword arguments.
        mask: What is removed; None for the whole network.
        convention: ``"exact"`` counts the network that is built. A channel of a stream disappears only if it is dead
            in every branch that feeds it. ``"alternative"`` takes as the inputs of a layer the outputs of the layer
            before it in the chain, as if the skips were adapted (the paper's App. D). It counts fewer, is comparable
            with papers that count in this way, and is equal for a network without a mask.

    Returns:
        The cost of the network, layer by layer.

    Raises:
        StructureError: The network cannot be followed, or the mask is of single weights or of another network.
    """
    check_choice("convention", convention, CONVENTIONS)
    flow = follow_channels(model, example)
    if mask is None:
        return compute_whole_cost(flow)
    check_mask(model, mask)
    if mask.kind == "weights":
        raise StructureError("single weights cannot be cut out of a layer: count a mask of kind='filters'.")
    if convention == "alternative":
        return compute_alternative_cost(flow, flow.find_removed_outputs(mask.removed, mask.own_norms))
    return plan_removal(flow, mask).cost


# What a network costs -------------------------------------------------------------------------------------------------

MATRICES = re.compile(r"weight_(ih|hh|hr)(_l\d+)?(_reverse)?")


@dataclass(frozen=True)
class LayerCost:
    """One module: its own parameters, and the multiply-accumulates of one example in it."""

    name: str
    params: int
    macs: int


@dataclass(frozen=True)
class Cost:
    """A network's parameters and MACs (convolutions, linear and recurrent layers) for one example."""

    params: int
    macs: int
    layers: tuple[LayerCost, ...]

    def __repr__(self) -> str:
        return f"Cost({self.params:,} parameters, {self.macs:,} MACs)"

    def __str__(self) -> str:
        """A line per module."""
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [repr(self)]
        lines += [f"  {layer.name:<{width}}  {layer.params:>12,}  {layer.macs:>15,}" for layer in self.layers]
        return "\n".join(lines)


def compute_whole_cost(flow: Flow) -> Cost:
    """The cost of the network as it is."""
    return compute_cost(flow, make_full_layout(flow.graph.count))


def compute_cost(flow: Flow, layout: Layout, bypassed: Mapping[str, Bypass] | None = None) -> Cost:
    """The cost of the network that keeps this, and of the bypassed modules only the steps."""
    params, macs = _sizes(flow, layout)
    gone = list_bypassed_parts(flow.network, bypassed or {})
    params = {name: 0 if name.rpartition(".")[0] in gone else number for name, number in params.items()}
    return _cost(params, {name: 0 if name in gone else number for name, number in macs.items()})


def _sizes(flow: Flow, layout: Layout) -> tuple[dict[str, int], dict[str, int]]:
    """Parameter -> elements, layer -> MACs."""
    counts = layout.counts
    gone = _gone(flow, layout)
    params = {n: 0 if n.rpartition(".")[0] in gone else prod(shape) for n, shape in flow.parameters.items()}
    macs = _recurrent(flow)
    for s in flow.graph.slices.values():
        if params.get(s.name) and s.name not in flow.graph.dense:
            params[s.name] = params[s.name] // len(s.ids) * int(counts[s.ids].sum())
    for d in flow.graph.dense.values():
        elements = 0 if d.weight in layout.emptied else _elements(d, counts)
        if d.weight in params:
            params[d.weight] = elements
        owner = d.module or d.weight.rpartition(".")[0]  # a weight that its module uses by hand (attention)
        macs[owner] = macs.get(owner, 0) + round(elements * d.positions.get("eval", 0.0))
    return params, macs


def _recurrent(flow: Flow) -> dict[str, int]:
    """Recurrent module -> MACs. One op mixes all channels that they are given, so none of their widths changes."""
    examples = count_input_examples(flow.example)
    steps: dict[str, int] = {}  # of all examples
    for op in flow.graph.records.get("eval", ()):
        if op.name in RECURRENT:
            steps[op.module] = steps.get(op.module, 0) + prod(op.shapes[0][:-1])
    sizes = {module: _matrices(flow.network.get_submodule(module)) for module in steps}
    return {module: round(size * steps[module] / examples) for module, size in sizes.items() if size}


def _matrices(module: nn.Module) -> int:
    """Elements of a recurrent module's matrices: also of those that another one owns, or that are computed."""
    return sum(getattr(module, key).numel() for key in dir(module) if MATRICES.fullmatch(key))


def _gone(flow: Flow, layout: Layout) -> set[str]:
    """Modules of which nothing is left: emptied layers, and the norms that nothing needs."""
    emptied = {d.module for d in flow.graph.dense.values() if d.weight in layout.emptied}
    norms = flow.norms
    return emptied | {n for n in norms if not layout.needed[flow.graph.calls[n][0].given].any()}


def _elements(d: DenseWeight, counts: np.ndarray) -> int:
    """rows x columns / groups x kernel."""
    rows, columns = int(counts[d.out].sum()), int(counts[d.into[0]].sum())
    held = counts[d.out].reshape(d.groups, -1).any(axis=1)
    # A depthwise convolution that is widened has a group for every channel that it reads.
    groups = int((held * np.maximum(counts[d.into[0]], 1)).sum() if d.groups == len(d.into[0]) else held.sum())
    return rows * columns // max(groups, 1) * d.kernel


def _cost(params: Mapping[str, int], macs: Mapping[str, int]) -> Cost:
    owners: dict[str, int] = {}
    for name, number in params.items():
        path = name.rpartition(".")[0]
        owners[path] = owners.get(path, 0) + number
    for name in macs:
        owners.setdefault(name, 0)
    layers = tuple(LayerCost(n, p, macs.get(n, 0)) for n, p in owners.items())
    return Cost(sum(owners.values()), sum(macs.values()), layers)


# App. D's approximate count -------------------------------------------------------------------------------------------


def compute_alternative_cost(flow: Flow, removed: Mapping[str, np.ndarray]) -> Cost:
    """Every layer reads what the layer before it in the chain gives; the skips are cut to fit.

    At an add the operand with the most layers behind it counts alone. A layer on the skip (a downsampling layer)
    gives as many channels as leave the add.
    """
    zero, skips = _chain(flow, removed)
    exact = flow.layout(removed)
    params, macs = _sizes(flow, exact)  # never more than what is built: what nothing reads goes in either count
    counts = (~zero).astype(np.int64)
    given = {name: cuts[-1] for name, cuts in flow.graph.calls.items()}
    widths: dict[str, int] = {}  # module -> channels that leave it
    for name, cut in given.items():
        behind = flow.following_norms.get(name, cut)
        widths[name] = skips.get(behind.module, int(counts[behind.out].sum()))
    work: dict[str, int] = {}
    for d in flow.graph.dense.values():
        rows = min(widths.get(d.module, len(d.out)), int(exact.counts[d.out].sum()))
        columns = min(max(int(counts[into].sum()) for into in d.into), int(exact.counts[d.into[0]].sum()))
        groups = max(1, round(d.groups * min(rows / len(d.out), columns / len(d.into[0])))) if d.groups > 1 else 1
        elements = (
            0 if d.weight in exact.emptied else min(rows * columns // groups * d.kernel, _elements(d, exact.counts))
        )
        for name, number in ((d.weight, elements), (d.bias or "", rows)):
            if name in params:
                params[name] = min(params[name], number)
        work[d.module] = work.get(d.module, 0) + round(elements * d.positions.get("eval", 0.0))
    for name in flow.norms:
        width = skips.get(name, int(counts[given[name].out].sum()))
        for n, shape in flow.parameters.items():
            if n.rpartition(".")[0] == name:
                params[n] = min(params[n], prod(shape) // len(given[name].given) * width)
    return _cost(params, {n: min(number, work.get(n, number)) for n, number in macs.items()})


def _chain(flow: Flow, removed: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, int]]:
    """(values,) which are zero when only the deepest operand of an add counts; and skip module -> its width."""
    graph = flow.graph
    zero = np.zeros(graph.count, dtype=bool)
    zero[ZERO] = True
    depth = np.zeros(graph.count, dtype=np.int64)  # layers on the way to a value
    layers = {d.module: d for d in graph.dense.values()}
    origin: dict[int, str] = {}  # first value of a cut -> its module
    read = {int(into[0]) for d in graph.dense.values() for into in d.into}
    skips: dict[str, int] = {}
    for step in graph.steps:
        if isinstance(step, ModuleCall):
            zero[step.out] = zero[step.into] | step.forced(removed.get(step.module), zero)
            layer = layers.get(step.module)
            before = layer.into if layer else [step.through if step.through is not None else step.given]
            depth[step.out] = max(int(depth[ids].max(initial=0)) for ids in before) + (layer is not None)
            origin[int(step.out[0])] = step.module
            continue
        parts = [zero[x].all(axis=1) for x in step.operands]
        depths = [int(depth[x].max(initial=0)) for x in step.operands]
        depth[step.out] = max(depths)
        if not step.all or len(parts) < 2 or any(step.kills):
            zero[step.out] = step.zero(parts)
            continue
        main = int(np.argmax(depths))
        zero[step.out] = parts[main]
        for k, x in enumerate(step.operands):
            module = origin.get(int(x[0, 0]))
            if k != main and module is not None and int(x[0, 0]) not in read:
                skips[module] = int((~zero[step.out]).sum())
    return zero, skips
