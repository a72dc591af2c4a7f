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
from sosp.core.batches import Chunk, check_device, resize_chunks
from sosp.core.borrowed_model import find_device
from sosp.core.layers import align_values, apply_gates
from sosp.core.loss_names import LossLike
from sosp.core.losses import compute_example_losses, refuse_infinite
from sosp.core.progress import track_progress
from sosp.errors import DataError, DifferentiationError, SospError
from sosp.graph.records import Structures
from sosp.scoring import jets
from sosp.scoring.label_certainty import LabelCertainty
from sosp.scoring.own_targets import OwnTargets

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
    own: OwnTargets | None = None  # the network's own outputs as targets; None: the data's
    certainty: LabelCertainty | None = None  # records how certain the network is of the labels


@dataclass(frozen=True)
class Terms:
    """Averages over the examples."""

    examples: int
    first: Tensor  # (S,)
    second: Tensor | None = None  # (S,)
    pairs: Tensor | None = None  # (S, S)


@dataclass(frozen=True)
class Options:
    """Options of a criterion that the user gives to ``sosp.score``."""

    classes: int | None = None  # labels sampled per example instead of all outputs (SOSP-I)
    generator: torch.Generator | None = None  # source of randomness


@dataclass(frozen=True)
class Values:
    """Ranking that is not a derivative of the loss, and the number of examples it was computed from."""

    values: Tensor  # (S,)
    examples: int = 0


# One place averages -------------------------------------------------------------------------------------------------

Sums = tuple[Tensor | None, ...]


def average_examples(
    problem: Problem, label: str, step: Callable[[Chunk], Sums], share: float = 1.0
) -> tuple[int, Sums]:
    """Sum ``step`` over the data in chunks that fit the memory and divide once by the number of examples.

    ``share``: the memory a pass needs, as a multiple of the activations of a forward pass.
    """
    total: list[Tensor | None] = []
    count = 0
    device = find_device(problem.model)
    chunks = resize_chunks(_check_chunks(problem.chunks, device), chunk_size(problem, device, share))
    for chunk in track_progress(chunks, label, problem.examples, "size"):
        for part in _run_in_halves(step, chunk):
            total = [_plus(a, b) for a, b in zip(total or [None] * len(part), part, strict=True)]
        count += chunk.size
    counts = distributed.gather_counts(count, device)
    if 0 in counts:
        raise DataError(
            "the data is empty: it contains no examples to score with. Is the loader's dataset or subset empty?"
            if not any(counts)
            else f"{sum(counts)} examples are too few for {len(counts)} processes: give each of them an example."
        )
    distributed.sum_tensors(*[t for t in total if t is not None])
    return sum(counts), tuple(None if t is None else t.div_(sum(counts)) for t in total)


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)


def _check_chunks(chunks: Iterable[Chunk], device: torch.device) -> Iterator[Chunk]:
    for chunk in chunks:
        check_device(chunk, device)
        if chunk.size:
            yield chunk


def _run_in_halves(step: Callable[[Chunk], Sums], chunk: Chunk) -> Iterator[Sums]:
    """The step on the whole chunk, or on ever smaller parts of it when memory runs out."""
    try:
        result = step(chunk)
    except torch.OutOfMemoryError:
        if chunk.size == 1 or not chunk.divisible:
            raise
    else:
        yield result
        return
    torch.cuda.empty_cache()
    half = chunk.size // 2
    yield from _run_in_halves(step, chunk.rows(0, half))
    yield from _run_in_halves(step, chunk.rows(half, chunk.size))


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


def make_reference_tensor(model: nn.Module, chunk: Chunk) -> Tensor:
    """A tensor of the model's device and floating type, to make others like it."""
    for x in (*model.parameters(), *tree_leaves(chunk.inputs)):
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.new_empty(0)
    return torch.empty(0)


@contextmanager
def install_jet_gates(problem: Problem, gates: Gates) -> Iterator[None]:
    """Run the network on jets, which start at its first gate."""
    layers = problem.structures.layers
    values = problem.structures.expand_to_channels(gates.values)
    # A channel without a gate stands still.
    tangents = (
        None if gates.direction is None else problem.structures.expand_to_channels(gates.direction, otherwise=0.0)
    )

    def apply(i: int, output: Any) -> Any:
        moving = tangents[i] if tangents is not None and gates.moving[i] else None
        return jets.apply_gate(output, jets.Gate(values[i], moving, layers[i].axis))

    with apply_gates(problem.model, layers, problem.structures.gate, apply), jets.fold_batch_norms(problem.model):
        yield


@contextmanager
def install_plain_gates(problem: Problem, values: Tensor) -> Iterator[None]:
    """Run the network with every channel multiplied by its gate."""
    layers = problem.structures.layers
    spread = problem.structures.expand_to_channels(values)

    def apply(i: int, output: Any) -> Any:
        return output * align_values(spread[i], output.dim(), layers[i].axis)

    with apply_gates(problem.model, layers, problem.structures.gate, apply):
        yield


def repeat_single_example(chunk: Chunk) -> tuple[Chunk, float]:
    """A lone example twice, and the factor that makes up for it.

    With a single example torch's batch norm gets its gradient wrong on CPUs where that gradient is laid out in an
    unusual order (seen with torch 2.13); with two it does not. Jets do without torch's batch norm.
    """
    if chunk.size > 1:
        return chunk, 1.0
    return chunk.twice(), 0.5


def compute_gated_losses(problem: Problem, chunk: Chunk) -> Any:
    """One loss per example, (N,)."""
    losses = compute_losses(problem, chunk)
    check_requires_grad(jets.get_primal(losses))
    return losses


def compute_losses(problem: Problem, chunk: Chunk) -> Any:
    """The same of the network as it is, which need not depend on anything."""
    return measure_losses(problem, chunk.run(problem.model), chunk)


def measure_losses(problem: Problem, outputs: Any, chunk: Chunk) -> Any:
    """One loss per example, (N,), of outputs: against the targets of the data or the network's own outputs."""
    if problem.own is not None:
        return refuse_infinite(problem.own.compute_losses(outputs, chunk), chunk)
    if problem.certainty is not None:
        problem.certainty.record(outputs, chunk)
    return compute_example_losses(problem.loss, outputs, chunk)


def check_requires_grad(output: Tensor) -> None:
    if not output.requires_grad:
        raise DifferentiationError(
            "the loss does not depend differentiably on any structure. Look for torch.no_grad, .detach(), .item() or "
            "an argmax in the model's forward or in the loss."
        )


def compute_derivatives(output: Tensor | list[Tensor], inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """``d output / d inputs``; zeros where an input plays no part."""
    for x in [output] if isinstance(output, Tensor) else output:
        check_requires_grad(x)
    return list(torch.autograd.grad(output, inputs, materialize_grads=True, allow_unused=True, **options))


def check_double_backward(slope: Tensor) -> None:
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
FALLBACK_ERRORS = (
    jets.UnsupportedError,
    RuntimeError,
    NotImplementedError,
    TypeError,
    AttributeError,
    IndexError,
    ValueError,
)


def try_in_order(ways: Mapping[str, Way], advice: str = "") -> Way:
    """Try the ways in turn on the first chunk and stay with the one that works."""
    names = list(ways)
    told: list[str] = []

    def step(*args: Any) -> Any:
        while True:
            try:
                result = ways[names[0]](*args)
            except (SospError, torch.OutOfMemoryError):
                raise
            except FALLBACK_ERRORS as error:
                if not told:
                    compute_losses(*args[:2])  # a mistake of the model or the loss shows itself here
                told.append(f"{names[0]}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                if len(names) == 1:
                    tried = "; ".join(told)
                    raise DifferentiationError(
                        f"the network could not be differentiated by any of the exact ways tried. {tried}. {advice}"
                    ) from error
                names.pop(0)
                text = f"using a slower exact way ({names[0]}); {told[-1]}"
                warnings.warn(text, SlowPathWarning, stacklevel=count_library_frames())
            else:
                return result

    return step


def count_library_frames() -> int:
    """How far up the stack the user's own call of sosp is, for a warning to point at."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "sosp":
        frame, level = frame.f_back, level + 1
    return level


def convert_to_double(x: Tensor) -> Tensor:
    """In double precision, where the device has it: sums over many chunks."""
    return x if x.device.type == "mps" else x.double()
