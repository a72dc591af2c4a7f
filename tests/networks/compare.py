"""Masks for a case, and what to compare a shrunk network with: numbers, shapes, and where every element came from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks.recipe import Case, Removal, run, tensors
from sosp.graph.plan import Plan

# The same sums of at most a few hundred terms with zeros left out: rounding of float64, 2e-16, times what batch
# statistics of four examples amplify it by. float32 has 6e-8.
EXACT = 1e-10
SINGLE = 1e-5

TRANSPOSED = nn.modules.conv._ConvTransposeNd
CONV = nn.modules.conv._ConvNd
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")


# --- masks


def mask_of(model: nn.Module, removed: Mapping[str, Sequence[int]], c: Case) -> sosp.Mask:
    """The mask that removes these channels, from a model of the case's making."""
    if not c.exclude:
        return sosp.Mask.from_removed(model, removed, c.example)
    return mask_from(sosp.find_structures(model, c.example, exclude=c.exclude), removed)


def mask_from(found: sosp.Structures, removed: Mapping[str, Sequence[int]]) -> sosp.Mask:
    """The mask that removes these channels, of structures that are one channel each."""
    ids = {layer.name: ids for layer, ids in zip(found.layers, found.ids, strict=True)}
    chosen = [ids[name][channel] for name, gone in removed.items() for channel in gone]
    return sosp.Mask.from_structures(found, torch.tensor(chosen, dtype=torch.long))


def some_channels(c: Case, share: float, seed: int = 0) -> Removal:
    """Each channel with that probability, never all of a layer, at least one in all."""
    generator = torch.Generator().manual_seed(seed + sum(map(ord, c.name)))
    removed: Removal = {}
    for name in c.layers:
        width = width_out(c.model.get_submodule(name))
        spared = int(torch.randint(width, (), generator=generator))
        gone = torch.rand(width, generator=generator) < share
        gone[spared] = False
        removed[name] = gone.nonzero().flatten().tolist()
    if not any(removed.values()):
        name = next(n for n in c.layers if width_out(c.model.get_submodule(n)) > 1)
        removed[name] = [0]
    return {name: gone for name, gone in removed.items() if gone}


def one_layer(c: Case) -> Removal:
    """Half the channels of one layer."""
    everything = some_channels(c, 0.5, seed=1)
    names = list(everything)
    chosen = names[sum(map(ord, c.name)) % len(names)]
    return {chosen: everything[chosen]}


def union(a: Removal, b: Removal) -> Removal:
    return {name: sorted({*a.get(name, ()), *b.get(name, ())}) for name in {**a, **b}}


# --- shapes


def width_out(module: nn.Module) -> int:
    """The rows of a layer's weight."""
    if isinstance(module, TRANSPOSED):
        return module.weight.shape[1] * module.groups
    return module.weight.shape[0]


def width_in(module: nn.Module) -> int:
    """The columns of a layer's weight; the channels of anything else with parameters or buffers per channel."""
    if isinstance(module, TRANSPOSED):
        return module.weight.shape[0]
    if isinstance(module, CONV):
        return module.weight.shape[1] * module.groups
    if isinstance(module, nn.Linear):
        return module.weight.shape[1]
    return next(t for t in [*module.parameters(), *module.buffers()] if t.dim()).numel()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- where every element came from


@torch.no_grad()
def numbered(model: nn.Module, order: torch.Generator | None = None) -> nn.Module:
    """A float64 copy in which every element of every float parameter and buffer is a number of its own, from 1 on.

    With ``order``, the numbers are shuffled.
    """
    copy = deepcopy(model).double()
    start = 1
    for tensor in _floats(copy).values():
        numbers = torch.arange(start, start + tensor.numel(), dtype=torch.float64)
        if order is not None:
            numbers = numbers[torch.randperm(len(numbers), generator=order)]
        tensor.copy_(numbers.view(tensor.shape))
        start += tensor.numel()
    return copy


def _floats(model: nn.Module) -> dict[str, Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t for name, t in found.items() if t.is_floating_point()}


def origins(c: Case, mask: sosp.Mask | Plan) -> dict[str, Tensor]:
    """For each float tensor of the shrunk model: the flat index in the original's tensor of that name, per element.

    -1 where an element is no copy. Shrinking two copies numbered in two ways tells copies from coincidences.
    """
    codes = [numbered(c.model), numbered(c.model, torch.Generator().manual_seed(0))]
    first, second = (_floats(model) for model in codes)
    small = [_floats(sosp.shrink(model, mask, c.example, verify=False)) for model in codes]
    found: dict[str, Tensor] = {}
    for name in (n for n in first if n in small[0]):
        a, b = first[name].detach().flatten(), second[name].detach().flatten()
        x, y = small[0][name].detach(), small[1][name].detach()
        index = (x - a[0] if len(a) else x).round().long()
        inside = (index >= 0) & (index < len(a))
        safe = index.clamp(0, max(len(a) - 1, 0))
        found[name] = torch.where(inside & (a[safe] == x) & (b[safe] == y), index, -1)
    return found


def channels_left(c: Case, layer: str, found: Mapping[str, Tensor]) -> list[int]:
    """The original channel of every row of a shrunk layer."""
    module: Any = c.model.get_submodule(layer)
    weight = next(n for n in _weights_of(layer) if n in found)
    rows = found[weight]
    shape = c.model.get_parameter(weight).shape
    if not isinstance(module, TRANSPOSED):
        return [int(row.max()) // shape[1:].numel() for row in rows.flatten(1)]
    # (in, out / groups, ...): the group of an input channel is the group of the output channels beside it.
    group = rows.flatten(2)[..., 0] // shape[1:].numel() // (shape[0] // module.groups)
    beside = rows.flatten(2)[..., 0] // shape[2:].numel() % shape[1]
    channel = group * shape[1] + beside
    return list(dict.fromkeys(channel.flatten().tolist()))


def _weights_of(layer: str) -> list[str]:
    computed = (f"{layer}.parametrizations.weight.original{n}" for n in ("1", ""))
    return [f"{layer}.weight", *computed]


# --- numbers


@contextmanager
def without_chance() -> Iterator[None]:
    """Dropout scales instead of choosing, since it would choose otherwise in a narrower tensor; all else is seeded."""

    def scale(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * (1 - p / 2) if training else x

    with mock.patch.multiple(F, **dict.fromkeys(DROPOUTS, scale)), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def outputs(model: nn.Module, example: Any, training: bool = False) -> list[Tensor]:
    model.train(training)
    with without_chance():
        return tensors(run(model, example))


def apart(a: Tensor, b: Tensor, scale: Tensor | float | None = None) -> float:
    """The largest difference, relative to the largest element of ``b`` (or to ``scale``)."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    scale = float(b.abs().max() if scale is None else scale)
    difference = float((a - b).abs().max())
    return difference / scale if scale else difference


def all_apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The worst of several tensors."""
    if len(a) != len(b):
        return float("inf")
    return max(map(apart, a, b), default=0.0)


def loss_of(found: Sequence[Tensor]) -> Tensor:
    """A number that every output has a say in, each element with another weight."""
    total = found[0].new_zeros(())
    for x in found:
        weights = torch.linspace(-1, 1.5, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)
        total = total + (weights * x + 0.3 * x * x).sum()
    return total


def check_close(mine: list[Tensor], theirs: list[Tensor], what: str, bound: float = EXACT) -> None:
    worst = all_apart(mine, theirs)
    assert worst < bound, what


def check_both_modes(mine: nn.Module, theirs: nn.Module, example: Any, bound: float = EXACT) -> None:
    for training in (False, True):
        what = "train mode" if training else "eval mode"
        check_close(outputs(mine, example, training), outputs(theirs, example, training), what, bound)
