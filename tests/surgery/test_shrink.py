"""Smaller networks that compute what the masked ones compute: outputs, statistics, gradients, and really smaller."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from networks import case, to_shrink
from networks.compare import (
    EXACT,
    SINGLE,
    apart,
    check_both_modes,
    check_close,
    loss_of,
    mask_of,
    one_layer,
    origins,
    outputs,
    parameters,
    some_channels,
    width_in,
    width_out,
)
from networks.recipe import Case, Removal, cast
from oracles.removed import removed as without
from oracles.removed import zero_inputs

EVERY = pytest.mark.parametrize("name", to_shrink())


# --- the same numbers


def check_same(c: Case, removed: Removal) -> None:
    """Shrunk and masked agree in every number, and the model that was given is as it was."""
    mask = mask_of(c.model, removed, c)
    before = state(c.model)
    small = sosp.shrink(c.model, mask, c.example)
    assert changed(c.model, before) == []
    check_names(small, c.model)
    masked = sosp.masked(c.model, mask)
    check_close(outputs(small, c.example), outputs(masked, c.example), "eval mode")
    check_training(small, masked, c, origins(c, mask))


def check_names(small: nn.Module, model: nn.Module) -> None:
    """The same classes under the same names, but for what is gone as a whole; what is added is the library's."""
    mine, theirs = dict(small.named_modules()), dict(model.named_modules())
    assert type(small) is type(model)
    assert set(theirs) <= set(mine)
    assert all(type(mine[n]).__module__.startswith("sosp.") for n in set(mine) - set(theirs))
    other = [n for n in theirs if type(mine[n]) is not type(theirs[n])]
    assert [n for n in other if any(True for _ in mine[n].parameters())] == []
    assert {n: mine[n].training for n in theirs} == {n: m.training for n, m in theirs.items()}
    assert set(small.state_dict()) <= set(model.state_dict())
    assert parameters(small) <= parameters(model)


def check_training(small: nn.Module, masked: nn.Module, c: Case, source: dict[str, Tensor]) -> None:
    """Outputs, gradients and statistics of one step in train mode; what is gone had nothing to learn."""
    found = [outputs(model, c.example, training=True) for model in (small, masked)]
    check_close(*found, "train mode")
    for outs in found:
        loss_of(outs).backward()
    theirs = dict(masked.named_parameters())
    scale = max((float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None), default=1.0)
    for name, p in theirs.items():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        kept = check_copies(f"gradient of {name}", small_gradient(small, name), gradient, source.get(name), scale)
        lost = gradient.flatten()[~kept]
        worst = apart(lost, torch.zeros_like(lost), scale)
        assert worst < EXACT, f"gradient of what {name} lost"
    mine = dict(small.named_buffers())
    for name, buffer in masked.named_buffers():
        if name in mine and buffer.is_floating_point():
            check_copies(name, mine[name], buffer, source[name], None)
        elif name.endswith("num_batches_tracked") and name in mine:
            assert torch.equal(mine[name], buffer), name


def small_gradient(small: nn.Module, name: str) -> Tensor | None:
    p = dict(small.named_parameters()).get(name)
    return p if p is None else torch.zeros_like(p) if p.grad is None else p.grad


def check_copies(what: str, mine: Tensor | None, theirs: Tensor, source: Tensor | None, scale: float | None) -> Tensor:
    """The elements of a shrunk tensor are those of the original they come from; returns which of these are left."""
    left = torch.zeros(theirs.numel(), dtype=torch.bool)
    if mine is None or source is None:
        return left
    copied = source >= 0
    worst = apart(mine[copied], theirs.flatten()[source[copied]], scale)
    assert worst < EXACT, what
    left[source[copied]] = True
    return left


def state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that must not change."""
    return {
        "numbers": {n: t.clone() for n, t in model.state_dict().items()},
        "modules": {n: id(m) for n, m in model.named_modules()},
        "tensors": {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "wishes": {n: p.requires_grad for n, p in model.named_parameters()},
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {n: (list(m._forward_hooks), list(m._forward_pre_hooks)) for n, m in model.named_modules()},
        "chance": torch.get_rng_state(),
    }


def changed(model: nn.Module, before: dict[str, Any]) -> list[str]:
    now = state(model)
    numbers = now.pop("numbers"), before["numbers"]
    same = numbers[0].keys() == numbers[1].keys() and all(torch.equal(numbers[0][n], t) for n, t in numbers[1].items())
    chance = torch.equal(now.pop("chance"), before["chance"])
    return [n for n in now if now[n] != before[n]] + ["numbers"] * (not same) + ["chance"] * (not chance)


@pytest.mark.parametrize("share", [0.3, 0.7])
@EVERY
def test_shrunk_computes_what_masked_computes(name: str, share: float) -> None:
    c = case(name)
    check_same(c, some_channels(c, share))


@EVERY
def test_with_one_layer_pruned(name: str) -> None:
    c = case(name)
    check_same(c, one_layer(c))


@pytest.mark.parametrize("name", [n for n in to_shrink() if case(n).whole])
def test_with_a_whole_layer_removed(name: str) -> None:
    for layer in case(name).whole:
        c = case(name)
        check_same(c, {layer: list(range(width_out(c.model.get_submodule(layer))))})


@EVERY
def test_with_an_empty_mask_nothing_changes(name: str) -> None:
    c = case(name)
    small = sosp.shrink(c.model, mask_of(c.model, {}, c), c.example)
    assert {n: t.shape for n, t in small.state_dict().items()} == {n: t.shape for n, t in c.model.state_dict().items()}
    assert all(map(torch.equal, outputs(small, c.example), outputs(c.model, c.example)))


@EVERY
def test_in_single_precision(name: str) -> None:
    c = case(name)
    model, example = c.model.float(), cast(c.example, torch.float32)
    mask = mask_of(case(name).model, some_channels(c, 0.3), case(name))
    small, masked = sosp.shrink(model, mask, example), sosp.masked(model, mask)
    check_both_modes(small, masked, example, SINGLE)


@pytest.mark.parametrize("share", [0.3, 0.7])
@EVERY
def test_masked_is_what_the_oracle_says_removal_means(name: str, share: float) -> None:
    c = case(name)
    removed = some_channels(c, share)
    masked = sosp.masked(c.model, mask_of(c.model, removed, c))
    check_both_modes(masked, without(c.model, c.example, removed, c.layers), c.example)


def test_modes_and_hooks_of_the_given_model_stay_and_the_copy_has_them_too() -> None:
    c = case("resnet")
    seen: list[str] = []
    c.model.train()
    c.model.layer1.eval()
    c.model.layer2[0].register_forward_hook(lambda m, a, o: seen.append("layer2.0"))
    c.model.fc.weight.requires_grad_(False)
    before = state(c.model)
    small = sosp.shrink(c.model, mask_of(case("resnet").model, some_channels(c, 0.3), c), c.example)
    assert changed(c.model, before) == []
    check_names(small, c.model)
    assert {n: p.requires_grad for n, p in small.named_parameters()} == before["wishes"]
    seen.clear()
    outputs(small, c.example)
    assert seen == ["layer2.0"]


# --- really smaller


@EVERY
def test_layers_lose_the_rows_of_a_mask_on_them(name: str) -> None:
    c = case(name)
    wrong = {}
    for layer in (n for n in c.layers if n in c.shrinks):
        small = sosp.shrink(c.model, mask_of(c.model, {layer: c.by[layer]}, c), c.example)
        lost = width_out(c.model.get_submodule(layer)) - width_out(small.get_submodule(layer))
        if lost < len(c.by[layer]):  # more, where others have no use without them
            wrong[layer] = f"lost {lost} rows of {c.by[layer]}"
    assert wrong == {}


@EVERY
def test_consumers_lose_the_columns_that_are_always_zero(name: str) -> None:
    c = case(name)
    wrong = []
    for consumer, removed in c.narrows:
        small = sosp.shrink(c.model, mask_of(c.model, removed, c), c.example)
        lost = width_in(c.model.get_submodule(consumer)) - width_in(small.get_submodule(consumer))
        zeros = zero_inputs(c.model, c.example, removed, c.layers)
        wanted = int(zeros[consumer].sum()) if consumer in zeros else max(map(len, removed.values()))
        if lost != wanted:
            wrong.append(f"{consumer} lost {lost} of {wanted} columns without {removed}")
    assert wrong == []


@pytest.mark.parametrize("name", [n for n in to_shrink() if case(n).frees])
def test_layers_lose_rows_that_nothing_reads_any_more(name: str) -> None:
    c = case(name)
    for layer, removed in c.frees:
        small = sosp.shrink(c.model, mask_of(c.model, removed, c), c.example)
        assert width_out(small.get_submodule(layer)) < width_out(c.model.get_submodule(layer)), (layer, removed)


class ByHand(nn.Module):
    """Layers and a norm whose parameters are taken by hand as well."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.e1, self.norm, self.e2, self.d1 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.e1(x)).relu()
        z = self.d1((y + self.e2(y)).relu()).relu()
        if self.what == "weight":
            return nn.functional.linear(z, self.e1.weight.t())
        return z + {"bias": self.e2.bias, "norm": self.norm.bias, "rows": self.e2.weight.sum(1)}[self.what]


@pytest.mark.parametrize("what", ["weight", "bias", "norm", "rows"])
@pytest.mark.parametrize("join", ["zeros", "scatter"])
def test_parameters_that_are_taken_by_hand_keep_their_numbers(what: str, join: str) -> None:
    torch.manual_seed(0)
    model, x = ByHand(what).eval(), torch.randn(24, 6)
    mask = sosp.Mask.from_removed(model, {"e1": [0, 1, 2], "e2": [0, 3]}, x)
    small, masked = sosp.shrink(model, mask, x, join=join, verify=False), sosp.masked(model, mask)
    torch.testing.assert_close(small(x), masked(x), atol=1e-5, rtol=0)
