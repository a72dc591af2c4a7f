"""Diagonal Fisher information of structures: one by one, and collected over coupled groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from sosp.batches import check_device
from sosp.cost import cost_of, whole_cost
from sosp.criteria.filters import summed
from sosp.criteria.method import Values
from sosp.criteria.options import Options
from sosp.passes import Problem, home
from sosp.records import Structures
from sosp.statistics import areas, squared_gradients


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
        return _per(problem, torch.ones(len(problem.structures)))  # refused there: the data is empty
    check_device(head, home(problem.model))
    layers, held = problem.structures.layers, areas(problem, head.rows(0, 1))
    sizes = summed(problem.structures, [torch.full((x.channels,), a) for x, a in zip(layers, held, strict=True)])
    return _per(replace(problem, chunks=chain([head], chunks)), sizes)


def group_fisher_macs(problem: Problem, options: Options) -> Values:
    """The same over the multiply-accumulates that go with the channel, in the layers that make it and that read it."""
    return _per(problem, saved_macs(problem.structures))


def _per(problem: Problem, sizes: Tensor) -> Values:
    count, _, squares = squared_gradients(problem)
    return Values(squares / sizes.clamp_min(1.0).to(squares), count)


def saved_macs(structures: Structures) -> Tensor:
    """(S,) multiply-accumulates of one example that go when a structure does, by the exact count.

    Structures with channels in the same layers save the same: one count for all of them.
    """
    flow, whole = structures.flow, whole_cost(structures.flow).macs
    places = {layer.name: layer.norms for layer in structures.layers}
    known: dict[tuple[tuple[str, int], ...], float] = {}
    found = torch.zeros(len(structures))
    for s in range(len(structures)):
        channels = structures.channels_of(torch.tensor([s]))
        key = tuple((name, len(c)) for name, c in channels.items())
        if key not in known:
            known[key] = whole - cost_of(flow, flow.layout(flow.removed(channels, places))).macs
        found[s] = known[key]
    return found
