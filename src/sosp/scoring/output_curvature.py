"""The curvature R_n of the loss in the outputs, as cotangents v with ``sum_v v v^T = R_n`` (App. B)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from sosp.core.batches import Chunk
from sosp.core.loss_names import LossLike
from sosp.core.losses import IGNORE_INDEX, are_numbers, call_loss, find_logits, find_own_loss, move_class_axis
from sosp.errors import ArgumentError, LossError, is_whole

LARGEST_R = 2048  # outputs for which a dense output Hessian (outputs x outputs per example) is formed


def factor_curvature(
    loss: LossLike,
    outputs: Any,
    chunk: Chunk,
    classes: int | None,
    generator: torch.Generator | None,
    temperature: float | None = None,
) -> Iterator[Tensor]:
    """Cotangents of the logits, each one backward pass, whose outer products sum to R_n for every example n.

    With a ``temperature`` T the targets are the network's own outputs: ``R = (diag p - p p^T) / T^2`` at
    ``p = softmax(f / T)``.
    """
    if classes is not None:
        _check_classes(loss, classes)
    logits = find_logits(outputs).detach()
    if temperature is not None:
        yield from _factor_own_outputs(loss, logits, chunk, classes, generator, temperature)
        return
    own = find_own_loss(loss, outputs, chunk)
    if callable(loss):
        yield from _dense_factors(loss, outputs, chunk)
    elif loss == "mse" and own is None:
        yield from _identity_factors(logits, classes, generator)
    elif loss == "bce" and own is None:
        yield from _sigmoid_factors(logits, classes, generator)
    else:
        labels = chunk.targets if own is None else _own_labels(own.detach(), logits, chunk.targets)
        softmax = _probabilities(logits, labels, together=own is not None)
        yield from _softmax_factors(*softmax) if classes is None else _sampled_labels(*softmax, classes, generator)


def _factor_own_outputs(
    loss: LossLike,
    logits: Tensor,
    chunk: Chunk,
    classes: int | None,
    generator: torch.Generator | None,
    temperature: float,
) -> Iterator[Tensor]:
    """The cotangents where the network is its own target."""
    if are_numbers(loss, logits):
        yield from _identity_factors(logits, classes, generator)
        return
    if loss == "bce":
        yield from (v / temperature for v in _sigmoid_factors(logits / temperature, classes, generator))
        return
    softmax = _probabilities(logits / temperature, _find_padding(chunk, logits), together=False)
    found = _softmax_factors(*softmax) if classes is None else _sampled_labels(*softmax, classes, generator)
    yield from (v / temperature for v in found)


def _find_padding(chunk: Chunk, logits: Tensor) -> Tensor | None:
    """Return labels that ignore the positions which the attention mask of a dict batch leaves out; None without one."""
    mask = chunk.inputs.get("attention_mask") if isinstance(chunk.inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.shape != logits.shape[:-1]:
        return None
    return torch.where(mask.bool(), 0, IGNORE_INDEX)


def _own_labels(own: Tensor, logits: Tensor, labels: Any) -> Tensor:
    """The labels whose mean cross-entropy the model's own loss is: as given or, in language models, the next token."""
    found: list[tuple[float, Tensor]] = []
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        ahead = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX) if labels.dim() == 2 else labels
        for y in (labels, ahead):
            if tuple(y.shape) in (tuple(logits.shape[:-1]), (logits.shape[0], *logits.shape[2:])):
                value = F.cross_entropy(move_class_axis(logits, y), y.long(), ignore_index=IGNORE_INDEX)
                found.append((float((value - own).abs()), y))
    error, best = min(found, key=lambda f: f[0], default=(math.inf, None))
    # Language models add up their losses in single precision, whatever their own.
    loose = 1e-3 if torch.finfo(logits.dtype).bits > 16 else 5e-2
    if best is None or not error <= loose * (1 + float(own.abs())):
        raise LossError(
            "the model returns its own loss, which is not the cross-entropy of its logits and labels, so SOSP-I does "
            "not know its curvature. Use method='sosp-h', or give loss=a function of (outputs, targets) with one "
            "loss per example."
        )
    return best


def _check_classes(loss: LossLike, classes: int) -> None:
    if callable(loss):
        raise ArgumentError(
            "classes= samples labels of a loss known by name; with your own loss, or one with options, leave it out."
        )
    if not is_whole(classes) or classes < 1:
        raise ArgumentError(f"classes={classes!r} must be a positive whole number of labels sampled per example.")


def _probabilities(logits: Tensor, targets: Any, together: bool) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Softmax with the classes last (N, positions, D), the weight of each position, and the way back.

    Positions share the weight of their example or, ``together``, that of the batch.
    """
    labels = targets if isinstance(targets, Tensor) and not targets.is_floating_point() else None
    second = move_class_axis(logits, labels)
    last = second is not logits
    moved = second.movedim(1, -1)
    p = moved.flatten(1, -2).softmax(-1) if moved.dim() > 2 else moved.softmax(-1).unsqueeze(1)
    weight = p.new_ones(p.shape[:2]) / p.shape[1]
    if labels is not None:
        counted = (labels != IGNORE_INDEX).reshape(p.shape[:2]).to(p.dtype)
        total = counted.sum().clamp_min(1) / len(counted) if together else counted.sum(1, keepdim=True).clamp_min(1)
        weight = counted / total
    elif isinstance(targets, Tensor) and targets.shape == logits.shape:
        weight = weight * targets.to(p.dtype).sum(1).reshape(p.shape[:2])  # 1, if they are probabilities

    def back(v: Tensor) -> Tensor:
        v = v.reshape(moved.shape)
        return v if last or v.dim() == 2 else v.movedim(-1, 1)

    return p, weight, back


def _softmax_factors(p: Tensor, weight: Tensor, back: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """``diag(p) - p p^T = B B^T`` with D - 1 columns ``sqrt(p_j) ((e_j - p) - c (e_D - p))``.

    A = diag(sqrt p) - p sqrt(p)^T has A A^T = R and A sqrt(p) = 0: the reflection that turns sqrt(p) into the last
    axis empties the last column, which saves one of D backward passes. c = sqrt(p_D) / (1 + sqrt(p_D)).
    """
    D = p.shape[-1]
    root = p.sqrt()
    c = root[..., -1:] / (1 + root[..., -1:])
    for position in range(p.shape[1]):
        here = weight.new_zeros(weight.shape)
        here[:, position] = weight[:, position].sqrt()
        for j in range(D - 1):
            v = (c - 1) * p
            v[..., j] += 1
            v[..., -1] -= c[..., 0]
            yield back(v * (root[..., j] * here).unsqueeze(-1))


def _sampled_labels(
    p: Tensor, weight: Tensor, back: Callable[[Tensor], Tensor], k: int, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Unbiased: with y ~ p, ``E[(p - e_y)(p - e_y)^T] = R``; k draws, each one backward pass."""
    generator = generator or torch.Generator(p.device).manual_seed(0)
    flat = p.flatten(0, 1).to(generator.device)
    drawn = torch.multinomial(flat, k, replacement=True, generator=generator).to(p.device)
    scale = (weight / k).sqrt().unsqueeze(-1)
    for i in range(k):
        label = F.one_hot(drawn[:, i].view(p.shape[:2]), p.shape[-1]).to(p.dtype)
        yield back((p - label) * scale)


def _identity_factors(logits: Tensor, classes: int | None, generator: torch.Generator | None) -> Iterator[Tensor]:
    """R = I: one unit vector per output, or random signs (``E[s s^T] = I``) when only some are asked for."""
    shape, D = logits.shape, logits[0].numel()
    if classes is None:
        for j in range(D):
            yield (
                F.one_hot(torch.tensor(j, device=logits.device), D).to(logits.dtype).expand(shape[0], D).reshape(shape)
            )
        return
    generator = generator or torch.Generator(logits.device).manual_seed(0)
    for _ in range(classes):
        signs = torch.randint(0, 2, shape, generator=generator, device=generator.device).to(logits) * 2 - 1
        yield signs / math.sqrt(classes)


def _sigmoid_factors(logits: Tensor, classes: int | None, generator: torch.Generator | None) -> Iterator[Tensor]:
    """``diag(p (1 - p)) / D`` with ``p = sigmoid(f)``: a vector per output, or drawn answers y ~ p, ``(p - y)``."""
    p, D = logits.sigmoid(), logits[0].numel()
    if classes is None:
        root = (p * (1 - p) / D).sqrt()
        yield from (unit * root for unit in _identity_factors(logits, None, None))
        return
    generator = generator or torch.Generator(logits.device).manual_seed(0)
    for _ in range(classes):
        drawn = torch.bernoulli(p.to(generator.device), generator=generator).to(p)
        yield (p - drawn) / math.sqrt(classes * D)


def _dense_factors(loss: Callable[[Any, Any], Tensor], outputs: Any, chunk: Chunk) -> Iterator[Tensor]:
    """Any other loss convex in the outputs: its own Hessian, ``R_n = V diag(w) V^T``, column by column."""
    logits = find_logits(outputs)
    D = logits[0].numel()
    if D > LARGEST_R:
        raise LossError(
            f"SOSP-I with your own loss forms its Hessian in the outputs, and there are {D} of them (limit "
            f"{LARGEST_R}). Use method='sosp-h', which never forms it."
        )
    R = output_hessian(loss, outputs, chunk)
    w, V = torch.linalg.eigh(R)
    if bool((w < -1e-6 * w.abs().amax().clamp_min(1e-30)).any()):
        raise LossError(
            "the loss is not convex in the network's outputs, so its Gauss-Newton matrix does not measure damage. "
            "Use method='sosp-h' or 'exact', which take any twice differentiable loss."
        )
    root = w.clamp_min(0).sqrt()
    for j in range(D):
        yield (V[:, :, j] * root[:, j, None]).reshape(logits.shape)


def output_hessian(loss: Callable[[Any, Any], Tensor], outputs: Any, chunk: Chunk) -> Tensor:
    """``d²l_n / df df`` of every example, (N, D, D), by differentiating twice through the loss alone."""
    fresh, tensors = _copy_as_leaves(outputs)
    z = find_logits(fresh)
    others = [x for x in tensors if x is not z]
    values = call_loss(loss, fresh, chunk)
    slope, *rest = torch.autograd.grad(values.sum(), [z, *others], create_graph=True, materialize_grads=True)
    if any(bool(r.any()) for r in rest):
        raise LossError(
            "the loss depends on outputs of the model besides its logits, which SOSP-I does not follow. Use "
            "method='sosp-h', or wrap the model to return one tensor."
        )
    slope = slope.flatten(1) if slope.dim() > 1 else slope.unsqueeze(1)
    if not slope.requires_grad:  # linear in the outputs
        return slope.new_zeros(*slope.shape, slope.shape[1])
    columns = slope.sum(0)  # examples do not mix, so one backward pass serves all of them
    rows = [torch.autograd.grad(column, z, retain_graph=True, materialize_grads=True)[0] for column in columns]
    return torch.stack([row.reshape(slope.shape) for row in rows], 1)


def _copy_as_leaves(outputs: Any) -> tuple[Any, list[Tensor]]:
    """A copy of the outputs whose tensors are leaves of a new graph, and those tensors."""
    leaves: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            wide = torch.promote_types(x.dtype, torch.float32)  # rounding in half precision looks like a concave loss
            leaves.append(x.detach().to(wide, copy=True).requires_grad_())
            return leaves[-1]
        return x

    twin = tree_map(leaf, outputs)
    if twin is outputs:  # a class of the user's own
        twin = copy.copy(outputs)
        for key, x in vars(outputs).items():
            setattr(twin, key, tree_map(leaf, x))
    return twin, leaves
