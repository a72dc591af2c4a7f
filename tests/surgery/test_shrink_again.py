"""Shrunk networks are pruned again; whole blocks and coupled channels are removed."""

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from networks import case, to_shrink
from networks.compare import (
    EXACT,
    apart,
    channels_left,
    check_both_modes,
    mask_of,
    outputs,
    parameters,
    some_channels,
    union,
    width_out,
)
from networks.recipe import Case, Removal
from networks.shrunk import Shrunk, cut, original, shrink_both_ways, shrunk

EVERY = pytest.mark.parametrize("name", to_shrink())
WITH_BLOCKS = [
    *("resnet", "resnet-preact", "densenet", "inception", "unet", "inverted-residual", "conv1d-blocks", "convnext"),
]
AGAIN = [
    "resnet",
    "resnet-preact",
    "densenet",
    "mobilenet-v3",
    "resnext",
    "flatten-constant",
    "groupnorm",
    "attention-hf",
    "swiglu",
    "twice",
    "depthwise-bias",
]
COUPLED = ["resnet", "resnet-preact", "densenet", "inverted-residual", "mobilenet-v3", "two-streams", "swiglu"]


# --- again


def left_of(s: Shrunk, removed: Removal) -> Removal:
    """Channels of the original as channels of the shrunk model; those that are gone already are left out."""
    translated = {}
    for layer, gone in removed.items():
        left = channels_left(s.case, layer, s.source)
        translated[layer] = [left.index(i) for i in gone if i in left]
    return {layer: gone for layer, gone in translated.items() if gone}


@EVERY
def test_shrunk_twice_is_shrunk_once_with_the_union(name: str) -> None:
    s = shrunk(name, 0.3)
    c, first, second = s.case, s.removed, some_channels(s.case, 0.3, seed=7)
    both = union(first, second)
    whole = {n for n, gone in both.items() if len(gone) == width_out(c.model.get_submodule(n))}
    second = {n: gone for n, gone in second.items() if n not in whole}
    again = sosp.shrink(s.small, mask_of(s.small, left_of(s, second), c), c.example)
    once = cut(name, union(first, second))
    assert {n: t.shape for n, t in again.state_dict().items()} == {n: t.shape for n, t in once.state_dict().items()}
    check_both_modes(again, once, c.example)


# A norm that only the emptied branch reads is gone after the first cut; with both at once its width differs from that
# of its input, or it holds channels of the stream back.
NORM_HOLDS_CHANNELS = (("convnext", "pwconv2"), ("attention-hf", "proj"), ("resnet-preact", "blocks.1.conv1"))


@pytest.mark.parametrize("name", [n for n in to_shrink() if case(n).whole])
def test_shrunk_again_where_a_layer_is_gone(name: str) -> None:
    """The zeros that are left of it hold nothing back but what they are added to."""
    for layer in original(name).whole:
        first = {layer: list(range(width_out(original(name).model.get_submodule(layer))))}
        s = shrink_both_ways(name, first)
        c, small = s.case, s.small
        needed = used(small, c)
        second = {n: gone for n, gone in some_channels(c, 0.4, seed=3).items() if n in needed}
        later = left_of(s, second)
        if not later or (alive(small) & set(c.layers)) - needed:
            continue  # what is computed for nothing is refused, by name
        masked = mask_of(small, later, c)
        again = sosp.shrink(small, masked, c.example)
        check_both_modes(deepcopy(again), sosp.masked(small, masked), c.example)
        if (name, layer) != ("resnet-preact", "blocks.0.conv2"):  # a norm of the sum knows of no zeros in it
            once = cut(name, first | second)
            check_both_modes(again, once, c.example)
            shapes = [{n: t.shape for n, t in found.state_dict().items()} for found in (again, once)]
            if (name, layer) in NORM_HOLDS_CHANNELS:
                assert parameters(again) < parameters(once)
            else:
                assert shapes[0] == shapes[1], layer


def alive(model: nn.Module) -> set[str]:
    return {n for n, module in model.named_modules() if isinstance(getattr(module, "weight", None), nn.Parameter)}


def used(model: nn.Module, c: Case) -> set[str]:
    """Layers that the outputs depend on."""
    model = deepcopy(model)
    sum((x.square().sum() for x in outputs(model, c.example)), torch.zeros(())).backward()
    return {n for n in alive(model) if (g := model.get_submodule(n).weight.grad) is not None and g.abs().sum() > 0}


def scores(model: nn.Module, c: Case) -> sosp.Saliency:
    labels = torch.arange(len(c.example)) % outputs(model, c.example)[0].shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sosp.SlowPathWarning)
        return sosp.score(model, (c.example, labels))


@pytest.mark.parametrize("name", AGAIN)
def test_a_shrunk_model_has_the_scores_of_the_masked_one_and_can_be_pruned_again(name: str) -> None:
    s = shrunk(name, 0.3)
    c, (small, masked) = s.case, s.copies()
    mine, theirs = scores(small, c), scores(masked, c)
    ids = {layer.name: ids for layer, ids in zip(theirs.structures.layers, theirs.structures.ids, strict=True)}
    kept = torch.cat([ids[layer.name][channels_left(c, layer.name, s.source)] for layer in mine.structures.layers])
    assert apart(mine.first, theirs.first[kept]) < EXACT
    assert apart(mine.second, theirs.second[kept]) < EXACT
    again = sosp.select(mine, ratio=0.3, cap=0.6)
    smaller, masked = sosp.shrink(small, again, c.example), sosp.masked(small, again)
    assert parameters(smaller) < parameters(small)
    check_both_modes(smaller, masked, c.example)


# --- other masks


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_blocks(name: str) -> None:
    count = len(sosp.find_structures(case(name).model, case(name).example, kind="blocks"))
    for block in range(count):
        c = case(name)
        found = sosp.find_structures(c.model, c.example, kind="blocks")
        mask = sosp.Mask.from_structures(found, torch.tensor([block]))
        small, masked = sosp.shrink(c.model, mask, c.example), sosp.masked(c.model, mask)
        assert parameters(small) < parameters(c.model)
        check_both_modes(small, masked, c.example)


def wide_outputs(model: nn.Module, c: Case) -> dict[str, tuple[int, int]]:
    """Layers whose output is wider than their weight: zeros were put back."""
    found: dict[str, tuple[int, int]] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            width = output.shape[-1] if isinstance(module, nn.Linear) else output.shape[1]
            if width != width_out(module):
                found[name] = (width_out(module), width)

        return hook

    twin = deepcopy(model)
    for name in c.layers:
        twin.get_submodule(name).register_forward_hook(look(name))
    outputs(twin, c.example)
    return found


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_channels_go_together_and_nothing_is_put_back(name: str) -> None:
    c = case(name)
    found = sosp.find_structures(c.model, c.example, groups="coupled")
    single = sosp.find_structures(c.model, c.example)
    assert len(found) <= len(single)
    picked = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[: len(found) // 3]
    mask = sosp.Mask.from_structures(found, picked)
    small, masked = sosp.shrink(c.model, mask, c.example), sosp.masked(c.model, mask)
    assert wide_outputs(small, c) == {}
    check_both_modes(small, masked, c.example)


def test_coupled_channels_of_a_residual_stage_are_one_structure() -> None:
    c = case("resnet")
    found = sosp.find_structures(c.model, c.example, groups="coupled")
    for structure in range(len(found)):
        together = {n: gone.tolist() for n, gone in found.channels_of(torch.tensor([structure])).items()}
        if "conv1" in together:
            (channel,) = together["conv1"]
            assert together == {n: [channel] for n in ("conv1", "layer1.0.conv2", "layer1.1.conv2")}
