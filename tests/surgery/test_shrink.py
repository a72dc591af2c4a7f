"""Smaller networks that compute what the masked ones compute: outputs, statistics, gradients, and really smaller."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import sosp
from helpers.unchanged import check_unchanged
from networks import case, to_shrink
from networks.compare import (
    EXACT,
    SINGLE,
    apart,
    check_both_modes,
    check_close,
    loss_of,
    one_layer,
    outputs,
    parameters,
    width_in,
    width_out,
)
from networks.recipe import Case, cast
from networks.shrunk import Shrunk, cut, original, shrink_both_ways, shrunk
from oracles.removed import removed as without
from oracles.removed import zero_inputs

EVERY = pytest.mark.parametrize("name", to_shrink())


# --- the same numbers


def check_same(s: Shrunk) -> None:
    """Shrunk and masked agree in every number."""
    small, masked = s.copies()
    check_names(small, s.case.model)
    check_close(outputs(small, s.case.example), outputs(masked, s.case.example), "eval mode")
    check_training(small, masked, s.case, s.source)


def check_names(small: nn.Module, model: nn.Module) -> None:
    """The same classes under the same names, but for what is gone as a whole; what is added is the library's."""
    mine, theirs = dict(small.named_modules()), dict(model.named_modules())
    assert type(small) is type(model)
    assert set(theirs) <= set(mine)
    assert all(type(mine[n]).__module__.startswith("sosp.") for n in set(mine) - set(theirs))
    other = [n for n in theirs if type(mine[n]) is not type(theirs[n])]
    assert [n for n in other if mine[n]._parameters] == []  # the skip of a block that is gone still has some
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


SHARES = (0.3, 0.7)


@EVERY
def test_shrunk_computes_what_masked_computes(name: str) -> None:
    for share in SHARES:
        check_same(shrunk(name, share))
    check_same(shrink_both_ways(name, one_layer(original(name))))
    for layer in original(name).whole:
        width = width_out(original(name).model.get_submodule(layer))
        check_same(shrink_both_ways(name, {layer: list(range(width))}))


@EVERY
def test_masked_is_what_the_oracle_says_removal_means(name: str) -> None:
    for share in SHARES:
        s, c = shrunk(name, share), case(name)
        check_both_modes(s.copies()[1], without(c.model, c.example, s.removed, c.layers), c.example)


@EVERY
def test_with_an_empty_mask_nothing_changes(name: str) -> None:
    c = case(name)
    small = cut(name, {})
    assert {n: t.shape for n, t in small.state_dict().items()} == {n: t.shape for n, t in c.model.state_dict().items()}
    assert all(map(torch.equal, outputs(small, c.example), outputs(c.model, c.example)))


@EVERY
def test_in_single_precision(name: str) -> None:
    c, mask = case(name), shrunk(name, 0.3).mask
    model, example = c.model.float(), cast(c.example, torch.float32)
    small, masked = sosp.shrink(model, mask, example), sosp.masked(model, mask)
    check_both_modes(small, masked, example, SINGLE)


def test_modes_and_hooks_of_the_given_model_stay_and_the_copy_has_them_too() -> None:
    c = case("resnet")
    seen: list[str] = []
    c.model.train()
    c.model.layer1.eval()
    c.model.layer2[0].register_forward_hook(lambda m, a, o: seen.append("layer2.0"))
    c.model.fc.weight.requires_grad_(False)
    wishes = {n: p.requires_grad for n, p in c.model.named_parameters()}
    with check_unchanged(c.model):
        small = sosp.shrink(c.model, shrunk("resnet", 0.3).mask, c.example)
    check_names(small, c.model)
    assert {n: p.requires_grad for n, p in small.named_parameters()} == wishes
    seen.clear()
    outputs(small, c.example)
    assert seen == ["layer2.0"]


class TwoBranches(nn.Module):
    """The sum of two layers: where one loses a channel, its output is scattered to the width of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 6), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x) + self.b(x))


def test_hooks_of_the_user_see_the_output_at_its_full_width() -> None:
    """The scatter comes before them."""
    model, x, seen = TwoBranches(), torch.randn(5, 3), []
    model.a.register_forward_hook(lambda m, a, o: seen.append(o))
    small = sosp.shrink(model, sosp.Mask.from_removed(model, {"a": [0, 3]}, x), x)
    assert small.a.out_features == 4
    seen.clear()
    small(x)
    (output,) = seen
    assert (output != 0).any(0).tolist() == [False, True, True, False, True, True]


# --- really smaller


@EVERY
def test_layers_lose_the_rows_of_a_mask_on_them(name: str) -> None:
    c = original(name)
    wrong = {}
    for layer in (n for n in c.layers if n in c.shrinks):
        small = cut(name, {layer: c.by[layer]})
        lost = width_out(c.model.get_submodule(layer)) - width_out(small.get_submodule(layer))
        if lost < len(c.by[layer]):  # more, where others have no use without them
            wrong[layer] = f"lost {lost} rows of {c.by[layer]}"
    assert wrong == {}


@EVERY
def test_layers_lose_what_is_zero_and_what_nothing_reads(name: str) -> None:
    c = original(name)
    for consumer, removed in c.narrows:
        lost = width_in(c.model.get_submodule(consumer)) - width_in(cut(name, removed).get_submodule(consumer))
        zeros = zero_inputs(deepcopy(c.model), c.example, removed, c.layers)
        wanted = int(zeros[consumer].sum()) if consumer in zeros else max(map(len, removed.values()))
        assert lost == wanted, (consumer, removed)
    for layer, removed in c.frees:
        assert width_out(cut(name, removed).get_submodule(layer)) < width_out(c.model.get_submodule(layer)), layer


@pytest.mark.parametrize(("kept", "width"), [(3, 4), (4, 4), (5, 8), (7, 8), (13, 16)])
def test_inputs_of_layers_are_rounded_up_to_the_next_multiple(kept: int, width: int) -> None:
    model, x = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(5, 4)
    mask = sosp.Mask.from_removed(model, {"0": list(range(16 - kept))}, x)
    assert sosp.shrink(model, mask, x, round_to=4)[2].in_features == width


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
