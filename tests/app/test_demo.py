"""The demo: repeatable, leaves the random state alone, ends in its table, writes only into its own folder."""

import json
import re
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
    methods=(None,),
    macs=0.5,
    images=300,
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
    return [replace(row, milliseconds={}) for row in rows]


def test_the_rows(quick: Path) -> None:
    said: list[str] = []
    rows = demo.run_demo(quick / "d", said.append, replace(SMALL, methods=(None, "random")))
    assert [row.network for row in rows] == ["trained", "pruned by sosp-i", "pruned by random"]
    assert len(said) == 3
    trained, *others = rows
    assert (trained.params, trained.macs) == (77754, 763520)
    assert trained.accuracy > 0.8  # after one epoch
    for row in others:  # at the same MACs, which no channel less would use better
        assert 0.45 < row.macs / trained.macs <= 0.5
        assert list(row.accuracies) == ["pruned", "repaired", "fine-tuned"]
        assert row.accuracies["repaired"] > row.accuracies["pruned"]
        assert row.widths["conv1"][0] == 16
        assert any(after < before for before, after in row.widths.values())
    assert all(set(row.milliseconds) == {1, 32} and min(row.milliseconds.values()) > 0 for row in rows)


def test_it_is_repeatable_and_leaves_the_random_state_alone(quick: Path) -> None:
    before = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    first, again = (demo.run_demo(quick / "d", lambda line: None) for _ in range(2))
    assert without_times(first) == without_times(again)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    other = demo.run_demo(quick / "e", lambda line: None, replace(SMALL, seed=1))
    assert without_times(other) != without_times(first)


def test_what_it_prints_is_in_the_report_and_loads(quick: Path) -> None:
    found = call("demo")
    assert found.exit_code == 0, found.output
    assert "Report: runs/demo/report.html" in found.stdout
    assert "runs/demo/small.safetensors. Load it with:" in found.stdout
    rows = json.loads((quick / "runs" / "demo" / "demo.json").read_text())["rows"]
    page = (quick / "runs" / "demo" / "report.html").read_text()
    way = [x for row in rows[:2] for x in row["accuracies"].values()]
    assert f"Accuracy {' → '.join(f'{100 * x:.2f} %' for x in way)}: trained, pruned, repaired, fine-tuned." in page
    for row in rows:
        assert all(f"{x:.2%}" in found.stdout for x in row["accuracies"].values())
        assert all(f'<data value="{x}">' in page for x in (*row["accuracies"].values(), row["params"], row["macs"]))
    assert re.findall(r'<section id="(\w+)">', page) == ["comparison", "layers", "next"]
    code = [line.strip() for line in found.stdout.splitlines()][-3:]
    there: dict[str, Any] = {}
    exec("\n".join(code), there)
    assert sosp.evaluate(there["model"], sosp.data.digits().test).top1 == way[-1]
    assert sum(p.numel() for p in there["model"].parameters()) == rows[1]["params"]


def test_as_json(quick: Path) -> None:
    (facts,) = lines("demo", "--out", "mine")
    assert (facts["network"], facts["report"]) == ("mine/small.safetensors", "mine/report.html")
    assert len(facts["rows"]) == 2


def test_another_folder_is_left_alone(quick: Path) -> None:
    (quick / "notes").mkdir()
    (quick / "notes" / "todo.txt").write_text("sleep")
    assert "notes: contains files that are not from an earlier demo" in refusal("demo", "--out", "notes")
    assert [p.name for p in (quick / "notes").iterdir()] == ["todo.txt"]


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install 'sosp[demo]'" in refusal("demo")


def test_the_defaults_end_within_a_point_of_where_they_began(quick: Path) -> None:
    trained, pruned = demo.run_demo(quick / "d", lambda line: None, type(SMALL)(methods=(None,)))
    assert trained.accuracy >= 0.97
    assert pruned.accuracy > trained.accuracy - 0.01
    assert pruned.macs <= 0.3 * trained.macs
