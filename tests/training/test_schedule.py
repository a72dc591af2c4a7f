"""Schedules: the paper's by name, the rate step by step against formulas written out, and what is refused."""

import math
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest

import sosp
from sosp import SCHEDULES, Schedule
from sosp.errors import ArgumentError
from sosp.training.schedule import describe_schedule_change, resolve_schedule

# --- the paper's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cifar", "densenet", "imagenet"])
def test_all_of_the_papers_use_the_same_optimiser(name: str) -> None:
    s = SCHEDULES[name]
    assert (s.rate, s.momentum, s.decay, s.nesterov) == (0.1, 0.9, 1e-4, False)
    assert (s.smoothing, s.ema, s.distill, s.warmup) == (0, 0, 0, 0)


@pytest.mark.parametrize(("name", "epochs", "first", "second"), [("cifar", 200, 120, 160), ("densenet", 300, 150, 225)])
def test_the_rate_falls_twice_to_a_tenth(name: str, epochs: int, first: int, second: int) -> None:
    s = SCHEDULES[name]
    assert s.epochs == epochs
    for epoch in range(epochs):
        wanted = 0.1 if epoch < first else 0.01 if epoch < second else 0.001
        for share in (0.0, 0.5, 0.999):
            assert s.rate_at(epoch, share) == pytest.approx(wanted, rel=1e-12)


def test_imagenet_falls_along_a_cosine() -> None:
    s = SCHEDULES["imagenet"]
    assert (s.epochs, s.batch) == (128, 256)
    assert s.rate_at(0, 0) == 0.1
    assert s.rate_at(64, 0) == pytest.approx(0.05, rel=1e-12)  # half-way down
    assert s.rate_at(32, 0) == pytest.approx(0.05 * (1 + math.sqrt(0.5)), rel=1e-12)
    assert 0 < s.rate_at(127, 0.999) < 1e-8
    rates = [s.rate_at(e, k / 10) for e in range(128) for k in range(10)]
    assert rates == sorted(rates, reverse=True)


def test_every_named_schedule_ends() -> None:
    for s in SCHEDULES.values():
        assert s.rate_at(s.epochs - 1, 0.99) < s.rate


# --- the rate over time ---------------------------------------------------------------------------------


def test_milestones_are_shares_and_move_with_the_epochs() -> None:
    s = replace(SCHEDULES["cifar"], epochs=10)
    assert [round(s.rate_at(e, 0.5), 6) for e in range(10)] == [0.1] * 6 + [0.01] * 2 + [0.001] * 2


def test_a_milestone_may_be_given_twice_or_at_the_ends() -> None:
    s = Schedule(epochs=4, rate=1.0, milestones=(0, 0.5, 0.5, 1))
    assert [s.rate_at(e, 0) for e in range(4)] == pytest.approx([0.1, 0.1, 0.001, 0.001])


def test_constant() -> None:
    s = Schedule(epochs=3, shape="constant", rate=0.3)
    assert {s.rate_at(e, k / 7) for e in range(3) for k in range(7)} == {0.3}


@pytest.mark.parametrize("shape", ["steps", "cosine", "constant"])
def test_warmup_rises_in_a_line_then_the_shape_goes_on(shape: str) -> None:
    plain, warm = (Schedule(epochs=10, rate=0.5, shape=shape, warmup=w) for w in (0, 2.5))
    assert warm.rate_at(0, 0) == 0
    assert warm.rate_at(1, 0.25) == pytest.approx(0.25)
    assert warm.rate_at(2, 0.4) == pytest.approx(0.5 * 2.4 / 2.5)
    for epoch, share in ((2, 0.5), (2, 0.75), (5, 0), (9, 0.9)):
        assert warm.rate_at(epoch, share) == plain.rate_at(epoch, share)


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("rate", x) for x in (-0.1, math.nan, math.inf, "0.1", None, True)],
        *[("momentum", x) for x in (-0.1, 1.1, math.nan)],
        *[("decay", x) for x in (-1e-4, math.inf)],
        *[("smoothing", x) for x in (-0.1, 1.5)],
        *[("ema", x) for x in (-0.1, 1.01)],
        *[("distill", x) for x in (-0.5, 2)],
        *[("warmup", x) for x in (-1, math.inf, "2")],
        *[("temperature", x) for x in (0, -1, math.inf)],
        *[("factor", x) for x in (-1, 1.5)],
        *[("epochs", x) for x in (-1, 1.5, "10", True, None)],
        *[("batch", x) for x in (0, -1, 12.5, None)],
        *[("milestones", x) for x in ((0.5, 1.5), (-0.1,), ("0.5",), 0.5, "0.5", None, (math.nan,))],
        *[("nesterov", x) for x in ("no", 1, None)],
        *[("shape", x) for x in ("step", "linear", None, 3)],
    ],
)
def test_a_value_outside_its_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=field):
        Schedule(**{field: value})


def test_a_wrong_shape_suggests_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="Did you mean 'cosine'"):
        Schedule(shape="cosin")


@pytest.mark.parametrize(("wrong", "right"), [("cifar10", "cifar"), ("imagnet", "imagenet"), ("denset", "densenet")])
def test_a_wrong_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ArgumentError, match=f"Did you mean '{right}'"):
        resolve_schedule(wrong)


@pytest.mark.parametrize("wrong", [None, 3, {"epochs": 3}, [1]])
def test_what_is_no_schedule_is_refused_with_the_list(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="densenet"):
        resolve_schedule(wrong)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ArgumentError, match="momentum"):
        Schedule(momentum=0, nesterov=True)
    assert not Schedule().nesterov


def test_the_ends_of_the_ranges_are_inside() -> None:
    s = Schedule(epochs=0, batch=1, rate=0, momentum=0, decay=0, factor=1, smoothing=1, ema=1, distill=1, milestones=())
    assert s.rate_at(0, 0) == 0
    assert Schedule(milestones=[0.5]).milestones == (0.5,)  # type: ignore[arg-type]


def test_a_schedule_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        sosp.Schedule().epochs = 3  # type: ignore[misc]


def test_a_difference_names_the_field_and_both_values() -> None:
    mine = Schedule(milestones=(0.5,))
    stored = {**asdict(mine), "milestones": [0.5]}  # JSON has lists
    assert describe_schedule_change(mine, stored) is None
    assert describe_schedule_change(mine, {**stored, "rate": 0.3}) == "rate was 0.3 and is 0.1"
    assert describe_schedule_change(mine, {**stored, "milestones": [0.4]}) == "milestones was (0.4,) and is (0.5,)"
