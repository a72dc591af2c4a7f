"""Label arrays: for every element of an activation, the number of the channel it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ZERO, OPAQUE = 0, 1  # a zero that the code itself put there (padding); no channel that could be followed

# These only rearrange elements, whatever they are given: applied to the labels themselves.
RESHAPES = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "ravel",
        "view_as",
        "reshape_as",
        "_unsafe_view",
        "atleast_1d",
    ]
)
MOVES = frozenset(
    [
        "permute",
        "transpose",
        "t",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "adjoint",
        "mT",
        "T",
        "H",
        "mH",
        "expand",
        "expand_as",
        "broadcast_to",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "narrow",
        "select",
        "__getitem__",
        "index_select",
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "vstack",
        "roll",
        "flip",
        "repeat",
        "tile",
        "repeat_interleave",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "diagonal",
        "unfold",
    ]
)
JOINS = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack"])  # all their tensors are moved
SHAPED_LIKE = frozenset(["view_as", "reshape_as", "expand_as"])  # of the second tensor only the shape counts
IDENTITY_OPS = frozenset(["contiguous", "clone", "detach", "alias", "requires_grad_", "positive", "__pos__"])


@dataclass(frozen=True, eq=False)
class Labels:
    """One label per element of a tensor of ``shape``; ``core`` has size 1 along the axes on which labels repeat."""

    core: Tensor  # int64
    shape: tuple[int, ...]

    @property
    def varying(self) -> tuple[int, ...]:
        """The axes along which the labels change."""
        return tuple(d for d, n in enumerate(self.core.shape) if n > 1)

    def full(self) -> Tensor:
        """A label per element, as a view that takes no memory."""
        return self.core.expand(self.shape)

    def along(self, axis: int) -> np.ndarray | None:
        """(n,) the labels along one axis, if they change along no other."""
        axis = axis % len(self.shape)
        if any(d != axis for d in self.varying):
            return None
        return self.core.reshape(-1).expand(self.shape[axis]).numpy()

    def numbers(self) -> np.ndarray:
        """Every label that occurs."""
        return np.unique(self.core.numpy())


def label_axis(labels: np.ndarray, axis: int, shape: Sequence[int]) -> Labels:
    """Labels that change along one axis."""
    sizes = [1] * len(shape)
    sizes[axis % len(shape)] = len(labels)
    return Labels(torch.from_numpy(np.ascontiguousarray(labels)).view(sizes), tuple(shape))


def compress_labels(full: Tensor) -> Labels:
    """Find the axes along which a full array of labels repeats itself."""
    shape = tuple(full.shape)
    core = full
    for d in range(core.dim()):
        if core.shape[d] > 1:
            head = core.narrow(d, 0, 1)
            if core.stride(d) == 0 or bool((core == head).all()):
                core = head
    return Labels(core.clone() if core.numel() < full.numel() else core, shape)


def reshape_labels(labels: Labels, shape: tuple[int, ...]) -> Labels:
    """The same elements in another shape. Axes that do not mix with labelled ones are never spread out."""
    spread: list[int] = []
    sizes: list[int] = []
    for ours, theirs in _groups(labels.shape, shape):
        varies = any(labels.core.shape[d] > 1 for d in ours)
        spread += [labels.shape[d] if varies else 1 for d in ours]
        sizes += [shape[d] if varies else 1 for d in theirs]
    found = compress_labels(labels.core.expand(spread).reshape(sizes))
    return Labels(found.core, shape)


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """Split two shapes into the shortest runs of axes with equal products."""
    found: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0, a, b = i, j, 1, 1
        if i < len(before):
            a, i = a * before[i], i + 1
        if j < len(after):
            b, j = b * after[j], j + 1
        while a != b:
            if a < b or (j >= len(after) and i < len(before)):
                a, i = a * before[i], i + 1
            else:
                b, j = b * after[j], j + 1
        found.append((range(i0, i), range(j0, j)))
    return found


def find_kept_indices(labels: Labels, counts: np.ndarray) -> list[np.ndarray] | None:
    """Which positions stay along every axis, when label v occurs ``counts[v]`` times; None where that is no box."""
    core = labels.core.numpy()
    wanted = counts[core]
    picks: list[np.ndarray] = []
    box: np.ndarray = np.ones((), dtype=counts.dtype)
    for d, n in enumerate(labels.shape):
        if core.shape[d] == 1:
            picks.append(np.arange(n))
            continue
        others = tuple(q for q in range(core.ndim) if q != d)
        most = wanted.max(axis=others)
        picks.append(np.repeat(np.arange(n), most))
        sizes = [1] * core.ndim
        sizes[d] = n
        box = box * (most > 0).reshape(sizes)
    varying = labels.varying
    if len(varying) > 1 and not np.array_equal(np.broadcast_to(box, core.shape) > 0, wanted > 0):
        return None
    if not varying and wanted.size and not wanted.all():
        return None
    return picks


def resize_labels(labels: Labels, counts: np.ndarray) -> Labels | None:
    """The labels that stay, when label v occurs ``counts[v]`` times."""
    picks = find_kept_indices(labels, counts)
    if picks is None:
        return None
    core = labels.core
    for d in labels.varying:
        core = core.index_select(d, torch.from_numpy(picks[d]))
    return Labels(core, tuple(len(p) for p in picks))


def move_labels(
    name: str, call: Callable[..., object], given: list[Labels], shapes: list[tuple[int, ...]]
) -> list[Labels]:
    """The labels behind an op that rearranges elements; ``call`` runs it on label arrays."""
    if name in RESHAPES:
        return [reshape_labels(given[0], shapes[0])]
    result = call(*[x.full() for x in given])
    outputs = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
    return [compress_labels(x) for x in outputs]
