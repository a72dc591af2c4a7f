"""What a user may get wrong on the command line: refused in one line that says what to do, and nothing is written."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch

import sosp
import sosp.app.report
from helpers.commands import QUICK, TOML, call, lines, refusal

NET = "sosp:digits_resnet"
DIGITS = ("--data", "digits")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def network(folder: Path, name: str, body: str) -> str:
    """The name of a network that a file of the user's makes."""
    (folder / f"{name}.py").write_text(
        f"import torch\nfrom torch import nn\nclass Net(nn.Module):\n{body}\ndef make():\n    return Net()\n"
    )
    return f"{name}.py:make"


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "sosp:resnt56", *DIGITS), "Did you mean 'sosp:resnet56'?"),
        (("prune", "resnet56", *DIGITS), "Did you mean 'sosp:resnet56'?"),
        (("train", NET, "--data", "cifr10"), "there is no dataset 'cifr10'. Did you mean 'cifar10'?"),
        (("eval", NET, "--data", "digit"), "Did you mean 'digits'?"),
        (("prune", NET, *DIGITS, "--method", "sosp-g"), "--method='sosp-g' is not known. Did you mean 'sosp-"),
        (("prune", NET, *DIGITS, "--exclude", "layer4"), "'layer4'"),
        (("train", NET, *DIGITS, "--schedule", "cifr"), "--schedule='cifr' is not known. Did you mean 'cifar'?"),
        (("train", NET, *DIGITS, "--device", "cdua"), "device='cdua' cannot be used"),
        (("train", NET, *DIGITS, "--graph"), "graph=True needs a CUDA device"),
    ],
)
def test_unknown_names_suggest_the_nearest(words: tuple[str, ...], message: str, here: Path) -> None:
    assert message in refusal(*words)
    assert not (here / "runs").exists()


def test_what_is_neither_a_run_nor_a_model_or_file(here: Path) -> None:
    said = refusal("prune", "runs/nope", *DIGITS)
    assert (
        "there is no run 'runs/nope' (no such folder). It is not a network either: there is no model 'runs/nope'."
        in said
    )
    assert call("train", NET, *QUICK, "--epochs", "0", "--out", "runs/first").exit_code == 0
    assert "Did you mean 'runs/first'? It is not a network either: there is no model" in refusal(
        "finetune", "runs/frist"
    )
    assert refusal("count", "nofile.safetensors") == "nofile.safetensors: there is no such file."


def test_a_width_of_nothing(here: Path) -> None:
    (here / "zero.toml").write_text(TOML.replace("0.25", "0") + "[train]\nepochs = 1\n")
    assert refusal("run", "zero.toml") == "zero.toml: [model] width=0.0: factors for widths must be above 0."
    for words in (("train", NET, *DIGITS), ("count", NET)):
        assert "width=0.0: factors for widths must be above 0." in refusal(*words, "--width", "0")
    assert not (here / "runs").exists()


# --- files of one's own ---------------------------------------------------------------------------------

OWN = """from torch import nn
def needs(n):
    return nn.Linear(n, 2)
class Net(nn.Module):
    def __init__(self, wide):
        super().__init__()
def calls():
    return needs()
"""
BROKEN = {
    "own.py:needs": "own.py, line 2: TypeError: needs() missing 1 required positional argument: 'n'. It is called with",
    "own.py:Net": "own.py, line 5: TypeError: Net.__init__() missing 1 required positional argument: 'wide'.",
    "own.py:calls": "own.py, line 8: TypeError: needs() missing 1 required positional argument: 'n'.",
    "syntax.py:make": "syntax.py, line 2: SyntaxError: invalid syntax.",
    "imports.py:make": "syntax.py, line 2: SyntaxError: invalid syntax.",
    "lacks.py:make": "lacks.py, line 2: ModuleNotFoundError: No module named 'no_such_module'.",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("words", [("count",), ("train", NET, "--schedule", "digits", "--data")], ids=["model", "data"])
def test_an_error_in_a_file_of_ones_own_is_one_line(
    words: tuple[str, ...], name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "own.py").write_text(OWN)
    (here / "syntax.py").write_text("\ndef make(:\n    pass\n")
    (here / "imports.py").write_text("import syntax\n")
    (here / "lacks.py").write_text("\nimport no_such_module\n")
    said = refusal(*words, name)
    assert f"{name} does not run: " in said
    assert f"{here}/{BROKEN[name]}" in said


def test_a_bug_that_is_not_the_users_keeps_its_traceback(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "own.py").write_text(OWN)

    def broken(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr("sosp.nets.by_name.user_networks.load_function", broken)
    with pytest.raises(KeyError):
        call("count", "own.py:needs")


# --- data -----------------------------------------------------------------------------------------------


def test_a_missing_folder(here: Path) -> None:
    words = ("train", "sosp:resnet20", "--data", "cifar10")
    assert "is read from files: give their folder" in refusal(*words)
    assert "there is no folder nowhere" in refusal(*words, "--data-dir", "nowhere").replace(f"{here}/", "")
    assert "there is no folder" in refusal("data", "nowhere")


def test_a_folder_that_is_half_unpacked(here: Path) -> None:
    (here / "cifar-10-batches-py").mkdir()
    (here / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"")
    words = ("train", "sosp:resnet20", "--data", "cifar10", "--data-dir", ".")
    assert "contains only a part of CIFAR-10; missing: " in refusal(*words)
    found = {line["name"]: line["state"] for line in lines("data", ".")}
    assert found["cifar10"] == "incomplete"


def test_a_folder_of_another_kind(here: Path) -> None:
    for part in ("train", "val"):
        (here / part / "cat").mkdir(parents=True)
        (here / part / "cat" / "1.png").write_bytes(b"")
    words = ("train", "sosp:resnet20", "--data", "cifar10", "--data-dir", ".")
    assert "looks like an image folder with train/ and val/" in refusal(*words)
    assert "is not read from a folder" in refusal("train", NET, *DIGITS, "--data-dir", ".")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", NET), "this needs data: name a dataset (--data"),
        (("prune", NET), "this needs data: name a dataset (--data"),
        (("eval", NET), "this needs data: name a dataset (--data"),
        (("eval", NET, "--data-dir", "."), "a data folder is given without the name of the dataset"),
        (("train", "sosp:resnet20", *DIGITS), "sosp:resnet20 does not take the 1x8x8 images of digits"),
        (("train", NET, *DIGITS, "--input", "3x32x32"), "input is 3x32x32, but the images of digits are 1x8x8"),
        (("train", NET, *DIGITS, "--classes", "5"), "has 5 outputs, but digits has 10 classes"),
    ],
)
def test_data_that_does_not_fit(words: tuple[str, ...], message: str, here: Path) -> None:
    assert message in refusal(*words)
    assert not (here / "runs").exists()


def test_data_of_ones_own_needs_a_schedule(here: Path) -> None:
    (here / "own.py").write_text(
        "import torch\ndef load():\n    part = torch.zeros(20, 1, 8, 8), torch.arange(20) % 10\n    return part, part\n"
    )
    words = ("train", NET, "--width", "0.25", "--data", "own.py:load")
    assert "there is no schedule for this dataset: choose one of cifar, " in refusal(*words)
    assert call(*words, "--schedule", "digits", "--epochs", "0").exit_code == 0


# --- weights --------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_network(here: Path) -> None:
    torch.save(sosp.nets.make("resnet20", width=0.25).state_dict(), here / "r20.pth")
    words = ("prune", NET, *DIGITS, "--weights")
    assert "r20.pth: these weights are not for this" in refusal(*words, "r20.pth")
    sosp.save(here / "r20.safetensors", sosp.nets.make("resnet20", width=0.25))
    assert "r20.safetensors: the model " in refusal(*words, "r20.safetensors")
    assert "nowhere.pth: there is no such file" in refusal(*words, "nowhere.pth")
    assert "does not say which network they belong to. Name the network" in refusal("finetune", "r20.pth", *DIGITS)
    assert not (here / "runs").exists()


def test_a_mask_of_another_network(here: Path) -> None:
    model = sosp.nets.make("digits_resnet")
    sosp.save(here / "plain.safetensors", model)
    assert "contains no mask" in refusal("count", NET, "--mask", "plain.safetensors")
    assert "is neither a run that pruned a network nor a file" in refusal("count", NET, "--mask", "nowhere")
    x = torch.zeros(2, 1, 8, 8)
    mask = sosp.Mask.from_removed(model, {"layer2.0.downsample.0": [1]}, x)
    sosp.save(here / "masked.safetensors", model, mask)
    assert "which this model does not have" in refusal("count", "sosp:resnet20", "--mask", "masked.safetensors")


# --- configs --------------------------------------------------------------------------------------------

START = "[model]\nname = 'sosp:digits_resnet'\n[data]\nname = 'digits'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[prune]\nrato = 0.5", "c.toml: [prune] rato is not known. Did you mean 'ratio'?"),
        ("[prnue]\nratio = 0.5", "c.toml: [prnue] is not known. Did you mean 'prune'?"),
        ("[prune]\nratio = 'half'", "c.toml: [prune] ratio should be a number, not 'half'."),
        ("[train]\nepochs = 1.5", "c.toml: [train] epochs should be a whole number, not 1.5."),
        ("[prune", "c.toml: is not valid TOML"),
        ("", "c.toml: has no stage to run. Add a section [train], [prune] or [finetune]."),
        ("[train]\ndistill = 0.5", "distill=0.5 needs a teacher: name a run, or a file of weights."),
        ("[finetune]\ndistill = 0.5", "distill=0.5 needs a teacher: name a run, or a file of weights."),
        (
            "[finetune]\nteacher = 'x'",
            "a teacher is given, but distill is 0: set distill to the teacher's share of the loss.",
        ),
    ],
)
def test_configs(text: str, message: str, here: Path) -> None:
    (here / "c.toml").write_text(START + text)
    assert message in refusal("run", "c.toml")
    assert not (here / "runs").exists()


def test_a_config_that_is_not_there() -> None:
    assert "nowhere.toml: there is no such file" in refusal("run", "nowhere.toml")


# --- runs -----------------------------------------------------------------------------------------------


def test_a_folder_that_holds_another_run(here: Path) -> None:
    assert call("train", NET, *QUICK, "--out", "mine").exit_code == 0
    before = everything(here / "mine")
    words = ("train", NET, *QUICK, "--out", "mine", "--seed", "1")
    assert "mine: contains a different run: [run] seed was 0 and is 1. Nothing was changed." in refusal(*words)
    assert "contains a different run" in refusal("prune", NET, *DIGITS, "--out", "mine")
    assert "mine is an existing run: --seed cannot be changed" in refusal("run", "mine", "--seed", "1")
    assert "mine: contains files that are not from an earlier demo" in refusal("demo", "--out", "mine")
    assert "is a run, and its weights are used: leave out --weights" in refusal("eval", "mine", "--weights", "x.pth")
    assert everything(here / "mine") == before


def test_a_folder_that_holds_no_run(here: Path) -> None:
    (here / "notes").mkdir()
    (here / "notes" / "todo.txt").write_text("")
    words = ("train", NET, *QUICK)
    assert "notes: contains todo.txt, but no run" in refusal(*words, "--out", "notes")
    assert "notes: is a folder that contains no run (it has no config.json)" in refusal("eval", "notes")
    assert "new: there is no run to resume" in refusal(*words, "--out", "new", "--resume")
    assert sorted(everything(here)) == [str(here / "notes" / "todo.txt")]


def test_a_run_that_has_not_come_to_anything(here: Path) -> None:
    words = ("prune", NET, "--width", "0.25", *DIGITS, "--macs", "0.0001", "--out", "hopeless")
    assert "macs=0.0001 cannot be met" in refusal(*words, begun=True)
    assert "no stage of this run is done. Resume it: sosp run hopeless" in refusal("eval", "hopeless")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(here: Path) -> None:
    (here / "fixed").mkdir(mode=0o500)
    assert "cannot be written to" in refusal("train", NET, *QUICK, "--out", "fixed/run")


# --- memory ---------------------------------------------------------------------------------------------


def test_out_of_memory_says_which_batch_would_fit(here: Path) -> None:
    """A network that takes at most 20 images while it is trained."""
    body = (
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n        if self.training and len(x) > 20:\n"
        "            raise torch.OutOfMemoryError('CUDA out of memory.')\n        return self.layer(x.flatten(1))\n"
    )
    name = network(here, "hungry", body)
    words = ("train", name, *DIGITS, "--schedule", "digits", "--epochs", "1", "--batch", "64", "--out", "big")
    assert "a batch of 64 examples does not fit into memory; batch=16 fits" in refusal(*words, begun=True)
    assert call(*words[:-4], "--batch", "16", "--out", "fits").exit_code == 0


# --- what would only be found out later, or not at all --------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            "[train]\nepochs=2\n[compare]\nmethods=['random']",
            "a comparison cannot use distillation or a section [train]",
        ),
        ("[prune]\ncap=0.5\nkind='blocks'\n[compare]\nmethods=['random']", "from [prune]: leave out kind, cap"),
        ("[prune]\nratio=0.3\n[expand]\n", "from [prune]: leave out ratio"),
        ("[train]\nepochs=2\n[prune]\nmacs=1.5", "macs=1.5 must be the share of the MACs to keep"),
        ("[train]\nepochs=2\n[prune]\nmacs=0.5\nratios={conv1=0.3}", "give one of them"),
        ("[train]\nepochs=2\n[prune]\nratios={'layer9.*'=0.3}", "layer9"),
        ("[train]\nepochs=2\n[prune]\nratio=0.9\ncap=0.2", "cap=0.2"),
        ("[train]\nepochs=2\n[run]\nname='a/b'", "name='a/b' is a path"),
    ],
)
def test_sections_that_cannot_work_are_refused_before_anything_is_trained(
    sections: str, message: str, here: Path
) -> None:
    (here / "c.toml").write_text(TOML + sections)
    assert message in refusal("run", "c.toml")
    assert not (here / "runs").exists()


@pytest.mark.parametrize("objective", ["joint", "order", "structure", "signed"])
def test_an_objective_for_a_ranking_is_refused(objective: str) -> None:
    words = ("prune", NET, *DIGITS, "--width", "0.25", "--method", "magnitude-l1", "--objective", objective)
    assert "has its own ranking" in refusal(*words, begun=True)


def test_a_budget_that_would_cut_the_network_in_two() -> None:
    words = ("prune", NET, *DIGITS, "--width", "0.25", "--macs", "0.01", "--examples", "50", "--preset", "paper")
    message = refusal(*words, begun=True)
    assert message.startswith("macs=0.01 takes every channel of ")
    assert "Raise macs, bound the share" in message


def test_a_run_that_is_not_there() -> None:
    for command in ("finetune", "prune", "eval"):
        assert "there is no model 'runs/typo'" in refusal(command, "runs/typo")


def test_a_training_that_fails_in_its_last_step(here: Path) -> None:
    words = ("train", NET, *DIGITS, "--width", "0.25", "--epochs", "1", "--batch", "1297", "--rate", "1e30")
    message = refusal(*words, "--name", "far", code=3, begun=True)
    assert "on the test data is not finite at step 1 (epoch 1), with learning rate 1e+30" in message
    assert not (here / "runs" / "far" / "model.safetensors").exists()


def test_a_file_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("train", NET, *QUICK, "--out", "run").exit_code == 0

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(sosp.app.report, "write_text", full)
    assert refusal("report", "run") == "run/report.html: cannot be read or written (No space left on device)."
