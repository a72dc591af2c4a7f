"""The command line: its surface, its exit codes, what every option becomes, and that a refusal is one line."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

import sosp
from helpers.commands import call, lines, refusal
from sosp.app import cli, demo
from sosp.app.cli import inspection_commands, run_commands
from sosp.app.cli.progress_bar import ProgressBar
from sosp.app.config import SECTIONS, Config, format_flag
from sosp.core.options import (
    AUTO_OR_NUMBER,
    AUTO_OR_WHOLE,
    FLAG,
    NUMBER,
    NUMBERS,
    SHAPE,
    SHARES,
    TEXT,
    TEXTS,
    WHOLE,
    WIDTHS,
    Option,
    OptionKind,
    collect_options,
)
from sosp.core.progress import ACTIVE_BARS
from sosp.errors import OutOfMemoryError, SospError, TrainingError
from sosp.nets import by_name
from sosp.training import Moment

MODEL = "--weights --classes --width --input"
DATA = "--data --data-dir"
TRAIN = (
    "--schedule --epochs --batch --rate --momentum --decay --nesterov --shape --milestones --factor --warmup "
    "--smoothing --ema --distill --temperature --teacher --slimming --precision --channels-last --graph --compile "
    "--pad-widths --save-every"
)
PRUNE = (
    "--ratio --params --macs --max-drop --method --preset --groups --kind --cap --scope --ratios --rule --scale "
    "--round-to --join --targets --temperature --examples --samples --objective --gate --exclude --downsampling "
    "--repair --repair-examples --sweeps --rounds --recalibrate --curve"
)
COMPARE = "--methods --ratios --seeds --statistics --repair"
SOME = "--gate --groups --exclude --downsampling --examples"
EXPAND = "--widen --blocks --probe --when --ratios --sizes --tuning --seeds"
SCORE = "--method --groups --gate --exclude --downsampling --examples"
RUN = "--name --out --seed --device"
SURFACE = {
    "demo": "--out --json",
    "train": f"MODEL --dry-run --resume {MODEL} {DATA} {TRAIN} {RUN} --json",
    "prune": f"MODEL|RUN --dry-run --resume {MODEL} {DATA} {PRUNE} {RUN} --json",
    "finetune": f"MODEL|RUN --dry-run --resume {MODEL} {DATA} {TRAIN} {RUN} --json",
    "run": f"CONFIG|RUN --dry-run --resume {RUN} --json",
    "compare": f"MODEL|RUN --dry-run --resume {MODEL} {DATA} {COMPARE} {SOME} {TRAIN} {RUN} --json",
    "tradeoff": (
        f"MODEL|RUN --budgets {MODEL} {DATA} {PRUNE.partition('--max-drop ')[2].partition(' --recalibrate')[0]} "
        "--out --seed --device --json"
    ),
    "expand": f"MODEL|RUN --dry-run --resume {MODEL} {DATA} {EXPAND} {SCORE} --cap {TRAIN} {RUN} --json",
    "bottlenecks": (
        f"MODEL|RUN --ratios --subsamples --alpha {MODEL} {DATA} {SCORE} --objective --samples --seed --device --json"
    ),
    "report": "RUN... --out --png --json",
    "eval": f"MODEL|RUN --batch --limit {MODEL} {DATA} --device --json",
    "count": f"MODEL|RUN --mask --convention {MODEL} --json",
    "trace": f"MODEL|RUN {MODEL} --json",
    "data": "DIR --json",
    "reproduce": "NAME --list --status --tiny --data-dir --weights --only --seeds --epochs --retry --results --work "
    "--page --dry-run --device --json",
}
COMMANDS = pytest.mark.parametrize("command", SURFACE)


def parameters(command: str) -> list[Any]:
    return list(cli.load_command(command).params)


def exit_code(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """What ``sosp WORDS...`` exits with, through its entry point."""
    monkeypatch.setattr(sys, "argv", ["sosp", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def failing(error: BaseException) -> Any:
    def run(*_: object, **__: object) -> None:
        raise error

    return run


# --- the surface ----------------------------------------------------------------------------------------


def test_the_commands() -> None:
    command: Any = typer.main.get_command(cli.app)
    assert list(command.commands) == list(SURFACE)
    assert [option.opts for option in command.params] == [["--version"]]


@COMMANDS
def test_the_surface_is_frozen(command: str) -> None:
    found = [p.metavar if p.param_type_name == "argument" else p.opts[0] for p in parameters(command)]
    assert " ".join(found) == SURFACE[command]


@COMMANDS
def test_help_mentions_everything(command: str) -> None:
    found = call(command, "--help")
    assert found.exit_code == 0
    for word in SURFACE[command].split():
        assert word in found.stdout, word
    assert all(p.help and p.help.endswith(".") for p in parameters(command))


@COMMANDS
def test_the_list_of_commands_says_what_their_help_says(command: str) -> None:
    assert cli.load_command(command).help.split("\n\n")[0].replace("\n", " ") == cli.COMMANDS[command][1]


def test_help_names_the_commands_and_exit_codes() -> None:
    found = call("--help").stdout
    assert all(command in found for command in SURFACE)
    assert "Exit codes: 0 success" in found


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"sosp {sosp.__version__}\n"


# --- every option arrives -------------------------------------------------------------------------------

SAMPLES: dict[OptionKind, tuple[list[str], Any]] = {
    TEXT: (["some"], "some"),
    WHOLE: (["7"], 7),
    AUTO_OR_WHOLE: (["7"], 7),
    AUTO_OR_NUMBER: (["2.5"], 2.5),
    NUMBER: (["0.25"], 0.25),
    TEXTS: (["a", "b"], ("a", "b")),
    NUMBERS: (["0.25", "0.5"], (0.25, 0.5)),
    SHAPE: (["1x8x8"], "1x8x8"),
    SHARES: (["layer1.*=0.5,conv1=0"], {"layer1.*": 0.5, "conv1": 0.0}),
    WIDTHS: (["layer1=2,conv1=0.5"], {"layer1": 2.0, "conv1": 0.5}),
}
CASES = [
    (command, section, key)
    for command, section in (("train", "train"), ("prune", "prune"), ("finetune", "finetune"), ("prune", "run"))
    for key in collect_options(SECTIONS[section])
] + [("prune", section, key) for section in ("model", "data") for key in collect_options(SECTIONS[section])]


def sample(key: str, option: Option) -> tuple[list[str], Any]:
    """Words for the command line, and the value they mean."""
    if option.choices:
        return [option.choices[-1]], option.choices[-1]
    return (["true"], True) if option.kind is FLAG else SAMPLES[option.kind]


@pytest.mark.parametrize(("command", "section", "key"), CASES)
def test_every_option_becomes_a_key(command: str, section: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(run_commands, "launch_run", lambda config, *_, **__: seen.append(config))
    option = collect_options(SECTIONS[section])[key]
    words, value = sample(key, option)
    flag = format_flag(section, key)
    given = [flag] if option.kind is FLAG else [part for word in words for part in (flag, word)]
    extra = {"samples": ["--method", "sosp-i"], "rounds": ["--repair"]}.get(key, [])
    if option.flag == "":
        assert call(command, "sosp:resnet20").exit_code == 0
        value = "sosp:resnet20"
    else:
        assert call(command, "sosp:resnet20", *given, *extra).exit_code == 0
    assert getattr(getattr(seen[0], section), key) == value
    if option.kind is FLAG:
        assert call(command, "sosp:resnet20", flag.replace("--", "--no-", 1)).exit_code == 0
        assert getattr(getattr(seen[1], section), key) is False


@pytest.mark.parametrize("key", collect_options(SECTIONS["run"]))
def test_run_takes_the_place_from_flags(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(run_commands, "launch_run", lambda config, *_, **__: seen.append(config))
    (tmp_path / "c.toml").write_text("[model]\nname = 'sosp:resnet20'\n[prune]\n[run]\nseed = 3\nname = 'there'\n")
    words, value = sample(key, collect_options(SECTIONS["run"])[key])
    assert call("run", tmp_path / "c.toml", format_flag("run", key), *words).exit_code == 0
    assert getattr(seen[0].run, key) == value
    assert seen[0].run.seed == (7 if key == "seed" else 3)


# --- exit codes and errors ------------------------------------------------------------------------------


def test_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "prun") == 2
    assert "prun" in capsys.readouterr().err
    assert exit_code(monkeypatch, "prune", "x", "--rato", "3") == 2
    assert "--ratio" in capsys.readouterr().err


def test_wrong_usage_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "prune", "--json", "--rato") == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["code"] == 2
    assert "--rato" in json.loads(printed.out)["error"]
    assert printed.err == ""


def test_the_entry_point_in_json_has_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "count", "sosp:digits_resnet", "--json") == 0
    assert json.loads(capsys.readouterr().out)["params"] == 77754
    assert exit_code(monkeypatch, "count", "sosp:digits", "--json") == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SospError("layer 'conv[1]' " + "cannot be pruned, " * 12 + "exclude it"), 2),
        (OutOfMemoryError("a batch of 512 examples does not fit into memory; batch=128 fits."), 2),
        (TrainingError("the loss is no finite number at step 3."), 3),
    ],
)
def test_a_refusal_is_one_line(error: SospError, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_demo", failing(error))
    assert refusal("demo", code=code) == str(error)
    assert lines("demo") == [{"error": str(error), "code": code}]


def test_out_of_memory_outside_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_demo", failing(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")))
    assert refusal("demo").startswith("the device ran out of memory (CUDA out of memory. Tried); use a smaller batch")


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_demo", failing(KeyboardInterrupt()))
    assert refusal("demo", code=130) == "stopped."


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "run_demo", failing(ZeroDivisionError("ours")))
    monkeypatch.setattr(sys, "argv", ["sosp", "demo", "--json"])
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main()
    assert json.loads(capsys.readouterr().out) == {"error": "ZeroDivisionError: ours"}


def test_warnings_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    def warn(*_: object) -> Any:
        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn("slow, but exact", sosp.SlowPathWarning, stacklevel=1)
        raise SospError("enough")

    monkeypatch.setattr(demo, "run_demo", warn)
    assert call("demo").stderr == "sosp: slow, but exact\nsosp: enough\n"
    assert lines("demo") == [{"warning": "slow, but exact"}, {"error": "enough", "code": 2}]


# --- looking --------------------------------------------------------------------------------------------


def test_count() -> None:
    found = call("count", "sosp:digits_resnet").stdout
    assert "layer1.0.conv1        │      2,304 │ 147,456" in found
    assert "total                 │     77,754 │ 763,520" in found
    (facts,) = lines("count", "sosp:digits_resnet", "--input", "1x4x4", "--width", "2")
    expected = sosp.count(sosp.nets.make("digits_resnet", width=2.0), torch.zeros(2, 1, 4, 4))
    assert (facts["params"], facts["macs"]) == (expected.params, expected.macs)
    assert [layer["name"] for layer in facts["layers"]] == [layer.name for layer in expected.layers]


def test_count_needs_to_know_the_input(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(3, 2)\n")
    assert "is not known: give it (input 3x32x32)" in refusal("count", f"{tmp_path}/mine.py:make")
    (facts,) = lines("count", f"{tmp_path}/mine.py:make", "--input", "3")
    assert (facts["params"], facts["macs"]) == (8, 6)


def test_flow() -> None:
    assert "stream 0: 16 channels\n  from  conv1, layer1.0.conv2" in call("trace", "sosp:digits_resnet").stdout
    (facts,) = lines("trace", "sosp:digits_resnet", "--width", "0.25")
    assert facts["streams"][0]["width"] == 4
    assert facts["pinned"][0]["layers"] == ["linear"]


def test_data(tmp_path: Path) -> None:
    found = call("data", str(tmp_path)).stdout
    assert found.startswith("cifar10: absent\n  download cifar-10-python.tar.gz from https://")
    states = {line["name"]: line["state"] for line in lines("data", str(tmp_path))}
    assert states == {"cifar10": "absent", "cifar100": "absent", "imagenet": "absent", "imagenette": "absent"}


def test_eval_counts_and_measures() -> None:
    words = ("eval", "sosp:digits_resnet", "--data", "digits", "--width", "0.25", "--limit", "100", "--batch", "7")
    warned, facts = lines(*words)
    assert (
        warned["warning"] == "sosp:digits_resnet has no weights (--weights): its parameters are randomly initialised."
    )
    model = by_name.build_network("sosp:digits_resnet", width=0.25)
    expected = sosp.evaluate(model, sosp.data.digits().test, limit=100)
    assert (facts["examples"], facts["top1"]) == (100, expected.top1)
    assert facts["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert f"{expected.top1:.2%}" in call(*words).stdout
    assert "--batch=0 must be a whole number" in refusal(*words[:-1], "0")


def test_the_looking_commands_are_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(inspection_commands, "require_mask", lambda word: seen.append(word))
    assert call("count", "sosp:digits_resnet", "--mask", "somewhere").exit_code == 0
    assert seen == ["somewhere"]
    assert "convention='exat' is not known. Did you mean 'exact'?" in refusal(
        "count", "sosp:digits_resnet", "--convention", "exat"
    )


def test_the_bar_says_how_far_it_is_and_leaves() -> None:
    printed = io.StringIO()
    bar = ProgressBar(Console(file=printed, force_terminal=True, width=120))
    for done in (1, 5):
        bar.update("train", done, 10, Moment(2, 0.5, 0.875, 12345.0))
        assert len(ACTIVE_BARS) == 1  # no other bar beside it
    bar.clear()
    assert ACTIVE_BARS == []
    for words in ("train epoch 2", "50 %", "loss 0.500  accuracy 87.5%  12,345 images/s"):
        assert words in printed.getvalue()


def test_no_bar_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    ProgressBar(Console(file=printed)).update("train", 1, 10, Moment(1, None, None, 1.0))
    monkeypatch.setenv("SOSP_PROGRESS", "0")
    ProgressBar(Console(file=printed, force_terminal=True)).update("train", 1, 10, Moment(1, None, None, 1.0))
    assert (printed.getvalue(), ACTIVE_BARS) == ("", [])


# --- as a program ---------------------------------------------------------------------------------------


def test_python_m_sosp(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(3, 2)\n")
    words = [sys.executable, "-m", "sosp", "count", "mine:make", "--input", "3", "--json"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    assert (found.returncode, json.loads(found.stdout)["params"], found.stderr) == (0, 8, "")
