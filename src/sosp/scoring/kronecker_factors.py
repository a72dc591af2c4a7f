"""Kronecker factors of the Fisher, layer by layer: A from what a layer is given, G from the gradient of what it gives.

With a_t what a layer sees at position t of its output (a patch, and 1 for the bias) and g_t the gradient of the loss
there, the layer's block of the Fisher is taken to be ``F = A (x) G``, ``A = E_nt[a a^T]``, ``G = E_n[sum_t g g^T]``:
Martens & Grosse 2015 for linear layers, Grosse & Martens 2016 for convolutions. EigenDamage (Wang et al. 2019;
github.com/alecwangcq/EigenDamage-Pytorch) divides A and multiplies G by the number of positions, for the same product,
and averages the averages of batches; here sums over all examples are divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sosp.core import distributed
from sosp.core.batches import Chunk
from sosp.core.layers import apply_gates, find_channel_axis
from sosp.core.losses import compute_example_losses
from sosp.core.outputs import find_logits
from sosp.errors import DifferentiationError, StructureError, check_choice
from sosp.scoring.output_curvature import factor_curvature, find_output_root
from sosp.scoring.passes import (
    Problem,
    Sums,
    average_examples,
    compute_derivatives,
    convert_to_double,
    repeat_single_example,
)

# "sampled": a label per example drawn from the network's own outputs, as the paper does: unbiased for the true Fisher.
# "exact": every output with its probability instead, one backward pass each. "empirical": the labels of the data.
FISHERS = ("sampled", "exact", "empirical")


@dataclass(frozen=True)
class CurvatureMeasure:
    """What is summed over the examples of a chunk, for each layer."""

    slope: Callable[[Any, Tensor], Callable[[Tensor], Tensor]]  # (layer, input) -> a function of its output's gradient
    given: Callable[[Any, Tensor, Tensor], Tensor] | None = None  # (layer, input, output) -> a sum, also over positions
    once: bool = False  # where a layer is called twice, the sum of its slopes is not what is wanted


@dataclass(frozen=True, eq=False)
class KroneckerFactors:
    """One layer: the mean over positions of what it was given, the mean over examples of what came back."""

    A: Tensor
    G: Tensor


# The pass -------------------------------------------------------------------------------------------------------------


def estimate_kronecker_factors(
    problem: Problem, taps: str = "patches", fisher: str = "sampled", generator: torch.Generator | None = None
) -> dict[str, KroneckerFactors]:
    """A and G of every layer of the problem's structures, whatever the gate.

    ``taps="patches"``: A over whole patches, in the order of ``weight.flatten(1)``, and the bias where there is one.
    ``taps="channels"``: A over input channels, (c_in, c_in), the mean over the taps of the kernel, without the bias.
    """
    check_choice("taps", taps, INPUT_PRODUCTS)
    check_layer_types(problem, f"taps={taps!r}", grouped=False)
    measure = CurvatureMeasure(
        lambda layer, x: lambda g: sum_outer_products(flatten_positions(layer, g)), INPUT_PRODUCTS[taps]
    )
    _, found = measure_curvature(problem, measure, fisher, generator)
    return {name: KroneckerFactors(A, G) for name, (A, G) in found.items() if A is not None}


def measure_curvature(
    problem: Problem,
    measure: CurvatureMeasure,
    fisher: str = "sampled",
    generator: torch.Generator | None = None,
    labels: int | None = None,
) -> tuple[int, dict[str, tuple[Tensor | None, Tensor]]]:
    """How many examples; layer -> what was measured of its input and output, by position; and of the gradient.

    ``labels`` to draw per example, each one backward pass; one, if nothing is said.
    """
    check_choice("fisher", fisher, FISHERS)
    generator = generator or torch.Generator().manual_seed(distributed.get_rank())
    names = [layer.name for layer in problem.structures.layers]

    def step(chunk: Chunk) -> Sums:
        chunk, share = repeat_single_example(chunk)
        watch = CurvatureHooks(problem, measure)
        with watch.on():  # until the last backward pass: it may run forward again
            outputs = chunk.run(problem.model)
            watch.open = False
            leaves = watch.leaves + [x for x in tree_leaves(chunk.inputs) if isinstance(x, Tensor) and x.requires_grad]
            for end, v in _list_backward_starts(problem, outputs, chunk, fisher, generator, labels):
                compute_derivatives(end, leaves, grad_outputs=v, retain_graph=True)
        return tuple(None if x is None else convert_to_double(x) * share for sums in watch.sums for x in sums)

    count, means = average_examples(problem, "Kronecker factors", step, share=2)
    found: dict[str, tuple[Tensor | None, Tensor]] = {}
    for name, given, positions, slope in zip(names, means[::3], means[1::3], means[2::3], strict=True):
        if slope is None or positions is None:
            raise DifferentiationError(
                f"no gradient of the loss came back to {name!r}. Exclude it with exclude=[{name!r}], or look for "
                "torch.no_grad, .detach() or re-entrant checkpointing around it."
            )
        found[name] = None if given is None else given.div_(positions), slope
    return count, found


def _list_backward_starts(
    problem: Problem, outputs: Any, chunk: Chunk, fisher: str, generator: torch.Generator, labels: int | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Where backward passes start, and with which cotangent."""
    losses = compute_example_losses(
        problem.loss, outputs, chunk
    )  # which also refuses bad labels and what is not finite
    if fisher == "empirical":
        yield losses.sum(), None
        return
    logits = find_logits(outputs)
    if fisher == "sampled" and isinstance(problem.loss, str):
        found = find_output_root(problem.loss, outputs, chunk).draw(labels or 1, generator)
    else:  # a loss of the user's own has no labels to draw: its curvature in the outputs is taken as it is
        found = factor_curvature(problem.loss, outputs, chunk, labels, generator)
    yield from ((logits, v.to(logits.dtype)) for v in found)


class CurvatureHooks:
    """Hooks on the layers that add up what passes, there and then: later a ReLU may have written over it."""

    def __init__(self, problem: Problem, measure: CurvatureMeasure) -> None:
        self.problem, self.measure = problem, measure
        self.layers = [problem.model.get_submodule(layer.name) for layer in problem.structures.layers]
        self.sums: list[list[Tensor | None]] = [[None, None, None] for _ in self.layers]  # given, positions, slope
        self.inputs: list[list[Tensor]] = [[] for _ in self.layers]
        self.leaves: list[Tensor] = []
        self.open = True

    @contextmanager
    def on(self) -> Iterator[None]:
        """For a forward pass, and its backward passes."""
        with ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                stack.callback(layer.register_forward_pre_hook(self._input(i), with_kwargs=True).remove)
            stack.enter_context(
                apply_gates(self.problem.model, self.problem.structures.layers, "weights", self._output)
            )
            yield

    def _input(self, i: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.inputs[i].append((args or tuple(named.values()))[0].detach())

        return hook

    def _output(self, i: int, z: Tensor) -> Tensor:
        layer, x = self.layers[i], self.inputs[i].pop()
        if not z.requires_grad:  # not the leaf itself goes on, for in-place operations to work
            leaf = z.detach().requires_grad_()
            self.leaves.append(leaf)
            z = leaf.clone()
        if not self.open:
            return z
        if self.measure.once and self.sums[i][1] is not None:
            name = self.problem.structures.layers[i].name
            raise StructureError(
                f"{name!r} is called more than once, and its gradients in one example would have to be added up before "
                f"they are squared. Exclude it with exclude=[{name!r}], or use method='obd'."
            )
        if self.measure.given is not None:
            self._add(i, 0, self.measure.given(layer, x, z.detach()))
        self._add(i, 1, torch.tensor(z.numel() / z.shape[find_channel_axis(layer, z)], device=z.device))
        slope = self.measure.slope(layer, x)
        z.register_hook(lambda g: self._add(i, 2, slope(g)))
        return z

    def _add(self, i: int, which: int, found: Tensor) -> None:
        before = self.sums[i][which]
        self.sums[i][which] = found if before is None else before + found


# What a layer sees ----------------------------------------------------------------------------------------------------


def flatten_positions(layer: nn.Module, z: Tensor) -> Tensor:
    """(positions of all examples, channels) of an output or its gradient."""
    axis = find_channel_axis(layer, z)
    return _promote_half_precision(z.movedim(axis, -1).reshape(-1, z.shape[axis]))


def sum_outer_products(x: Tensor) -> Tensor:
    """``sum_i x_i x_i^T``."""
    return x.T @ x


def extract_patches(layer: Any, x: Tensor) -> Tensor:
    """(examples, positions, inputs) that a layer multiplies its weight with, in the order of ``weight.flatten(1)``."""
    if hasattr(layer, "kernel_size"):
        return _promote_half_precision(_windows(layer, _padded(layer, x)))
    return _promote_half_precision(x.reshape(len(x) if x.dim() > 1 else 1, -1, x.shape[-1]))


def _patch_outer(layer: Any, x: Tensor, z: Tensor) -> Tensor:
    seen = extract_patches(layer, x).flatten(0, 1)
    return sum_outer_products(seen if layer.bias is None else F.pad(seen, (0, 1), value=1.0))


def _channel_outer(layer: Any, x: Tensor, z: Tensor) -> Tensor:
    """The diagonal blocks of the patches' matrix, averaged: every input counts as often as a tap of the kernel sees it.

    The taps are taken to be uncorrelated, as the paper does to make its first projection a 1 x 1 convolution.
    """
    if not hasattr(layer, "kernel_size"):
        return sum_outer_products(_promote_half_precision(x.reshape(-1, x.shape[-1])))
    x = _promote_half_precision(_padded(layer, x))
    seen = torch.ones((), dtype=x.dtype, device=x.device)
    for length, k, stride, dilation in _axes(layer, x):
        starts = torch.arange(_steps(length, k, stride, dilation), device=x.device) * stride
        at = starts[:, None] + torch.arange(k, device=x.device) * dilation
        seen = seen[..., None] * torch.bincount(at.flatten(), minlength=length)
    return (x * seen).transpose(0, 1).flatten(1) @ x.transpose(0, 1).flatten(1).T / prod(layer.kernel_size)


INPUT_PRODUCTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "patches": _patch_outer,
    "channels": _channel_outer,
}
KNOWN_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def explain_refusal(layer: nn.Module, grouped: bool) -> str | None:
    """Why what a layer multiplies its weight with is not known here; None if it is."""
    if type(layer) not in KNOWN_LAYERS:  # a class of its own may pad or weigh in its own way
        return f"is a {type(layer).__name__}"
    if not grouped and getattr(layer, "groups", 1) > 1:
        return f"has {layer.groups} groups, each with its own factor"
    return None


def check_layer_types(problem: Problem, what: str, grouped: bool) -> None:
    """Before any work: every layer must be one whose patches are known."""
    for layer in problem.structures.layers:
        why = explain_refusal(problem.model.get_submodule(layer.name), grouped)
        if why is not None:
            raise StructureError(
                f"{what} is for linear layers and {'' if grouped else 'ungrouped '}convolutions, and {layer.name!r} "
                f"{why}. Exclude it with exclude=[{layer.name!r}], or use method='obd', which takes any layer."
            )


def _promote_half_precision(x: Tensor) -> Tensor:
    """Half precision is not for sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _padded(layer: Any, x: Tensor) -> Tensor:
    """(examples, channels, ...) with the border that the convolution adds; it also takes an example without a batch."""
    x = x if x.dim() == len(layer.kernel_size) + 2 else x.unsqueeze(0)
    if isinstance(layer.padding, tuple):
        border = [p for pad in reversed(layer.padding) for p in (pad, pad)]
    else:
        border = layer._reversed_padding_repeated_twice  # "same" and "valid", worked out by torch
    return F.pad(x, border, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)


def _axes(layer: Any, x: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Length, kernel, stride and dilation along every axis of space."""
    return zip(x.shape[2:], layer.kernel_size, layer.stride, layer.dilation, strict=True)


def _steps(length: int, k: int, stride: int, dilation: int) -> int:
    return (length - (k - 1) * dilation - 1) // stride + 1


def _windows(layer: Any, x: Tensor) -> Tensor:
    """(examples, positions, channels x taps) of a padded input."""
    n, space = len(x), len(layer.kernel_size)
    for axis, (_, k, stride, dilation) in enumerate(_axes(layer, x), start=2):
        x = x.unfold(axis, (k - 1) * dilation + 1, stride)[..., ::dilation]
    return x.movedim(1, 1 + space).reshape(n, prod(x.shape[2 : 2 + space]), -1)
