"""Repair as a part of pruning: what to remove when the rest will make up for it, in one call, in rounds, in a run."""

import csv
import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_repair import inputs, off
from torch import Tensor, nn

import sosp
from helpers.commands import call, lines, refusal
from networks import case
from oracles import repair as oracle
from sosp.app.config import PruningSection
from sosp.core.losses import LossLike
from sosp.errors import ArgumentError
from sosp.graph.plan import plan_removal
from sosp.refit import RemovalHistory, repair_plan
from sosp.scoring.criteria.obs import BLOCK, DAMPING, eliminate_structures
from sosp.studies.compare.comparison_cells import ComparisonCell, ComparisonPlan, ComparisonStore
from sosp.studies.compare.method_comparison import compare


@pytest.fixture(autouse=True)
def few_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for such small layers, in less time."""
    monkeypatch.setattr(repair_plan, "ROWS", 2000)


# --- the saliency after compensation --------------------------------------------------------------------


def pairs(S: int, rank: int, seed: int = 0) -> Tensor:
    J = torch.randn(rank, S, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return J.T @ J / rank


@pytest.mark.parametrize("damping", [0.1, 1e-3])
def test_the_order_of_optimal_brain_surgeon(damping: float) -> None:
    Q = pairs(9, 30)
    order, costs = eliminate_structures(Q, damping)
    expected, losses = oracle.surgeon(Q, damping)
    assert order.tolist() == expected
    torch.testing.assert_close(costs.cumsum(0), torch.tensor(losses, dtype=torch.float64))


def test_many_structures_go_block_by_block() -> None:
    Q = pairs(2 * BLOCK + 7, 400)
    order, costs = eliminate_structures(Q, DAMPING)
    assert sorted(order.tolist()) == list(range(len(Q)))
    k = BLOCK + 5
    damped = Q + DAMPING * Q.diagonal().mean() * torch.eye(len(Q), dtype=Q.dtype)
    torch.testing.assert_close(costs[:k].sum(), oracle.least_loss(damped, order[:k].tolist()))


def test_values_are_the_losses_and_do_not_depend_on_labels() -> None:
    c = case("conv-bn")
    saliency, other = (sosp.score(c.model, (c.inputs, y), method="sosp-obs") for y in (c.targets, c.targets.flip(0)))
    Q = sosp.score(c.model, (c.inputs, c.targets), method="sosp-i").pairs
    assert Q is not None
    assert saliency.values is not None
    assert other.values is not None
    order, losses = oracle.surgeon(Q.double(), DAMPING)
    torch.testing.assert_close(saliency.values[order], torch.tensor(losses, dtype=torch.float64))
    torch.testing.assert_close(saliency.values, other.values)
    mask = sosp.select(saliency, ratio=0.5)
    assert mask == sosp.Mask.from_structures(saliency.structures, torch.tensor(sorted(order[: mask.chosen])))


# --- in one call ----------------------------------------------------------------------------------------


def test_prune_and_repair() -> None:
    c = case("residual")
    x = inputs(c.inputs)
    data = (x, c.model(x).argmax(1))
    plain, repaired = (sosp.prune(c.model, data, ratio=0.4, repair=r, preset="paper") for r in (False, True))
    assert plain.repaired is None
    assert repaired.repaired is not None
    assert plain.mask == repaired.mask
    assert plain.cost_after == repaired.cost_after
    assert off(repaired.model, c.model, x) < 0.8 * off(plain.model, c.model, x)
    assert repaired.repaired.summary in str(repaired).splitlines()


@pytest.mark.parametrize("loss", ["mse", lambda f, y: (f - y).square().mean(1)], ids=["by name", "of ones own"])
def test_outputs_that_are_numbers_are_repaired_as_numbers(loss: LossLike) -> None:
    c = case("mlp")
    x = inputs(c.inputs)
    data = (x, 50 * c.model(x).detach())
    found = sosp.prune(c.model, data, ratio=0.4, loss=loss, repair=True, scoring=sosp.Scoring(examples=None))
    plain = sosp.shrink(c.model, found.mask, x)
    wanted = sosp.repair(plain, c.model, data, loss="mse")
    for name, weight in wanted.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], weight), name
    assert found.repaired is not None
    with torch.no_grad():
        ours, theirs = found.model(x), c.model(x)
    share = float((ours - theirs).square().sum() / (theirs - theirs.mean(0)).square().sum())
    assert abs(found.repaired.agreement_after - (1 - share)) < 0.1  # of the variance, on other inputs


@pytest.mark.parametrize(("widths", "macs"), [((15, 12, 19, 5), 0.6), ((9, 7, 17, 5), 0.37)])
def test_rounds_do_not_round_a_budget_up(widths: tuple[int, ...], macs: float) -> None:
    torch.manual_seed(0)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    model, x = nn.Sequential(*layers[:-1]), torch.randn(200, widths[0])
    found = sosp.prune(model, (x, torch.randint(5, (200,))), macs=macs, repair=sosp.Repair(rounds=2))
    assert found.cost_after.macs <= macs * found.cost_before.macs


@pytest.mark.parametrize("budget", [{"ratio": 0.5}, {"params": 0.4}, {"macs": 0.5}, {}], ids=str)
def test_rounds_meet_the_budget(budget: dict[str, float]) -> None:
    c = case("conv-bn")
    x = inputs(c.inputs)
    batches = ((part, c.model(part).argmax(1)) for part in x.split(60))  # can be read once only
    found = sosp.prune(c.model, batches, method="sosp-obs", **budget, repair=sosp.Repair(rounds=3))
    count = sosp.count(c.model, x[:4], found.mask)
    assert (count.params, count.macs) == (found.cost_after.params, found.cost_after.macs)
    assert sosp.count(found.model, x[:4]).params == count.params
    shares = {
        "ratio": found.mask.ratio,
        "params": count.params / found.cost_before.params,
        "macs": count.macs / found.cost_before.macs,
    }
    for name, wanted in (budget or {"ratio": 0.5}).items():
        assert abs(shares[name] - wanted) < 0.12 if name == "ratio" else shares[name] <= wanted
    assert off(found.model, c.model, x) < 1


def weight_normed() -> nn.Module:
    norm = torch.nn.utils.parametrizations.weight_norm
    convolutions = norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), norm(nn.Conv2d(8, 12, 3)), nn.ReLU()
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), norm(nn.Linear(12, 5)))


def grouped(*middle: nn.Module) -> nn.Module:
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *middle, nn.ReLU(), nn.Conv2d(24, 24, 1), nn.ReLU(), *head)


ROUNDS = {
    "weight norm": weight_normed,
    "groups": lambda: grouped(nn.Conv2d(16, 24, 3, groups=4)),
    "transposed groups": lambda: grouped(nn.ConvTranspose2d(16, 24, 3, groups=2)),
    "depthwise": lambda: grouped(nn.Conv2d(16, 48, 3, groups=16), nn.ReLU(), nn.Conv2d(48, 24, 1)),
}


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("budget", [{"macs": 0.6}, {"ratio": 0.4}], ids=str)
def test_the_mask_of_all_rounds_is_that_of_the_network(name: str, budget: dict[str, float]) -> None:
    torch.manual_seed(0)
    model, x = ROUNDS[name]().eval(), torch.randn(300, 3, 10, 10)
    found = sosp.prune(
        model, (x, torch.arange(300) % 5), **budget, repair=sosp.Repair(rounds=3), scoring=sosp.Scoring(examples=100)
    )
    counted, built = sosp.count(model, x[:2], found.mask), sosp.count(found.model, x[:2])
    assert (counted.macs, counted.params) == (built.macs, built.params)
    assert 0 < found.mask.chosen < found.mask.structures


class Branches(nn.Module):
    """Branches with biases that are worth little, one with its own gates: the first rounds empty them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.down, self.up = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(4, 12, 3, padding=1)
        self.body, self.squeeze, self.gate = nn.Conv2d(12, 12, 1), nn.Conv2d(12, 3, 1), nn.Conv2d(3, 12, 1)
        self.last, self.head = nn.Conv2d(12, 16, 3), nn.Linear(16, 5)
        with torch.no_grad():
            for layer in (self.down, self.up, self.squeeze):
                layer.weight.mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.up(self.down(x).relu())
        y = self.body(x)
        x = x + y * self.gate(self.squeeze(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return self.head(self.last(x).relu().mean((2, 3)))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}


@pytest.mark.parametrize("groups", ["independent", "coupled"])
def test_rounds_go_on_behind_a_layer_that_an_earlier_one_emptied(groups: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(100, 3, 8, 8)
    data = x, torch.arange(100) % 5
    first = sosp.select(
        sosp.score(model, data, structures=sosp.find_structures(model, x, groups=groups)), ratio=1 - 0.5**0.25
    )
    assert len(first.removed["down"]) == 4  # the first of four rounds
    found = sosp.prune(
        model, data, ratio=0.5, preset="paper", selection=sosp.Selection(groups=groups), repair=sosp.Repair(rounds=4)
    )
    assert abs(found.mask.ratio - 0.5) < 0.03
    assert found.mask.removed["down"].tolist() == [0, 1, 2, 3]
    # The network is the one that the mask stands for, with other numbers in it.
    assert shapes(found.model) == shapes(sosp.shrink(model, found.mask, x))
    assert sosp.count(found.model, x).params == sosp.count(model, x, found.mask).params == found.cost_after.params
    assert off(found.model, model, x) < off(sosp.shrink(model, found.mask, x), model, x)
    found.save(tmp_path / "small.safetensors")
    assert torch.equal(sosp.load(tmp_path / "small.safetensors", model)(x), found.model(x))


def test_a_layer_that_an_earlier_cut_emptied_stays_absent() -> None:
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(4, 3, 8, 8)
    absent = RemovalHistory(sosp.find_structures(model, x))
    mask = sosp.Mask.from_removed(model, {"down": range(4), "up": [0, 5]}, x)
    absent.record(plan_removal(sosp.trace(model, x), mask))
    once = sosp.shrink(model, mask, x)
    again = sosp.Mask.from_removed(once, {"up": [0], "last": [3]}, x)
    absent.record(plan_removal(sosp.trace(once, x), again))
    lacks = absent.mask().removed
    assert {name: gone.tolist() for name, gone in lacks.items()} == {
        "down": [0, 1, 2, 3],
        "up": [0, 1, 5],
        "last": [3],
    }


@pytest.mark.filterwarnings("ignore:the code branches on the values")
def test_a_layer_that_is_not_run_on_the_example_is_not_absent() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 6), nn.Linear(4, 6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.one(x) if bool(x.mean() > 0) else self.other(x)).relu())

    model, x = Either(), torch.rand(4, 4)
    absent = RemovalHistory(sosp.find_structures(model, x))
    absent.record(plan_removal(sosp.trace(model, x), sosp.Mask.from_removed(model, {}, x)))
    absent.record(plan_removal(sosp.trace(model, -x), sosp.Mask.from_removed(model, {}, -x)))
    assert absent.mask().removed == {}


def test_what_is_absent() -> None:
    c = case("residual")
    structures = sosp.find_structures(c.model, c.inputs)
    gone = {"block1.conv1": [0], "block2.conv1": [1, 2], "block2.conv2": [0, 3]}
    mask = sosp.Mask.from_removed(c.model, gone, c.inputs)
    absent = RemovalHistory(structures)
    absent.record(plan_removal(sosp.trace(c.model, c.inputs), mask))
    assert absent.mask() == mask
    once = sosp.shrink(c.model, mask, c.inputs)
    again = sosp.Mask.from_removed(once, {"block2.conv2": [0, 1]}, c.inputs)
    absent.record(plan_removal(sosp.trace(once, c.inputs), again))
    lacks = absent.mask().removed
    assert lacks["block2.conv2"].tolist() == [0, 1, 2, 3]
    assert lacks["block2.conv1"].tolist()[-2:] == [1, 2]


# --- in a run -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    words = ("--data", "digits", "--width", "0.25", "--epochs", "2", "--out", str(folder))
    assert call("train", "sosp:digits_resnet", *words).exit_code == 0
    return folder


def test_sosp_prune_repair(trained: Path, tmp_path: Path) -> None:
    words = (
        "--ratio",
        "0.4",
        "--method",
        "first-order",
        "--examples",
        "100",
        "--no-curve",
        "--repair",
        "--rounds",
        "2",
    )
    found = lines("prune", str(trained), *words, "--out", str(tmp_path))[-1]["results"]["prune"]
    facts = found["repair"]
    assert facts["agreement_after"] > facts["agreement_before"]
    assert facts["examples"] == 1000
    assert facts["seconds"] > 0
    assert {"layer", "before", "after"} <= facts["layers"][0].keys()
    assert all(layer["after"] <= layer["before"] for layer in facts["layers"])
    assert abs(found["removed"] / found["structures"] - 0.4) < 0.05
    page = (tmp_path / "report.html").read_text()
    assert '<section id="repair">' in page
    assert f"{facts['agreement_after']:.1%} after it" in page


@pytest.mark.parametrize("words", ["--join zeros", "--join zeros --repair", "--repair --rounds 2"])
def test_the_budget_is_that_of_the_network_that_is_built(trained: Path, tmp_path: Path, words: str) -> None:
    more = ("--macs", "0.6", "--round-to", "2", "--examples", "100", "--no-curve", "--out", str(tmp_path))
    found = lines("prune", str(trained), *words.split(), *more)[-1]["results"]["prune"]
    assert found["macs"] <= 0.6 * found["before"]["macs"]
    model = sosp.load(tmp_path / "small.safetensors", sosp.nets.make("digits_resnet", width=0.25))
    assert sosp.count(model, torch.zeros(2, 1, 8, 8)).macs == found["macs"]


def test_rounds_without_repair_are_refused(trained: Path) -> None:
    assert "rounds needs repair" in refusal("prune", str(trained), "--no-repair", "--rounds", "2")
    with pytest.raises(ArgumentError, match="rounds needs repair"):
        PruningSection(repair=True, rounds=2, ratios={"conv1": 0.5})


def test_rounds_with_zeros_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"join='zeros' cannot be combined with several rounds.*groups='coupled'"):
        PruningSection(repair=True, rounds=2, join="zeros")


# --- compared -------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.head(torch.relu(self.bn2(self.conv2(x))).mean((2, 3)))


def test_compare_repairs_where_asked(tmp_path: Path) -> None:
    whole = sosp.data.digits()
    data = replace(whole, train=whole.train.subset(300, 0), test=whole.test.subset(100, 0))
    torch.manual_seed(0)
    model = sosp.train(Small(), data, replace(sosp.SCHEDULES["digits"], epochs=2)).model
    asked = ComparisonPlan(("random", "eigendamage"), (0.4,), examples=60, recalibrate=120)
    before = compare(model, data, asked, folder=tmp_path)
    assert [c.repaired for c in before] == [None, None]
    after = compare(model, data, replace(asked, repair=True), folder=tmp_path)
    assert after[0].repaired is not None
    assert after[0].repaired >= after[0].masked
    assert replace(after[0], repaired=None) == before[0]  # all else was known
    assert after[1] == before[1]  # its layers are no longer the original's
    again: list[ComparisonCell] = []
    assert compare(model, data, replace(asked, repair=True), folder=tmp_path, on_cell=again.append) == after
    assert again == []


def test_cells_of_older_files_are_read(tmp_path: Path) -> None:
    cell = ComparisonCell("random", 0.5, 0, masked=0.25)
    old = {k: v for k, v in asdict(cell).items() if k != "repaired"}
    (tmp_path / "cells.jsonl").write_text(json.dumps(old) + "\n" + json.dumps({**old, "more": 1}) + "\n")
    assert list(ComparisonStore(tmp_path).known.values()) == [cell]


def test_sosp_compare_repair(trained: Path, tmp_path: Path) -> None:
    words = ("--methods", "random", "--ratios", "0.4", "--examples", "60", "--statistics", "100", "--repair")
    found = call("compare", str(trained), *words, "--out", str(tmp_path / "run"))
    assert found.exit_code == 0
    assert "repaired" in found.stdout
    assert "accuracy after repair" in found.stdout
    (row,) = csv.DictReader((tmp_path / "run" / "comparison.csv").read_text().splitlines())
    assert 0 < float(row["repaired"]) <= 1


class Scaled(nn.Module):
    """A linear layer of the user's own, without a bias."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width_in) / width_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_a_layer_type_without_a_bias_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kind = sosp.extend.LayerType(axis=-1, channels=lambda layer: len(layer.weight))
    monkeypatch.setitem(sosp.extend.LAYERS, Scaled, kind)
    model, x = nn.Sequential(Scaled(6, 12), nn.ReLU(), nn.Linear(12, 4)), torch.randn(200, 6)
    found = sosp.prune(model, x, macs=0.7)
    assert found.repaired is not None
    assert off(found.model, model, x) < off(sosp.shrink(model, found.mask, x[:8]), model, x)


def test_one_number_per_example_is_judged_alike_with_and_without_its_own_axis() -> None:
    torch.manual_seed(0)
    body, x = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(200, 6)
    found = [sosp.prune(model, x, macs=0.5) for model in (body, nn.Sequential(body, nn.Flatten(0)))]
    column, flat = (pruned.repaired for pruned in found)
    assert column is not None
    assert flat is not None
    assert flat.agreement_after == pytest.approx(column.agreement_after, abs=1e-6)
    assert found[1].model(x).shape == (200,)
