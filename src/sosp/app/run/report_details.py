"""What a report shows of a pruning beside its figures: every layer's widths, and the loss as structures go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sosp.app.config import PruningSection
from sosp.app.run.expansion_stage import make_growth
from sosp.app.run.job import RunJob
from sosp.data import Source
from sosp.errors import ArgumentError
from sosp.graph.layout import LayoutStyle
from sosp.graph.mask import Mask, masked
from sosp.graph.plan import plan_removal
from sosp.graph.records import INPUT, Saliency, Structures
from sosp.nets.by_name import parse_network_name
from sosp.pipeline.pruned import Pruned
from sosp.selection.greedy_order import rank_structures
from sosp.selection.saved_saliency import read_saliency
from sosp.studies.bottlenecks.bottleneck_detection import CostOf, bottlenecks
from sosp.training import evaluate

POINTS = 8  # along the way, the whole mask being the last one
EXAMPLES = 256  # the loss is measured on: enough to see a curve, and a small part of what scoring takes
# Methods whose numbers are derivatives of the loss in the gates, and so predict what removing several does to it.
DERIVATIVES = ("sosp-h", "sosp-i", "sosp-i-diagonal", "first-order", "exact")


def find_saved_bottlenecks(job: RunJob, saved: Path, structures: Structures) -> dict[str, Any] | None:
    """The bottlenecks that a saved saliency shows; None for a method that ranks every layer by itself."""
    ours = parse_network_name(job.config.model.name)[0] == "sosp" and not getattr(job.start, "sosp_recipes", ())
    cost: CostOf | None = (lambda factors: make_growth(job).cost(factors)) if ours else None
    try:
        return bottlenecks(read_saliency(saved), structures=structures, cost=cost).as_dict()
    except ArgumentError:
        return None


def collect_details(model: nn.Module, found: Pruned, section: PruningSection, scored: Source) -> dict[str, Any]:
    """``layers`` and, unless the section says otherwise, ``losses``, on the examples that it was ``scored`` with."""
    layers = list_widths(found, section.selection.style)
    return {"layers": layers, "losses": measure_losses(model, found, scored) if section.curve else None}


# --- widths ---------------------------------------------------------------------------------------------


def list_widths(found: Pruned, style: LayoutStyle) -> list[dict[str, Any]]:
    """Every layer in the order of the network: the stream it reads and the one it writes, channels before and left."""
    structures, flow = found.saliency.structures, found.saliency.structures.flow
    if flow is None:
        return []
    layout = (found.plan or plan_removal(flow, found.mask, style)).layout
    number = number_streams(structures.wiring)

    def record(d: Any) -> dict[str, Any]:
        name, gone = d.module or d.weight, d.weight in layout.emptied
        read = structures.wiring.get(name, (INPUT,))
        sizes = {"into": d.into[0] if d.into else d.out[:0], "out": d.out}
        return {
            "name": name,
            "reads": number.get(read[0], 0) if read else 0,
            "writes": number.get(name, 0),
            **{key: [len(ids), 0 if gone else int(layout.counts[ids].sum())] for key, ids in sizes.items()},
        }

    return [record(d) for d in flow.graph.dense.values()]


def number_streams(wiring: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Layer -> the number of the stream it writes into; what meets in front of a layer is one stream, 0 the input."""
    first: dict[str, str] = {INPUT: INPUT}

    def root(name: str) -> str:
        while first.setdefault(name, name) != name:
            name = first[name]
        return name

    for name, read in wiring.items():
        root(name)
        for other in read[1:]:
            first[root(other)] = root(read[0])
    roots = list(dict.fromkeys(root(name) for name in (INPUT, *wiring)))
    return {name: roots.index(root(name)) for name in first}


# --- losses ---------------------------------------------------------------------------------------------


def measure_losses(model: nn.Module, found: Pruned, scored: Source) -> dict[str, Any]:
    """The loss after the first structures are gone, after more, after all: measured, and as the derivatives say."""
    order = order_removals(found.saliency, found.mask)
    counts = sorted({round(k * len(order) / POINTS) for k in range(POINTS + 1)})
    some = scored.subset(min(EXAMPLES, len(scored)), 0)  # of all classes, also where files lie in their order
    return {
        "examples": len(some),
        "points": [_point(model, found.saliency, order[:count], some) for count in counts],
    }


def order_removals(saliency: Saliency, mask: Mask) -> Tensor:
    """The structures of the mask, those first that would go first if all were ranked together."""
    structures = saliency.structures
    ids = [
        ids[mask.removed[layer.name].to(ids.device)]
        for layer, ids in zip(structures.layers, structures.ids, strict=True)
        if layer.name in mask.removed
    ]
    gone = torch.cat(ids).unique() if ids else torch.zeros(0, dtype=torch.long)
    return gone[rank_structures(saliency).cpu()[gone].argsort()]


def _point(model: nn.Module, saliency: Saliency, gone: Tensor, some: Source) -> dict[str, Any]:
    left = masked(model, Mask.from_structures(saliency.structures, gone)) if len(gone) else model
    tested = evaluate(left, some)
    changes = predict_changes(saliency, gone) if saliency.method in DERIVATIVES else {}
    found = {"loss": tested.loss, "top1": tested.top1, **changes}
    return {"removed": len(gone), **{k: v if math.isfinite(v) else None for k, v in found.items()}}


def predict_changes(saliency: Saliency, gone: Tensor) -> dict[str, float]:
    """The change of the loss, ``-sum f_s`` and ``-sum f_s + 1/2 sum H_ss'`` over what is gone.

    Where pairs are not known, the second sum is over the terms that the method has instead: ``(H 1)_s`` for SOSP-H,
    ``H_ss`` for the diagonal.
    """
    assert saliency.first is not None
    picked = torch.zeros_like(saliency.first)
    picked[gone.to(picked.device)] = 1
    slope = -float(saliency.first @ picked)
    if saliency.pairs is not None:
        return {"first": slope, "second": slope + 0.5 * float(picked @ (saliency.pairs @ picked))}
    if saliency.second is not None:
        return {"first": slope, "second": slope + 0.5 * float(saliency.second @ picked)}
    return {"first": slope}
