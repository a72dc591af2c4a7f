"""The demo: repeatable, leaves the random state alone, ends in its table, writes only into its own folder."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sosp
from helpers.commands import call, lines, refusal
from sosp.app import demo

SMALL = demo.DemoSettings(
    examples=50,
    training=replace(sosp.SCHEDULES["digits"], epochs=1),
    tuning=replace(sosp.SCHEDULES["finetune-digits"], epochs=1),
)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "DemoSettings", lambda: SMALL)
    monkeypatch.setattr(demo, "RUNS", 1)
    return tmp_path


def without_times(rows: list[demo.DemoRow]) -> list[demo.DemoRow]:
    return [replace(row, latency=0.0) for row in rows]


def test_the_rows(quick: Path) -> None:
    said: list[str] = []
    rows = demo.run_demo(quick / "d", said.append)
    names = ["trained", "sosp-h: pruned", "sosp-h: fine-tuned", "random: pruned", "random: fine-tuned"]
    assert [row.network for row in rows] == names
    assert len(said) == 3
    trained, pruned, tuned, *_ = rows
    assert (trained.params, trained.macs) == (77754, 763520)
    assert (pruned.params, pruned.macs) == (tuned.params, tuned.macs)
    assert pruned.params < 0.6 * trained.params
    assert all(row.latency > 0 for row in rows)
    assert trained.accuracy > 0.8  # after one epoch


def test_it_is_repeatable_and_leaves_the_random_state_alone(quick: Path) -> None:
    before = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    first, again = (demo.run_demo(quick / "d", lambda line: None) for _ in range(2))
    assert without_times(first) == without_times(again)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    other = demo.run_demo(quick / "e", lambda line: None, replace(SMALL, seed=1))
    assert without_times(other) != without_times(first)


def test_the_printed_lines_load_the_network_of_the_table(quick: Path) -> None:
    found = call("demo")
    assert found.exit_code == 0, found.output
    assert "runs/demo/small.safetensors. Load it with:" in found.stdout
    code = [line.strip() for line in found.stdout.splitlines()][-3:]
    there: dict[str, Any] = {}
    exec("\n".join(code), there)
    row = json.loads((quick / "runs" / "demo" / "demo.json").read_text())["rows"][2]
    assert f"{row['accuracy']:.2%}" in found.stdout
    assert sosp.evaluate(there["model"], sosp.data.digits().test).top1 == row["accuracy"]
    assert sum(p.numel() for p in there["model"].parameters()) == row["params"]


def test_as_json(quick: Path) -> None:
    (facts,) = lines("demo", "--out", "mine")
    assert facts["network"] == "mine/small.safetensors"
    assert len(facts["rows"]) == 5


def test_another_folder_is_left_alone(quick: Path) -> None:
    (quick / "notes").mkdir()
    (quick / "notes" / "todo.txt").write_text("sleep")
    assert "notes: contains files that are not from an earlier demo" in refusal("demo", "--out", "notes")
    assert [p.name for p in (quick / "notes").iterdir()] == ["todo.txt"]


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install 'sosp[demo]'" in refusal("demo")


def test_the_defaults_make_a_network_worth_pruning() -> None:
    settings = type(SMALL)()
    data = sosp.data.digits()
    trained = sosp.train(demo.new_network(settings.seed), data, settings.training, seed=settings.seed)
    assert sosp.evaluate(trained.model, data.test).top1 >= 0.97
