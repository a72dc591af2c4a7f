"""Experiments as data: names that say everything, the paper's settings, numbers that stand in its source; records."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sosp
from sosp.errors import ArgumentError, RunError
from sosp.studies import paper
from sosp.studies.cell_records import find_cell_record, read_cell_record, write_cell_record
from sosp.studies.cells import encode_cell
from sosp.studies.experiment import list_starts
from sosp.studies.pages.result_rows import ResultRow
from sosp.studies.pages.verdicts import judge_claims
from sosp.studies.paper import Cell, CellRecord, Experiment, PrunedCell, TimedCell, TrainedCell

SOURCE = Path(os.environ.get("SOSP_TEST_PAPER", os.devnull))  # the LaTeX source of the paper
EVERY = pytest.mark.parametrize("name", paper.EXPERIMENTS)
VARIANTS = {
    "as it is": lambda e: e,
    "tiny": paper.make_tiny,
    "short": lambda e: paper.set_epochs(e, 30),
}
ORIGIN = {"commit": "abc", "torch": "2", "hardware": "a machine", "begun": "today"}


def variants() -> list[Experiment]:
    return [make(paper.make_experiment(name)) for name in paper.EXPERIMENTS for make in VARIANTS.values()]


# --- cells ----------------------------------------------------------------------------------------------


def test_equal_names_are_equal_cells_wherever_they_stand() -> None:
    known: dict[str, Cell] = {}
    for experiment in variants():
        for cell in (*experiment.cells, *list_starts(experiment)):
            assert known.setdefault(cell.name, cell) == cell
    assert len(set(known.values())) == len(known) > 500
    assert all(re.fullmatch(r"[a-z0-9_.-]+", name) for name in known)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "sosp-i"},
        {"budget": ("ratio", 0.25)},
        {"budget": ("params", 0.5)},
        {"seed": 3},
        {"gate": "features"},
        {"cap": 0.9},
        {"scale": "kernel"},
        {"examples": 500},
        {"shuffled": True},
        {"cycles": 2},
        {"episodes": 10},
        {"start": TrainedCell("resnet20", "cifar10")},
        {"start": TrainedCell("resnet56", "cifar10", seed=1)},
        {"start": TrainedCell("resnet56", "cifar10", width=2.0)},
        {"start": TrainedCell("resnet56", "cifar10", slimming=1e-4)},
        {"tuning": replace(sosp.SCHEDULES["cifar"], epochs=3)},
        {"tuning": replace(sosp.SCHEDULES["cifar"], rate=0.01)},
    ],
)
def test_every_field_of_a_cell_is_in_its_name(change: dict[str, Any]) -> None:
    cell = PrunedCell(TrainedCell("resnet56", "cifar10"), "sosp-h", ("ratio", 0.5))
    assert replace(cell, **change).name != cell.name


def test_a_name_reads_well() -> None:
    cell = paper.make_experiment("resnet56-cifar10").cells[0]
    assert cell.name == "resnet56-cifar10-e200-sosp-h-ratio0.5-weights-e200-s0"


# --- the paper's settings -------------------------------------------------------------------------------


def test_the_settings_are_the_papers() -> None:
    every = [c for n in paper.EXPERIMENTS for c in paper.make_experiment(n).cells if isinstance(c, PrunedCell)]
    cells = [cell for cell in every if cell.tuning.epochs]
    assert {cell.examples for cell in cells if not cell.other_rate} == {1000}
    assert {cell.gate for cell in cells if cell.gate != "weights"} == {"features"}
    schedules = {(c.start.network, c.start.data): c.tuning for c in cells if not c.other_rate}
    assert schedules.pop(("densenet40", "cifar10")) == schedules.pop(("densenet40", "cifar100"))
    for (_, data), schedule in schedules.items():
        assert schedule == sosp.SCHEDULES["imagenet" if data == "imagenet" else "cifar"]
    vgg = [cell for cell in cells if cell.start.network == "vgg19"]
    assert {cell.cap for cell in vgg} == {0.95}
    assert {cell.cap for cell in cells if cell not in vgg} == {None}


def test_eigendamage_is_also_fine_tuned_its_own_way() -> None:
    """As in configs/exp_for_cifar/*/*/one_pass/base/kfacf_eigen_base.json of its repository, and its pruner's code."""
    for name in ("global-high", "global-medium"):
        cells = [c for c in paper.make_experiment(name).cells if isinstance(c, PrunedCell)]
        gentle = [c for c in cells if c.other_rate]
        plain = {replace(c, tuning=c.start.schedule, examples=1000) for c in gentle}
        assert plain == {c for c in cells if c.label == "eigendamage"}
        assert {c.label for c in gentle} == {"eigendamage, rate 0.001"}
        assert {"-n50000-rate0.001-e150-" in c.name for c in gentle} == {True}
        for cell in gentle:
            rates = [cell.tuning.rate_at(epoch, 0.0) for epoch in (0, 74, 75, 111, 112, 149)]
            assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])


def test_the_first_experiment_has_the_cells_that_decide() -> None:
    cells = paper.make_experiment("resnet56-cifar10").cells
    wanted = {(m, ("ratio", r)) for m in ("sosp-h", "sosp-i", "first-order", "random") for r in (0.3, 0.5, 0.7)}
    found = {(c.method, c.budget) for c in cells if isinstance(c, PrunedCell) and c.seed == 0 and c.gate == "weights"}
    assert wanted <= found
    first = [c for c in cells[:8] if isinstance(c, PrunedCell)]  # what a GPU trains side by side
    assert {c.budget for c in first} == {("ratio", 0.5), ("ratio", 0.7)}
    featured = [c for c in cells if isinstance(c, PrunedCell) and c.gate == "features"]
    assert {(c.method, c.budget) for c in featured} == {(m, ("ratio", 0.5)) for m in ("sosp-h", "sosp-i")}


def test_before_tuning_varies_what_may_be_the_reason() -> None:
    cells = [c for c in paper.make_experiment("before-tuning").cells if isinstance(c, PrunedCell)]
    assert {cell.tuning.epochs for cell in cells} == {0}
    for gate in ("weights", "features"):
        found = {(c.method, c.budget[1], c.examples) for c in cells if c.gate == gate}
        for method in ("sosp-h", "sosp-i", "first-order"):
            assert found >= {(method, ratio, 1000) for ratio in (0.1, 0.3, 0.5, 0.7)} | {(method, 0.5, 5000)}
    short = [c for c in paper.set_epochs(paper.make_experiment("before-tuning"), 30).cells if isinstance(c, PrunedCell)]
    assert {(c.start.schedule.epochs, c.tuning.epochs) for c in short} == {(30, 0)}


def test_all_of_the_runtime_table_is_there() -> None:
    found = {(c.network, c.width, c.method) for c in paper.make_experiment("runtime").cells if isinstance(c, TimedCell)}
    wanted = {(n, 1.0) for n in ("resnet56", "resnet32x4", "densenet40", "vgg19", "resnet50")}
    wanted |= {("resnet56", float(w)) for w in (2, 4, 8)}
    assert found == {(*place, method) for place in wanted for method in ("sosp-h", "sosp-i")}


@EVERY
def test_tiny_is_small_and_on_digits(name: str) -> None:
    found = paper.make_tiny(paper.make_experiment(name))
    assert 0 < len(found.cells) <= 12
    assert {encode_cell(cell).get("data", "digits") for cell in found.cells} == {"digits"}
    assert all(start.schedule.epochs <= 1 and start.network == "digits_resnet" for start in list_starts(found))


@EVERY
def test_budgets_are_those_of_the_published_rows(name: str) -> None:
    """Where the paper prints a row of a method that is measured, there is a cell for it."""
    found = paper.make_experiment(name)
    cells = {(c.start.network, c.start.data, c.label, c.budget) for c in found.cells if isinstance(c, PrunedCell)}
    for row in found.published:
        if row.method in {label for _, _, label, _ in cells} and row.method != "amc":
            assert (row.network, row.data, row.method, row.budget) in cells, row


# --- the paper's numbers --------------------------------------------------------------------------------


UNITS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("accuracy", "std", "before", "before_std", "params_cut", "macs_cut"), (1.0,)),
    "params": (1e3, 1e6),
    **dict.fromkeys(("macs", "macs_alternative"), (1e6, 1e9)),
    "seconds": (1.0, 60.0, 3600.0),
    "seconds_std": (1.0, 60.0),
}


def stands(value: float, units: tuple[float, ...], line: str) -> bool:
    """In one of the units."""
    printed = {float(word) for word in re.findall(r"\d+(?:\.\d+)?", line)}
    return any(round(value / unit, 6) in printed for unit in units)


@pytest.mark.skipif(not SOURCE.is_file(), reason="the paper's source is not there")
@EVERY
def test_published_numbers_stand_in_their_lines(name: str) -> None:
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    for row in paper.make_experiment(name).published:
        for name_, units in UNITS.items():
            value = getattr(row, name_)
            assert value is None or stands(value, units, lines[row.line - 1]), (row, name_)
        if row.final_line is not None:
            line = lines[row.final_line - 1]
            assert stands(row.final or 0, (1.0,), line), row
            assert stands(row.final_std or 0, (1.0,), line), row
    for claim in paper.make_experiment(name).claims:
        assert claim.line is None or lines[claim.line - 1].strip(), claim


@EVERY
def test_every_claim_can_be_judged(name: str) -> None:
    """There are cells for both of its sides, that differ in nothing else."""
    found = paper.make_experiment(name)
    full = [ResultRow(cell, 1, (done(cell),), None) for cell in found.cells if cell.seed == 0]
    said = list(judge_claims(found, full))
    assert [claim for claim in found.claims if claim not in {finding.claim for finding in said}] == []


def done(cell: Cell) -> CellRecord:
    """A record with every figure."""
    shares = dict.fromkeys(("final", "best", "zeroed", "cut", "recalibrated"), 0.5)
    sizes = {"params": 10, "macs": 20, "seconds": 1.0}
    metrics, history, start = {**shares, **sizes}, {"seconds": [1.0]}, {"accuracy": 0.6}
    return CellRecord(encode_cell(cell), cell.name, "some", "done", metrics=metrics, history=history, start=start)


# --- variants -------------------------------------------------------------------------------------------


def test_seeds_and_patterns_choose_cells() -> None:
    whole = paper.make_experiment("resnet56-cifar10")
    assert {cell.seed for cell in paper.limit_seeds(whole, 2).cells} == {0, 1}
    few = paper.select_cells(whole, r"cifar10-.*ratio0\.5-weights.*-s0$").cells
    assert [cell.label for cell in few] == ["sosp-h", "sosp-i", "first-order", "random"]


def test_another_length_gives_other_cells() -> None:
    whole, short = paper.make_experiment("shuffle"), paper.set_epochs(paper.make_experiment("shuffle"), 30)
    assert not {c.name for c in whole.cells} & {c.name for c in short.cells}
    assert all(c.tuning.epochs == c.start.schedule.epochs == 30 for c in short.cells if isinstance(c, PrunedCell))
    untrained = paper.set_epochs(paper.make_experiment("expand-init"), 30)
    assert {start.schedule.epochs for start in list_starts(untrained)} == {0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: paper.make_experiment("resnet-56"), "Did you mean 'resnet56-cifar10'?"),
        (lambda: paper.select_cells(paper.make_experiment("shuffle"), "("), "is not a valid regular expression"),
        (lambda: paper.select_cells(paper.make_experiment("shuffle"), "vgg"), "matches no cell of shuffle"),
        (lambda: paper.limit_seeds(paper.make_experiment("shuffle"), 0), "seeds=0"),
        (lambda: paper.set_epochs(paper.make_experiment("shuffle"), -1), "epochs=-1"),
    ],
)
def test_refusals_name_the_way_out(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        make()


# --- records --------------------------------------------------------------------------------------------

CELL = PrunedCell(TrainedCell("digits_resnet", "digits"), "sosp-h", ("ratio", 0.5))
FIGURES = {"params": 10, "macs": 20, "cut": 0.5, "first": 0.6, "final": 0.9, "best": 0.95}


def record(cell: Cell = CELL, experiment: str = "some", **more: Any) -> CellRecord:
    start = {"sha256": "f", "accuracy": 0.9, "params": 20, "macs": 40}
    options = {"metrics": FIGURES, "start": start, "origin": ORIGIN, **more}
    return CellRecord(encode_cell(cell), cell.name, experiment, **{"state": "done", **options})


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write_cell_record(tmp_path, record(), "some")
    assert path == tmp_path / "some" / f"{CELL.name}.json"
    assert read_cell_record(path) == record()
    assert find_cell_record(tmp_path, "some", CELL) == record()
    assert find_cell_record(tmp_path, "some", replace(CELL, seed=1)) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half written beside it


def test_a_cell_that_another_experiment_has_done_is_done(tmp_path: Path) -> None:
    write_cell_record(tmp_path, record(state="failed", reason="it broke", metrics={}), "some")
    assert find_cell_record(tmp_path, "other", CELL).state == "failed"  # type: ignore[union-attr]
    write_cell_record(tmp_path, record(experiment="third"), "third")
    assert (
        find_cell_record(tmp_path, "other", CELL)
        == find_cell_record(tmp_path, "some", CELL)
        == record(experiment="third")
    )


def test_a_record_of_another_cell_with_that_name_is_refused(tmp_path: Path) -> None:
    changed = replace(record(), cell={**encode_cell(CELL), "examples": 999})
    write_cell_record(tmp_path, changed, "some")
    with pytest.raises(RunError, match="examples is 999, and here 1000"):
        find_cell_record(tmp_path, "some", CELL)
    with pytest.raises(RunError, match=re.escape(f"{tmp_path / 'some'}")):  # where it is, whoever looks for it
        find_cell_record(tmp_path, "other", CELL)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "not a record of an experiment"),
        ({"extra": 1}, "'extra' is missing or unknown"),
        ({"state": "maybe"}, "its state is 'maybe'"),
        ({"state": "failed"}, "failed without a reason"),
        ({"name": "else"}, "its name is 'else'"),
        ({"cell": {"kind": "odd"}}, "of kind 'odd'"),
        ({"cell": ["pruned"]}, "its 'cell' is ['pruned']"),
        ({"origin": []}, "its 'origin' is []"),
        ({"metrics": None}, "its 'metrics' is None"),
        ({"cell": {**encode_cell(CELL), "tuning": None}}, "does not say how long"),
        ({"cell": {**encode_cell(CELL), "start": {"schedule": []}}}, "does not say how long"),
        ({"origin": {**ORIGIN, "commit": ""}}, "does not say the commit"),
        ({"metrics": {k: v for k, v in FIGURES.items() if k != "final"}}, "has no final"),
        ({"metrics": {k: v for k, v in FIGURES.items() if k != "cut"}}, "has no cut"),
        ({"metrics": {**FIGURES, "final": 91.2}}, "not a share"),
        ({"metrics": {**FIGURES, "params": 10.5}}, "not a whole number"),
        ({"metrics": {**FIGURES, "params": -1}}, "its params is -1"),
        ({"metrics": {**FIGURES, "final": None}}, "its final is None"),
        ({"metrics": {**FIGURES, "final": "0.9"}}, "its final is '0.9'"),
    ],
)
def test_malformed_records_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_cell_record(tmp_path, record(), "some")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RunError, match=re.escape(words)) as caught:
        read_cell_record(path)
    assert str(path) in str(caught.value)
    assert "Move it away" in str(caught.value)


def test_what_was_not_fine_tuned_has_no_final_accuracy(tmp_path: Path) -> None:
    cell = replace(CELL, tuning=replace(CELL.tuning, epochs=0))
    figures = {k: v for k, v in FIGURES.items() if k not in ("first", "final", "best")}
    path = write_cell_record(tmp_path, record(cell, metrics=figures), "some")
    assert read_cell_record(path).metrics == figures
    with pytest.raises(RunError, match="has no first"):
        write_cell_record(tmp_path, record(CELL, metrics=figures), "some")


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = write_cell_record(tmp_path, record(), "some")
    path.write_text(path.read_text()[:50])
    with pytest.raises(RunError, match="is not valid JSON"):
        read_cell_record(path)
