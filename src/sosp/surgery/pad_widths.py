"""A network in the form that a GPU trains fastest: widths that its kernels like, and nothing scattered.

A pruned network has layers of 7 or 13 channels, and scatters that put them into their places of a stream. Kernels for
bfloat16 want multiples of 8, so that cuDNN would pad every tensor at every call. Here the layers themselves get the
missing channels, once, with weights of zero, and a scatter becomes rows of zeros. What was added stays zero because
its gradient is set to zero; every other number is that of the small network.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosp.core.borrowed_model import preserve_random_state
from sosp.core.layers import find_layer_type, is_norm
from sosp.graph import Flow, trace
from sosp.graph.channels import Ids, ModuleCall
from sosp.graph.recipe import Recipe, apply_recipe
from sosp.surgery.shrink import check_same_outputs

MULTIPLE = 8  # of channels: 16 bytes of bfloat16

Places = dict[str, dict[int, Tensor]]  # tensor -> axis -> the place each one had, -1 for one that was added


class PaddedModel:
    """A network with room, and the way back."""

    def __init__(self, model: nn.Module, small: nn.Module, places: Places) -> None:
        self.model, self.small, self.places = model, small, places
        self.kept = {n: {axis: _invert_index(index) for axis, index in axes.items()} for n, axes in places.items()}

    def masks(self, model: nn.Module) -> dict[str, Tensor]:
        """Parameter -> 0 for what was added, 1 for the rest; laid out as the parameters of ``model`` are."""
        found = {}
        for name, p in model.named_parameters():
            if name in self.places:
                found[name] = _fill_zeros(torch.ones_like(p, requires_grad=False), self.places[name])
        return found

    def narrow(self, name: str, x: Tensor) -> Tensor:
        """What the small network has of a tensor with room."""
        for axis, index in self.kept.get(name, {}).items():
            x = x.index_select(axis, index.to(x.device))
        return x

    def widen(self, name: str, x: Tensor) -> Tensor:
        """A tensor of the small network, with zeros in the room around it."""
        axes = self.places.get(name, {})
        for axis, index in axes.items():
            x = x.index_select(axis, index.clamp_min(0).to(x.device))
        return _fill_zeros(x, axes)

    @torch.no_grad()
    def remove_padding(self, model: nn.Module) -> nn.Module:
        """The small network with the numbers of one with room, on its device and in its layout."""
        small = copy.deepcopy(self.small)
        theirs = _tensors(model)
        small = small.to(next(iter(theirs.values())).device)
        for name, mine in _tensors(small).items():
            if name in theirs and not _is_scatter(name):
                mine.data = self.narrow(name, theirs[name].detach()).clone(memory_format=torch.preserve_format)
        return small.train(model.training)


def _fill_zeros(x: Tensor, axes: dict[int, Tensor]) -> Tensor:
    """With zeros, in place, wherever something was added."""
    for axis, index in axes.items():
        x.index_fill_(axis, (index < 0).nonzero().flatten().to(x.device), 0)
    return x


def _invert_index(index: Tensor) -> Tensor:
    """(n,) where each channel of the small network went."""
    at = (index >= 0).nonzero().flatten()
    return at[index[at].argsort()]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_scatter(name: str) -> bool:
    return ".scatter." in f".{name}"


def pad_model(model: nn.Module, example: Any) -> PaddedModel | None:
    """None where there is nothing to gain, or where the network cannot be followed."""
    if not _is_odd(model):
        return None
    try:
        with preserve_random_state():
            return _pad_and_check(model, example)
    except Exception:  # a training does not fail with what only makes it faster
        return None


def _is_odd(model: nn.Module) -> bool:
    """Whether more than one layer has a width that kernels do not like; the last one has one output per class."""
    widths = [kind.channels(m) for m in model.modules() if (kind := find_layer_type(m)) is not None]
    return sum(w % MULTIPLE > 0 for w in widths) > 1 or any("scatter" in m._modules for m in model.modules())


def _pad_and_check(model: nn.Module, example: Any) -> PaddedModel | None:
    flow = trace(model, example)
    recipe, places = _recipe(model, flow)
    if not places:
        return None
    roomy = copy.deepcopy(model)
    apply_recipe(roomy, recipe)
    _set_zero(roomy, places)
    check_same_outputs(roomy, model, example, flow.modes)
    return PaddedModel(roomy, model, places)


@torch.no_grad()
def _set_zero(model: nn.Module, places: Places) -> None:
    tensors = _tensors(model)
    for name, axes in places.items():
        _fill_zeros(tensors[name], axes)


def _recipe(model: nn.Module, flow: Flow) -> tuple[Recipe, Places]:
    """How to make room, and where everything goes."""
    blocks = ChannelBlocks(model, flow)
    while True:
        try:
            places = blocks.places()
            break
        except SplitBlockError as misfit:
            blocks.hold(misfit.block)
    sizes: dict[str, dict[str, int]] = {}
    for d in flow.graph.dense.values():
        kind = find_layer_type(model.get_submodule(d.module)) if d.module else None
        axes = places.get(d.weight, {})
        for axis, attribute in zip((d.out_axis, d.in_axis), kind.sizes if kind else (), strict=False):
            if axis in axes:
                sizes.setdefault(d.module, {})[attribute] = len(axes[axis])
    for name in flow.graph.calls:
        width = places.get(f"{name}.weight", {}).get(0, places.get(f"{name}.running_mean", {}).get(0))
        if width is not None and is_norm(module := model.get_submodule(name)) and hasattr(module, "num_features"):
            sizes.setdefault(name, {})["num_features"] = len(width)
    slices = {n: {axis: index.clamp_min(0) for axis, index in axes.items()} for n, axes in places.items()}
    return Recipe(slices, sizes=sizes, scatters=dict.fromkeys(blocks.absorbed())), places


class SplitBlockError(Exception):
    """A block of channels does not stand in a tensor as a whole."""

    def __init__(self, block: int) -> None:
        self.block = block


class ChannelBlocks:
    """Channels that stand together, in one order, wherever they stand: the output of a layer, a stream."""

    def __init__(self, model: nn.Module, flow: Flow) -> None:
        graph = self.graph = flow.graph
        self.scatters = {n: cuts for n, cuts in graph.calls.items() if "scatter" in model.get_submodule(n)._modules}
        straight = [(c.into, c.out) for n, cuts in graph.calls.items() if n not in self.scatters for c in cuts]
        self.classes = graph.classes(straight)
        self.blocks: list[Ids] = []
        self.owner: dict[int, int] = {}  # class -> its block
        self.held: set[int] = set()
        outputs = [d.out for d in graph.dense.values()] + [c.out for cuts in self.scatters.values() for c in cuts]
        for ids in outputs:
            self._add(self.classes[ids])
        self._hold_what_is_fixed(flow)
        self.behind = {self.block(cuts[0].given): (name, cuts[0]) for name, cuts in self.scatters.items()}
        for cuts in self.scatters.values():
            self._check_scatter(cuts)

    def _add(self, classes: Ids) -> None:
        if any(np.array_equal(classes, b) for b in self.blocks):
            return
        known = {self.owner[c] for c in classes.tolist() if c in self.owner}
        self.blocks.append(classes)
        for c in classes.tolist():
            self.owner.setdefault(c, len(self.blocks) - 1)
        if known or len(np.unique(classes)) < len(classes):
            self.held |= known | {len(self.blocks) - 1}

    def block(self, ids: Ids) -> int:
        return self.owner.get(int(self.classes[ids[0]]), -1)

    def _hold_what_is_fixed(self, flow: Flow) -> None:
        graph = self.graph
        fixed: list[Ids] = [flow.pins, *graph.even, *(box.core.numpy() for box in graph.boxes)]
        for d in graph.dense.values():
            if d.groups > 1 or not d.narrow:
                fixed += [d.out, *d.into]
        for c in np.unique(np.concatenate([self.classes[ids].reshape(-1) for ids in fixed])).tolist():
            self.held |= {self.owner[c]} if c in self.owner else set()

    def _check_scatter(self, cuts: list[ModuleCall]) -> None:
        """One that is not the same everywhere, or not the only one behind a block, stays as it is."""
        first = cuts[0]
        block = self.block(first.given)
        same = all(np.array_equal(c.index, first.index) and self.block(c.given) == block for c in cuts)
        alone = sum(self.block(c[0].given) == block for c in self.scatters.values()) == 1
        if not same or not alone or block < 0 or not np.array_equal(self.blocks[block], self.classes[first.given]):
            self.held |= {block, self.block(first.out)}

    def hold(self, block: int) -> None:
        """This one keeps its width; a scatter behind it then keeps the width of what it gives."""
        self.held.add(block)
        if block in self.behind:
            self.held.add(self.block(self.behind[block][1].out))

    def absorbed(self) -> list[str]:
        """The scatters that are not needed any more."""
        return [name for block, (name, _) in self.behind.items() if block not in self.held]

    def arrangement(self, block: int) -> Ids:
        """(m,) which of its channels stands at each place, -1 for none."""
        width = len(self.blocks[block])
        if block in self.held:
            return np.arange(width)
        if block in self.behind:
            cut = self.behind[block][1]
            out = self.block(cut.out)
            above = np.arange(len(cut.out)) if out in self.held | {-1} else self.arrangement(out)
            return np.where(above >= 0, cut.index[above.clip(0)], -1)
        return np.concatenate([np.arange(width), np.full(-width % MULTIPLE, -1)])

    def places(self) -> Places:
        found: Places = {}
        for s in self.graph.slices.values():
            if s.name not in self.graph.dense:
                self._note(found, s.name, s.axis, [s.ids])
        for d in self.graph.dense.values():
            if d.narrow and d.groups == 1:
                self._note(found, d.weight, d.out_axis, [d.out])
                self._note(found, d.weight, d.in_axis, d.into)
        return found

    def _note(self, found: Places, name: str, axis: int, calls: Sequence[Ids]) -> None:
        indices = [self._index(ids) for ids in calls]
        for index in indices:
            if not np.array_equal(index, np.arange(len(index))):
                found.setdefault(name, {})[axis] = torch.from_numpy(index)
        if any(not np.array_equal(index, indices[0]) for index in indices):
            raise SplitBlockError(self._any(calls))

    def _any(self, calls: Sequence[Ids]) -> int:
        """A block in these that still has room."""
        for ids in calls:
            for c in self.classes[ids].tolist():
                if self.owner.get(c, -1) not in self.held | {-1}:
                    return self.owner[c]
        raise AssertionError("tensors without room differ")

    def _index(self, ids: Ids) -> Ids:
        """(m,) the place each one had along an axis with these channels; pixels of one channel may be flattened."""
        classes, found, at = self.classes[ids], [], 0
        while at < len(classes):
            block = self.owner.get(int(classes[at]), -1)
            if block < 0 or block in self.held:
                found.append(np.array([at]))
                at += 1
                continue
            whole = self.blocks[block]
            run = int((np.cumsum(classes[at:] != classes[at]) == 0).sum())
            if not np.array_equal(classes[at : at + run * len(whole)], np.repeat(whole, run)):
                raise SplitBlockError(block)
            order = self.arrangement(block)
            found.append(np.where(order[:, None] >= 0, at + order[:, None] * run + np.arange(run), -1).reshape(-1))
            at += run * len(whole)
        return np.concatenate([np.zeros(0, dtype=np.int64), *found]).astype(np.int64)
