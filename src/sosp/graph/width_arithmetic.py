"""Numbers that the code makes of widths: found by running a smaller network beside the record of the whole one.

``x / x.shape[1] ** 0.5`` and ``q @ k / math.sqrt(self.q.out_features)`` compute something else when channels are gone.
Nothing shows that while the whole network runs; of the smaller one an op is given another number than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sosp.core.layers import find_layer_type
from sosp.graph.channels import Graph, Ids, OpRecord, Pin
from sosp.graph.layout import Layout, make_full_layout
from sosp.graph.recipe import Recipe

if TYPE_CHECKING:
    from sosp.graph.dry_run import DryRunMode
    from sosp.graph.flow import Flow

WHY = "the code uses the number of channels as a value"
Width = tuple[str, str]  # module, attribute


@dataclass(frozen=True)
class Trial:
    """A smaller network that was tried out, and how."""

    flow: Flow
    layout: Layout
    recipe: Recipe
    again: Callable[[Layout, Recipe], Iterable[tuple[str, DryRunMode]]]  # try another one out, mode by mode

    def run(self, mode: str, layout: Layout, recipe: Recipe) -> DryRunMode:
        return dict(self.again(layout, recipe))[mode]


def find_width_pins(trial: Trial, mode: str, run: DryRunMode) -> Iterator[Pin]:
    """Pins for the widths of which the numbers were made that are others than before."""
    if not run.computed:
        return
    unchanged = trial.run(mode, make_full_layout(trial.flow.graph.count), Recipe())
    chance = {id(r) for r in unchanged.computed}  # other numbers every time: chance, a counter
    for record in run.computed:
        if id(record) not in chance:
            ids = _width(trial, mode, record)
            if ids is not None:
                yield Pin(ids, record.name, record.where, WHY)


def _width(trial: Trial, mode: str, record: OpRecord) -> Ids | None:
    """The channels whose count is in the number; None where nothing is gone that could be."""
    graph, counts = trial.flow.graph, trial.layout.counts
    stated = _find_stated_channels(trial, mode, record)
    read = [ids for m, module, ids in graph.reads if m == mode and module == record.module]
    weights = [_of_tensor(graph, name) for m, module, name in graph.sized if m == mode and module == record.module]
    around = np.concatenate([stated[:0], *read, *weights])
    at_op = np.concatenate([stated[:0], *(x.numbers() for x in (*record.given, *record.out) if x is not None)])
    classes = trial.flow.classes
    both = around[np.isin(classes[around], classes[at_op])]
    for ids in (stated, both, around, np.arange(graph.count)):
        if (counts[ids] == 0).any():
            return np.unique(ids)
    return None


def _find_stated_channels(trial: Trial, mode: str, record: OpRecord) -> Ids:
    """The channels that a layer's own attribute counts (``out_features``), if the number is right where it is old."""
    recipe = trial.recipe
    widths = [
        (name, key) for name, sizes in recipe.sizes.items() if name not in recipe.emptied for key in sizes
        if key != "groups"
    ]  # fmt: skip

    def right(old: list[Width]) -> bool:
        sizes = {n: {k: v for k, v in a.items() if (n, k) not in old} for n, a in recipe.sizes.items()}
        return id(record) in trial.run(mode, trial.layout, replace(recipe, sizes=sizes)).agreed

    found = widths if widths and right(widths) else []
    while len(found) > 1:
        half = len(found) // 2
        part = next((p for p in (found[:half], found[half:]) if right(p)), None)
        if part is None:
            break
        found = part
    return np.concatenate([np.zeros(0, dtype=int), *(_of_width(trial, name, key) for name, key in found)])


def _of_width(trial: Trial, name: str, key: str) -> Ids:
    """The channels that an attribute of a module counts."""
    graph = trial.flow.graph
    kind = find_layer_type(trial.flow.network.get_submodule(name))
    for d in graph.dense.values():
        if kind is not None and d.module == name:
            return d.out if key == kind.sizes[0] or not d.into else d.into[0]
    if name in graph.calls:
        return graph.calls[name][0].given
    return _of_tensor(graph, f"{name}.weight")


def _of_tensor(graph: Graph, name: str) -> Ids:
    """The channels that lie along the axes of a parameter."""
    layer, slices = graph.dense.get(name), graph.slices.get(name)
    found = [layer.out, *layer.into[:1]] if layer is not None else [slices.ids] if slices is not None else []
    return np.concatenate([np.zeros(0, dtype=int), *found])
