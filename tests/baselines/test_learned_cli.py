"""Methods that learn, from the command line: slimming in a training, and those that cannot score by themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sosp
from helpers.commands import QUICK, call, refusal
from sosp.baselines import Slimming
from sosp.errors import StructureError
from sosp.nets import by_name

BARE = """
from torch import nn

def bare():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
"""


def trained(folder: Path, *more: str) -> Any:
    found = call("train", "sosp:digits_resnet", *QUICK, "--out", str(folder), "--device", "cpu", *more)
    assert found.exit_code == 0, found.output
    return sosp.load(folder / "model.safetensors", sosp.nets.digits_resnet(width=0.25))


def test_train_with_slimming(tmp_path: Path) -> None:
    model = trained(tmp_path / "slim", "--slimming", "0.02")
    config = json.loads((tmp_path / "slim" / "config.json").read_text())
    assert "0.02" in json.dumps(config)
    start = by_name.build_network("sosp:digits_resnet", classes=10, width=0.25, seed=0)
    schedule = sosp.Schedule(**{**vars(sosp.SCHEDULES["digits"]), "epochs": 2})
    data = sosp.data.load("digits")
    wanted = sosp.train(start, data, schedule, companion=Slimming(0.02)).model
    plain = sosp.train(start, data, schedule).model
    same = {n: torch.equal(x, wanted.state_dict()[n]) for n, x in model.state_dict().items()}
    assert all(same.values())
    assert not torch.equal(model.state_dict()["bn1.weight"], plain.state_dict()["bn1.weight"])


def test_a_run_with_another_strength_is_another_run(tmp_path: Path) -> None:
    trained(tmp_path / "run", "--slimming", "0.02")
    line = refusal("train", "sosp:digits_resnet", *QUICK, "--out", str(tmp_path / "run"), "--device", "cpu", code=2)
    assert "slimming was 0.02 and is not given" in line


@pytest.mark.parametrize("value", ["-0.1", "nan"])
def test_a_strength_that_is_none(value: str) -> None:
    assert "--slimming" in refusal("train", "sosp:digits_resnet", *QUICK, "--slimming", value)


def test_a_network_without_batch_norms_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(BARE)
    words = ["train", f"{tmp_path}/nets.py:bare", "--data", "digits", "--out", f"{tmp_path}/run", "--device", "cpu"]
    assert "trainable scales of batch norms, but this network has none" in refusal(*words, "--slimming", "0.1")
    assert not (tmp_path / "run").exists()


def test_a_comparison_has_no_slimming(tmp_path: Path) -> None:
    words = ["compare", "sosp:digits_resnet", *QUICK, "--methods", "random", "--slimming", "0.1"]
    assert "slimming is for training and fine-tuning" in refusal(*words, "--out", f"{tmp_path}/run", "--device", "cpu")


@pytest.mark.parametrize("method", ["variational", "gal", "amc"])
def test_what_is_learned_cannot_be_scored(method: str) -> None:
    model = sosp.nets.digits_resnet(width=0.25)
    data = (torch.randn(4, 1, 8, 8), torch.arange(4))
    with pytest.raises(StructureError, match=rf"method='{method}' needs to be learned.*'sosp-h'"):
        sosp.score(model, data, method=method)
    assert callable(getattr(sosp.learned, method))
    assert f"sosp.learned.{method}" in sosp.METHODS[method].about
