"""Methods side by side: every cell is what its steps give one by one, is kept once done, and never measured twice."""

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from helpers.commands import call, refusal
from sosp.errors import ArgumentError, StructureError
from sosp.studies.compare.comparison_cells import ComparisonCell, ComparisonPlan
from sosp.studies.compare.method_comparison import compare
from sosp.studies.compare.summary import summarise_cells
from sosp.surgery.fold_norms import fold_norms
from sosp.training import Accuracy, Epoch

METHODS = ("sosp-h", "random", "slimming", "group-fisher")


class Small(nn.Module):
    """Two residual branches with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = nn.Conv2d(8, 10, 3, 1, 1, bias=False), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return self.head(torch.relu(x + y).mean((2, 3)))


@pytest.fixture(scope="module")
def data() -> sosp.data.Dataset:
    whole = sosp.data.digits()
    return replace(whole, train=whole.train.subset(300, 0), test=whole.test.subset(100, 0))


@pytest.fixture(scope="module")
def model(data: sosp.data.Dataset) -> nn.Module:
    torch.manual_seed(0)
    return sosp.train(Small(), data, replace(sosp.SCHEDULES["digits"], epochs=3)).model


PLAN = ComparisonPlan(METHODS, (0.25, 0.5), seeds=2, examples=60, recalibrate=100)


@pytest.fixture(scope="module")
def cells(model: nn.Module, data: sosp.data.Dataset) -> tuple[ComparisonCell, ...]:
    return compare(model, data, PLAN)


def by_hand(model: nn.Module, data: Any, method: str, ratio: float, seed: int) -> dict[str, Any]:
    """The same in single steps, with the network that is really smaller."""
    example, _ = next(iter(data.train.ordered(batch=4, limit=4)))
    groups = "coupled" if method == "group-fisher" else "independent"
    found = sosp.find_structures(model, example, groups=groups)
    generator = torch.Generator().manual_seed(seed)
    batches = data.train.subset(60, seed).ordered(batch=250)
    saliency = sosp.score(model, batches, method=method, structures=found, examples=60, generator=generator)
    mask = sosp.select(saliency, ratio=ratio)
    small = sosp.shrink(model, mask, example)
    other = sosp.count(model, example, mask, convention="alternative")
    again = sosp.recalibrate(small, data.train, examples=100, seed=seed)
    return {
        "params": sum(p.numel() for p in small.parameters()),
        "macs": sosp.count(small, example).macs,
        "params_alternative": other.params,
        "macs_alternative": other.macs,
        "removed": mask.chosen,
        "masked": sosp.evaluate(small, data.test).top1,
        "recalibrated": sosp.evaluate(again, data.test).top1,
    }


def test_all_cells_in_order(cells: tuple[ComparisonCell, ...]) -> None:
    assert [c.key for c in cells] == [(m, r, s) for m in METHODS for r in PLAN.ratios for s in range(2)]
    assert all(not c.refusal and c.tuned is None and c.seconds > 0 for c in cells)


@pytest.mark.parametrize("k", range(16))
def test_a_cell_is_its_steps(cells: tuple[ComparisonCell, ...], model: nn.Module, data: Any, k: int) -> None:
    cell = cells[k]
    for name, wanted in by_hand(model, data, *cell.key).items():
        assert getattr(cell, name) == wanted, name


def test_other_seeds_are_other_draws(cells: tuple[ComparisonCell, ...]) -> None:
    random = [c for c in cells if c.method == "random" and c.ratio == 0.5]
    assert (random[0].params, random[0].macs) != (random[1].params, random[1].macs)


def test_means_and_deviations(cells: tuple[ComparisonCell, ...]) -> None:
    found = summarise_cells(cells)
    assert [(s.method, s.ratio) for s in found] == [(m, r) for m in METHODS for r in PLAN.ratios]
    first, second = cells[2], cells[3]
    low, high = sorted([first.recalibrated, second.recalibrated])
    assert found[1].means["recalibrated"] == pytest.approx((low + high) / 2)
    assert found[1].stds["recalibrated"] == pytest.approx((high - low) / 2**0.5)  # of two, over n - 1
    assert "tuned" not in found[1].means


def test_done_is_done(model: nn.Module, data: Any, tmp_path: Path, cells: tuple[ComparisonCell, ...]) -> None:
    """Also after a process that was killed while it wrote, and for a plan that asks for more."""
    plan = replace(PLAN, methods=("random", "slimming"), seeds=1)
    told: list[ComparisonCell] = []
    compare(model, data, plan, folder=tmp_path, on_cell=told.append)
    file = tmp_path / "cells.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == len(told) == 4
    file.write_text("".join(lines[:2]) + lines[2][:40])
    told.clear()
    again = compare(model, data, replace(plan, ratios=(0.25, 0.5, 0.6)), folder=tmp_path, on_cell=told.append)
    assert [c.key for c in told] == [("random", 0.6, 0), *[("slimming", r, 0) for r in (0.25, 0.5, 0.6)]]
    unlike = {"seconds": 0.0}
    for cell in again:
        if cell.ratio != 0.6:
            wanted = next(c for c in cells if c.key == cell.key)
            assert replace(cell, **unlike) == replace(wanted, **unlike)


def test_fine_tuned(model: nn.Module, data: Any, tmp_path: Path) -> None:
    plan = ComparisonPlan(("slimming",), (0.25, 0.5), examples=60, recalibrate=100)
    schedule = replace(sosp.SCHEDULES["finetune-digits"], epochs=2)
    found = compare(model, data, plan, schedule=schedule, folder=tmp_path)
    example, _ = next(iter(data.train.ordered(batch=4, limit=4)))
    for cell in found:
        saliency = sosp.score(model, data.train.ordered(batch=250), method="slimming")
        small = sosp.shrink(model, sosp.select(saliency, ratio=cell.ratio), example)
        history = sosp.train(small, data, schedule).history
        assert cell.tuned == history[-1].test.top1
        assert cell.best == max(e.test.top1 for e in history)
    told: list[ComparisonCell] = []
    assert compare(model, data, plan, schedule=schedule, folder=tmp_path, on_cell=told.append) == found
    assert not told


def test_tuned_is_the_accuracy_after_the_last_epoch(
    model: nn.Module, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a training whose second epoch is its best."""
    history = [
        Epoch(n, 1.0, 1.0, Accuracy(a, 1.0, 1.0, 100), 0.1, 1.0, 1.0) for n, a in ((1, 0.5), (2, 0.75), (3, 0.25))
    ]
    trained = SimpleNamespace(history=history)
    monkeypatch.setattr(
        "sosp.studies.compare.method_comparison.train", lambda networks, *_, **__: dict.fromkeys(networks, trained)
    )
    plan = ComparisonPlan(("slimming",), (0.25,), examples=20, recalibrate=50)
    (cell,) = compare(model, data, plan, schedule=sosp.SCHEDULES["finetune-digits"])
    assert (cell.tuned, cell.best) == (0.25, 0.75)


def test_the_model_is_left_alone(model: nn.Module, data: Any) -> None:
    before = {n: x.clone() for n, x in model.state_dict().items()}
    model.train()
    compare(model, data, ComparisonPlan(("random",), (0.5,), examples=20, recalibrate=50))
    assert model.training
    model.eval()
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"methods": ("sosp-g",)}, "sosp-h"),
        ({"methods": ()}, "nothing to compare"),
        ({"methods": ("random", "random")}, "twice"),
        ({"ratios": (0.5, 1.0)}, "ratio=1.0"),
        ({"ratios": ()}, "nothing to compare"),
        ({"seeds": 0}, "seeds=0"),
    ],
)
def test_bad_plans(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ComparisonPlan(**{"methods": ("random",), **plan})


def test_a_method_that_does_not_fit_is_refused_before_any_work(data: Any) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    told: list[ComparisonCell] = []
    with pytest.raises(StructureError, match="slimming"):
        compare(model, data, ComparisonPlan(("random", "slimming"), (0.5,)), on_cell=told.append)
    assert not told


def test_a_mask_that_cuts_the_network_in_two_is_a_cell(data: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 10))
    (cell,) = compare(model, data, ComparisonPlan(("first-order",), (0.8,), examples=50))
    assert cell.refusal
    assert cell.masked is None
    (found,) = summarise_cells((cell,))
    assert found.refusal == cell.refusal


# --- the command ----------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["compare", "sosp:digits_resnet", "--data", "digits", "--methods", "random,fpgm", "--ratios", "0.3,0.5"]
    words += ["--statistics", "100", "--out", "here"]
    said = call(*words).output
    assert "random 0.3, seed 0:" in said
    assert "fpgm" in said
    rows = list(csv.DictReader((tmp_path / "here" / "comparison.csv").read_text().splitlines()))
    assert [(r["method"], r["ratio"]) for r in rows] == [(m, r) for m in ("random", "fpgm") for r in ("0.3", "0.5")]
    kept = [json.loads(line) for line in (tmp_path / "here" / "cells.jsonl").read_text().splitlines()]
    assert [float(r["recalibrated"]) for r in rows] == [c["recalibrated"] for c in kept]
    assert "seed 0:" not in call(*words).output  # done is done
    assert "twice" in refusal(*words[:4], "--methods", "random,random", "--out", "there")
    assert "--epochs" in refusal(*words[:4], "--rate", "0.1", "--out", "there")
    assert "comparison" in refusal("eval", "here")


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (("--methods", "group-fisher,eigendamage", "--gate", "weights"), "--groups coupled --gate weights"),
        (("--methods", "fpgm", "--repair", "--width", "layer1=0.5"), "--width layer1=0.5"),
    ],
)
def test_what_a_report_says_to_do_next_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["compare", "sosp:digits_resnet", "--data", "digits", "--ratios", "0.3"]
    call(*words, "--examples", "50", "--statistics", "400", "--out", "here", *more)
    page = (tmp_path / "here" / "report.html").read_text()
    (command,) = re.findall(r"sosp (prune [^<]*)", page)
    assert wanted in command
    assert ("--repair" in more) == ("--repair" in command)
    assert "eigendamage" not in command  # which makes its network itself
    assert call(*shlex.split(command), "--out", "there").exit_code == 0


def test_seeds_begin_where_they_are_told(model: nn.Module, data: Any, cells: tuple[ComparisonCell, ...]) -> None:
    plan = replace(PLAN, methods=("random",), ratios=(0.5,), seeds=1, seed=1)
    (found,) = compare(model, data, plan)
    (wanted,) = [c for c in cells if c.key == ("random", 0.5, 1)]
    assert replace(found, seconds=0.0) == replace(wanted, seconds=0.0)
    with pytest.raises(ArgumentError, match="seed=-1"):
        replace(PLAN, seed=-1)


def test_eigendamage_stands_beside_the_others(model: nn.Module, data: Any, tmp_path: Path) -> None:
    """Its directions are no structures, and its network no masked one; the rest of a cell is as for any method."""
    plan = ComparisonPlan(("eigendamage", "random"), (0.3, 0.6), examples=60, recalibrate=100)
    schedule = replace(sosp.SCHEDULES["finetune-digits"], epochs=1)
    found = compare(model, data, plan, schedule=schedule, folder=tmp_path)
    example, _ = next(iter(data.train.ordered(batch=8, limit=8)))
    for cell in found[:2]:
        batches = list(data.train.subset(60, 0).ordered(batch=250))
        generator = torch.Generator().manual_seed(0)
        made = sosp.eigendamage(model, batches, ratio=cell.ratio, examples=60, generator=generator)
        again = sosp.recalibrate(made.model, data.train, examples=100)
        assert cell.params == cell.params_alternative == sum(p.numel() for p in made.model.parameters())
        assert cell.macs == cell.macs_alternative == sosp.count(made.model, example).macs
        assert cell.removed == made.lost == sum(len(r.columns) + len(r.rows) for r in made.removed.values())
        assert cell.structures == made.directions == 1 + 8 + 8 + 10 + 10 + 8
        assert cell.masked == sosp.evaluate(made.model, data.test).top1
        assert cell.recalibrated == sosp.evaluate(again, data.test).top1
        assert cell.tuned == sosp.train(made.model, data, schedule).history[-1].test.top1


def test_all_that_need_no_training_are_compared_by_default(tmp_path: Path) -> None:
    words = ["compare", "sosp:digits_resnet", "--data", "digits", "--dry-run", "--json", "--out", f"{tmp_path}/run"]
    named = json.loads(call(*words).stdout.splitlines()[-1])["compare"]["methods"]
    learned = {"variational", "gal", "amc", "exact"}
    assert set(sosp.METHODS) - set(named) == learned


# --- folded norms ---------------------------------------------------------------------------------------


class Branching(nn.Module):
    """A convolution whose output is read by its norm and by another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return (self.norm(x) + self.other(x)).mean((2, 3))


def settled(model: nn.Module) -> nn.Module:
    """With statistics that matter."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            for x, mean in ((m.weight, 1.0), (m.bias, 0.3), (m.running_mean, 0.5)):
                nn.init.normal_(x, mean, 0.2)
            nn.init.uniform_(m.running_var, 0.5, 2.0)
    return model.eval()


def test_folded_norms_leave_the_function_as_it_is() -> None:
    model = settled(sosp.nets.make("digits_resnet"))
    x = torch.randn(16, 1, 8, 8)
    found = fold_norms(model, x)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in found.modules())
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_norm_that_cannot_be_folded_stays() -> None:
    model, x = settled(Branching()), torch.randn(4, 1, 8, 8)
    assert fold_norms(model, x) is model
    shared = settled(nn.Sequential(nn.Conv2d(1, 1, 3), norm := nn.BatchNorm2d(1), nn.Conv2d(1, 1, 3), norm))
    found = fold_norms(shared, x)
    torch.testing.assert_close(found(x), shared(x), rtol=1e-4, atol=1e-5)
