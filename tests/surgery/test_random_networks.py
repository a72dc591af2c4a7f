"""Random networks under random masks: the smaller network computes and learns what the masked one does."""

import copy
import math
import os
import re
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import sosp
from networks import random_networks as generator

START = int(os.environ.get("SOSP_FUZZ_START", "0"))
SEEDS = range(START, START + int(os.environ.get("SOSP_FUZZ_SEEDS", "300")))
QUICK = 60  # seeds of every run of the tests

# float64 rounds at 1e-16; sums of up to 1e3 terms in another order, some twenty layers deep and through norms that
# amplify up to tenfold (eps >= 1e-2), stay below 1e-12 of the largest number.
TOLERANCE = 1e-10


@pytest.mark.parametrize("seed", [*SEEDS[:QUICK], *(pytest.param(n, marks=pytest.mark.slow) for n in SEEDS[QUICK:])])
def test_the_shrunk_network_is_the_masked_one(seed: int) -> None:
    check_shrink(seed)


def check_shrink(seed: int) -> None:
    """Everything that must hold for the network and the mask of this seed."""
    example = generator.network(seed)
    model, x = example.model.train(seed % 2 == 1), example.inputs
    mask = random_mask(model, x, seed)
    reference = without_dropout(sosp.masked(model, mask))
    try:
        small, origin = shrunk_with_origin(model, mask, x)
    except sosp.errors.DisconnectedError:
        check_disconnected(reference, mask, x)
        return
    if seed % 8 == 0:  # tracing takes most of the time, and what is selected cannot depend on the numbers
        check_alike(small, sosp.shrink(model, mask, x, verify=False))
    check_kin(model, mask, small, reference, x)
    small = without_dropout(small)
    check_step(reference.eval(), small.eval(), x, origin, "eval")
    check_step(reference.train(), small.train(), x, origin, "train")
    check_statistics(reference, small, origin)
    check_step(reference.eval(), small.eval(), x, origin, "eval after training")


def random_mask(model: nn.Module, x: Tensor, seed: int) -> sosp.Mask:
    structures = sosp.find_structures(model, x)
    removed = generator.removal(model, x, seed, structures)
    numbers = [ids[removed.get(a.name, [])] for a, ids in zip(structures.layers, structures.ids, strict=True)]
    return sosp.Mask.from_structures(structures, torch.cat(numbers))


def check_disconnected(reference: nn.Module, mask: sosp.Mask, x: Tensor) -> None:
    """A refused mask empties a layer, and nothing of the input reaches the output."""
    assert any(len(mask.removed.get(layer.name, ())) == layer.channels for layer in mask.layers)
    x = x.clone().requires_grad_()
    outputs, _ = tree_flatten(reference.eval()(x))
    grads = torch.autograd.grad([y.sum() for y in outputs if y.requires_grad], x, allow_unused=True)
    assert grads[0] is None or not grads[0].any(), "the mask was refused, but the network is whole"


def check_alike(small: nn.Module, other: nn.Module) -> None:
    """The same modules and the same numbers, bit for bit."""
    assert [(n, type(m)) for n, m in small.named_modules()] == [(n, type(m)) for n, m in other.named_modules()]
    assert portrait(small).state == portrait(other).state


def check_kin(model: nn.Module, mask: sosp.Mask, small: nn.Module, reference: nn.Module, x: Tensor) -> None:
    """Same class, same names, same modes, and smaller."""
    assert type(small) is type(model)
    modes = {n: m.training for n, m in small.named_modules()}
    assert all(modes.get(n) == m.training for n, m in model.named_modules())
    sizes = [sum(p.numel() for p in m.parameters()) for m in (small, model)]
    assert sizes[0] <= sizes[1]
    check_rows(model, mask, small, reference, x)


def check_rows(model: nn.Module, mask: sosp.Mask, small: nn.Module, reference: nn.Module, x: Tensor) -> None:
    """Each layer lost the filters that the mask removes; of an emptied one at most one is left."""
    widths = {layer.name: layer.channels for layer in mask.layers}
    for name, gone in mask.removed.items():
        layer, left = model.get_submodule(name), small.get_submodule(name)
        if is_plain(layer) and isinstance(getattr(left, "weight", None), Tensor):
            rows = left.weight.shape[1 if getattr(layer, "transposed", False) else 0]
            wanted = max(widths[name] - len(gone), 1)
            kept = rows > wanted and not is_read_in_training(reference, name, gone, x)
            assert not kept, f"{name} keeps {rows} of {widths[name]} filters, the mask leaves {wanted}"


def check_statistics(reference: nn.Module, small: nn.Module, origin: "Origin") -> None:
    """What batch norms collected in training, in the channels whose shift makes a difference to the outputs."""
    values = origin.values(reference)
    for name, b in small.named_buffers():
        if name not in origin.codes:
            continue
        codes, shift = origin.codes[name], name.rpartition(".")[0] + ".bias"
        seen = origin.seen[codes - origin.starts[name] + origin.starts[shift]] if shift in origin.starts else ...
        gap = distance(b.flatten()[seen], values[codes][seen])
        assert gap < TOLERANCE, f"train: the statistics {name} differ by {gap:.1e}"


def check_step(reference: nn.Module, small: nn.Module, x: Tensor, origin: "Origin", mode: str) -> None:
    """Equal outputs, and equal gradients of a random functional of them."""
    wanted, form = tree_flatten(reference(x.clone()))
    found, other = tree_flatten(small(x.clone()))
    assert form == other
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape, f"{mode}: output {i} is {tuple(a.shape)}, not {tuple(b.shape)}"
        gap = distance(a, b)
        assert gap < TOLERANCE, f"{mode}: output {i} differs by {gap:.1e}"
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=draw, dtype=y.dtype) for y in wanted]
    check_gradients(gradients(reference, wanted, weights), gradients(small, found, weights), origin, mode)


def check_gradients(wanted: dict[str, Tensor], found: dict[str, Tensor], origin: "Origin", mode: str) -> None:
    """Each kept weight has the gradient it had; what is gone had none."""
    flat = torch.cat([g.flatten() for g in wanted.values()])  # parameters come first in a catalogue
    largest = max(float(flat.abs().max()), 1e-300)
    origin.seen[: len(flat)] |= flat != 0
    lost = torch.ones(len(flat), dtype=torch.bool)
    for name, g in found.items():
        codes = origin.codes[name]
        lost[codes] = False
        gap = float((g.flatten() - flat[codes]).abs().max()) / largest if g.numel() else 0.0
        assert gap < TOLERANCE, f"{mode}: the gradient of {name} differs by {gap:.1e}"
    gap = float((flat * lost).abs().max()) / largest
    assert gap < TOLERANCE, f"{mode}: {origin.name_of(int((flat * lost).abs().argmax()))} is gone, but had a gradient"


def gradients(model: nn.Module, outputs: list[Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    total = sum((w * y).sum() for w, y in zip(weights, outputs, strict=True))
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, grads, strict=True))


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    if not wanted.numel():
        return 0.0
    return float((found - wanted).detach().abs().max()) / max(float(wanted.detach().abs().max()), 1e-300)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):
            module.p = 0.0
    return model


def is_read_in_training(reference: nn.Module, name: str, gone: Tensor, x: Tensor) -> bool:
    """An auxiliary head that only training runs reads the filters before the norm behind which they are removed."""
    outputs = []
    for shift in (0.0, 1.0):
        twin = copy.deepcopy(reference).train()
        layer = twin.get_submodule(name)
        axis = -1 if isinstance(layer, nn.Linear) else 1
        handle = layer.register_forward_hook(
            lambda m, a, y, s=shift, d=axis: y.index_add(d, gone, s * noise(y, gone, d))
        )
        layer._forward_hooks.move_to_end(handle.id, last=False)
        outputs.append(tree_flatten(twin(x.clone()))[0])
    return not all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def noise(y: Tensor, gone: Tensor, axis: int) -> Tensor:
    return torch.rand_like(y.index_select(axis, gone))


def is_plain(layer: Any) -> bool:
    """Its weight is a parameter, and a filter can go without regard to the others (groups stay equally wide)."""
    computed = isinstance(layer, generator.StdConv2d) or "weight" not in layer._parameters
    return not computed and getattr(layer, "groups", 1) == 1


class Portrait(NamedTuple):
    """All there is to see of a model, and of the global random state."""

    modules: list[Any]
    parameters: list[Any]
    state: list[tuple[str, bytes]]
    random: bytes


def portrait(model: nn.Module) -> Portrait:
    return Portrait(
        [(n, id(m), type(m), m.training, len(m._forward_hooks), list(m.__dict__)) for n, m in model.named_modules()],
        [(n, id(p), p.requires_grad, p.grad is None) for n, p in model.named_parameters()],
        [(n, t.detach().numpy().tobytes()) for n, t in model.state_dict().items()],
        torch.get_rng_state().numpy().tobytes(),
    )


# --- where each element of the smaller network comes from -----------------------------------------------


def shrunk_with_origin(model: nn.Module, mask: sosp.Mask, x: Tensor) -> tuple[nn.Module, "Origin"]:
    """The smaller network, and for every element of it which one of the original it is.

    A copy of the model carries a number of its own in every element. Narrowing only selects elements, so the numbers
    that are left when it is shrunk say where each came from; then they give way to what the original has there.
    """
    origin = Origin(model)
    twin = origin.numbered(model)
    before = portrait(twin)
    small = sosp.shrink(twin, mask, x, verify=False)
    assert portrait(twin) == before, "the model given was changed"
    origin.read(small)
    values = origin.values(model)
    for name, t in catalogue(small):
        t.data.copy_(values[origin.codes[name]].view(t.shape))
    return small, origin


def catalogue(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter, then every statistic."""
    statistics = [(n, b) for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))]
    return [*model.named_parameters(), *statistics]


class Origin:
    """The elements of a model, numbered, and what became of the numbers in a smaller one."""

    def __init__(self, model: nn.Module) -> None:
        sizes = [t.numel() for _, t in catalogue(model)]
        self.total = sum(sizes)
        self.starts = dict(zip((n for n, _ in catalogue(model)), accumulate(sizes, initial=0), strict=False))
        # A power of two is exact; with numbers up to 1 the network still computes finite ones.
        self.unit = 2.0 ** -math.ceil(math.log2(self.total + 1))
        self.codes: dict[str, Tensor] = {}
        self.seen = torch.zeros(self.total, dtype=torch.bool)  # parameters that had a gradient

    def numbered(self, model: nn.Module) -> nn.Module:
        """A copy whose elements are 1, 2, 3, ... times ``unit``."""
        twin = copy.deepcopy(model)
        for name, t in catalogue(twin):
            numbers = torch.arange(t.numel(), dtype=t.dtype).view(t.shape) + (self.starts[name] + 1)
            t.data.copy_(numbers * self.unit)
        return twin

    def read(self, small: nn.Module) -> None:
        for name, t in catalogue(small):
            numbers = t.detach().flatten() / self.unit
            codes = numbers.round().long() - 1
            valid = (codes + 1 == numbers) & (codes >= 0) & (codes < self.total)
            assert valid.all(), f"{name} holds {numbers[~valid][0].item()}, which is no element of the original"
            self.codes[name] = codes
        seen = torch.cat(list(self.codes.values()))
        assert len(seen.unique()) == len(seen), "an element of the original is there twice"

    def values(self, model: nn.Module) -> Tensor:
        """(elements,) what a model of the original size holds."""
        return torch.cat([t.detach().flatten() for _, t in catalogue(model)])

    def name_of(self, code: int) -> str:
        return [n for n, start in self.starts.items() if start <= code][-1]


# --- the generator itself -------------------------------------------------------------------------------

FEATURES = {
    "inputs": "2d 1d 3d tokens vectors",
    "norms": "bn gn in ln rms ln-by-hand bn-frozen",
    "activations": "relu relu-inplace gelu silu hardswish sigmoid tanh leaky prelu elu",
    "adds": "residual + += add preact type-a1 type-a2 three-way sum stack-mean difference maximum mixture",
    "concats": "dense inception pool chunk split slice half interleave split-add res2 crelu unet unet-add",
    "moves": "shuffle reorder maxout unshuffle pixelshuffle",
    "groups": "grouped separable inverted multiplier convnext",
    "products": "se-conv se-linear se-mean eca gate product tanh-gate glu",
    "mixes": "cbam lrn channel-softmax channel-mean nonlocal",
    "raw": "layerscale channelbias scalar constants dropout stdconv weightnorm rawconv",
    "shared": "shared-twice shared-twice-relu shared-siamese shared-sequential shared-two-norms",
    "sizes": "maxpool avgpool adaptivemaxpool adaptiveavgpool strided upsample transposed",
    "attention": "attention-timm attention-shape attention-constant attention-sdpa attention-mha encoderlayer",
    "on tokens": "classtoken mlp swiglu mixer pre post",
    "heads": "flatten pooled max mean class flat aux two-heads features pair",
}


def features(description: str) -> set[str]:
    """The words of a description; the number of groups of a norm is left out."""
    return {re.sub(r"^gn\d+$", "gn", word) for word in re.findall(r"[\w+=-]+", description)}


def test_every_feature_occurs() -> None:
    found = set().union(*(features(generator.network(seed).description) for seed in range(300)))
    assert sorted(set(" ".join(FEATURES.values()).split()) - found) == []


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_seed_gives_the_same_network_whatever_the_global_state(seed: int) -> None:
    torch.manual_seed(1)
    one = generator.network(seed)
    torch.manual_seed(2)
    two = generator.network(seed)
    assert one.description == two.description
    assert torch.equal(one.inputs, two.inputs)
    assert portrait(one.model).state == portrait(two.model).state
    assert generator.removal(one.model, one.inputs, seed) == generator.removal(two.model, two.inputs, seed)
