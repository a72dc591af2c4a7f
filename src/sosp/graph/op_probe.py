"""Find out what an op does to channels by trying it on small random tensors: no table of ops to keep up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

SMALL = (3, 5, 4, 7, 6, 8, 9, 11, 10, 12, 13)  # stand-ins for the sizes of an op that takes no sizes itself
MOST = 1 << 22  # elements: beyond this an op is not tried out


@dataclass(frozen=True)
class OpCall:
    """One call of an op, with its arguments laid out flat."""

    func: Callable[..., Any]
    name: str
    leaves: Sequence[Any]
    spec: TreeSpec
    shapes: tuple[tuple[int, ...], ...]  # of the tensors it returned
    known: Mapping[int, Tensor]  # position -> the values of an integer or boolean tensor, where they are known

    @property
    def tensors(self) -> list[int]:
        return [k for k, x in enumerate(self.leaves) if isinstance(x, Tensor)]

    def run(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The op on other tensors."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        if "dropout_p" in kwargs:  # attention: what it does to channels does not depend on dropout
            kwargs["dropout_p"] = 0.0
        return [x for x in tree_leaves(self.func(*args, **kwargs)) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class SlicedOp:
    """An op that treats the slices along an axis by themselves."""

    axes: tuple[int, ...]  # of that axis in each output
    kills: tuple[bool, ...]  # per sliced operand: where it is zero, the output is
    all: bool  # where all of them are zero, the output is


CACHE: dict[Any, SlicedOp | None] = {}
NO_COPIES: set[Any] = set()  # calls that compute something


def probe_slices(call: OpCall, axes: Mapping[int, int]) -> SlicedOp | None:
    """Does ``f(x[S]) == f(x)[S]`` hold when operand k is sliced along ``axes[k]``?"""
    for sizes in ([small] if (small := _stand_ins(call)) else []) + [{}]:
        shapes = {k: tuple(sizes.get(n, n) for n in call.leaves[k].shape) for k in call.tensors}
        if any(torch.Size(s).numel() > MOST for s in shapes.values()):
            return None
        found = _probe_cached(call, axes, shapes, sizes)
        if found is not None:
            return found
    return None


def _probe_cached(call: OpCall, axes: Mapping[int, int], shapes: Mapping[int, Any], sizes: Mapping[int, int]) -> Any:
    if call.known:
        return _try(call, axes, shapes, sizes)
    key = (
        call.func,
        tuple(axes.items()),
        tuple((shapes[k], x.dtype) if k in shapes else _kind(x) for k, x in enumerate(call.leaves)),
        call.spec,
        tuple(tuple(sizes.get(n, n) for n in s) for s in call.shapes),
    )
    if key not in CACHE:
        CACHE[key] = _try(call, axes, shapes, sizes)
    return CACHE[key]


def _plain(x: Any) -> Any:
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return (type(x), x)


def _stand_ins(call: OpCall) -> dict[int, int]:
    """Smaller sizes to try an op with first; equal ones stay equal, and 1 stays 1."""
    if call.known:
        return {}
    found = sorted({n for k in call.tensors for n in call.leaves[k].shape if n > 1})
    if len(found) > len(SMALL) or any(n not in found for s in call.shapes for n in s if n > 1):
        return {}
    return dict(zip(found, SMALL, strict=False))


def _try(call: OpCall, axes: Mapping[int, int], shapes: Mapping[int, Any], sizes: Mapping[int, int]) -> SlicedOp | None:
    try:
        return _probe(call, axes, shapes, sizes)
    except Exception:  # an op may refuse the slices in any way it likes
        return None


def _probe(
    call: OpCall, axes: Mapping[int, int], shapes: Mapping[int, Any], sizes: Mapping[int, int]
) -> SlicedOp | None:
    generator = torch.Generator().manual_seed(0)
    given = list(call.leaves)
    for k, shape in shapes.items():
        given[k] = call.known[k] if k in call.known else _random(call.leaves[k], shape, generator)
    given = [torch.device("cpu") if isinstance(x, torch.device) else x for x in given]
    width = {given[k].shape[d] for k, d in axes.items()}
    if len(width) != 1:
        return None
    C = width.pop()
    # Not every other one, not all, not evenly spaced.
    S = torch.randperm(C, generator=generator)[: max(1, (2 * C) // 3)].sort().values if C > 2 else torch.tensor([C - 1])

    def run(change: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        return call.run([change(k, x.clone()) if k in shapes else x for k, x in enumerate(given)])

    whole = run(lambda k, x: x)
    if [tuple(y.shape) for y in whole] != [tuple(sizes.get(n, n) for n in s) for s in call.shapes]:
        return None
    part = run(lambda k, x: x.index_select(axes[k], S) if k in axes else x)
    found = [_axis(y, p, S, C) for y, p in zip(whole, part, strict=True)]
    if any(d is None for d in found):
        return None
    out = [d for d in found if d is not None]

    def zero(which: set[int]) -> bool:
        ys = run(lambda k, x: x.index_fill(axes[k], S, 0) if k in which else x)
        return all(bool((y.index_select(d, S) == 0).all()) for y, d in zip(ys, out, strict=True))

    return SlicedOp(tuple(out), tuple(zero({k}) for k in axes), zero(set(axes)))


def _random(like: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if like.dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if like.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    return torch.zeros(shape, dtype=like.dtype)


def _axis(whole: Tensor, part: Tensor, S: Tensor, C: int) -> int | None:
    """The one axis along which ``part`` is the slices S of ``whole``."""
    found = None
    for d in range(whole.dim()):
        expected = [len(S) if q == d else n for q, n in enumerate(whole.shape)]
        if whole.shape[d] != C or list(part.shape) != expected:
            continue
        if torch.allclose(whole.index_select(d, S), part, rtol=1e-6, atol=1e-9, equal_nan=True):
            if found is not None:
                return None
            found = d
    return found


def probe_copies(call: OpCall, labels: Mapping[int, Tensor], opaque: int, zero: int) -> list[Tensor] | None:
    """If every element of the output is a copy of one element of the input (or 0): the labels of the output.

    The op is run on numbered elements, which says where each one comes from, and on random ones, which checks it.
    """
    places = call.tensors
    if not all(call.leaves[k].is_floating_point() or k in call.known for k in places):
        return None
    sizes = [call.leaves[k].numel() for k in places]
    if sum(sizes) > MOST:
        return None
    key = (call.func, call.spec, tuple(_kind(x) for x in call.leaves))
    if key in NO_COPIES and not call.known:
        return None
    found = _find_copies(call, labels, opaque, zero, places, sizes)
    if found is None:
        NO_COPIES.add(key)
    return found


def _kind(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else _plain(x)


def _find_copies(
    call: OpCall, labels: Mapping[int, Tensor], opaque: int, zero: int, places: list[int], sizes: list[int]
) -> list[Tensor] | None:
    values = [torch.zeros(1, dtype=torch.float64)]
    names = [torch.tensor([zero])]
    codes, noise = list(call.leaves), list(call.leaves)
    generator = torch.Generator().manual_seed(1)
    start = 1
    for k, size in zip(places, sizes, strict=True):
        shape = call.leaves[k].shape
        if k in call.known:
            codes[k] = noise[k] = call.known[k]
            continue
        codes[k] = torch.arange(start, start + size, dtype=torch.float64).view(shape)
        values.append(torch.randn(size, generator=generator, dtype=torch.float64))
        noise[k] = values[-1].view(shape).clone()
        names.append(labels[k].reshape(-1) if k in labels else torch.full((size,), opaque))
        start += size
    try:
        numbered, random = call.run(codes), call.run(noise)
    except Exception:  # as above
        return None
    table, label = torch.cat(values), torch.cat(names)
    found = []
    for a, b, shape in zip(numbered, random, call.shapes, strict=False):
        index = a.round().long() if a.is_floating_point() and bool(torch.isfinite(a).all()) else None
        if index is None or tuple(a.shape) != shape or not bool(((index >= 0) & (index < start)).all()):
            return None
        if not bool((index == a).all()) or not torch.equal(table[index], b):
            return None
        found.append(label[index])
    return found if len(found) == len(call.shapes) else None
