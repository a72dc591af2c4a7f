"""What pruning keeps for the report: widths of the network that is built, streams, losses measured and predicted."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sosp
from sosp.app.config import PruningSection, build_config
from sosp.app.run import prepare_job
from sosp.app.run.report_details import (
    collect_details,
    find_saved_bottlenecks,
    list_widths,
    measure_losses,
    number_streams,
    order_removals,
    predict_changes,
)
from sosp.graph.layout import LayoutStyle
from sosp.graph.records import INPUT, OUTPUT
from sosp.pipeline.cut import select_and_shrink
from sosp.pipeline.pruned import Pruned
from sosp.selection.saved_saliency import save_saliency
from sosp.selection.selection_options import Selection


@pytest.fixture(scope="module")
def data() -> Any:
    """Examples as the pipeline gives them: a source with subsets."""
    return sosp.data.digits().train.subset(120, 0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return sosp.nets.make("digits_resnet", width=0.5).eval()


@lru_cache
def pruned(model: nn.Module, data: Any, method: str = "sosp-h") -> Pruned:
    x, _ = next(iter(data.ordered(batch=4, limit=4)))
    structures = sosp.find_structures(model, x)
    saliency = sosp.score(model, list(data.ordered(batch=50)), method=method, structures=structures)
    return select_and_shrink(model, saliency, x, Selection(rule="saliency"), ratio=0.5)


# --- widths ---------------------------------------------------------------------------------------------


def test_widths_are_those_of_the_network_that_is_built(model: nn.Module, data: Any) -> None:
    found = pruned(model, data)
    rows = list_widths(found, LayoutStyle())
    before, after = dict(model.named_modules()), dict(found.model.named_modules())
    assert [row["name"] for row in rows] == [n for n, m in before.items() if isinstance(m, (nn.Conv2d, nn.Linear))]
    for row in rows:
        for key, axis in (("out", 0), ("into", 1)):
            shapes = [getattr(m[row["name"]], "weight").shape[axis] for m in (before, after)]  # noqa: B009
            assert row[key] == shapes, (row["name"], key)


def test_what_meets_is_one_stream() -> None:
    """conv -> a block (a, b) around which a skip leads -> last."""
    wiring = {"conv": (INPUT,), "a": ("conv",), "b": ("a",), "last": ("conv", "b"), OUTPUT: ("last",)}
    found = number_streams(wiring)
    assert found["conv"] == found["b"]
    assert len({found[name] for name in (INPUT, "conv", "a", "last")}) == 4
    assert found[INPUT] == 0


def test_branches_that_meet_later_than_others() -> None:
    wiring = {"a": (INPUT,), "b": (INPUT,), "c": (INPUT,), "d": ("a", "b"), "e": ("c", "b"), OUTPUT: ("d", "e")}
    found = number_streams(wiring)
    assert found["a"] == found["b"] == found["c"] != found["d"] == found["e"]


# --- losses ---------------------------------------------------------------------------------------------


def test_losses_are_measured_on_the_masked_network(model: nn.Module, data: Any) -> None:
    found = pruned(model, data)
    course = measure_losses(model, found, data)
    x, y = next(iter(data.subset(120, 0).ordered(batch=120)))
    order = order_removals(found.saliency, found.mask)
    assert [p["removed"] for p in course["points"]] == [round(k * len(order) / 8) for k in range(9)]
    assert course["examples"] == 120
    for point in course["points"][::4]:
        gone = order[: point["removed"]]
        twin = sosp.masked(model, sosp.Mask.from_structures(found.saliency.structures, gone)) if len(gone) else model
        with torch.no_grad():
            logits = twin(x)
        assert point["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)  # float32 sums
        assert point["top1"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))


def test_the_order_ends_with_the_mask_and_begins_with_the_cheapest(model: nn.Module, data: Any) -> None:
    found = pruned(model, data)
    order = order_removals(found.saliency, found.mask)
    scores = found.saliency.scores[order]
    assert torch.equal(scores, scores.sort().values)
    assert sosp.Mask.from_structures(found.saliency.structures, order) == found.mask


@pytest.mark.parametrize("method", ["sosp-h", "sosp-i", "sosp-i-diagonal", "first-order"])
def test_predictions_add_up_what_the_method_knows(model: nn.Module, data: Any, method: str) -> None:
    saliency = pruned(model, data, method).saliency
    gone = [1, 5, 40]
    assert saliency.first is not None
    slope = -sum(float(saliency.first[s]) for s in gone)
    found = predict_changes(saliency, torch.tensor(gone))
    assert found["first"] == pytest.approx(slope, rel=1e-4)
    if method == "first-order":
        assert "second" not in found
        return
    if saliency.pairs is not None:
        curve = sum(float(saliency.pairs[s, t]) for s in gone for t in gone)
    else:
        assert saliency.second is not None
        curve = sum(float(saliency.second[s]) for s in gone)
    assert found["second"] == pytest.approx(slope + curve / 2, rel=1e-4)


def test_second_order_is_exact_where_the_loss_is_quadratic() -> None:
    """Two linear layers and a squared loss: the output is linear in the gates of the hidden units."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    x, y = torch.randn(20, 5).double(), torch.randn(20, 3).double()
    saliency = sosp.score(model, (x, y), method="exact", loss="mse")
    gone = torch.tensor([0, 2, 3, 6])
    twin = sosp.masked(model, sosp.Mask.from_structures(saliency.structures, gone))
    measured = [(m(x) - y).pow(2).sum(1).mean().item() / 2 for m in (model, twin)]
    assert predict_changes(saliency, gone)["second"] == pytest.approx(measured[1] - measured[0], rel=1e-10)


def test_methods_without_derivatives_predict_nothing(model: nn.Module, data: Any) -> None:
    course = measure_losses(model, pruned(model, data, "magnitude-l2"), data)
    assert all(point.keys() == {"removed", "loss", "top1"} for point in course["points"])


def test_no_curve_if_nobody_wants_it(model: nn.Module, data: Any) -> None:
    found = pruned(model, data)
    assert collect_details(model, found, PruningSection(curve=False), data)["losses"] is None
    assert collect_details(model, found, PruningSection(), data)["losses"]["examples"] == 120


def test_a_loss_that_is_no_number_is_none(model: nn.Module, data: Any) -> None:
    found = pruned(model, data)
    broken = sosp.nets.make("digits_resnet", width=0.5).eval()
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.linear.bias.fill_(float("nan"))
    points = measure_losses(broken, found, data)["points"]
    assert all(point["loss"] is None for point in points)


# --- bottlenecks ----------------------------------------------------------------------------------------


def test_narrow_places(model: nn.Module, data: Any, tmp_path: Path) -> None:
    found = pruned(model, data)
    save_saliency(tmp_path / "s.safetensors", found.saliency, found.mask)
    config = build_config(
        {"model": {"name": "sosp:digits_resnet", "width": 0.5}, "data": {"name": "digits"}, "prune": {}}
    )
    job = prepare_job(config)
    places = find_saved_bottlenecks(job, tmp_path / "s.safetensors", found.saliency.structures)
    assert places is not None
    assert {"blocks", "ratios", "advice"} <= places.keys()
    assert places["before"] == {"params": found.cost_before.params, "macs": found.cost_before.macs}
    assert places["after"] is not None
    save_saliency(tmp_path / "t.safetensors", replace(found.saliency, scope="layer"), found.mask)
    assert find_saved_bottlenecks(job, tmp_path / "t.safetensors", found.saliency.structures) is None
