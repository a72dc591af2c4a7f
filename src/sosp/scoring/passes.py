"""Passes over data: a network with its gates on, run chunk by chunk, and averaged in one place.

Sums over examples are collected chunk by chunk and divided once, so that how the data is cut into batches does not
matter. A quantity has a fast way (jets) and slower exact ones for networks that jets cannot follow; the first that
works is used, and a warning says so when it is not the fast one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sosp.core import distributed
from sosp.core.batches import Chunk, check_device, rebatch
from sosp.core.borrow import home
from sosp.core.gates import along, gated
from sosp.core.losses import LossLike, per_example
from sosp.core.progress import track
from sosp.errors import DataError, DifferentiationError, SospError
from sosp.graph.records import Structures
from sosp.scoring import jets

CPU_CHUNK = 96 * 2**20  # bytes of activations at once: beyond the caches a pass gets slower, not faster
LARGEST_CHUNK = 1024  # examples: a GPU is busy by then


class SlowPathWarning(UserWarning):
    """An exact but slower way had to be taken."""


@dataclass(frozen=True)
class Problem:
    """A network (borrowed: in eval mode, parameters frozen), what can be removed from it, and the loss on some data."""

    model: nn.Module
    structures: Structures
    loss: LossLike
    chunks: Iterable[Chunk]
    examples: int | None = None  # how many are expected, for the progress bar


@dataclass(frozen=True)
class Terms:
    """Averages over the examples."""

    examples: int
    first: Tensor  # (S,)
    second: Tensor | None = None  # (S,)
    pairs: Tensor | None = None  # (S, S)


# One place averages -------------------------------------------------------------------------------------------------

Sums = tuple[Tensor | None, ...]


def average(problem: Problem, label: str, step: Callable[[Chunk], Sums], share: float = 1.0) -> tuple[int, Sums]:
    """Sum ``step`` over the data in chunks that fit the memory and divide once by the number of examples.

    ``share``: the memory a pass needs, as a multiple of the activations of a forward pass.
    """
    total: list[Tensor | None] = []
    count = 0
    device = home(problem.model)
    chunks = rebatch(_checked(problem.chunks, device), chunk_size(problem, device, share))
    for chunk in track(chunks, label, problem.examples, "size"):
        for part in _halved(step, chunk):
            total = [_plus(a, b) for a, b in zip(total or [None] * len(part), part, strict=True)]
        count += chunk.size
    counts = distributed.counts(count, device)
    if 0 in counts:
        raise DataError(
            "the data is empty: not one example to score with. Is the loader's dataset or subset empty?"
            if not any(counts)
            else f"{sum(counts)} examples are too few for {len(counts)} processes: give every one of them an example."
        )
    distributed.sum_(*[t for t in total if t is not None])
    return sum(counts), tuple(None if t is None else t.div_(sum(counts)) for t in total)


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)


def _checked(chunks: Iterable[Chunk], device: torch.device) -> Iterator[Chunk]:
    for chunk in chunks:
        check_device(chunk, device)
        if chunk.size:
            yield chunk


def _halved(step: Callable[[Chunk], Sums], chunk: Chunk) -> Iterator[Sums]:
    """The step on the whole chunk, or on ever smaller parts of it when memory runs out."""
    try:
        result = step(chunk)
    except torch.OutOfMemoryError:
        if chunk.size == 1:
            raise
    else:
        yield result
        return
    torch.cuda.empty_cache()
    half = chunk.size // 2
    yield from _halved(step, chunk.rows(0, half))
    yield from _halved(step, chunk.rows(half, chunk.size))


def chunk_size(problem: Problem, device: torch.device, share: float) -> int:
    """How many examples run at once: what the caches like on a CPU, what the memory holds on a GPU."""
    footprint = max(problem.structures.footprint, 1)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(1, min(LARGEST_CHUNK, int(0.5 * free / (share * footprint))))
    return max(4, min(256, CPU_CHUNK // footprint))


# Gates on a running network -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gates:
    """A gate of one for every structure, (S,) or (N, S) for each example by itself, and the direction it moves in."""

    values: Tensor
    direction: Tensor | None  # (S,)
    moving: tuple[bool, ...]  # per layer, whether any of its gates moves


def open_gates(problem: Problem, like: Tensor, direction: Tensor | None = None, examples: int | None = None) -> Gates:
    """All gates open, ready to be differentiated in."""
    structures = problem.structures
    shape = (len(structures),) if examples is None else (examples, len(structures))
    values = like.new_ones(shape).requires_grad_()
    if direction is None:
        return Gates(values, None, (False,) * len(structures.layers))
    moving = tuple(bool(direction[ids[ids >= 0]].any()) for ids in structures.ids)
    return Gates(values, direction.to(like).requires_grad_(), moving)


def example_tensor(model: nn.Module, chunk: Chunk) -> Tensor:
    """A tensor of the model's device and floating type, to make others like it."""
    for x in (*model.parameters(), *tree_leaves(chunk.inputs)):
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.new_empty(0)
    return torch.empty(0)


@contextmanager
def jet_gates(problem: Problem, gates: Gates) -> Iterator[None]:
    """Run the network on jets, which start at its first gate."""
    layers = problem.structures.layers
    values = problem.structures.spread(gates.values)
    # A channel without a gate stands still.
    tangents = None if gates.direction is None else problem.structures.spread(gates.direction, otherwise=0.0)

    def apply(i: int, output: Any) -> Any:
        moving = tangents[i] if tangents is not None and gates.moving[i] else None
        return jets.gate(output, jets.Gate(values[i], moving, layers[i].axis))

    with gated(problem.model, layers, problem.structures.gate, apply), jets.folded_norms(problem.model):
        yield


@contextmanager
def plain_gates(problem: Problem, values: Tensor) -> Iterator[None]:
    """Run the network with every channel multiplied by its gate."""
    layers = problem.structures.layers
    spread = problem.structures.spread(values)

    def apply(i: int, output: Any) -> Any:
        return output * along(spread[i], output.dim(), layers[i].axis)

    with gated(problem.model, layers, problem.structures.gate, apply):
        yield


def doubled(chunk: Chunk) -> tuple[Chunk, float]:
    """A lone example twice, and the factor that makes up for it.

    With a single example torch's batch norm gets its gradient wrong on CPUs where that gradient is laid out in an
    unusual order (seen with torch 2.13); with two it does not. Jets do without torch's batch norm.
    """
    if chunk.size > 1:
        return chunk, 1.0
    return chunk.twice(), 0.5


def losses_of(problem: Problem, chunk: Chunk) -> Any:
    """One loss per example, (N,)."""
    losses = ungated_losses(problem, chunk)
    refuse_constant(jets.value(losses))
    return losses


def ungated_losses(problem: Problem, chunk: Chunk) -> Any:
    """The same of the network as it is, which need not depend on anything."""
    return per_example(problem.loss, chunk.run(problem.model), chunk)


def refuse_constant(output: Tensor) -> None:
    if not output.requires_grad:
        raise DifferentiationError(
            "the loss does not depend differentiably on any structure. Look for torch.no_grad, .detach(), .item() or "
            "an argmax in the model's forward or in the loss."
        )


def derivative(output: Tensor, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """``d output / d inputs``; zeros where an input plays no part."""
    refuse_constant(output)
    return list(torch.autograd.grad(output, inputs, materialize_grads=True, allow_unused=True, **options))


def refuse_dead_ends(slope: Tensor) -> None:
    """A backward marked ``once_differentiable`` ends in an error node that ``autograd.grad`` walks past in silence."""
    seen: set[Any] = set()
    stack = [slope.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise NotImplementedError("an operation's backward cannot be differentiated (once_differentiable)")
        stack += [n for n, _ in node.next_functions]


# Ways: the same quantity, fast first ----------------------------------------------------------------------------------

Way = Callable[..., Any]
# What a network outside a way's reach raises; anything of ours is about the data or the model and goes to the user.
OUT_OF_REACH = (
    jets.Unsupported,
    RuntimeError,
    NotImplementedError,
    TypeError,
    AttributeError,
    IndexError,
    ValueError,
)


def first_that_works(ways: Mapping[str, Way], advice: str = "") -> Way:
    """Try the ways in turn on the first chunk and stay with the one that works."""
    names = list(ways)
    told: list[str] = []

    def step(*args: Any) -> Any:
        while True:
            try:
                result = ways[names[0]](*args)
            except (SospError, torch.OutOfMemoryError):
                raise
            except OUT_OF_REACH as error:
                if not told:
                    ungated_losses(*args[:2])  # a mistake of the model or the loss shows itself here
                told.append(f"{names[0]}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                if len(names) == 1:
                    tried = "; ".join(told)
                    raise DifferentiationError(
                        f"the network could not be differentiated by any of the exact ways tried. {tried}. {advice}"
                    ) from error
                names.pop(0)
                text = f"taking a slower exact way ({names[0]}); {told[-1]}"
                warnings.warn(text, SlowPathWarning, stacklevel=_users_level())
            else:
                return result

    return step


def _users_level() -> int:
    """How far up the stack the user's own call of sosp is, for a warning to point at."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "sosp":
        frame, level = frame.f_back, level + 1
    return level


def wide(x: Tensor) -> Tensor:
    """In double precision, where the device has it: sums over many chunks."""
    return x if x.device.type == "mps" else x.double()
