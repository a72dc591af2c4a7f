"""Diagonal Fisher information of structures: one by one, and collected over coupled groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosp.core.batches import check_device
from sosp.core.borrowed_model import find_device
from sosp.graph.plan import compute_cost, compute_whole_cost
from sosp.graph.records import Structures
from sosp.scoring.criteria.filters import sum_channels
from sosp.scoring.example_gradients import count_channel_elements, squared_gradients
from sosp.scoring.passes import Options, Problem, Values


def fisher(problem: Problem, options: Options) -> Values:
    """``1/(2N) sum_n g_ns^2``, ``g_ns = sum over positions of a dl_n/da``: the gradient of the gate of s for example n.

    Theis et al., Faster gaze prediction with dense networks and Fisher pruning, 2018 (arXiv 1801.05787). The loss of a
    trained network has no slope, and the Fisher information with the labels of the data stands for its curvature.
    The paper's cost term is ``select(..., scale="macs")``.
    """
    count, _, squares = squared_gradients(problem)
    return Values(0.5 * squares, count)


def group_fisher(problem: Problem, options: Options) -> Values:
    """``sum_n g_ns^2 / (N m_s)``, g_ns summed over all channels that share a place, m_s the memory they hold.

    Liu et al., Group Fisher Pruning for Practical Network Compression, ICML 2021 (github.com/jshilong/FisherPruning).
    Memory: the elements, for one example, of the outputs of all layers that produce the channel. The authors put the
    masks where a channel is read and remove one channel at a time while they train; the gates here stand where it is
    made, which is the same sum in a network of ReLUs, and all are scored at once.
    """
    chunks = iter(problem.chunks)
    head = next(chunks, None)
    if head is None:
        return _divide_by_size(problem, torch.ones(len(problem.structures)))  # refused there: the data is empty
    check_device(head, find_device(problem.model))
    layers, held = problem.structures.layers, count_channel_elements(problem, head.rows(0, 1))
    sizes = sum_channels(problem.structures, [torch.full((x.channels,), a) for x, a in zip(layers, held, strict=True)])
    return _divide_by_size(replace(problem, chunks=chain([head], chunks)), sizes)


def group_fisher_macs(problem: Problem, options: Options) -> Values:
    """The same over the multiply-accumulates that go with the channel, in the layers that make it and that read it."""
    return _divide_by_size(problem, saved_macs(problem.structures))


def _divide_by_size(problem: Problem, sizes: Tensor) -> Values:
    count, _, squares = squared_gradients(problem)
    return Values(squares / sizes.clamp_min(1.0).to(squares), count)


def saved_macs(structures: Structures) -> Tensor:
    """(S,) multiply-accumulates of one example that go when a structure does, by the exact count.

    Structures that are made and read by the same layers save the same: one count for all of them.
    """
    flow = structures.flow
    assert flow is not None  # structures are coupled, which needs it
    whole = compute_whole_cost(flow).macs
    norms = {layer.name: layer.norms for layer in structures.layers}
    places = _find_channel_uses(flow)
    keys: list[list[ChannelUse]] = [[] for _ in range(len(structures))]
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        for c, s in enumerate(ids.tolist()):
            keys[s] += places[layer.name][c] if s >= 0 else ()
    found = torch.zeros(len(structures))
    known: dict[tuple[ChannelUse, ...], float] = {}
    for s, key in enumerate(map(tuple, keys)):
        if key not in known:
            removed = flow.find_removed_outputs(structures.channels_of(torch.tensor([s])), norms)
            known[key] = whole - compute_cost(flow, flow.layout(removed)).macs
        found[s] = known[key]
    return found


ChannelUse = tuple[str, int, int]  # a layer's weight, and how many channels it makes and reads


def _find_channel_uses(flow: Any) -> dict[str, list[tuple[ChannelUse, ...]]]:
    """Layer -> channel -> every layer that makes or reads what flows together with it, and how many channels of it."""
    together, _ = flow.coupled()
    found: dict[int, list[ChannelUse]] = {}
    for d in flow.graph.dense.values():
        made, read = (np.bincount(together[ids], minlength=len(together)) for ids in (d.out, d.into[0]))
        for c in np.flatnonzero(made + read).tolist():
            found.setdefault(c, []).append((d.weight, int(made[c]), int(read[c])))
    return {
        name: [tuple(found.get(c, ())) for c in together[cuts[0].out].tolist()]
        for name, cuts in flow.graph.calls.items()
    }
