"""The curvature R_n of the loss in the outputs, as cotangents v with ``sum_v v v^T = R_n`` (App. B)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from sosp.core.batches import Chunk
from sosp.core.loss_names import LossLike
from sosp.core.losses import IGNORE_INDEX, call_loss, find_own_loss, move_class_axis
from sosp.core.outputs import find_logits
from sosp.errors import ArgumentError, LossError, is_whole
from sosp.scoring.output_roots import OutputRoot, root_of_numbers, root_of_sigmoid, root_of_softmax

LARGEST_R = 2048  # outputs for which a dense output Hessian (outputs x outputs per example) is formed


def factor_curvature(
    loss: LossLike, outputs: Any, chunk: Chunk, classes: int | None, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Cotangents of the logits, each one backward pass, whose outer products sum to R_n for every example n.

    With ``classes``, as many cotangents, whose outer products sum to R_n on average.
    """
    if classes is not None:
        _check_classes(loss, classes)
    if callable(loss):
        return _dense_factors(loss, outputs, chunk)
    root = find_output_root(loss, outputs, chunk)
    return root.columns() if classes is None or classes >= root.width else root.sample(classes, generator)


def find_output_root(loss: str, outputs: Any, chunk: Chunk) -> OutputRoot:
    """Return the root of the curvature of a known loss in the logits."""
    own = find_own_loss(loss, outputs, chunk)
    logits = find_logits(outputs).detach()
    if loss != "cross_entropy" and own is None:
        flat, weight = logits.reshape(len(logits), 1, -1), logits.new_ones(len(logits), 1)
        back = partial(torch.reshape, shape=logits.shape)
        return root_of_numbers(flat, weight, back) if loss == "mse" else root_of_sigmoid(flat.sigmoid(), weight, back)
    labels = chunk.targets if own is None else _own_labels(own.detach(), logits, chunk.targets)
    return root_of_softmax(*_probabilities(logits, labels, together=own is not None))


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
            "classes= is for a loss known by name; with your own loss, or one with options, leave it out."
        )
    if not is_whole(classes) or classes < 1:
        raise ArgumentError(f"classes={classes!r} must be a positive whole number of random cotangents per example.")


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
