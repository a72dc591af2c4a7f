"""The Gauss-Newton matrix in the gates: ``1/N sum_n J_n^T R_n J_n``, J_n = d outputs / d gates of example n (Eq. 7).

R_n is a sum of v v^T over a few cotangents v of the outputs. Each v is one backward pass through gates that are kept
apart by example: its gate gradients are N rows of a tall matrix, and the Gram matrix of all rows is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from sosp.core import distributed
from sosp.core.batches import Chunk
from sosp.core.borrowed_model import find_device
from sosp.core.layers import apply_gates
from sosp.core.losses import check_finite
from sosp.core.outputs import find_logits
from sosp.scoring.jets import get_primal
from sosp.scoring.output_curvature import factor_curvature
from sosp.scoring.passes import (
    Gates,
    Problem,
    Sums,
    Terms,
    average_examples,
    check_requires_grad,
    compute_derivatives,
    convert_to_double,
    install_jet_gates,
    install_plain_gates,
    make_reference_tensor,
    measure_losses,
    open_gates,
    repeat_single_example,
    try_in_order,
)

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
    if generator is None:  # one for all chunks: the same signs again would not average out
        generator = torch.Generator(find_device(problem.model)).manual_seed(distributed.get_rank())
    rows_of = try_in_order(
        {
            "jets": _make_row_pass(install_jet_gates, classes, generator),
            "autograd": _make_row_pass(_plain, classes, generator),
        }
    )
    apart: list[bool] = []

    def step(chunk: Chunk) -> Sums:
        if not apart:
            apart.append(has_examples_first(problem, chunk))
        parts = [chunk] if apart[0] else [chunk.rows(i, i + 1) for i in range(chunk.size)]
        total = None
        with gram.all_or_nothing():
            for part in parts:
                first, rows = rows_of(problem, part, apart[0])
                gram.add(rows)
                total = first if total is None else total.add_(first)
        return (total,)

    count, (first,) = average_examples(problem, "Gauss-Newton", step, share=0.7)
    assert first is not None and gram.total is not None
    distributed.sum_tensors(gram.total)
    second = gram.total.div_(count)
    return Terms(count, first, second) if diagonal else Terms(count, first, second.sum(1), second)


class Gram:
    """Sums ``J^T J`` over blocks of rows, or only its diagonal."""

    def __init__(self, S: int, diagonal: bool) -> None:
        self.S, self.diagonal = S, diagonal
        self.total: Tensor | None = None
        self.blocks = 0

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """A chunk that runs out of memory may be tried again in halves, but not once part of it has been added."""
        before = self.blocks
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.blocks == before:
                raise
            raise MemoryError(
                f"the device ran out of memory within a chunk, with {self.S} structures. Free memory, exclude layers, "
                "or use method='sosp-h', which keeps no matrix."
            ) from error

    def add(self, rows: Iterator[Tensor]) -> None:
        """Add a chunk's rows, a thousand or so at a time."""
        for block in _blocks(rows):
            block = block.to(torch.promote_types(block.dtype, torch.float32))  # half precision is not for sums
            if self.total is None:
                self.total = block.new_zeros((self.S,) if self.diagonal else (self.S, self.S))
            self.blocks += 1
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


def _plain(problem: Problem, gates: Gates) -> AbstractContextManager[None]:
    return install_plain_gates(problem, gates.values)


def _make_row_pass(
    way: Callable[..., Any], classes: int | None, generator: torch.Generator | None
) -> Callable[..., Rows]:
    """Rows of one chunk: a forward pass with gates, then one backward pass per cotangent."""

    def rows_of(problem: Problem, chunk: Chunk, apart: bool) -> Rows:
        like = make_reference_tensor(problem.model, chunk)
        alone, share = repeat_single_example(chunk) if way is _plain and not apart else (chunk, 1.0)
        gates = open_gates(problem, like, examples=chunk.size if apart else None)
        with ExitStack() as stack:
            stack.enter_context(way(problem, gates))  # open until the last backward pass: it may run forward again
            outputs = alone.run(problem.model)
            if problem.own is None:
                loss = get_primal(measure_losses(problem, outputs, alone))
                (first,) = compute_derivatives(loss.sum(), [gates.values], retain_graph=True)
            else:  # a network that is its own target has no slope
                first = torch.zeros_like(gates.values)
            rows = backward(problem, outputs, alone, gates, stack.pop_all())
        return convert_to_double(first.sum(0) if apart else first * share), (r * share for r in rows)

    def backward(problem: Problem, outputs: Any, chunk: Chunk, gates: Gates, stack: ExitStack) -> Iterator[Tensor]:
        with stack:
            for tensors, cotangents in list_cotangents(problem, outputs, chunk, classes, generator):
                (rows,) = compute_derivatives(tensors, [gates.values], grad_outputs=cotangents, retain_graph=True)
                yield rows.view(-1, len(problem.structures))

    return rows_of


def list_cotangents(
    problem: Problem, outputs: Any, chunk: Chunk, classes: int | None, generator: torch.Generator | None
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield the tensors where a backward pass starts, and a cotangent of each; a random one starts in all at once."""
    if problem.own is None:
        logits = get_primal(find_logits(outputs))
        for v in factor_curvature(problem.loss, outputs, chunk, classes, generator):
            yield [logits], [v.to(logits.dtype)]
        return
    roots = problem.own.take_roots(outputs, chunk)
    for x, _ in roots:
        check_finite(x, chunk)
    moving = [(x, root) for x, root in roots if x.requires_grad]
    check_requires_grad(moving[0][0] if moving else roots[0][0])
    if classes is None or classes >= sum(root.width for _, root in moving):
        yield from (([x], [v.to(x.dtype)]) for x, root in moving for v in root.columns())
        return
    assert generator is not None
    for each in zip(*(root.sample(classes, generator) for _, root in moving), strict=True):
        yield [x for x, _ in moving], [v.to(x.dtype) for v, (x, _) in zip(each, moving, strict=True)]


def has_examples_first(problem: Problem, chunk: Chunk) -> bool:
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

        with apply_gates(problem.model, layers, gate, look), torch.no_grad():
            chunk.rows(0, n).run(problem.model)
    return all(found)
