"""One network at several budgets: the numbers of each, and taking one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from helpers.quarters import Net, pictures
from sosp.errors import ArgumentError, BudgetError


@pytest.fixture(scope="module")
def curve(trained: dict[str, Tensor]) -> sosp.Tradeoff:
    net = Net().eval()
    net.load_state_dict(trained)
    return sosp.tradeoff(net, pictures(), budgets=(0.3, 0.8, 0.5))


def test_every_point_is_what_prune_gives(curve: sosp.Tradeoff, model: Net) -> None:
    assert [point.budget for point in curve.points] == [1.0, 0.8, 0.5, 0.3]
    for point in curve.points[1:]:
        found = sosp.prune(model, pictures(), macs=point.budget)
        assert (point.macs, point.params) == (found.macs_left, found.params_left)
        assert point.quality == found.measured.answers.accuracy.after
        widths = {n: m.out_channels for n, m in found.model.named_modules() if isinstance(m, nn.Conv2d)}
        before = {n: m.out_channels for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
        assert {n: pair for n, pair in point.widths.items() if n in widths} == {
            n: (before[n], width) for n, width in widths.items()
        }
        taken = curve.at(macs=point.budget)
        assert all(torch.equal(a, b) for a, b in zip(taken.model.parameters(), found.model.parameters(), strict=True))
    whole = curve.points[0]
    assert (whole.macs, whole.params) == (1.0, 1.0)
    assert all(before == after for before, after in whole.widths.values())
    assert all(point.milliseconds is not None and point.milliseconds > 0 for point in curve.points)


def test_a_budget_that_is_not_kept_is_cut_by_the_same_scores(
    curve: sosp.Tradeoff, model: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sosp.pipeline.cut.score", None)  # nothing may be scored again
    found = curve.at(macs=0.65)
    assert found.macs_left <= 0.65
    assert found.measured is not None


def test_the_best_is_the_smallest_within_the_drop(model: Net) -> None:
    """The metric is the share of all filters of the network."""

    def width(net: nn.Module) -> float:
        return sum(m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)) / 48

    curve = sosp.tradeoff(model, pictures(), budgets=(0.8, 0.6, 0.3), metric=width, repair=False)
    drops = {point.budget: 1 - point.quality for point in curve.points[1:]}
    assert curve.points[0].quality == 1
    assert drops[0.8] < drops[0.6] < drops[0.3]
    assert curve.best(max_drop=drops[0.6]) is curve.at(0.6)
    with pytest.raises(BudgetError, match=r"at macs=0.8 metric falls by"):
        curve.best(max_drop=drops[0.8] / 2)
    assert "quality: metric\n" in str(curve)


def test_it_prints_and_plots(curve: sosp.Tradeoff, tmp_path: Path) -> None:
    lines = str(curve).splitlines()
    assert lines[0] == "quality: accuracy on 8 inputs used for neither scoring nor repair"
    assert [line.split()[0] for line in lines[1:6]] == ["budget", "unpruned", "macs", "macs", "macs"]
    assert f"{curve.points[2].macs:.1%}" in lines[4]
    assert lines[-1].startswith("Scored by sosp-i")
    for name in ("curve.svg", "curve.png"):
        assert curve.plot(tmp_path / name).stat().st_size > 1000


def test_what_cannot_be_met_is_named(model: Net) -> None:
    how: dict[str, Any] = {"selection": sosp.Selection(cap=0.5), "repair": False}
    curve = sosp.tradeoff(model, pictures(), budgets=(0.8, 0.01), **how)
    assert list(curve.refused) == [0.01]
    assert "macs=0.01 cannot be met" in str(curve)
    with pytest.raises(BudgetError, match="none of the budgets can be met"):
        sosp.tradeoff(model, pictures(), budgets=[0.01], **how)


@pytest.mark.parametrize("budgets", [(), (0.5, 1.5), "0.5", (0.5, "half"), 0.5])
def test_budgets_are_shares(model: Net, budgets: Any) -> None:
    with pytest.raises(ArgumentError, match="must be shares of the MACs"):
        sosp.tradeoff(model, pictures(), budgets=budgets)
