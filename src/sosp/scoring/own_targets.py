"""The network's own outputs as targets: which tensors count, as logits or as numbers, and how far they are softened.

Gates of ones give the targets, so there is no slope, and the curvature is that of the outputs alone. Logits count by
their cross-entropy at a temperature T, ``R = (diag p - p p^T) / T^2`` at ``p = softmax(f / T)``. Numbers count by their
squared change, every coordinate in units of its variance. Both are means over the positions (pixels, tokens) that an
attention mask does not leave out. Several tensors are added.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosp.core.batches import Chunk
from sosp.core.loss_names import AUTO, LOSS_TITLES
from sosp.core.outputs import WHOLE, are_numbers, find_class_axis, find_output_tensors, infer_loss
from sosp.scoring.jets import get_primal
from sosp.scoring.label_certainty import count_effective, measure_uncertainty
from sosp.scoring.output_roots import OutputRoot, root_of_numbers, root_of_sigmoid, root_of_softmax

LOOK = 64  # examples that decide the temperature and the variances
PASS = 16  # examples run at once to look at them
TEMPERATURES = (1.0, 2.0, 4.0, 8.0)
ENOUGH = 0.25  # share of the examples that must be effective
NEVER = -1e30  # logit of a position that is masked: a probability of zero, without 0 * inf


@dataclass(frozen=True, eq=False)
class OwnOutput:
    """One tensor of the outputs, and how its change is measured."""

    name: str
    loss: str  # "cross_entropy" and "bce" for logits, "mse" for numbers
    weight: Tensor | None = None  # (D,) of numbers; None: half the sum of squares, over all positions

    @property
    def title(self) -> str:
        """The name, or what to call an output without one."""
        if self.name == WHOLE:
            return "outputs" if self.loss == "mse" else "logits"
        return f"output {self.name}" if self.name.isdigit() else self.name


@dataclass(frozen=True, eq=False)
class OwnTargets:
    """The tensors of the outputs that count, and what logits are divided by."""

    outputs: tuple[OwnOutput, ...]
    temperature: float

    @cached_property
    def summary(self) -> str:
        """What is compared, such as ``logits (cross-entropy, T = 2)``."""
        found = []
        for loss, group in itertools.groupby(self.outputs, lambda output: output.loss):
            how = LOSS_TITLES[loss] + ("" if loss == "mse" else f", T = {self.temperature:g}")
            found.append(f"{' + '.join(output.title for output in group)} ({how})")
        return " + ".join(found)

    def compute_losses(self, outputs: Any, chunk: Chunk) -> Tensor:
        """Return the distance of every example's outputs to what they are with all gates open, (N,)."""
        tensors, total = find_output_tensors(outputs, chunk.size), None
        for output in self.outputs:
            values = self._measure_change(output, tensors[output.name], chunk)
            total = values if total is None else total + values
        assert total is not None
        return total

    def _measure_change(self, output: OwnOutput, x: Tensor, chunk: Chunk) -> Tensor:
        f = _arrange(x, output.loss, chunk)
        own, weight = get_primal(f).detach(), _weigh_positions(chunk, x, output)
        if output.loss == "mse":
            scale = 1.0 if output.weight is None else output.weight
            return ((f - own).pow(2) * (0.5 * scale * weight.unsqueeze(-1))).flatten(1).sum(1)
        f, own = f / self.temperature, own / self.temperature
        if output.loss == "bce":
            values = F.binary_cross_entropy_with_logits(f, own.sigmoid(), reduction="none").mean(-1)
        else:
            values = F.cross_entropy(f.movedim(-1, 1), own.softmax(-1).movedim(-1, 1), reduction="none")
        return (values * weight).sum(1)

    def take_roots(self, outputs: Any, chunk: Chunk) -> list[tuple[Tensor, OutputRoot]]:
        """Return every tensor that counts and the root of its curvature."""
        tensors = find_output_tensors(outputs, chunk.size)
        primal = [get_primal(tensors[output.name]) for output in self.outputs]
        return [(x, self._take_root(output, x, chunk)) for output, x in zip(self.outputs, primal, strict=True)]

    def _take_root(self, output: OwnOutput, x: Tensor, chunk: Chunk) -> OutputRoot:
        f = _arrange(x.detach(), output.loss, chunk)
        weight = _weigh_positions(chunk, x, output)
        shape = x.movedim(find_class_axis(x), -1).shape if x.dim() > 1 else x.shape

        def back(v: Tensor) -> Tensor:
            v = v.reshape(shape)
            return v.movedim(-1, find_class_axis(x)) if x.dim() > 1 else v

        if output.loss == "mse":
            return root_of_numbers(f, weight, back, output.weight)
        root = root_of_sigmoid if output.loss == "bce" else root_of_softmax
        p = (f / self.temperature).sigmoid() if output.loss == "bce" else (f / self.temperature).softmax(-1)
        return root(p, weight / self.temperature**2, back)


def _arrange(x: Tensor, loss: str, chunk: Chunk) -> Tensor:
    """(N, positions, D); classes that an attention mask leaves out, as answers of a span do, are never chosen."""
    f = (x.movedim(find_class_axis(x), -1) if x.dim() > 1 else x.unsqueeze(1)).reshape(x.shape[0], -1, _count_last(x))
    mask = _find_mask(chunk)
    if loss == "cross_entropy" and mask is not None and mask.shape == x.shape:
        return torch.where(mask.unsqueeze(1), f, NEVER)
    return f


def _count_last(x: Tensor) -> int:
    return x.shape[find_class_axis(x)] if x.dim() > 1 else 1


def _weigh_positions(chunk: Chunk, x: Tensor, output: OwnOutput) -> Tensor:
    """(N, positions) the weight of each position: its share of the example, zero where it is masked."""
    positions = x.numel() // max(1, x.shape[0] * _count_last(x))
    weight = get_primal(x).new_ones(x.shape[0], positions)
    mask = _find_mask(chunk)
    if mask is not None and x.dim() > 2 and mask.shape == x.shape[:-1]:
        weight = mask.reshape(weight.shape).to(weight)
    plain = output.loss == "mse" and output.weight is None
    return weight if plain else weight / weight.sum(1, keepdim=True).clamp_min(1)


def _find_mask(chunk: Chunk) -> Tensor | None:
    """Return the attention mask of the tokens that the outputs belong to; of a decoder, its own."""
    if not isinstance(chunk.inputs, Mapping):
        return None
    decodes = any(str(key).startswith("decoder_") for key in chunk.inputs)
    mask = chunk.inputs.get("decoder_attention_mask" if decodes else "attention_mask")
    return mask.bool() if isinstance(mask, Tensor) else None


# A look at the outputs of some examples decides -----------------------------------------------------------------------


def take_look(chunks: Iterator[Chunk], most: int = LOOK) -> tuple[list[Chunk], Iterator[Chunk]]:
    """Return some examples from the front, and all chunks with those still in them."""
    taken: list[Chunk] = []
    while sum(chunk.size for chunk in taken) < most and (chunk := next(chunks, None)) is not None:
        taken.append(chunk)
    few, left = [], most
    for chunk in taken:
        size = min(left, chunk.size)
        step = PASS if chunk.divisible else chunk.size
        few += [chunk.rows(i, min(i + step, size)) if chunk.divisible else chunk for i in range(0, size, step)]
        left -= size
    return few, itertools.chain(taken, chunks)


@torch.no_grad()
def choose_own_targets(model: nn.Module, look: Sequence[Chunk], loss: str, temperature: float | str) -> OwnTargets:
    """Return which outputs count, by a look at those of some examples.

    Args:
        model: The network.
        look: Some examples, as ``take_look`` gives them.
        loss: What the outputs are; "auto" to infer it for each of them.
        temperature: What logits are divided by; "auto" for the smallest of 1, 2, 4 and 8 that leaves more than a
            quarter of the examples effective.
    """
    seen = [(chunk, find_output_tensors(chunk.run(model), chunk.size)) for chunk in look]
    names = [name for name in seen[0][1] if all(name in tensors for _, tensors in seen)]
    found = tuple(_describe_output(name, seen, loss, first=name == names[0]) for name in names)
    if not isinstance(temperature, str):
        return OwnTargets(found, temperature)
    softest = TEMPERATURES[-1] if any(output.loss != "mse" for output in found) else 1.0
    choices = (T for T in TEMPERATURES if softest > T and _is_enough(OwnTargets(found, T), seen))
    return OwnTargets(found, next(choices, softest))


Seen = Sequence[tuple[Chunk, dict[str, Tensor]]]


def _describe_output(name: str, seen: Seen, loss: str, first: bool) -> OwnOutput:
    chunk, x = seen[0][0], seen[0][1][name]
    if loss != AUTO:
        return OwnOutput(name, "mse" if are_numbers(loss, x) else loss)
    fit = infer_loss(name, x, chunk, chunk.targets if first else None)
    return OwnOutput(name, fit, _weigh_coordinates(name, seen) if fit == "mse" else None)


def _weigh_coordinates(name: str, seen: Seen) -> Tensor:
    """(D,) ``1 / (D variance)`` over examples and positions, for all coordinates and all tensors to count alike.

    One that hardly varies counts no more than one with a millionth of the mean variance.
    """
    rows = []
    for chunk, tensors in seen:
        f = _arrange(tensors[name], "mse", chunk)
        rows.append(f[_weigh_positions(chunk, tensors[name], OwnOutput(name, "mse")) > 0])
    variance = torch.cat(rows).to(torch.promote_types(rows[0].dtype, torch.float32)).var(0, correction=0)
    if not bool(variance.isfinite().all()) or not bool(variance.any()):
        variance = torch.ones_like(variance)
    return (1 / variance.clamp_min(1e-6 * float(variance.mean())) / len(variance)).to(rows[0].dtype)


def _is_enough(own: OwnTargets, seen: Seen) -> bool:
    """Return whether more than a quarter of the examples is effective at this temperature."""
    r = []
    for chunk, tensors in seen:
        parts = []
        for output in own.outputs:
            if output.loss != "mse":
                f = _arrange(tensors[output.name], output.loss, chunk) / own.temperature
                weight = _weigh_positions(chunk, tensors[output.name], output)
                parts.append(measure_uncertainty(f, weight, output.loss))
        r.append(torch.stack(parts).sum(0))
    every = torch.cat(r)
    return count_effective(every) > ENOUGH * len(every)
