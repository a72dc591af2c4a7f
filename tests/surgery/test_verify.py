"""Verification: a wrong surgery is caught before anybody relies on it, and a right one never raises an alarm."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
import sosp.surgery.shrink
from helpers.unchanged import check_unchanged
from networks import case
from sosp.errors import SurgeryError
from sosp.graph.recipe import Recipe, ScatterIndex

Change = Callable[[Recipe], Recipe]
REMOVED = {"conv1": [0], "block1.conv1": [1], "block1.conv2": [2], "block2.conv1": [1]}


def mask_of(model: nn.Module, x: Any, removed: dict[str, list[int]]) -> sosp.Mask:
    return sosp.Mask.from_removed(model, removed, x)


def plant(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let the plan of a surgery go wrong."""
    plan_removal = sosp.surgery.shrink.plan_removal

    def wrong(*args: Any) -> Any:
        plan = plan_removal(*args)
        changed = change(plan.recipe)
        assert repr(changed) != repr(plan.recipe)
        return replace(plan, recipe=changed)

    monkeypatch.setattr(sosp.surgery.shrink, "plan_removal", wrong)


def sliced(recipe: Recipe, name: str, axis: int, change: Callable[[Tensor], Tensor]) -> Recipe:
    """The recipe with another choice along one axis of one tensor."""
    index = recipe.slices[name][axis]
    return replace(recipe, slices={**recipe.slices, name: {**recipe.slices[name], axis: change(index)}})


def swap(index: Tensor) -> Tensor:
    return index[[1, 0, *range(2, len(index))]]


def placed(recipe: Recipe, name: str, change: Callable[[Tensor], Tensor]) -> Recipe:
    """The recipe with another scatter."""
    old = recipe.scatters[name]
    assert old is not None
    return replace(recipe, scatters={**recipe.scatters, name: ScatterIndex(change(old.index), old.axis, old.given)})


WRONG: dict[str, Change] = {
    "two rows swapped": lambda r: sliced(r, "conv1.weight", 0, swap),
    "two columns swapped": lambda r: sliced(r, "block2.conv2.weight", 1, swap),
    "a scale of another channel": lambda r: sliced(r, "bn1.weight", 0, swap),
    "a running mean of another channel": lambda r: sliced(r, "block2.bn1.running_mean", 0, swap),
    "a live row dropped, a dead one kept": lambda r: sliced(r, "block2.conv1.weight", 0, lambda i: i * 0 + 1),
    "scattered to other places": lambda r: placed(r, "block1.bn2", lambda i: i.roll(1)),
    "scattered to fewer places": lambda r: placed(r, "block1.bn2", lambda i: i.masked_fill(i == 1, -1)),
    "scattered twice": lambda r: placed(r, "block1.bn2", lambda i: i.clamp_min(0)),
    "no scatter": lambda r: replace(r, scatters={n: p for n, p in r.scatters.items() if n != "block1.bn2"}),
    "a slice forgotten": lambda r: replace(r, slices={n: s for n, s in r.slices.items() if n != "block2.conv2.weight"}),
    "a norm passed by": lambda r: replace(r, passed=("block2.bn2",)),
    "a layer emptied": lambda r: replace(r, emptied=("block2.conv2",)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_surgery_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case("residual")
    mask = mask_of(c.model, c.inputs, REMOVED)
    plant(monkeypatch, WRONG[what])
    with check_unchanged(c.model), pytest.raises(SurgeryError) as caught:
        sosp.shrink(c.model, mask, c.inputs)
    assert "bug in sosp" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{"conv2": [3]}, {"conv1": [2]}])
def test_a_live_channel_dropped_is_caught(
    more: dict[str, list[int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole recipe is that of another mask, with one channel more."""
    c = case("conv-bn")
    model, x = c.model.to(dtype), c.inputs.to(dtype)
    mask = mask_of(model, x, {"conv1": [0], "conv2": [1]})
    wrong = mask_of(model, x, {"conv1": [0, *more.get("conv1", [])], "conv2": [1, *more.get("conv2", [])]})
    recipe = sosp.surgery.shrink.plan_removal(sosp.trace(model, x), wrong).recipe
    plant(monkeypatch, lambda r: recipe)
    with pytest.raises(SurgeryError, match="differs from"):
        sosp.shrink(model, mask, x)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_what_is_wrong_in_train_mode_only_is_caught(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a dropout, which draws other numbers for fewer channels."""

    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(4, 6)
            self.fc2 = nn.Linear(6, 2)
            self.extra = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Any:
            x = F.dropout(F.relu(self.fc1(x)), rate, self.training)
            return (self.fc2(x), self.extra(x)) if self.training else self.fc2(x)

    model, x = made(Auxiliary), noise(5, 4)
    mask = mask_of(model, x, {"fc1": [0, 3]})
    plant(monkeypatch, lambda r: sliced(r, "extra.weight", 1, swap))
    with pytest.raises(SurgeryError, match="in train mode"):
        sosp.shrink(model, mask, x)


def test_without_verification_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case("residual")
    mask = mask_of(c.model, c.inputs, REMOVED)
    plant(monkeypatch, WRONG["two columns swapped"])
    small = sosp.shrink(c.model, mask, c.inputs, verify=False)
    masked = sosp.masked(c.model, mask)
    assert (small(c.inputs) - masked(c.inputs)).abs().max() > 1e-3


def test_verification_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case("conv-bn")
    mask = mask_of(c.model, c.inputs, {"conv1": [0]})
    calls = []
    monkeypatch.setattr(sosp.surgery.shrink, "check_same_outputs", lambda *args: calls.append(args))
    sosp.shrink(c.model, mask, c.inputs)
    sosp.shrink(c.model, mask, c.inputs, verify=False)
    assert len(calls) == 1


def test_a_wrong_surgery_on_a_network_that_runs_in_one_precision_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be looked at again in double precision; what is far off is wrong all the same."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(4, 6)
            self.fc2 = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.relu(self.fc1(x)).float())

    model, x = made(Single), noise(5, 4)
    mask = mask_of(model, x, {"fc1": [0, 3]})
    assert sosp.shrink(model, mask, x).fc1.out_features == 4
    plant(monkeypatch, lambda r: sliced(r, "fc2.weight", 1, swap))
    with pytest.raises(SurgeryError):
        sosp.shrink(model, mask, x)


# --- no false alarm


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["residual", "concat", "depthwise", "layernorm"])
def test_no_alarm_in_lower_precision(name: str, dtype: torch.dtype) -> None:
    c = case(name)
    model, x = c.model.to(dtype), c.inputs.to(dtype)
    mask = mask_of(model, x, {layer: [0] for layer in c.norms})
    small = sosp.shrink(model, mask, x)
    assert {p.dtype for p in small.parameters()} == {dtype}


def test_no_alarm_in_a_deep_network_in_lower_precision() -> None:
    """Twenty layers that each double the rounding errors."""
    layers = [m for _ in range(20) for m in (nn.Linear(16, 16), nn.ReLU())]
    model = made(lambda: nn.Sequential(*layers, nn.Linear(16, 3)))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    for dtype in (torch.float32, torch.bfloat16):
        x = noise(8, 16).to(dtype)
        mask = mask_of(model.to(dtype), x, {str(i): [0, 5, 7] for i in range(0, 40, 2)})
        assert sosp.shrink(model, mask, x)[2].in_features == 13


class Random(nn.Module):
    """Something random in train mode between two layers."""

    def __init__(self, chance: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 4)
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv1(x)))
        x = x + self.chance(F.relu(self.conv2(x)), self.training)
        return self.fc(x.mean((2, 3)))


def stochastic_depth(x: Tensor, training: bool) -> Tensor:
    """Huang et al. 2016: a branch is left out for some of the examples."""
    return x * (torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5) if training else x


def feature_noise(x: Tensor, training: bool) -> Tensor:
    """Every channel of every example has noise of its own."""
    return x + 0.1 * torch.randn_like(x) if training else x


CHANCE: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "dropout": lambda x, training: F.dropout(x, 0.5, training),
    "dropout2d": lambda x, training: F.dropout2d(x, 0.5, training),
    "alpha dropout": lambda x, training: F.alpha_dropout(x, 0.5, training),
    "feature alpha dropout": lambda x, training: F.feature_alpha_dropout(x, 0.5, training),
    "stochastic depth": stochastic_depth,
    "noise": feature_noise,
    "rrelu": lambda x, training: F.rrelu(x - 1, training=training),
}


@pytest.mark.parametrize("what", CHANCE)
def test_no_alarm_where_chance_decides_in_train_mode(what: str) -> None:
    model, x = made(lambda: Random(CHANCE[what])), noise(6, 3, 5, 5)
    mask = mask_of(model, x, {"conv1": [0, 2], "conv2": [1, 2]})
    with check_unchanged(model):
        small = sosp.shrink(model, mask, x)
    with torch.no_grad():
        assert torch.allclose(small(x), sosp.masked(model, mask)(x), atol=1e-5)


def test_dropout_modules_and_attention_dropout_raise_no_alarm() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
            self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
            self.drop = nn.Dropout(0.3)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            rate = 0.4 if self.training else 0.0
            x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).flatten(2)
            return self.head(x + self.drop(self.fc2(self.drop(F.relu(self.fc1(x))))))

    model, x = made(Block), noise(3, 5, 8)
    small = sosp.shrink(model, mask_of(model, x, {"fc1": [0, 4, 5]}), x)
    assert small.fc1.out_features == 9


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_no_alarm_for_batch_norms_that_see_two_examples(examples: int) -> None:
    """Statistics of two numbers: what they are divided by may be next to nothing, and amplifies rounding."""
    layers = [m for _ in range(6) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
    model = made(lambda: nn.Sequential(*layers, nn.Linear(6, 3)))
    x = noise(examples, 6)
    mask = mask_of(model, x, {"0": [1], "3": [0, 2], "6": [5], "9": [1], "12": [2, 3]})
    small = sosp.shrink(model, mask, x)
    assert small[3].in_features == 5


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_no_alarm_for_tiny_and_huge_numbers(scale: float) -> None:
    model, x = made(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))), noise(5, 4) * scale
    small = sosp.shrink(model, mask_of(model, x, {"0": [1]}), x)
    assert small[0].out_features == 5


def test_no_alarm_for_numbers_that_are_none() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc2(F.relu(self.fc1(x)))
            return torch.cat([y.log(), y / 0], 1)  # NaN where it is negative, and infinities

    model, x = made(Logs), noise(5, 4)
    small = sosp.shrink(model, mask_of(model, x, {"fc1": [1]}), x)
    assert small.fc2.in_features == 5


def test_chance_and_modes_are_left_as_they_were() -> None:
    model, x = made(lambda: Random(CHANCE["dropout"])).train(), noise(4, 3, 5, 5)
    mask = mask_of(model, x, {"conv1": [0]})
    before = torch.get_rng_state()
    given = x.clone()
    with check_unchanged(model):
        small = sosp.shrink(model, mask, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, given)
    assert small.training
    fresh = deepcopy(model.bn)
    assert torch.equal(small.bn.running_mean, fresh.running_mean[1:])  # it learned nothing from being looked at
    assert small.bn.num_batches_tracked == 0
