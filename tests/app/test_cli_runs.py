"""Runs from the command line: every stage, what it leaves behind, going on after a stop, and the same numbers twice."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sosp
from helpers.commands import QUICK, TOML, call, lines, refusal
from sosp.app.cli.targets import resolve_target
from sosp.nets import by_name
from sosp.surgery.checkpoint import inspect

NET = "sosp:digits_resnet"
WHOLE = f"""{TOML}[train]
epochs = 1
batch = 256
[prune]
macs = 0.6
groups = "coupled"
recalibrate = true
[finetune]
epochs = 1
batch = 256
distill = 0.5
"""


def original() -> torch.nn.Module:
    return sosp.nets.make("digits_resnet", classes=10, width=0.25)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return sosp.load(path, original()).state_dict()


def equal(a: Path, b: Path) -> bool:
    mine, theirs = tensors(a), tensors(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def events(folder: Path) -> list[tuple[str, str]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(event["event"], event["stage"]) for event in found]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    found = call("train", NET, *QUICK, "--out", folder)
    assert found.exit_code == 0, found.output
    return folder


@pytest.fixture(scope="module")
def pruned(trained: Path) -> Path:
    folder = trained.parent / "pruned"
    words = ("--groups", "coupled", "--exclude", "conv1", "--no-downsampling", "--examples", "50", "--seed", "3")
    found = call("prune", trained, *words, "--out", folder)
    assert found.exit_code == 0, found.output
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all stages."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    folder.parent.joinpath("c.toml").write_text(WHOLE)
    found = call("run", folder.parent / "c.toml", "--out", folder)
    assert found.exit_code == 0, found.output
    return folder


# --- what a run leaves behind ---------------------------------------------------------------------------


def test_a_training(trained: Path) -> None:
    names = {p.name for p in trained.iterdir()}
    assert names == {
        "config.json",
        "log.txt",
        "metrics.jsonl",
        "checkpoints",
        "model.safetensors",
        "result.json",
        "report.html",
        ".lock",
    }
    config, result = read(trained / "config.json"), read(trained / "result.json")
    assert config["config"]["model"] == {"name": NET, "classes": 10, "width": 0.25, "input": "1x8x8"}
    assert config["config"]["train"]["schedule"] == "digits"
    assert (config["schedules"]["train"]["epochs"], config["schedules"]["train"]["rate"]) == (2, 0.05)
    assert {"sosp", "torch", "python", "command", "commit", "begun"} <= config.keys()
    model = sosp.load(trained / "model.safetensors", original())
    assert result["train"]["top1"] == sosp.evaluate(model, sosp.data.digits().test).top1 > 0.5
    assert events(trained) == [("begin", "train"), *[("epoch", "train")] * 2, ("end", "train")]
    log = (trained / "log.txt").read_text()
    assert "train epoch   2/2  loss " in log
    assert "model = sosp.load(" in log
    assert "\x1b" not in log


def test_the_lines_of_python_load_the_network(trained: Path) -> None:
    found = call("train", NET, *QUICK, "--out", trained)
    code = [line.strip() for line in found.stdout.splitlines()][-3:]
    assert code[0] == "import sosp"
    there: dict[str, Any] = {}
    exec("\n".join(code), there)
    assert torch.equal(there["model"].conv1.weight, tensors(trained / "model.safetensors")["conv1.weight"])


def test_a_pruning(trained: Path, pruned: Path) -> None:
    facts = read(pruned / "result.json")["prune"]
    saved = inspect(pruned / "small.safetensors")
    assert saved.mask is not None
    assert (saved.mask.chosen, saved.mask.structures) == (facts["removed"], facts["structures"])
    assert facts["removed"] >= round(0.5 * facts["structures"])
    assert not any("downsample" in name or name == "conv1" for name in saved.mask.removed)
    x = torch.zeros(2, 1, 8, 8)
    small = sosp.load(pruned / "small.safetensors", original())
    assert (
        facts["params"] == sosp.count(small, x).params < facts["before"]["params"] == sosp.count(original(), x).params
    )
    assert facts["before"]["top1"] == read(trained / "result.json")["train"]["top1"]
    assert facts["top1"] == sosp.evaluate(small, sosp.data.digits().test).top1
    assert facts["latency"] > 0
    config = read(pruned / "config.json")
    assert config["digests"]["model.weights"] == by_name.hash_weights_file(trained / "model.safetensors")
    assert config["config"]["data"] == {"name": "digits"}


def test_pruning_is_what_the_library_does(trained: Path, pruned: Path) -> None:
    model, data = sosp.load(trained / "model.safetensors", original()), sosp.data.digits()
    keep = ["conv1", *sosp.downsampling(model)]
    scoring = sosp.Scoring(examples=50, generator=torch.Generator().manual_seed(3))
    found = sosp.prune(model, data, exclude=keep, scoring=scoring, selection=sosp.Selection(groups="coupled"))
    assert inspect(pruned / "small.safetensors").mask == found.mask
    small = sosp.load(pruned / "small.safetensors", original())
    assert all(torch.equal(t, small.state_dict()[n]) for n, t in found.model.state_dict().items())


def test_fine_tuning_with_a_teacher(trained: Path, pruned: Path) -> None:
    folder = trained.parent / "tuned"
    found = lines("finetune", pruned, *QUICK[-2:], "--distill", "0.5", "--out", folder)
    assert found[-1]["network"] == str(folder / "tuned.safetensors")
    config = read(folder / "config.json")["config"]
    assert config["finetune"]["teacher"] == str(trained / "model.safetensors")
    assert inspect(folder / "tuned.safetensors").mask == inspect(pruned / "small.safetensors").mask
    before, after = read(pruned / "result.json")["prune"], read(folder / "result.json")["finetune"]
    assert (after["params"], after["macs"]) == (before["params"], before["macs"])
    assert after["top1"] > before["top1"]
    (evaluated,) = lines("eval", folder)
    assert evaluated["top1"] == after["top1"]
    (again,) = lines("eval", pruned / "small.safetensors")
    assert again["top1"] == before["top1"]


def test_a_share_for_every_layer(trained: Path, tmp_path: Path) -> None:
    words = ("--ratios", "layer1.0.conv1=0.5,layer3.*=0.25", "--scope", "layer", "--out", tmp_path / "p")
    assert call("prune", trained, *words).exit_code == 0
    mask = inspect(tmp_path / "p" / "small.safetensors").mask
    assert mask is not None
    lost = {name: len(channels) for name, channels in mask.removed.items()}
    assert lost == {"layer1.0.conv1": 2, "layer3.0.conv1": 4, "layer3.0.conv2": 4, "layer3.0.downsample.0": 4}


def test_count_and_trace_of_a_run(trained: Path, pruned: Path) -> None:
    facts = read(pruned / "result.json")["prune"]
    (small,) = lines("count", pruned)
    (masked,) = lines("count", trained, "--mask", pruned)
    (file,) = lines("count", NET, "--width", "0.25", "--mask", pruned / "small.safetensors")
    assert small["params"] == masked["left"]["params"] == file["left"]["params"] == facts["params"]
    assert small["macs"] == masked["left"]["macs"] == facts["macs"]
    assert f"{facts['params']:,}" in call("count", trained, "--mask", pruned).stdout
    (flow,) = lines("trace", pruned)
    assert sum(stream["width"] for stream in flow["streams"]) < 224 / 4


def test_everything_in_one_run(whole: Path) -> None:
    result = read(whole / "result.json")
    assert list(result) == ["train", "prune", "finetune"]
    assert result["prune"]["macs"] <= 0.6 * result["train"]["macs"]
    assert result["prune"]["before"]["top1"] == result["train"]["top1"]
    assert result["finetune"]["params"] == result["prune"]["params"]
    assert events(whole)[::2] == [("begin", "train"), ("end", "train"), ("end", "prune"), ("epoch", "finetune")]
    table = call("run", whole).stdout
    assert all(name in table for name in ("trained", "pruned by sosp-i", "fine-tuned", "tuned.safetensors"))
    (facts,) = lines("eval", whole)
    assert facts["top1"] == result["finetune"]["top1"]


def test_the_teacher_is_the_network_before_pruning(whole: Path) -> None:
    for target in (whole, whole / "small.safetensors"):
        plan = lines("finetune", target, "--distill", "0.5", "--dry-run")[-1]
        assert plan["config"]["finetune"]["teacher"] == str(whole / "model.safetensors")
        assert plan["config"]["model"]["weights"].endswith("tuned.safetensors" if target == whole else target.name)


# --- twice ----------------------------------------------------------------------------------------------


def test_a_finished_run_is_shown_again_and_not_repeated(whole: Path) -> None:
    files = [p for p in whole.rglob("*") if p.is_file() and p.name not in ("log.txt", ".lock")]
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files}
    found = lines("run", whole.parent / "c.toml", "--out", whole, "--resume")
    assert [line["event"] for line in found] == ["run", "result"]
    assert found[-1]["results"] == read(whole / "result.json")
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files} == before


def test_only_the_missing_stage_is_done(whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    found = call("run", whole.parent / "c.toml", "--out", again)
    assert found.exit_code == 0
    assert equal(again / "tuned.safetensors", whole / "tuned.safetensors")  # a run is repeatable
    (again / "tuned.safetensors").unlink()
    stamp = (again / "small.safetensors").stat().st_mtime_ns
    found = lines("run", again)
    assert [line["stage"] for line in found if line["event"] == "begin"] == ["finetune"]
    assert (again / "small.safetensors").stat().st_mtime_ns == stamp
    assert equal(again / "tuned.safetensors", whole / "tuned.safetensors")


def test_other_weights_under_the_same_name_are_another_run(trained: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    weights.write_bytes((trained / "model.safetensors").read_bytes())
    words = ("prune", NET, "--width", "0.25", "--weights", weights, "--data", "digits", "--out", tmp_path / "p")
    assert call(*words).exit_code == 0
    assert call(*words).exit_code == 0
    sosp.save(weights, original())
    message = refusal(*words)
    assert 'contains a different run: [model] weights was "sha256 ' in message
    assert message.endswith("or restore the files that the run started with")


def test_the_data_of_a_run_may_lie_elsewhere(trained: Path, tmp_path: Path) -> None:
    config = read(trained / "config.json")
    config["config"]["data"] = {"name": "folder", "folder": "there"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("result.json", "model.safetensors"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())

    def data(**given: str) -> dict[str, str]:
        return dict(resolve_target(str(tmp_path), {"model": {}, "data": given})[0]["data"])

    assert data() == {"name": "folder", "folder": "there"}
    assert data(folder="here") == {"name": "folder", "folder": "here"}
    assert data(name="digits") == {"name": "digits"}  # which needs no folder
    assert f"there is no folder {tmp_path}/gone" in refusal("prune", tmp_path, "--data-dir", tmp_path / "gone")


def test_another_seed_of_fine_tuning_is_another_run(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ((), ("--seed", "1")):
        assert call("finetune", pruned, "--epochs", "1", *words).exit_code == 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {
        f"finetune-{pruned.name}",
        f"finetune-{pruned.name}-seed1",
    }


def test_a_dry_run_refuses_what_the_run_would(trained: Path, pruned: Path, tmp_path: Path) -> None:
    plan = ("prune", trained, "--examples", "50", "--dry-run")
    assert "there is no run to resume" in refusal(*plan, "--resume", "--out", tmp_path / "none")
    assert "contains a different run" in refusal(*plan, "--ratio", "0.7", "--out", pruned)
    assert call(*plan, "--out", tmp_path / "none").exit_code == 0


def test_figures_that_are_none(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("[]")
    for command in ("report", "run"):
        assert "result.json: does not contain the results of the stages" in refusal(
            command, tmp_path / "run", begun=command == "run"
        )


def test_a_table_in_a_file_is_whole(trained: Path, tmp_path: Path) -> None:
    ratios = ",".join(f"0.{k}" for k in range(1, 10))
    words = ("--methods", "magnitude-l1", "--ratios", ratios, "--seeds", "2", "--statistics", "50", "--out", tmp_path)
    found = call("compare", trained, *words)
    assert found.exit_code == 0, found.output
    assert "…" not in found.stdout + (tmp_path / "log.txt").read_text()
    assert found.stdout.count("±") >= 9


def test_default_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(WHOLE)
    expected = {
        ("train", NET, "--data", "digits"): "train-digits_resnet-digits-seed0",
        ("train", NET, "--data", "digits", "--seed", "3", "--name", "mine"): "mine",
        ("prune", NET, "--data", "digits", "--macs", "0.5", "--method", "sosp-i"): (
            "prune-digits_resnet-digits-sosp-i-macs0.5-seed0"
        ),
        ("run", "plan.toml"): "plan",
    }
    for words, name in expected.items():
        plan = lines(*words, "--dry-run")[-1]
        assert plan["folder"] == f"runs/{name}"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.toml"]


# --- before -----------------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_would_cost_and_writes_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    (plan,) = lines("run", whole.parent / "c.toml", "--out", folder, "--dry-run")
    assert plan["train"]["images"] == 1297
    assert plan["train"]["steps"] == 6
    assert plan["train"]["macs"] == 3 * plan["network"]["macs"] * 1297
    assert plan["train"]["seconds"] > 0
    assert plan["prune"] == {"method": "sosp-i", "structures": 56, "budget": {"macs": 0.6}, "examples": 256}
    words = call("run", whole.parent / "c.toml", "--out", folder, "--dry-run").stdout
    assert "train: 1 epochs of 1,297 images in batches of 256, 6 steps" in words
    assert f"Run {folder} would be created. Nothing was done." in words
    assert not folder.exists()


# --- stopping -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_saves_and_goes_on_to_the_same_end(tmp_path: Path) -> None:
    words = ["train", NET, *QUICK, "--epochs", "12", "--json"]
    command = [sys.executable, "-m", "sosp", *words, "--out", "stopped"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "epoch":
                break
        process.send_signal(signal.SIGINT)
        rest = [json.loads(line) for line in process.stdout]
    assert process.returncode == 130
    assert rest[-1] == {"error": "stopped. Finished work is in stopped. Resume with: sosp run stopped", "code": 130}
    assert not (tmp_path / "stopped" / "result.json").exists()
    assert call(*words, "--out", tmp_path / "straight").exit_code == 0
    resumed = lines("run", tmp_path / "stopped")
    assert 0 < sum(line["event"] == "epoch" for line in resumed) < 12
    assert equal(tmp_path / "stopped" / "model.safetensors", tmp_path / "straight" / "model.safetensors")


def test_training_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    found = lines("train", NET, *QUICK, "--rate", "1e30", "--out", folder)
    assert found[-1]["code"] == 3
    assert "is not finite at step" in found[-1]["error"]
    assert "is not finite" in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_several_processes_print_and_write_once(tmp_path: Path) -> None:
    """As torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, "-m", "sosp", "train", NET, *QUICK, "--json", "--out", "both"]
    home = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**home, "RANK": rank})
        for rank in "01"
    ]
    first, second = (process.communicate()[0] for process in started)
    assert [process.returncode for process in started] == [0, 0]
    told = [json.loads(line).get("event") for line in first.splitlines()]
    assert [name for name in told if name] == ["run", "begin", "epoch", "epoch", "end", "result"]
    assert second == ""
    assert events(tmp_path / "both") == [("begin", "train"), *[("epoch", "train")] * 2, ("end", "train")]
    assert call("train", NET, *QUICK, "--out", tmp_path / "alone").exit_code == 0
    together, alone = (read(tmp_path / name / "result.json")["train"] for name in ("both", "alone"))
    # The sums of two halves are rounded otherwise than those of a whole: a few of 500 images may change sides.
    assert together["top1"] == pytest.approx(alone["top1"], abs=0.02)
