"""The table of networks to shrink says what is true of them: layers, norms, and what is zero when channels go."""

import pytest
import torch

import sosp
from networks import case, to_shrink
from networks.compare import outputs, width_out
from networks.recipe import run, tensors
from oracles.removed import zero_inputs

EVERY = pytest.mark.parametrize("name", to_shrink())


@EVERY
def test_it_runs_in_both_modes_and_is_the_same_every_time(name: str) -> None:
    c, again = case(name), case(name)
    for training in (False, True):
        a, b = outputs(c.model, c.example, training), outputs(again.model, again.example, training)
        assert all(torch.isfinite(x).all() for x in a)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@EVERY
def test_layers_and_their_norms(name: str) -> None:
    c = case(name)
    found = sosp.find_structures(c.model, c.example, exclude=c.exclude)
    assert {layer.name: layer.norms for layer in found.layers} == c.layers
    assert [layer.name for layer in found.layers] == list(c.layers)
    assert [layer.channels for layer in found.layers] == [width_out(c.model.get_submodule(n)) for n in c.layers]


@EVERY
def test_what_is_named_exists(name: str) -> None:
    c = case(name)
    widths = {n: width_out(c.model.get_submodule(n)) for n in c.layers}
    for consumer, removed in (*c.narrows, *c.frees):
        assert consumer in dict(c.model.named_modules())
        assert all(0 <= i < widths[n] for n, gone in removed.items() for i in gone), (consumer, removed)
    assert all(0 <= i < widths[n] for n, gone in c.by.items() for i in gone)
    assert {*c.whole, *c.shrinks, *(layer for layer, _ in c.frees)} <= set(c.layers)


@EVERY
def test_consumers_that_are_to_narrow_have_inputs_that_are_always_zero(name: str) -> None:
    c = case(name)
    for consumer, removed in c.narrows:
        zeros = zero_inputs(c.model, c.example, removed, c.layers)
        assert zeros.get(consumer, torch.tensor(True)).any(), (consumer, removed)  # or is no layer the oracle knows


@EVERY
def test_removing_a_whole_layer_does_not_cut_the_network(name: str) -> None:
    c = case(name)
    others = torch.Generator().manual_seed(5)
    moved = torch.utils._pytree.tree_map(
        lambda x: x + torch.randn(x.shape, generator=others, dtype=x.dtype) if x.is_floating_point() else (x + 1) % 2,
        c.example,
    )
    for layer in c.whole:
        removed = {layer: range(width_out(c.model.get_submodule(layer)))}
        model = sosp.masked(c.model, sosp.Mask.from_removed(c.model, removed, c.example))
        a, b = tensors(run(model, c.example)), tensors(run(model, moved))
        assert not any(torch.allclose(x, y) for x, y in zip(a, b, strict=True)), layer
