"""The commands about widths: an expansion as a run, and the bottlenecks of runs and networks."""

import csv
import json
from pathlib import Path

import pytest
import torch

import sosp
from helpers.commands import call, lines, refusal
from sosp.app.cli.width_commands import resolve_bottleneck_target
from sosp.app.config import build_config
from sosp.app.run.bottleneck_search import prepare_bottleneck_job, split_examples
from sosp.app.run.run_folder import SALIENCY, find_last_network, read_record
from sosp.errors import ArgumentError
from sosp.selection.saved_saliency import save_saliency

NET = ("sosp:digits_resnet", "--data", "small.py:make", "--width", "0.25")
ONCE = ("--schedule", "digits", "--epochs", "1", "--batch", "50")
QUICK = (*ONCE, "--examples", "50", "--method", "first-order")

SMALL = """
import sosp
def make():
    data = sosp.data.digits()
    (train,), (test,) = data.train.subset(150, 0).ordered(batch=150), data.test.subset(50, 0).ordered(batch=50)
    return train, test
"""

PADDED = """
import sosp
from sosp.nets.cifar import CifarResNet, ResNetShape
def make():
    return CifarResNet(ResNetShape(1, base=4, inputs=1), classes=10, width=1.0, skip="A")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(SMALL)
    return tmp_path


# --- expand ---------------------------------------------------------------------------------------------


def test_an_expansion_as_a_run(here: Path) -> None:
    words = ("expand", *NET, *QUICK, "--ratios", "0.5", "--out", "run", "--tuning", "2")
    planned = call(*words, "--dry-run").stdout
    assert "vanilla, expand, widen, 1 seeds; trained before pruning: 3 networks for 1 epochs" in planned
    assert "pruned to ratio 0.5 and trained for 2 epochs" in planned
    assert not (here / "run").exists()
    said = call(*words).stdout
    assert "expand, ratio 0.5, seed 0:" in said
    rows = list(csv.DictReader((here / "run" / "points.csv").read_text().splitlines()))
    assert [row["course"] for row in rows] == ["vanilla", "expand", "widen"]
    results = json.loads((here / "run" / "result.json").read_text())["expand"]
    assert [str(p["params"]) for p in results["points"]] == [row["params"] for row in rows]
    assert results["choices"][0]["seed"] == 0
    assert sorted(p.name for p in (here / "run" / "seed0" / "networks").iterdir()) == [
        f"{name}-ratio0.5.safetensors" for name in ("expand", "vanilla", "widen")
    ]
    *_, last = lines(*words)  # again: nothing is left to do
    assert last["results"]["expand"] == results
    assert [json.loads(x)["event"] for x in (here / "run" / "metrics.jsonl").read_text().splitlines()].count("end") == 1
    assert "a different run: [expand] tuning was 2 and is 3" in refusal(*words[:-1], "3")
    with pytest.raises(sosp.errors.RunError, match="contains an expansion, which saves several networks"):
        find_last_network("run")
    assert "contains an expansion" in refusal("eval", "run")


def test_an_expansion_that_was_stopped_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "expand",
        *NET,
        *QUICK,
        "--sizes",
        "0.5",
        "--when",
        "init",
        "--widen",
        "1.5",
        "--seeds",
        "2",
        "--out",
        "run",
    )

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sosp.studies.expand.pruning_protocols._tune", stop)
        found = call(*words)
    assert found.exit_code == 130
    assert "Resume with: sosp run run" in found.stderr
    assert (here / "run" / "seed0" / "choice.json").is_file()
    *_, last = lines("run", "run")
    points = last["results"]["expand"]["points"]
    assert [(p["seed"], p["course"]) for p in points] == [
        (s, c) for s in (0, 1) for c in ("vanilla", "expand", "widen")
    ]
    assert all(p["params"] <= p["size"] for p in points)
    assert all(p["tuned"] is not None for p in points)


def test_an_expansion_of_a_network_that_is_trained(here: Path) -> None:
    call("train", *NET, *ONCE, "--out", "trained")
    found = lines("expand", "trained", *QUICK, "--ratios", "0.5", "--dry-run")
    assert found[-1]["config"]["model"]["weights"] == str(here / "trained" / "model.safetensors")
    assert found[-1]["expand"]["sizes"] == ["ratio 0.5"]
    call("prune", "trained", "--ratio", "0.5", "--method", "random", "--no-curve", "--out", "pruned")
    assert "is already pruned" in refusal("expand", "pruned", *QUICK)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--widen", "0.5"), "--widen=0.5 must be a number, from 1 to 64"),
        (("--widen", "nan"), "--widen should be a number, not nan"),
        (("--ratios", "0.5,1.5"), "ratio=1.5 must be a share"),
        (("--sizes", "1.5"), "size=1.5"),
        (("--sizes", "many"), "--sizes should be a list of numbers"),
        (("--blocks", "0"), "--blocks=0"),
        (("--when", "later"), "--when='later'"),
        (("--method", "slimming", "--slimming", "0.1"), "distillation or slimming"),
        (("--exclude", "layer9"), "layer9"),
    ],
)
def test_bad_expansions(words: tuple[str, ...], message: str, here: Path) -> None:
    assert message in refusal("expand", *NET, *ONCE, "--out", "run", *words)
    assert not (here / "run").exists()


def test_widths_that_the_code_fixes_are_refused_before_any_work(here: Path) -> None:
    (here / "padded.py").write_text(PADDED)
    said = call("expand", "padded.py:make", "--data", "small.py:make", *QUICK, "--out", "run")
    assert said.exit_code == 2
    assert "'layer2.0.conv2', 'layer3.0.conv2' cannot be widened: the width is fixed." in said.stderr
    assert "zeros that pad other channels" in said.stderr
    assert not (here / "run").exists()


def test_sections_that_do_not_go_together() -> None:
    config = build_config({"model": {"name": "sosp:digits_resnet"}, "expand": {"ratios": [0.5]}})
    assert config.stages == ("expand",)
    with pytest.raises(ArgumentError, match=r"\[expand\] ratio=2"):
        build_config({"model": {"name": "a"}, "expand": {"ratios": [2]}})


def test_a_file_with_other_stages_is_refused(here: Path) -> None:
    text = '[model]\nname = "sosp:digits_resnet"\nwidth = 0.25\n[data]\nname = "digits"\n[expand]\nratios = [0.5]\n'
    (here / "a.toml").write_text(text)
    assert "an expansion needs a section [train]" in refusal("run", "a.toml")
    (here / "b.toml").write_text(f"{text}[train]\nepochs = 1\n[finetune]\nepochs = 1\n")
    assert "Remove [finetune] and [compare]" in refusal("run", "b.toml")


# --- bottlenecks ----------------------------------------------------------------------------------------


@pytest.fixture
def trained(here: Path) -> Path:
    call("train", *NET, *ONCE, "--out", "trained")
    return here / "trained"


def test_the_bottlenecks_of_a_run(trained: Path, here: Path) -> None:
    call("prune", "trained", "--ratio", "0.5", "--examples", "60", "--no-curve", "--preset", "paper", "--out", "pruned")
    assert (here / "pruned" / SALIENCY).is_file()
    (kept,) = lines("bottlenecks", "pruned", "--subsamples", "0")
    assert [b["name"] for b in kept["blocks"]] == ["layer1", "layer2", "layer3"]
    assert kept["method"] == "sosp-h"
    assert len(kept["ratios"]) == 9
    assert kept["blocks"][0]["stability"] is None
    assert kept["before"]["params"] == sum(p.numel() for p in sosp.nets.digits_resnet(width=0.25).parameters())
    (again,) = lines("bottlenecks", "pruned", "--subsamples", "2")
    assert [b["removed"] for b in again["blocks"]] == [b["removed"] for b in kept["blocks"]]
    assert again["subsamples"] == 2
    assert all(b["stability"] in (0, 0.5, 1) for b in again["blocks"])
    # The same numbers as the run's own mask has.
    mask = sosp.inspect(here / "pruned" / "small.safetensors").mask
    assert mask is not None
    layers = {layer["name"]: layer for layer in kept["layers"]}
    for layer in mask.layers:
        assert layers[layer.name]["removed"][4] == len(mask.removed.get(layer.name, ())) / layer.channels
    (other,) = lines("bottlenecks", "pruned", "--method", "first-order", "--ratios", "0.3,0.6", "--subsamples", "0")
    assert other["method"] == "first-order"
    assert other["ratios"] == pytest.approx([0.3, 0.6], abs=0.02)
    said = call("bottlenecks", "pruned", "--subsamples", "0").stdout
    assert "from the saliency of the run. Advice: " in said
    assert "parameters" in said


def test_the_bottlenecks_of_what_kept_no_saliency(trained: Path, here: Path) -> None:
    (found,) = lines("bottlenecks", "trained", "--examples", "40", "--subsamples", "1")
    assert found["subsamples"] == 1
    call("compare", "trained", "--methods", "random", "--ratios", "0.5", "--statistics", "50", "--out", "compared")
    (again,) = lines("bottlenecks", "compared", "--examples", "40", "--subsamples", "1")
    assert again["blocks"] == found["blocks"]
    *warned, fresh = lines("bottlenecks", *NET, "--examples", "40", "--subsamples", "0")
    assert "are randomly initialised" in warned[0]["warning"]
    assert fresh["blocks"] != found["blocks"]


def test_subsamples_share_no_example(here: Path) -> None:
    config = build_config(
        {"model": {"name": NET[0], "width": 0.25}, "data": {"name": "small.py:make"}, "prune": {"examples": 40}}
    )
    job = prepare_bottleneck_job(config, data=True)
    assert job.config.prune is not None
    parts = split_examples(job, job.config.prune, 3)
    images, labels = next(iter(job.dataset.train.ordered(batch=150)))
    seen: list[int] = []
    for x, y in parts:
        rows = [int((images == one).flatten(1).all(1).nonzero()[0]) for one in x]
        assert torch.equal(labels[rows], y)
        seen += rows
    assert len(seen) == len(set(seen)) == 120
    assert len(split_examples(job, job.config.prune, 10)[0][0]) == 15  # as many as there are for each
    with pytest.raises(ArgumentError, match="150 training examples are too few for 151 subsamples"):
        split_examples(job, job.config.prune, 151)


def test_the_bottlenecks_of_a_run_whose_data_lies_elsewhere(trained: Path, here: Path) -> None:
    assert call("prune", trained, "--ratio", "0.3", "--examples", "50", "--no-curve", "--out", "cut").exit_code == 0
    assert "is a run, and its weights are used" in refusal("bottlenecks", "cut", "--weights", "nowhere.pt")
    found = resolve_bottleneck_target("cut", {"model": {}, "data": {"folder": "here"}, "prune": {}})[0]
    assert found["data"] == {**read_record("cut").config.as_dict()["data"], "folder": "here"}


def test_bad_questions_about_bottlenecks(here: Path) -> None:
    fresh = ("bottlenecks", *NET, "--examples", "20", "--subsamples", "0")
    assert "ranks every layer by itself" in refusal(*fresh, "--method", "fpgm")
    assert "--ratios should be a list of numbers" in refusal(*fresh, "--ratios", "half")
    assert "ratio=1.0 must be a share" in refusal(*fresh, "--ratios", "0.5,1")
    assert "alpha=2.0" in refusal(*fresh, "--alpha", "2")
    assert "--subsamples=-1" in refusal("bottlenecks", *NET, "--subsamples", "-1")
    assert "needs data" in refusal("bottlenecks", "sosp:digits_resnet", "--input", "1x8x8")
    (here / "empty").mkdir()
    assert "folder that contains no run" in refusal("bottlenecks", "empty")


def test_a_saliency_of_other_layers_is_refused(trained: Path, here: Path) -> None:
    call("prune", "trained", "--ratio", "0.5", "--method", "first-order", "--no-curve", "--out", "pruned")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    saliency = sosp.score(model, (torch.randn(4, 4), torch.tensor([0, 1, 1, 0])))
    save_saliency(here / "pruned" / SALIENCY, saliency, sosp.select(saliency, ratio=0.3))
    assert "does not match its network: their layers differ" in refusal("bottlenecks", "pruned", "--subsamples", "0")
