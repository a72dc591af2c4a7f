"""How long a call takes: the record, comparisons in turns, and a model that is left as it was."""

import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
import sosp.graph.latency as MODULE
from helpers.unchanged import check_unchanged
from networks import case
from sosp.errors import ArgumentError, SospError


class Noted(nn.Module):
    """Does something at every call; a function, which copies of the module share."""

    def __init__(self, act: Callable[["Noted"], object]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return x


# --- the record


def test_the_record() -> None:
    c = case("conv-bn")
    found = sosp.latency(c.model, c.inputs, runs=7, warmup=1)
    assert isinstance(found, sosp.Latency)
    assert 0 < found.low <= found.median <= found.high < 1
    assert (found.runs, found.device) == (7, "cpu")


def test_median_and_spread_of_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 9, 9 (to warm up) and then 1 to 11 seconds in some order: deciles of 2 and 10, a median of 6."""
    lengths = iter([9, 9, 3, 1, 11, 7, 5, 2, 10, 4, 8, 6, 9])
    clock = [0.0]

    def now() -> float:
        return clock[0]

    def work(module: Noted) -> None:
        clock[0] += next(lengths)

    monkeypatch.setattr(MODULE, "time", SimpleNamespace(perf_counter=now))
    found = sosp.latency(Noted(work), torch.zeros(1), runs=11, warmup=2)
    assert (found.low, found.median, found.high, found.runs) == (2, 6, 10, 11)


def test_one_run() -> None:
    c = case("mlp")
    found = sosp.latency(c.model, c.inputs, runs=1, warmup=0)
    assert found.low == found.median == found.high
    assert found.runs == 1


def test_how_it_prints() -> None:
    assert str(sosp.Latency(0.0123456, 0.01, 0.0205, 30, "cpu")) == "12.3 ms (10 to 20.5, 30 runs, cpu)"


def test_a_record_is_frozen() -> None:
    record = sosp.Latency(1.0, 1.0, 1.0, 1, "cpu")
    with pytest.raises(AttributeError):
        record.median = 2.0


# --- comparisons


def test_several_networks_take_turns() -> None:
    seen: list[str] = []
    models = {name: Noted(lambda m, name=name: seen.append(name)) for name in ("before", "after", "other")}
    found = sosp.latency(models, torch.zeros(2), runs=3, warmup=1)
    assert list(found) == ["before", "after", "other"]
    assert all(isinstance(x, sosp.Latency) and x.runs == 3 for x in found.values())
    assert seen == ["before", "after", "other"] * 4


def test_the_slower_one_is_slower() -> None:
    slow, quick = Noted(lambda m: time.sleep(0.02)), Noted(lambda m: None)
    found = sosp.latency({"slow": slow, "quick": quick}, torch.zeros(2), runs=3, warmup=1)
    assert found["slow"].median >= 0.02
    assert found["quick"].median < found["slow"].median


def test_one_network_in_a_dict_gives_a_dict() -> None:
    c = case("mlp")
    found = sosp.latency({"": c.model}, c.inputs, runs=1)
    assert list(found) == [""]


def test_a_network_and_what_was_made_of_it() -> None:
    c = case("residual")
    small = sosp.shrink(c.model, sosp.Mask.from_removed(c.model, {"block1.conv2": [0]}, c.inputs), c.inputs)
    found = sosp.latency({"before": c.model, "after": small}, c.inputs, runs=2)
    assert all(x.median > 0 for x in found.values())


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_examples_of_every_form(form: str) -> None:
    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor | float = 1.0) -> Tensor:
            return a + b

    x = torch.ones(3)
    example = {"tensor": x, "tuple": (x, 2.0), "dict": {"a": x, "b": x}}[form]
    assert sosp.latency(Add(), example, runs=1).runs == 1


# --- how the model runs, and how it is left


def test_it_runs_in_eval_mode_without_gradients() -> None:
    seen: list[tuple[bool, bool]] = []
    model = Noted(lambda m: seen.append((m.training, torch.is_grad_enabled()))).train()
    sosp.latency(model, torch.zeros(1), runs=2, warmup=0)
    assert seen == [(False, False)] * 2


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_the_model_is_left_as_it_was(mode: str) -> None:
    c = case("residual")
    c.model.train(mode != "eval")
    if mode == "mixed":
        c.model.block1.eval()
    given = c.inputs.clone()
    with check_unchanged(c.model):
        sosp.latency(c.model, c.inputs, runs=2)
        sosp.latency({"a": c.model, "b": c.model}, c.inputs, runs=2)
    assert torch.equal(c.inputs, given)


@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_pass_keeps_is_not_kept(training: bool) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.fc(x)
            return self.last

    model = Counts().train(training)
    with check_unchanged(model):
        sosp.latency(model, torch.zeros(2, 3), runs=2)
    assert model.last is None
    assert model.calls == 0


def test_an_example_that_the_network_writes_into() -> None:
    model = Noted(lambda m: None)
    model.forward = lambda x: x.add_(1)
    x = torch.zeros(3)
    sosp.latency(model, x, runs=2)
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize("training", [False, True])
def test_on_another_device(training: bool) -> None:
    """The meta device is there on every machine."""
    c = case("conv-bn")
    c.model.train(training)
    with check_unchanged(c.model):
        found = sosp.latency(c.model, c.inputs, runs=2, device="meta")
        again = sosp.latency(c.model, c.inputs, runs=2, device=torch.device("meta"))
    assert found.device == again.device == "meta"
    assert {p.device.type for p in c.model.parameters()} == {"cpu"}
    assert c.inputs.device.type == "cpu"


def test_where_the_model_is_if_nothing_is_said() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    assert sosp.latency(model, torch.zeros(2, 3), runs=1).device == "meta"
    assert sosp.latency(nn.ReLU(), torch.zeros(2, 3), runs=1).device == "cpu"


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    c = case("conv-bn")
    with check_unchanged(c.model):
        found = sosp.latency(c.model, c.inputs, runs=3, device="cuda")
    assert found.device.startswith("cuda")
    assert 0 < found.low <= found.median <= found.high < 1


# --- what is refused


@pytest.mark.parametrize("bad", [0, -1, 2.0, "3", True, None])
def test_bad_numbers_of_runs(bad: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"runs={bad!r}"):
        sosp.latency(nn.ReLU(), torch.zeros(1), runs=bad)


@pytest.mark.parametrize("bad", [-1, 1.5, "3", False, None])
def test_bad_numbers_of_calls_to_warm_up(bad: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"warmup={bad!r}"):
        sosp.latency(nn.ReLU(), torch.zeros(1), warmup=bad)


@pytest.mark.parametrize("bad", [None, {}, {"a": 3}, {"a": nn.ReLU(), "b": torch.relu}, [nn.ReLU()], torch.relu, "net"])
def test_what_is_no_module(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="a module, or a dict of names and modules"):
        sosp.latency(bad, torch.zeros(1))


@pytest.mark.parametrize("bad", ["nowhere", 3.5, "cuda:-2"])
def test_a_device_that_is_none(bad: Any) -> None:
    model = nn.Linear(3, 2)
    with check_unchanged(model), pytest.raises(SospError) as caught:
        sosp.latency(model, torch.zeros(1, 3), device=bad)
    assert f"device={bad!r}" in str(caught.value)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("example", [torch.zeros(2, 4), None, (torch.zeros(2, 3), 1), {"y": torch.zeros(2, 3)}])
def test_an_example_that_the_model_does_not_take(example: Any, training: bool) -> None:
    model = nn.Linear(3, 2).train(training)
    with check_unchanged(model), pytest.raises(SospError, match="does not run on the example"):
        sosp.latency(model, example)


def test_an_error_of_one_of_several_names_it() -> None:
    models = {"good": nn.Linear(3, 2).eval(), "bad": nn.Linear(4, 2).eval()}
    with pytest.raises(SospError, match="'bad'"):
        sosp.latency(models, torch.zeros(2, 3))


@pytest.mark.parametrize("training", [False, True])
def test_a_lazy_layer_is_refused_or_stays_lazy(training: bool) -> None:
    model = nn.Sequential(nn.LazyLinear(3)).train(training)
    with suppress(SospError):
        sosp.latency(model, torch.zeros(2, 5), runs=1)
    assert isinstance(model[0], nn.LazyLinear)
    assert model[0].has_uninitialized_params()
