"""Carrying experiments out: every figure is what its steps give by hand, nothing is done twice, kills do no harm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sosp
from sosp.core.run_environment import describe_hardware
from sosp.data.registry import convert_to_dataset
from sosp.errors import ArgumentError, DataError, OutOfMemoryError, RunError, TrainingError
from sosp.nets import by_name
from sosp.studies import cell_pruning as cutting
from sosp.studies import paper, runner, starting_networks, training_groups
from sosp.studies import workspace as bench
from sosp.studies.cell_records import NETWORKS, CellRecord, find_cell_record, write_cell_record
from sosp.studies.cells import encode_cell
from sosp.studies.paper import Experiment, ExperimentSettings, PrunedCell, TimedCell, TrainedCell
from sosp.studies.record_origin import describe_origin, find_commit
from sosp.studies.workspace import parse_weights
from sosp.training import Accuracy, Epoch, Moment

CPU = torch.device("cpu")
FULL = os.environ.get("SOSP_TEST_FULL") == "1"
# Experiment -> the cells of its tiny variant that are run here; all of them with SOSP_TEST_FULL=1.
SOME = {
    "resnet56-cifar10": r"sosp-h-.*weights|sosp-i-.*features",
    "before-tuning": r"sosp-h-.*features",
    "runtime": r"x0\.25-",
    "global-high": r"slimming0.0001-.*-slimming-params",
    "amc-plainnet20": r"amc",
    "expand": r".",
    "init-vs-trained": r"e0-sosp-h-.*x2-s0",
    "shuffle": r"shuffled",
}


class Watch:
    """Remembers what it is told; may do something when it is."""

    def __init__(self, act: Any = None) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.act = act

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        self.seen.append((name, dict(facts)))
        if self.act is not None:
            self.act(self, name)

    def step(self, stage: str, done: int, total: int, moment: Moment) -> None:
        pass

    def cells(self, event: str) -> list[str]:
        return [facts["cell"] for name, facts in self.seen if name == event]


def setting(folder: Path, **more: Any) -> ExperimentSettings:
    origin = {**describe_origin(CPU), "commit": "abc"}
    return ExperimentSettings(folder / "results", folder / "work", CPU, origin=origin, **more)


def tiny(name: str) -> Experiment:
    return paper.make_tiny(paper.make_experiment(name))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny experiments have been run, all into one folder."""
    folder = tmp_path_factory.mktemp("experiments")
    for name in paper.EXPERIMENTS if FULL else SOME:
        whole = tiny(name)
        cells = whole.cells if FULL else paper.select_cells(whole, SOME[name]).cells
        paper.run_experiment(whole, setting(folder), Watch(), cells=cells)
    return folder


def one(home: Path, name: str, pattern: str) -> tuple[Any, CellRecord]:
    """The cell that the pattern finds, and its record."""
    whole = tiny(name)
    (cell,) = paper.select_cells(whole, pattern).cells
    found = find_cell_record(home / "results", whole.name, cell)
    assert found is not None
    return cell, found


# --- what a record says ---------------------------------------------------------------------------------


def test_all_that_was_asked_for_is_done(home: Path) -> None:
    for name, pattern in SOME.items():
        for cell in paper.select_cells(tiny(name), pattern).cells:
            found = find_cell_record(home / "results", f"{name}-tiny", cell)
            assert found is not None, cell.name
            assert found.state == "done", found.reason


@pytest.mark.parametrize("pattern", ["sosp-h-.*weights", "sosp-i-.*features"])
def test_a_pruned_cell_is_what_its_steps_give(home: Path, pattern: str) -> None:
    """The same by hand, from the network that was kept."""
    cell, record = one(home, "resnet56-cifar10", pattern)
    data = sosp.data.digits()
    original = by_name.build_network("sosp:digits_resnet", classes=10, width=0.25, seed=0)
    model = sosp.load(home / "work" / NETWORKS / f"{cell.start.name}.safetensors", original)
    example, _ = next(iter(data.train.ordered(batch=8, limit=8)))
    structures = sosp.find_structures(model, example, gate=cell.gate, exclude=sosp.downsampling(model))
    batches = data.train.subset(100, 0).ordered(batch=250)
    random = torch.Generator().manual_seed(0)
    saliency = sosp.score(model, batches, method=cell.method, structures=structures, examples=100, generator=random)
    mask = sosp.select(saliency, ratio=0.5)
    small = sosp.shrink(model, mask, example)
    tuned = sosp.train(small, data, cell.tuning, seed=0)
    found = record.metrics
    assert (found["structures"], found["removed"]) == (mask.structures, mask.chosen)
    assert found["params"] == sum(p.numel() for p in small.parameters())
    assert found["macs"] == sosp.count(small, example).macs
    other = sosp.count(model, example, mask, convention="alternative")
    assert (found["params_alternative"], found["macs_alternative"]) == (other.params, other.macs)
    assert found["cut"] == found["masked"] == sosp.evaluate(sosp.masked(model, mask), data.test).top1
    again = sosp.recalibrate(small, data.train, examples=5000, seed=0)
    assert found["recalibrated"] == sosp.evaluate(again, data.test).top1
    assert found["first"] == found["final"] == found["best"] == tuned.history[-1].test.top1
    assert list(record.history["test"]) == [found["final"]]
    assert record.start["accuracy"] == sosp.evaluate(model, data.test).top1
    assert record.start["params"] == sum(p.numel() for p in model.parameters())


def test_without_fine_tuning_a_record_ends_with_the_cut(home: Path) -> None:
    cell, record = one(home, "before-tuning", "sosp-h-.*features")
    _, tuned = one(home, "resnet56-cifar10", "sosp-i-.*features")
    assert record.metrics.keys() == tuned.metrics.keys() - {"first", "final", "best"}
    assert record.history == {"test": [], "loss": [], "seconds": []}
    assert record.seconds["tune"] == 0
    data = sosp.data.digits()
    model = sosp.load(
        home / "work" / NETWORKS / f"{cell.start.name}.safetensors",
        by_name.build_network("sosp:digits_resnet", width=0.25),
    )
    batches = list(data.train.subset(100, 0).ordered(batch=250))
    example = batches[0][0]
    structures = sosp.find_structures(model, example, exclude=sosp.downsampling(model))
    saliency = sosp.score(model, batches, method="sosp-h", structures=structures, examples=100)
    small = sosp.shrink(model, sosp.select(saliency, ratio=0.5), example)
    assert record.metrics["cut"] == sosp.evaluate(small, data.test).top1


def test_zeroed_is_the_papers_theta_without_m() -> None:
    """Weights of the removed filters are zero, the shift of their norm is not: by hand, filter by filter."""
    torch.manual_seed(0)
    model = sosp.nets.digits_resnet(width=0.25).eval()
    torch.nn.init.normal_(model.bn1.bias)  # type: ignore[arg-type]
    example = torch.randn(4, 1, 8, 8)
    mask = sosp.Mask.from_removed(model, {"conv1": [1, 2], "layer2.0.conv1": [0]}, example)
    found = cutting.zero_structures(model, mask)
    by_hand = by_name.build_network("sosp:digits_resnet", width=0.25)
    by_hand.load_state_dict(model.state_dict())
    for name, channel in (("conv1", 1), ("conv1", 2), ("layer2.0.conv1", 0)):
        by_hand.get_submodule(name).weight.data[channel] = 0  # type: ignore[index, union-attr]
    assert torch.equal(found(example), by_hand.eval()(example))
    assert not torch.allclose(found(example), sosp.masked(model, mask)(example))
    assert not torch.equal(found(example), model(example))  # which stayed as it was


def test_a_record_says_where_it_comes_from(home: Path) -> None:
    cell, record = one(home, "resnet56-cifar10", "sosp-h-.*weights")
    assert record.cell["tuning"]["epochs"] == cell.tuning.epochs
    assert record.origin["commit"] == "abc"
    assert record.origin["hardware"] == describe_hardware(CPU)
    assert "threads" in describe_hardware(CPU)
    assert record.origin["torch"] == torch.__version__
    assert "command" not in record.origin  # which would name folders of this machine
    assert record.seconds.keys() == {"score", "select", "shrink", "tune"}
    network = find_cell_record(home / "results", NETWORKS, cell.start)
    assert network is not None
    assert network.facts["source"] == "trained"
    assert network.facts["sha256"] == record.start["sha256"]


def test_the_commit_is_told_asked_for_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOSP_COMMIT", "told")
    assert find_commit() == "told"
    monkeypatch.delenv("SOSP_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert find_commit() == "unknown"


def test_cap_and_scale_are_heeded(home: Path) -> None:
    """The cut that select makes of the same saliency by hand, which neither of the two leaves as it is."""
    cell = PrunedCell(begun(home), "sosp-h", ("params", 0.5), cap=0.5, scale="macs", examples=100)
    cutter = cutting.CellPruner(bench.Workspace(setting(home)), cell.start)
    saliency, _ = cutter.saliency(cell)
    found = cutter.prune(cell, home / "capped").facts["removed_by_layer"]
    by_hand = {
        cap_scale: {
            layer.name: len(mask.removed.get(layer.name, ())) / layer.channels for layer in saliency.structures.layers
        }
        for cap_scale in ((0.5, "macs"), (None, "macs"), (0.5, None))
        for mask in [sosp.select(saliency, params=0.5, cap=cap_scale[0], scale=cap_scale[1])]
    }
    assert found == by_hand[0.5, "macs"]
    assert found != by_hand[None, "macs"]
    assert found != by_hand[0.5, None]


def test_two_cycles_are_two_trainings_that_shuffle_differently(tmp_path: Path) -> None:
    data, short = sosp.data.digits(), replace(sosp.SCHEDULES["digits"], epochs=1)
    model = by_name.build_network("sosp:digits_resnet", classes=10, width=0.25, seed=3)
    group = training_groups.TrainingGroup(training_groups.SharedTraining("digits", short, cycles=2), ("a",))
    table = bench.Workspace(setting(tmp_path))
    watch = Watch()
    found, history = training_groups.train_group(table, group, {"a": model}, {"a": 2}, tmp_path, watch)["a"]
    told = [(facts["number"], facts["epochs"]) for name, facts in watch.seen if name == "epoch"]
    assert told == [(1, 2), (2, 2)]
    first = sosp.train(model, data, short, seed=2)
    second = sosp.train(first.model, data, short, seed=1002)
    assert [e.loss for e in history] == [first.history[0].loss, second.history[0].loss]
    assert torch.equal(found.linear.weight, second.model.linear.weight)  # type: ignore[arg-type]


def test_a_network_whose_file_is_another_is_not_there(home: Path, tmp_path: Path) -> None:
    start, table = begun(home), bench.Workspace(setting(copied(home, tmp_path)))
    assert starting_networks.is_available(table, start)
    sosp.save(table.network_file(start), by_name.build_network("sosp:digits_resnet", classes=10, width=0.25, seed=9))
    assert not starting_networks.is_available(table, start)


def test_a_cut_of_another_network_is_made_anew(home: Path, tmp_path: Path) -> None:
    """And checkpoints of its fine-tuning are forgotten."""
    cell = PrunedCell(begun(home), "random", ("ratio", 0.5), examples=50)
    cutter = cutting.CellPruner(bench.Workspace(setting(home)), cell.start)
    cutter.prune(cell, tmp_path / cell.name)
    group = tmp_path / "group-0"
    group.mkdir()
    (group / training_groups.MEMBERS).write_text(f'["{cell.name}", "other"]')
    written = (tmp_path / cell.name / cutting.NETWORK).stat().st_mtime_ns
    cutter.prune(cell, tmp_path / cell.name)
    assert (tmp_path / cell.name / cutting.NETWORK).stat().st_mtime_ns == written
    assert group.exists()
    cutter.start = "another"
    cutter.prune(cell, tmp_path / cell.name)
    assert (tmp_path / cell.name / cutting.NETWORK).stat().st_mtime_ns > written
    assert not group.exists()


def test_shuffled_masks_keep_the_architecture(home: Path) -> None:
    _, plain = one(home, "resnet56-cifar10", "sosp-h-.*weights")
    _, other = one(home, "shuffle", "shuffled")
    assert plain.facts["removed_by_layer"] == other.facts["removed_by_layer"]
    assert plain.metrics["removed"] == other.metrics["removed"]
    assert plain.history["loss"] != other.history["loss"]


def test_init_pruning_trains_twice_from_the_first_weights(home: Path) -> None:
    cell, record = one(home, "init-vs-trained", SOME["init-vs-trained"])
    assert len(record.history["test"]) == 2 * cell.tuning.epochs
    assert record.start["name"] == "digits_resnetx0.25-digits-e0-s0"
    data = sosp.data.digits()
    fresh = by_name.build_network("sosp:digits_resnet", classes=10, width=0.25, seed=0)
    assert record.start["accuracy"] == sosp.evaluate(fresh, data.test).top1


def test_the_wider_networks_of_an_expansion_match(home: Path) -> None:
    """Expand widens what loses least; widen has as many parameters as can be had by a constant."""
    results = home / "results"
    wide = {
        c.start.label: find_cell_record(results, NETWORKS, c.start)
        for c in tiny("expand").cells
        if isinstance(c, PrunedCell)
    }
    assert wide.keys() == {"baseline", "baseline, expand", "baseline, widen"}
    vanilla, expand, widen = (r.metrics["params"] for r in wide.values() if r is not None)
    assert vanilla < widen
    assert abs(widen - expand) / expand < 0.1
    facts = wide["baseline, expand"].facts  # type: ignore[union-attr]
    least = min(facts["removed_by_block"], key=facts["removed_by_block"].get)
    assert facts["widened"] == f"{least} ×2"


def test_amc_meets_its_budget(home: Path) -> None:
    _, record = one(home, "amc-plainnet20", "amc")
    assert record.metrics["macs"] <= 0.5 * record.start["macs"]
    assert "search" in record.seconds


def test_slimming_begins_with_a_network_of_its_own(home: Path) -> None:
    cell, record = one(home, "global-high", SOME["global-high"])
    assert cell.start.slimming == 1e-4
    assert cell.label == "slimming-l1"
    assert record.metrics["params"] <= 0.5 * record.start["params"]
    _, plain = one(home, "resnet56-cifar10", "sosp-h-.*weights")
    assert record.start["sha256"] != plain.start["sha256"]


def test_eigendamage_finds_the_ratio_that_leaves_the_share(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "HALVINGS", 3)
    (cell,) = paper.select_cells(tiny("global-high"), "eigendamage").cells
    assert isinstance(cell, PrunedCell)
    cutter = cutting.CellPruner(bench.Workspace(setting(home)), cell.start)
    found = cutter.prune(cell, home / "eigendamage")
    assert found.metrics["params"] == sum(p.numel() for p in found.model.parameters())
    assert found.metrics["params"] <= 0.5 * sum(p.numel() for p in cutter.model.parameters())
    assert found.metrics["cut"] == sosp.evaluate(found.model, sosp.data.digits().test).top1


# --- times ----------------------------------------------------------------------------------------------


def test_times_are_taken_apart_and_repeated(home: Path) -> None:
    cell, record = one(home, "runtime", r"^digits_resnetx0\.25-digits-sosp-h-")
    found = record.metrics
    assert len(record.history["seconds"]) == cell.repeats == 2
    assert found["seconds"] == pytest.approx(found["score"] + found["select"])
    assert found["seconds"] > 0
    assert found["structures"] == 60
    assert found["outputs"] == 10
    assert record.facts["inputs"] == "digits"


def test_without_data_times_are_taken_on_random_numbers_and_say_so(tmp_path: Path) -> None:
    cell = TimedCell("resnet20", "cifar10", "sosp-h", width=0.25, examples=8, repeats=1)
    whole = Experiment("some", "", "", (cell,))
    assert paper.run_experiment(whole, setting(tmp_path), Watch()).count("done") == 1
    record = find_cell_record(tmp_path / "results", "some", cell)
    assert record is not None
    assert record.facts["inputs"] == "random numbers"
    assert record.metrics["outputs"] == 10


# --- nothing twice --------------------------------------------------------------------------------------


def test_a_second_run_does_nothing(home: Path) -> None:
    whole, watch = tiny("expand"), Watch()
    before = {p: p.stat().st_mtime_ns for p in (home / "results").rglob("*.json")}
    found = paper.run_experiment(whole, setting(home), watch)
    assert found.missing == 0
    assert found.count("done") == len(whole.cells)
    assert [name for name, _ in watch.seen] == ["plan"]
    assert before == {p: p.stat().st_mtime_ns for p in (home / "results").rglob("*.json")}
    leftovers = [p.name for p in (home / "work" / whole.name).iterdir()]
    assert leftovers == []


def test_what_another_experiment_did_is_not_done_again(home: Path) -> None:
    whole, watch = tiny("shuffle"), Watch()
    plain = [cell for cell in whole.cells if isinstance(cell, PrunedCell) and not cell.shuffled]
    paper.run_experiment(whole, setting(home), watch, cells=plain)
    assert watch.cells("cell") == []


def test_a_group_that_was_begun_is_gone_on_with_as_it_was(tmp_path: Path) -> None:
    training = training_groups.SharedTraining("digits", sosp.SCHEDULES["digits"])
    known = dict.fromkeys("abcdef", training)
    first = training_groups.form_groups(known, known, tmp_path, 4)
    assert [group.names for group in first] == [("a", "b", "c", "d"), ("e", "f")]
    folder = first[1].folder(tmp_path)
    folder.mkdir()
    (folder / training_groups.MEMBERS).write_text('["e", "f"]')
    # f is done, or not wanted: the group is the same still, and comes first.
    wanted = dict.fromkeys("abcde", training)
    assert [g.names for g in training_groups.form_groups(wanted, known, tmp_path, 4)] == [
        ("e", "f"),
        ("a", "b", "c", "d"),
    ]
    assert [g.names for g in training_groups.form_groups(wanted, wanted, tmp_path, 4)] == [("a", "b", "c", "d"), ("e",)]
    other = dict.fromkeys("ef", replace(training, cycles=2))
    assert [g.names for g in training_groups.form_groups(other, other, tmp_path, 4)] == [("e", "f")]
    assert training_groups.form_groups(other, other, tmp_path, 4)[0].folder(tmp_path) != folder
    # Begun on a machine with more room.
    assert [g.names for g in training_groups.form_groups(wanted, known, tmp_path, 1)] == [
        ("e", "f"),
        *zip("abcd", strict=True),
    ]


def begin(group: training_groups.TrainingGroup, place: Path) -> Path:
    """As if it had been trained for a while."""
    folder = group.folder(place)
    folder.mkdir()
    (folder / training_groups.MEMBERS).write_text(json.dumps(group.names))
    return folder


def test_a_network_is_trained_in_one_of_the_groups_that_were_begun(tmp_path: Path) -> None:
    training = training_groups.SharedTraining("digits", sosp.SCHEDULES["digits"])
    known = dict.fromkeys("abcd", training)
    for names in (("a", "b"), ("b", "c")):
        begin(training_groups.TrainingGroup(training, names), tmp_path)
    found = [group.names for group in training_groups.form_groups(known, known, tmp_path, 4)]
    assert found in ([("a", "b"), ("c", "d")], [("b", "c"), ("a", "d")])
    # What nobody wants any more is not gone on with.
    assert [g.names for g in training_groups.form_groups({"d": training}, known, tmp_path, 4)] == [("d",)]


def test_a_folder_that_is_not_what_it_says_is_no_group(tmp_path: Path) -> None:
    """Of two trainings, or under the name of another one."""
    first = training_groups.SharedTraining("digits", sosp.SCHEDULES["digits"])
    second = replace(first, cycles=2)
    known = {"a": first, "b": second, "c": first}
    for training in (first, second):
        begin(training_groups.TrainingGroup(training, ("a", "b")), tmp_path)
    begin(training_groups.TrainingGroup(first, ("c",)), tmp_path).rename(tmp_path / "group-0")
    found = training_groups.form_groups(known, known, tmp_path, 4)
    assert [(g.training, g.names) for g in found] == [(first, ("a", "c")), (second, ("b",))]


def test_networks_of_two_trainings_are_not_mixed(tmp_path: Path) -> None:
    first = training_groups.SharedTraining("digits", sosp.SCHEDULES["digits"])
    wanted = {"a": first, "b": replace(first, slimming=1e-4), "c": first, "d": first}
    assert [g.names for g in training_groups.form_groups(wanted, wanted, tmp_path, 2)] == [("a", "c"), ("d",), ("b",)]


def test_checkpoints_of_a_network_that_is_another_one_now_go(tmp_path: Path) -> None:
    training = training_groups.SharedTraining("digits", sosp.SCHEDULES["digits"])
    mine, other = (begin(training_groups.TrainingGroup(training, names), tmp_path) for names in (("a", "b"), ("c",)))
    training_groups.delete_member_checkpoints(tmp_path, "b")
    assert not mine.exists()
    assert other.exists()


def test_parts_are_told_as_often_as_a_training_was_moved(tmp_path: Path) -> None:
    """There and back: what was lost and trained again is told once."""
    group = training_groups.TrainingGroup(training_groups.SharedTraining("digits", sosp.SCHEDULES["digits"]), ("a",))
    path = begin(group, tmp_path) / training_groups.PARTS
    here, there = ({"hardware": h, "torch": "2.99", "commit": "abc"} for h in ("a desk", "a GPU"))
    for epoch, origin in ((1, here), (2, here), (3, there), (6, here)):
        training_groups._begin_part(path, epoch, origin)
    moved = [{"from": 1, **here}, {"from": 3, **there}, {"from": 6, **here}]
    assert training_groups.describe_parts(group, tmp_path, here) == {"parts": moved}
    training_groups._begin_part(path, 3, here)
    assert training_groups.describe_parts(group, tmp_path, here) == {}
    assert training_groups.describe_parts(group, tmp_path, there) == {"parts": moved[:1]}
    assert training_groups.describe_parts(group, tmp_path, {**here, "commit": "def"}) == {"parts": moved[:1]}


# --- killed ---------------------------------------------------------------------------------------------

START = TrainedCell("digits_resnet", "digits", replace(sosp.SCHEDULES["digits"], epochs=1), width=0.25)
PAIR = (
    PrunedCell(START, "sosp-h",
           ("ratio", 0.5), replace(sosp.SCHEDULES["digits"], epochs=3), examples=50),
    PrunedCell(START, "random",
           ("ratio", 0.5), replace(sosp.SCHEDULES["digits"], epochs=3), examples=50),
)  # fmt: skip
TWO = Experiment("two", "two networks side by side", "", PAIR)


def run_two(folder: Path, watch: Watch, side_by_side: int = 2, **origin: str) -> dict[str, CellRecord]:
    """Both networks side by side, as on a GPU."""
    torch.set_num_threads(1)
    bench.GROUP_SIZES[False] = side_by_side
    here = setting(folder)
    try:
        found = paper.run_experiment(TWO, replace(here, origin={**here.origin, **origin}), watch)
    finally:
        bench.GROUP_SIZES[False] = 1
    return {name: record for name, record in found.records.items() if record is not None}


def at(event: str, times: int, act: Callable[[], Any]) -> Watch:
    """Acts when an event comes for the so-manieth time."""

    def look(watch: Watch, name: str) -> None:
        if name == event and [n for n, _ in watch.seen].count(event) == times:
            act()

    return Watch(look)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellRecord]:
    """Never interrupted."""
    return run_two(tmp_path_factory.mktemp("whole"), Watch())


@pytest.mark.slow
def test_killed_it_goes_on_where_it_was(whole: dict[str, CellRecord], tmp_path: Path) -> None:
    """First in an epoch of the fine-tuning, by a signal that nothing can catch; then between the records of a group."""
    died = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr
    watch = at("cell", 1, stop)
    with pytest.raises(KeyboardInterrupt):
        run_two(tmp_path, watch)
    numbers = [facts["number"] for name, facts in watch.seen if name == "epoch"]
    assert numbers == [2, 2, 3, 3]  # the first epoch of both was there already
    assert watch.cells("cut") == sorted(whole, key=lambda name: "random" not in name)
    watch = Watch()
    found = run_two(tmp_path, watch)
    assert watch.cells("epoch") == []  # all had been trained, only a record was missing
    assert {n: (r.metrics, r.history["test"], r.history["loss"]) for n, r in found.items()} == {
        n: (r.metrics, r.history["test"], r.history["loss"]) for n, r in whole.items()
    }
    assert [p.name for p in (tmp_path / "work" / "two").iterdir()] == []


def test_moved_it_goes_on_as_it_was_and_says_what_was_done_where(whole: dict[str, CellRecord], tmp_path: Path) -> None:
    """From a machine on which both are trained side by side to one that has room for a single network."""
    with pytest.raises(KeyboardInterrupt):
        run_two(tmp_path, at("epoch", 5, stop), hardware="a large GPU")  # of the network, then one of both
    with pytest.raises(KeyboardInterrupt):
        run_two(tmp_path, at("epoch", 1, stop), hardware="one that fails in its first epoch")
    with pytest.raises(KeyboardInterrupt):
        run_two(tmp_path, at("cell", 1, stop), side_by_side=1, hardware="a small CPU", commit="def")
    found = run_two(tmp_path, Watch(), hardware="a desk")  # where nothing is trained, only kept
    begun = {"from": 1, "hardware": "a large GPU", "torch": torch.__version__, "commit": "abc"}
    ended = {"from": 2, "hardware": "a small CPU", "torch": torch.__version__, "commit": "def"}
    for name, record in found.items():
        assert record.facts["parts"] == [begun, ended]
        assert record.metrics == whole[name].metrics
    assert {record.origin["hardware"] for record in found.values()} == {"a desk"}
    assert not any("parts" in record.facts for record in whole.values())


def test_epochs_of_a_second_cycle_are_counted_on(tmp_path: Path) -> None:
    twice = Experiment("twice", "", "", (replace(PAIR[1], cycles=2),))
    here = setting(tmp_path)
    seen = 1 + 3 + 2  # epochs: of the network, of the first cycle, of the second
    with pytest.raises(KeyboardInterrupt):
        paper.run_experiment(twice, here, at("epoch", seen, stop))
    (found,) = paper.run_experiment(
        twice, replace(here, origin={**here.origin, "commit": "def"}), Watch()
    ).records.values()
    assert found is not None
    assert [(part["from"], part["commit"]) for part in found.facts["parts"]] == [(1, "abc"), (5, "def")]


def test_two_processes_do_not_meet(tmp_path: Path) -> None:
    table = bench.Workspace(setting(tmp_path))
    with table.lock_folders(), pytest.raises(RunError, match="another process is working there"):
        paper.run_experiment(TWO, setting(tmp_path), Watch())


# --- refused and failed ---------------------------------------------------------------------------------


def copied(home: Path, folder: Path) -> Path:
    """With the network that most tiny cells begin with."""
    shutil.copytree(home / "results" / NETWORKS, folder / "results" / NETWORKS)
    shutil.copytree(home / "work" / NETWORKS, folder / "work" / NETWORKS)
    return folder


def begun(home: Path) -> TrainedCell:
    cell, _ = one(home, "resnet56-cifar10", "sosp-h-.*weights")
    start: TrainedCell = cell.start
    return start


def test_a_cell_that_is_refused_is_kept_as_such_and_tried_again_on_demand(home: Path, tmp_path: Path) -> None:
    folder = copied(home, tmp_path)
    cell = PrunedCell(begun(home), "random", ("ratio", 0.98), replace(sosp.SCHEDULES["digits"], epochs=1))
    some = Experiment("some", "", "", (cell,))
    found = paper.run_experiment(some, setting(folder), Watch())
    assert found.count("refused") == 1
    assert "disconnects the network" in found.records[cell.name].reason  # type: ignore[union-attr]
    watch = Watch()
    paper.run_experiment(some, setting(folder), watch)
    assert watch.cells("cell") == []
    paper.run_experiment(some, setting(folder), watch, retry=True)
    assert watch.cells("cell") == [cell.name]


def test_a_method_the_network_does_not_allow_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DenseNets have no norm that belongs to one layer."""
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    noise = ((images, torch.arange(8)), (images, torch.arange(8)))
    monkeypatch.setattr(bench, "load", lambda name, folder: convert_to_dataset(noise, name))
    cell = PrunedCell(TrainedCell("densenet40", "cifar10", width=0.25), "slimming", ("params", 0.5))
    watch = Watch()
    found = paper.run_experiment(Experiment("some", "", "", (cell,)), setting(tmp_path, data_dir=tmp_path), watch)
    assert found.count("refused") == 1
    assert [name for name, _ in watch.seen] == ["plan", "cell"]


TESTED = (0.7, 0.9, 0.8)  # accuracies after each epoch


@pytest.fixture
def pretended(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two networks at a time; cutting and training cost nothing and give the same to all."""
    model = torch.nn.Linear(1, 1)
    figures = {"params": 2, "macs": 1, "cut": 0.5}
    history = tuple(Epoch(k, 0.5, 0.5, Accuracy(top1, 1.0, 0.5, 10), 0.1, 1.0, 10.0) for k, top1 in enumerate(TESTED))

    def cut(self: Any, cell: PrunedCell, folder: Path) -> Any:
        return cutting.CellPruningResult(model, figures, {}, {})

    def trained(bench: Any, group: Any, *_: Any) -> Any:
        return dict.fromkeys(group.names, (model, history))

    monkeypatch.setattr(cutting.CellPruner, "prune", cut)
    monkeypatch.setattr(training_groups, "train_group", trained)
    monkeypatch.setitem(bench.GROUP_SIZES, False, 2)
    return copied(home, tmp_path)


def three(home: Path) -> tuple[PrunedCell, ...]:
    return tuple(PrunedCell(begun(home), "random", ("ratio", 0.5), seed=seed) for seed in range(3))


def test_a_training_that_breaks_is_kept_as_failed_and_the_others_go_on(
    home: Path, pretended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, real, groups = three(home), training_groups.train_group, []

    def trained(bench: Any, group: Any, *rest: Any) -> Any:
        groups.append([int(name[-1]) for name in group.names])
        if cells[1].name in group.names:
            raise TrainingError(f"the loss of {cells[1].name!r} is no finite number at step 3.")
        return real(bench, group, *rest)

    monkeypatch.setattr(training_groups, "train_group", trained)
    found = paper.run_experiment(Experiment("some", "", "", cells), setting(pretended), Watch())
    assert [r.state for r in found.records.values() if r is not None] == ["done", "failed", "done"]
    assert groups == [[0, 1], [0, 2]]


def test_a_group_that_does_not_fit_is_halved(home: Path, pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, real, sizes = three(home), training_groups.train_group, []

    def trained(bench: Any, group: Any, *rest: Any) -> Any:
        sizes.append(len(group.names))
        if len(group.names) > 1:
            raise OutOfMemoryError("a batch does not fit.")
        return real(bench, group, *rest)

    monkeypatch.setattr(training_groups, "train_group", trained)
    found = paper.run_experiment(Experiment("some", "", "", cells), setting(pretended), Watch())
    assert found.count("done") == 3
    assert sizes == [2, 1, 1, 1]


def test_networks_of_one_schedule_are_trained_side_by_side(home: Path, pretended: Path) -> None:
    cells, watch = three(home), Watch()
    other = replace(cells[0], tuning=replace(cells[0].tuning, epochs=7))
    paper.run_experiment(Experiment("some", "", "", (*cells, other)), setting(pretended), watch)
    groups = [facts["cells"] for name, facts in watch.seen if name == "begin"]
    assert groups == [[cells[0].name, cells[1].name], [cells[2].name], [other.name]]


def test_first_best_and_final_accuracies_are_told_apart(home: Path, pretended: Path) -> None:
    cell = three(home)[0]
    found = paper.run_experiment(Experiment("some", "", "", (cell,)), setting(pretended), Watch()).records[cell.name]
    assert found is not None
    assert {n: found.metrics[n] for n in ("first", "best", "final")} == {"first": 0.7, "best": 0.9, "final": 0.8}
    assert tuple(found.history["test"]) == TESTED
    assert found.seconds["tune"] == 3.0


# --- data and weights that are given --------------------------------------------------------------------


def test_cells_without_their_data_wait(home: Path, tmp_path: Path) -> None:
    watch, folder = Watch(), copied(home, tmp_path)
    near, far = begun(home), TrainedCell("resnet56", "cifar100")
    some = Experiment("some", "", "", (near, PrunedCell(far, "sosp-h", ("ratio", 0.5))))
    found = paper.run_experiment(some, setting(folder), watch)
    assert found.missing == 1
    told = dict(watch.seen)["absent"]
    assert (told["data"], told["cells"]) == ("cifar100", 1)
    assert "--data-dir" in told["reason"]
    with pytest.raises(DataError, match="--data-dir"):
        paper.run_experiment(Experiment("far", "", "", (far,)), setting(folder), Watch())


def test_where_nothing_is_missing_no_data_is_needed(tmp_path: Path) -> None:
    far = TrainedCell("resnet56", "cifar100")
    metrics = {"accuracy": 0.7, "params": 8, "macs": 8}
    done = CellRecord(encode_cell(far), far.name, NETWORKS, "done", metrics=metrics, origin=setting(tmp_path).origin)
    write_cell_record(tmp_path / "results", done, NETWORKS)
    assert paper.run_experiment(Experiment("far", "", "", (far,)), setting(tmp_path)).count("done") == 1
    assert paper.run_experiment(Experiment("far", "", "", (far,)), setting(tmp_path), cells=()).missing == 0


def test_a_setting_takes_words_and_finds_out_the_rest(home: Path, tmp_path: Path) -> None:
    folder = copied(home, tmp_path)
    cell = replace(three(home)[0], tuning=replace(sosp.SCHEDULES["digits"], epochs=0))
    told = ExperimentSettings(str(folder / "results"), str(folder / "work"), "cpu")  # type: ignore[arg-type]
    found = paper.run_experiment(Experiment("some", "", "", (cell,)), told).records[cell.name]
    assert found is not None
    assert found.origin["torch"] == torch.__version__
    assert found.origin["commit"]


def test_given_weights_are_measured_and_not_trained(tmp_path: Path) -> None:
    start = TrainedCell("digits_resnet", "digits")
    model = by_name.build_network("sosp:digits_resnet", classes=10, seed=5)
    sosp.save(tmp_path / "given.safetensors", model)
    watch = Watch()
    given = setting(tmp_path, weights={"digits_resnet": tmp_path / "given.safetensors"})
    paper.run_experiment(Experiment("some", "", "", (start,)), given, watch)
    record = find_cell_record(tmp_path / "results", NETWORKS, start)
    assert record is not None
    assert record.facts["source"] == "given: given.safetensors"
    assert record.metrics["accuracy"] == sosp.evaluate(model, sosp.data.digits().test).top1
    assert watch.cells("epoch") == []
    untrained = replace(start.schedule, epochs=0)
    for other in ({"slimming": 0.1}, {"seed": 1}, {"width": 2.0}, {"schedule": untrained}):
        assert bench.Workspace(given).find_given_file(replace(start, **other)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("resnet56", "must be NAME=FILE"),
        ("resnet65=a", "Did you mean 'resnet56'?"),
        ("resnet56=/nowhere", "there is no file /nowhere"),
    ],
)
def test_weights_are_refused_by_name(word: str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(complaint)):
        parse_weights([word], ["resnet56", "vgg19"])


def test_the_state_counts(home: Path) -> None:
    whole = tiny("resnet56-cifar10")
    found = runner.read_experiment_state(whole, home / "results")
    assert found.count("done") + found.missing == len(whole.cells)
    assert found.missing == (0 if FULL else 4)


if __name__ == "__main__":
    # One epoch of the first network, three of each of the two: the fourth event is in the second epoch.
    run_two(Path(sys.argv[1]), at("epoch", 4, die))
