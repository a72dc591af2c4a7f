"""Random networks under random masks: the smaller network computes and learns what the masked one does."""

import copy
import math
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import generator
import sosp

START = int(os.environ.get("SOSP_FUZZ_START", "0"))
SEEDS = range(START, START + int(os.environ.get("SOSP_FUZZ_SEEDS", "300")))

# float64 rounds at 1e-16; sums of up to 1e3 terms in another order, some twenty layers deep and through norms that
# amplify up to tenfold (eps >= 1e-2), stay below 1e-12 of the largest number.
TOLERANCE = 1e-10


@pytest.mark.parametrize("seed", SEEDS)
def test_the_shrunk_network_is_the_masked_one(seed: int) -> None:
    check_shrink(seed)


def check_shrink(seed: int) -> None:
    """Everything that must hold for the network and the mask of this seed."""
    example = generator.network(seed)
    model, x = example.model.train(seed % 2 == 1), example.inputs
    mask = sosp.Mask.from_removed(model, generator.removal(model, x, seed), x)
    reference = without_dropout(sosp.masked(model, mask))
    before = portrait(model)
    try:
        small = without_dropout(sosp.shrink(model, mask, x, verify=False))
    except sosp.errors.DisconnectedError:
        check_disconnected(reference, mask, x)
        return
    assert portrait(model) == before, "the model given was changed"
    origin = Origin(model, mask, x)
    check_kin(model, mask, small, origin)
    check_eval(reference, small, x, origin)
    check_train(reference, small, x, origin)
    check_eval(reference, small, x, origin)  # with the statistics that training left


def check_disconnected(reference: nn.Module, mask: sosp.Mask, x: Tensor) -> None:
    """A refused mask empties a layer, and nothing of the input reaches the output."""
    assert any(len(mask.removed.get(layer.name, ())) == layer.channels for layer in mask.layers)
    x = x.clone().requires_grad_()
    outputs, _ = tree_flatten(reference.eval()(x))
    grads = torch.autograd.grad([y.sum() for y in outputs if y.requires_grad], x, allow_unused=True)
    assert grads[0] is None or not grads[0].any(), "the mask was refused, but the network is whole"


def check_kin(model: nn.Module, mask: sosp.Mask, small: nn.Module, origin: "Origin") -> None:
    """Same class, same names, same modes, same numbers, and smaller."""
    assert type(small) is type(model)
    names, modes = dict(small.named_modules()), dict(model.named_modules())
    assert modes.keys() <= names.keys()
    assert all(names[n].training == m.training for n, m in modes.items())
    values = origin.values(model)
    for name, t in catalogue(small):
        assert torch.equal(t.detach().flatten(), values[origin.codes[name]]), f"{name} has other numbers"
    sizes = [sum(p.numel() for p in m.parameters()) for m in (small, model)]
    assert sizes[0] <= sizes[1]
    if any(is_plain(model.get_submodule(n)) for n in mask.removed):
        assert sizes[0] < sizes[1], f"the mask removes channels, but all of {sizes[1]} parameters stayed"


def check_eval(reference: nn.Module, small: nn.Module, x: Tensor, origin: "Origin") -> None:
    check_step(reference.eval(), small.eval(), x, origin, "eval")


def check_train(reference: nn.Module, small: nn.Module, x: Tensor, origin: "Origin") -> None:
    """Also the statistics that batch norms collect on the way."""
    check_step(reference.train(), small.train(), x, origin, "train")
    values = origin.values(reference)
    buffers = dict(small.named_buffers())
    for name in buffers.keys() & origin.codes.keys():
        codes, b = origin.codes[name], buffers[name]
        kept = ~origin.masked[codes]
        gap = distance(b.flatten()[kept], values[codes][kept])
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


def is_plain(layer: Any) -> bool:
    """Its weight is a parameter, and a filter can go without regard to the others (groups stay equally wide)."""
    computed = isinstance(layer, generator.StdConv2d) or "weight" not in layer._parameters
    return not computed and getattr(layer, "groups", 1) == 1


def portrait(model: nn.Module) -> list[Any]:
    """All there is to see of a model, and of the global random state."""
    modules = [(n, id(m), type(m), m.training, len(m._forward_hooks)) for n, m in model.named_modules()]
    params = [(n, id(p), p.requires_grad, p.grad is None) for n, p in model.named_parameters()]
    state = [(n, t.detach().numpy().tobytes()) for n, t in model.state_dict().items()]
    return [modules, params, state, torch.get_rng_state().numpy().tobytes()]


# --- where each element of the smaller network comes from -----------------------------------------------


def catalogue(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter, then every statistic."""
    statistics = [(n, b) for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))]
    return [*model.named_parameters(), *statistics]


class Origin:
    """For every element of the smaller network, which one of the original it is.

    A copy of the model carries a number of its own in every element. Narrowing only selects elements, so the numbers
    left in the copy when it is shrunk by the same mask say where they came from.
    """

    def __init__(self, model: nn.Module, mask: sosp.Mask, x: Tensor) -> None:
        self.starts: dict[str, int] = {}
        self.total = sum(t.numel() for _, t in catalogue(model))
        unit = 2.0 ** -math.ceil(math.log2(self.total + 1))  # exact, and the network still computes finite numbers
        small = sosp.shrink(self.numbered(model, unit), mask, x, verify=False)
        self.codes = {n: self.read(n, t.detach().flatten() / unit) for n, t in catalogue(small)}
        seen = torch.cat(list(self.codes.values()))
        assert len(seen.unique()) == len(seen), "an element of the original is there twice"
        self.masked = self.mark(model, mask)

    def numbered(self, model: nn.Module, unit: float) -> nn.Module:
        """A copy whose elements are 1, 2, 3, ... times ``unit``."""
        twin = copy.deepcopy(model)
        at = 0
        for name, t in catalogue(twin):
            self.starts[name] = at
            t.data.copy_(torch.arange(at + 1, at + t.numel() + 1, dtype=t.dtype).view(t.shape) * unit)
            at += t.numel()
        return twin

    def read(self, name: str, numbers: Tensor) -> Tensor:
        codes = numbers.round().long() - 1
        valid = (codes + 1 == numbers) & (codes >= 0) & (codes < self.total)
        assert valid.all(), f"{name} holds {numbers[~valid][0].item()}, which is no element of the original"
        return codes

    def mark(self, model: nn.Module, mask: sosp.Mask) -> Tensor:
        """(elements,) the statistics of channels that the mask removes: nobody sees them."""
        gone = torch.zeros(self.total, dtype=torch.bool)
        for layer in mask.layers:
            for norm in layer.norms if layer.name in mask.removed else ():
                for key in ("running_mean", "running_var"):
                    if f"{norm}.{key}" in self.starts:
                        gone[self.starts[f"{norm}.{key}"] + mask.removed[layer.name]] = True
        return gone

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
    "groups": "separable inverted multiplier convnext",
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
    assert portrait(one.model)[2] == portrait(two.model)[2]
    assert generator.removal(one.model, one.inputs, seed) == generator.removal(two.model, two.inputs, seed)
