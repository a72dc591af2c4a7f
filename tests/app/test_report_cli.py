"""Reports from the command line: every run writes one, none is lost for it, `sosp report` makes and joins them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import sosp.app.report
from helpers.commands import QUICK, TOML, call, lines, refusal
from sosp.app.report.run_facts import read_run

NET = "sosp:digits_resnet"
WHOLE = f"""{TOML}[train]
epochs = 1
batch = 256
[prune]
method = "sosp-i"
examples = 60
[finetune]
epochs = 1
batch = 256
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all stages, by SOSP-I."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    folder.parent.joinpath("c.toml").write_text(WHOLE)
    found = call("run", folder.parent / "c.toml", "--out", folder)
    assert found.exit_code == 0, found.output
    assert f"Report: {folder / 'report.html'}" in found.output
    return folder


@pytest.fixture(scope="module")
def compared(whole: Path) -> Path:
    folder = whole.parent / "compared"
    words = ("--methods", "random,sosp-h", "--ratios", "0.3,0.5", "--seeds", "2", "--statistics", "50")
    found = call("compare", whole / "model.safetensors", *words, "--examples", "50", "--out", folder)
    assert found.exit_code == 0, found.output
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    assert call("train", NET, *QUICK, "--out", folder).exit_code == 0
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def numbers(page: str) -> list[float]:
    return [float(number) for number in re.findall(r'<data value="([^"]+)">', page)]


def test_a_run_of_all_stages(whole: Path) -> None:
    page, result = (whole / "report.html").read_text(), read(whole / "result.json")
    assert re.findall(r'<section id="(\w+)">', page) == [
        *("layers", "streams", "saliency", "losses", "pairs", "repair", "bottlenecks", "training", "next", "origin")
    ]
    found = numbers(page)
    for stage in ("train", "prune", "finetune"):
        assert all(result[stage][key] in found for key in ("top1", "params", "macs", "bytes")), stage
    for point in read(whole / "details.json")["losses"]["points"]:
        assert point["loss"] in found
    assert "sosp-i removed 28 of 56 structures (50.0%)." in page


def test_a_comparison(compared: Path) -> None:
    page, result = (compared / "report.html").read_text(), read(compared / "result.json")
    assert re.findall(r'<section id="(\w+)">', page) == ["comparison", "next", "origin"]
    found = numbers(page)
    assert all(s["means"]["recalibrated"] in found for s in result["compare"]["summaries"])
    assert result["compare"]["before"]["top1"] > 0
    assert "--method" in page


def test_a_training_alone(trained: Path) -> None:
    page = (trained / "report.html").read_text()
    assert re.findall(r'<section id="(\w+)">', page) == ["training", "next", "origin"]
    assert f"sosp prune {trained} --macs 0.5" in page


def test_the_report_of_a_step_shows_the_whole_way(trained: Path, tmp_path: Path) -> None:
    pruned, tuned = tmp_path / "pruned", tmp_path / "tuned"
    assert call("prune", trained, "--examples", "50", "--macs", "0.5", "--no-curve", "--out", pruned).exit_code == 0
    found = call("finetune", pruned, "--epochs", "1", "--out", tuned)
    assert found.exit_code == 0, found.output
    stages = ((trained, "train"), (pruned, "prune"), (tuned, "finetune"))
    ways = [f"{100 * read(folder / 'result.json')[stage]['top1']:.2f}" for folder, stage in stages]
    assert f"Accuracy {' % → '.join(ways)} %: trained; pruned by " in (tuned / "report.html").read_text()
    assert all(f"{x}%" in found.stdout for x in ways)  # in the table
    assert call("report", trained, pruned, tuned, "--out", tmp_path / "all.html").exit_code == 0
    page = (tmp_path / "all.html").read_text()
    assert 'Starts from <a href="#run0-top">trained</a>' in page
    assert 'Starts from <a href="#run1-top">pruned</a>' in page
    rows = re.findall(r'<th scope="row">(run \d): (\w+)</th><td>([^<]*)</td><td>([^<]*)</td>', page)
    assert [row[:3] for row in rows] == [
        ("run 1", "trained", ""),
        ("run 2", "pruned", "run 1"),
        ("run 3", "tuned", "run 2"),
    ]
    with open(pruned / "small.safetensors", "ab") as file:
        file.write(b" ")  # another network: the run that is there now is not where this one comes from
    assert read_run(tuned).parent is None
    assert read_run(tuned).earlier == ()


def test_the_curve_can_be_left_out(whole: Path, tmp_path: Path) -> None:
    words = ("prune", whole / "model.safetensors", "--examples", "50", "--out", tmp_path / "p")
    assert call(*words, "--no-curve").exit_code == 0
    assert '<section id="losses">' not in (tmp_path / "p" / "report.html").read_text()
    assert call(*words).exit_code == 0  # the same run: nothing that it made depends on it


def test_a_report_that_cannot_be_drawn_loses_no_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("no ink")

    monkeypatch.setattr(sosp.app.report, "write_report", fail)
    words = ("prune", whole / "model.safetensors", "--examples", "50", "--no-curve", "--out", tmp_path / "p")
    found = call(*words)
    assert found.exit_code == 0
    assert f"the report could not be written (no ink); try again: sosp report {tmp_path / 'p'}" in found.stderr
    assert "Report:" not in found.stdout
    assert (tmp_path / "p" / "result.json").is_file()
    assert lines(*words)[-1]["report"] is None
    monkeypatch.undo()
    assert call("report", tmp_path / "p").exit_code == 0
    assert (tmp_path / "p" / "report.html").is_file()


def test_made_anew_it_is_the_same(trained: Path) -> None:
    before = (trained / "report.html").read_bytes()
    (told,) = lines("report", trained)
    assert told == {"event": "result", "report": str(trained / "report.html"), "figures": []}
    assert (trained / "report.html").read_bytes() == before


def test_several_runs_and_figures(trained: Path, compared: Path, tmp_path: Path) -> None:
    found = call("report", trained, compared, "--out", tmp_path / "both.html", "--png", tmp_path / "a" / "b")
    assert found.exit_code == 0, found.output
    page = (tmp_path / "both.html").read_text()
    assert "<h1>2 runs</h1>" in page
    assert '<section id="run0-training">' in page
    assert '<section id="run1-comparison">' in page
    names = {path.name for path in (tmp_path / "a" / "b").iterdir()}
    assert {"trained-train-loss.png", "compared-recalibrated-macs.png"} <= names
    assert all(f"Figure: {tmp_path / 'a' / 'b' / name}" in found.stdout for name in names)


def test_a_run_that_was_stopped(whole: Path, compared: Path, tmp_path: Path) -> None:
    """Also in the middle of a line."""
    folder = tmp_path / "stopped"
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl", "model.safetensors"):
        (folder / name).write_bytes((whole / name).read_bytes())
    (folder / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text()[:-30])
    assert call("report", folder).exit_code == 0
    assert "Not finished: train, prune, finetune." in (folder / "report.html").read_text()
    part = tmp_path / "part"
    part.mkdir()
    (part / "config.json").write_bytes((compared / "config.json").read_bytes())
    (part / "cells.jsonl").write_text("".join((compared / "cells.jsonl").read_text().splitlines(keepends=True)[:3]))
    assert call("report", part).exit_code == 0
    assert '<section id="comparison">' in (part / "report.html").read_text()


def test_epochs_that_were_done_twice_count_once(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines, *lines]))
    assert {stage: len(epochs) for stage, epochs in read_run(folder).epochs.items()} == {"train": 1, "finetune": 1}


# --- refusals -------------------------------------------------------------------------------------------


def test_what_is_refused(whole: Path, trained: Path, tmp_path: Path) -> None:
    assert "is not the folder of a run" in refusal("report", tmp_path)
    assert "is not the folder of a run" in refusal("report", tmp_path / "nowhere")
    assert "give one with --out FILE" in refusal("report", whole, whole)
    assert "its folder does not exist" in refusal("report", whole, "--out", tmp_path / "x" / "y.html")
    assert "is a folder" in refusal("report", whole, "--out", tmp_path)
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    assert "is not a report" in refusal("report", whole, "--out", tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in refusal("report", trained, "--png", tmp_path / "file" / "x")


def test_a_broken_file_is_named(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    for text in ("{", '{"layers": [{"name": "a"}], "losses": null}', "[]", '{"layers": 3, "losses": null}'):
        (folder / "details.json").write_text(text)
        assert "details.json: is not" in refusal("report", folder)
    (folder / "details.json").unlink()
    (folder / "saliency.safetensors").write_bytes(b"123")
    assert "saliency.safetensors" in refusal("report", folder)
