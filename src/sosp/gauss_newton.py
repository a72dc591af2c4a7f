"""The Gauss-Newton matrix in the gates: ``1/N sum_n J_n^T R_n J_n``, J_n = d outputs / d gates of example n (Eq. 7).

R_n is a sum of v v^T over a few cotangents v of the outputs. Each v is one backward pass through gates that are kept
apart by example: its gate gradients are N rows of a tall matrix, and the Gram matrix of all rows is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sosp.data import Chunk
from sosp.gates import gated
from sosp.jets import Jet
from sosp.losses import factors, logits_of, per_example
from sosp.passes import (
    Leaves, Problem, Sums, Terms, average, collect, derivative, example_tensor, first_that_works, jet_gates,
    leaves, plain_gates,
)  # fmt: skip

ROWS = 1024  # rows of the Jacobian gathered for one product with itself

Rows = tuple[Tensor, Iterator[Tensor]]  # the first-order term (S,) of a chunk, and its rows, (n, S) at a time


def gauss_newton(
    problem: Problem,
    *,
    diagonal: bool = False,
    classes: int | None = None,
    generator: torch.Generator | None = None,
) -> Terms:
    """First-order term and Gauss-Newton pairs; only their diagonal, as ``second``, with ``diagonal``."""
    gram = Gram(len(problem.structures), diagonal)
    rows_of = first_that_works(
        {"jets": _with(jet_gates, classes, generator), "autograd": _with(_plain, classes, generator)}
    )
    apart: list[bool] = []

    def step(chunk: Chunk) -> Sums:
        if not apart:
            apart.append(examples_apart(problem, chunk))
        parts = [chunk] if apart[0] else [chunk.rows(i, i + 1) for i in range(chunk.size)]
        total = None
        for part in parts:
            first, rows = rows_of(problem, part, apart[0])
            gram.add(rows)
            total = first if total is None else total.add_(first)
        return (total,)

    count, (first,) = average(problem, "Gauss-Newton", step)
    assert first is not None and gram.total is not None
    second = gram.total.div_(count)
    return Terms(count, first, second) if diagonal else Terms(count, first, second.sum(1), second)


class Gram:
    """Sums ``J^T J`` over blocks of rows, or only its diagonal."""

    def __init__(self, S: int, diagonal: bool) -> None:
        self.S, self.diagonal = S, diagonal
        self.total: Tensor | None = None

    def add(self, rows: Iterator[Tensor]) -> None:
        """Add a chunk's rows, a thousand or so at a time."""
        started = False
        try:
            for block in _blocks(rows):
                self._add(block)
                started = True
        except torch.OutOfMemoryError as error:
            # Before the first block nothing was added, and the chunk may be tried again in halves.
            if started:
                raise MemoryError(
                    "out of memory in the middle of a chunk of examples; give smaller examples="
                ) from error
            raise

    def _add(self, block: Tensor) -> None:
        if self.total is None:
            shape = (self.S,) if self.diagonal else (self.S, self.S)
            self.total = block.new_zeros(shape)
        if self.diagonal:
            self.total += block.square().sum(0)
        else:
            self.total.addmm_(block.T, block)


def _blocks(rows: Iterator[Tensor]) -> Iterator[Tensor]:
    held: list[Tensor] = []
    for r in rows:
        held.append(r)
        if sum(len(h) for h in held) >= ROWS:
            yield torch.cat(held)
            held = []
    if held:
        yield torch.cat(held)


def _plain(problem: Problem, at: Leaves) -> Any:
    return plain_gates(problem, at.values)


def _with(gates: Callable[..., Any], classes: int | None, generator: torch.Generator | None) -> Callable[..., Rows]:
    """Rows of one chunk: a forward pass with gates, then one backward pass per cotangent."""

    def rows_of(problem: Problem, chunk: Chunk, apart: bool) -> Rows:
        like = example_tensor(problem.model, chunk)
        at = leaves(problem, like, None, chunk.size if apart else None)
        with gates(problem, at):
            outputs = chunk.run(problem.model)
            loss = per_example(problem.loss, outputs, chunk)
        values = list(at.values)
        first = derivative(_value(loss).sum(), values, retain_graph=True)
        summed = [None if f is None else f.sum(0) if apart else f for f in first]
        return collect(problem, summed, like), backward(problem, outputs, chunk, values)

    def backward(problem: Problem, outputs: Any, chunk: Chunk, values: list[Tensor]) -> Iterator[Tensor]:
        logits = _value(logits_of(outputs))
        for v in factors(problem.loss, outputs, chunk, classes, generator):
            found = derivative(logits, list(values), grad_outputs=v.to(logits.dtype), retain_graph=True)
            rows = [None if f is None else f if f.dim() == 2 else f.unsqueeze(0) for f in found]
            yield problem.structures.gather(rows, logits.new_empty(chunk.size, 0))

    return rows_of


def _value(x: Tensor) -> Tensor:
    return x.p if isinstance(x, Jet) else x


def examples_apart(problem: Problem, chunk: Chunk) -> bool:
    """Whether the first dimension of every gated output is the example, so that gates can be kept apart by it.

    Two runs, of two and of three examples, tell an example from a token or a window; where it is something else,
    the examples are run one by one.
    """
    if chunk.size < 3:
        return False
    found: list[bool] = []
    layers, gate = problem.structures.layers, problem.structures.gate
    for n in (2, 3):

        def look(i: int, output: Any, n: int = n) -> Any:
            found.append(output.dim() > 1 and output.shape[0] == n)
            return output

        with gated(problem.model, layers, gate, look), torch.no_grad():
            chunk.rows(0, n).run(problem.model)
    return all(found)
