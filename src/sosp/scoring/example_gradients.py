"""Passes over data that several criteria share: gate gradients of single examples, of minibatches, feature maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sosp.core import distributed
from sosp.core.batches import Chunk
from sosp.core.layers import apply_gates
from sosp.scoring.gauss_newton import has_examples_first
from sosp.scoring.jets import get_primal
from sosp.scoring.passes import (
    Gates,
    Problem,
    Sums,
    average_examples,
    compute_derivatives,
    compute_gated_losses,
    compute_losses,
    convert_to_double,
    install_jet_gates,
    install_plain_gates,
    make_reference_tensor,
    open_gates,
    repeat_single_example,
    try_in_order,
)

# Gradients of single examples: the empirical Fisher -------------------------------------------------------------------


def squared_gradients(problem: Problem) -> tuple[int, Tensor, Tensor]:
    """The number of examples, ``1/N sum_n d l_n/dg`` and ``1/N sum_n (d l_n/dg)^2``, (S,) each."""
    rows = example_rows(problem)

    def step(chunk: Chunk) -> Sums:
        J = rows(chunk)
        return J.sum(0), J.square().sum(0)

    count, (first, squares) = average_examples(problem, "Fisher", step, share=0.7)
    assert first is not None and squares is not None
    return count, first, squares


def gradient_products(problem: Problem, members: Sequence[Tensor]) -> tuple[int, Tensor, list[Tensor]]:
    """``1/N sum_n d l_n/dg`` and, within each set of structures, ``1/N sum_n (d l_n/dg)(d l_n/dg)^T``."""
    rows = example_rows(problem)

    def step(chunk: Chunk) -> Sums:
        J = rows(chunk)
        return J.sum(0), *(J[:, m].T @ J[:, m] for m in members)

    count, (first, *blocks) = average_examples(problem, "Fisher", step, share=0.7)
    assert first is not None
    return count, first, [b for b in blocks if b is not None]


def example_rows(problem: Problem) -> Callable[[Chunk], Tensor]:
    """A function of a chunk: ``d l_n / d g_s``, (n, S), the gate gradient of every example by itself.

    A gate's gradient is the sum, over the positions of its channels, of the activation times its gradient.
    """
    rows_of = try_in_order({"jets": _rows(install_jet_gates), "autograd": _rows(_plain)})
    apart: list[bool] = []

    def rows(chunk: Chunk) -> Tensor:
        if not apart:
            apart.append(has_examples_first(problem, chunk))
        parts = [chunk] if apart[0] else [chunk.rows(i, i + 1) for i in range(chunk.size)]
        return torch.cat([rows_of(problem, part) for part in parts])

    return rows


def _plain(problem: Problem, gates: Gates) -> Any:
    return install_plain_gates(problem, gates.values)


def _rows(way: Callable[[Problem, Gates], Any]) -> Callable[[Problem, Chunk], Tensor]:
    def rows_of(problem: Problem, chunk: Chunk) -> Tensor:
        n = chunk.size
        gates = open_gates(problem, make_reference_tensor(problem.model, chunk), examples=n if n > 1 else None)
        chunk, share = repeat_single_example(chunk) if way is _plain else (chunk, 1.0)
        with way(problem, gates):
            loss = get_primal(compute_gated_losses(problem, chunk)).sum() * share
            (rows,) = compute_derivatives(loss, [gates.values])
        return convert_to_double(rows.view(n, len(problem.structures)))

    return rows_of


# Gradients of minibatches ---------------------------------------------------------------------------------------------


def minibatch_gradients(problem: Problem, size: int) -> tuple[Tensor, Tensor]:
    """``sum_{n in b} d l_n/dg`` for every minibatch b, (B, S), and how many examples it has, (B,).

    The minibatches are cut here, ``size`` examples in the order of the data, whatever batches they came in; where
    several processes score, each holds a part of every minibatch.
    """
    gradient = try_in_order({"jets": _summed(install_jet_gates), "autograd": _summed(_plain)})
    sums: dict[int, Tensor] = {}
    sizes: dict[int, int] = {}

    def step(chunk: Chunk) -> Sums:
        spans = _split_minibatches(sum(sizes.values()), chunk.size, size)
        found = [(b, stop - start, gradient(problem, chunk.rows(start, stop))) for b, start, stop in spans]
        for b, n, g in found:  # only now that none of them ran out of memory
            sums[b] = sums[b] + g if b in sums else g
            sizes[b] = sizes.get(b, 0) + n
        return (torch.stack([g for _, _, g in found]).sum(0),)

    _, (first,) = average_examples(problem, "minibatch gradients", step, share=0.7)
    assert first is not None
    B = max(distributed.gather_counts(1 + max(sums), first.device))
    total = torch.stack([sums.get(b, torch.zeros_like(first)) for b in range(B)])
    counts = total.new_tensor([sizes.get(b, 0) for b in range(B)])
    distributed.sum_tensors(total, counts)
    return total, counts


def _split_minibatches(seen: int, n: int, size: int) -> list[tuple[int, int, int]]:
    """(minibatch, start, stop) of the next n examples of this process, which has seen so many: it has every R-th."""
    places = [((seen + i) * distributed.count_ranks() + distributed.get_rank()) // size for i in range(n)]
    starts = [i for i in range(n) if i == 0 or places[i] != places[i - 1]]
    return [(places[a], a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]


def _summed(way: Callable[[Problem, Gates], Any]) -> Callable[[Problem, Chunk], Tensor]:
    def gradient(problem: Problem, chunk: Chunk) -> Tensor:
        gates = open_gates(problem, make_reference_tensor(problem.model, chunk))
        chunk, share = repeat_single_example(chunk) if way is _plain else (chunk, 1.0)
        with way(problem, gates):
            loss = get_primal(compute_gated_losses(problem, chunk)).sum() * share
            return convert_to_double(*compute_derivatives(loss, [gates.values]))

    return gradient


# Feature maps ---------------------------------------------------------------------------------------------------------

FeatureMeasure = Callable[[Tensor], Tensor]  # (n, C, ...) feature maps -> (C,), summed over the examples


def feature_means(problem: Problem, measure: FeatureMeasure) -> tuple[int, list[Tensor]]:
    """What ``measure`` sees in every layer's feature maps behind its own norm, per example: (channels,) per layer.

    A layer that is called several times adds up what is seen in each.
    """
    layers = problem.structures.layers

    def step(chunk: Chunk) -> Sums:
        seen: list[Tensor | None] = [None] * len(layers)

        def look(i: int, output: Any) -> Any:
            found = convert_to_double(measure(_channels_second(output.detach(), layers[i].axis)))
            before = seen[i]
            seen[i] = found if before is None else before + found
            return output

        with apply_gates(problem.model, layers, "features", look), torch.no_grad():
            compute_losses(problem, chunk)  # a loss that is no number names its example
        return tuple(seen)

    count, means = average_examples(problem, "feature maps", step)
    like = next(m for m in means if m is not None)
    return count, [like.new_zeros(x.channels) if m is None else m for x, m in zip(layers, means, strict=True)]


def _channels_second(output: Tensor, axis: int) -> Tensor:
    """(n, C, ...): examples first, also where a convolution was given one without a batch."""
    return output.unsqueeze(0) if axis == 0 else output.movedim(axis, 1)


def count_channel_elements(problem: Problem, chunk: Chunk) -> list[float]:
    """Elements of one channel of every layer's own output, for one example: what it holds in memory."""
    layers = problem.structures.layers
    found = [0.0] * len(layers)

    def look(i: int, output: Any) -> Any:
        found[i] += output.numel() / (layers[i].channels * chunk.size)
        return output

    with apply_gates(problem.model, layers, "weights", look), torch.no_grad():
        chunk.run(problem.model)
    return found
