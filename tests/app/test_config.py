"""A run as data: what a file may say, and how everything else is refused by the name the user gave it."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sosp.app.config import (
    SECTIONS,
    Config,
    DataSection,
    ModelSection,
    PruningSection,
    TrainingSection,
    build_config,
    find_first_difference,
    format_flag,
    read_config,
)
from sosp.core.options import collect_options
from sosp.errors import ArgumentError
from sosp.training import SCHEDULES, Schedule, Speed

WHOLE = """
[model]
name = "sosp:resnet20"
weights = "r20.pth"
classes = 10
width = { layer1 = 2.0, conv1 = 1 }
input = "3x32x32"
[data]
name = "cifar10"
folder = "datasets"
[train]
schedule = "cifar"
epochs = 3
rate = 1
milestones = [0.5]
nesterov = true
[prune]
method = "sosp-i"
macs = 0.5
exclude = ["layer1.*", "conv1"]
downsampling = false
[finetune]
epochs = 1
distill = 0.5
[run]
name = "mine"
seed = 7
device = "cpu"
"""


def with_key(section: str, key: str, value: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {"model": {"name": "sosp:resnet20"}}
    sections.setdefault(section, {})[key] = value
    return sections


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_a_file_says_everything(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, WHOLE))
    assert config.stages == ("train", "prune", "finetune")
    assert config.model == ModelSection("sosp:resnet20", "r20.pth", 10, {"layer1": 2.0, "conv1": 1.0}, "3x32x32")
    assert config.model.shape == (3, 32, 32)
    assert (config.data.name, config.data.folder) == ("cifar10", "datasets")
    assert config.train is not None
    expected = replace(SCHEDULES["cifar"], epochs=3, rate=1.0, milestones=(0.5,), nesterov=True)
    assert config.train.build_schedule() == expected
    assert config.prune == PruningSection(method="sosp-i", macs=0.5, exclude=("layer1.*", "conv1"), downsampling=False)
    assert config.prune.budget == {"macs": 0.5}
    assert (config.run.name, config.run.seed, config.run.device) == ("mine", 7, "cpu")


def test_the_stages_are_the_sections_that_are_there() -> None:
    assert build_config({"model": {"name": "a"}}).stages == ()
    assert build_config({"model": {"name": "a"}, "prune": {}, "finetune": {}}).stages == ("prune", "finetune")


def test_as_dict_is_read_back(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, WHOLE))
    assert build_config(config.as_dict()) == config
    assert "cap" not in config.as_dict()["prune"]


def test_everything_that_can_be_chosen_about_training_is_there() -> None:
    for kind in (Schedule, Speed):
        assert {f.name for f in fields(kind)} <= set(collect_options(TrainingSection))
    assert TrainingSection().speed == Speed()
    for name, schedule in SCHEDULES.items():
        assert TrainingSection(schedule=name).build_schedule() == schedule


def test_zero_and_false_override_the_schedule() -> None:
    given = {"schedule": "cifar", "momentum": 0, "decay": 0, "nesterov": False}
    train = build_config({"model": {"name": "a"}, "train": given}).train
    assert train is not None
    schedule = train.build_schedule()
    assert (schedule.momentum, schedule.decay, schedule.nesterov) == (0, 0, False)
    assert (schedule.epochs, schedule.rate) == (200, 0.1)  # as in the paper


def test_every_option_explains_itself() -> None:
    for section, kind in SECTIONS.items():
        for key, option in collect_options(kind).items():
            assert option.help.endswith("."), (section, key)
            assert format_flag(section, key).startswith("--")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("trian", "epochs", 3, r"\[trian\] is not known. Did you mean 'train'\?"),
        ("prune", "rato", 0.5, r"\[prune\] rato is not known. Did you mean 'ratio'\? Known keys: ratio, params"),
        ("prune", "ratio", "0.5", r"\[prune\] ratio should be a number, not '0.5'"),
        ("prune", "ratio", True, r"\[prune\] ratio should be a number, not True"),
        ("prune", "ratio", 1.5, r"\[prune\] ratio=1.5 must be a number, from 0 to 1"),
        ("prune", "examples", 0, r"\[prune\] examples=0 must be a whole number or \"auto\", at least 1"),
        ("prune", "examples", 10.0, r"\[prune\] examples should be a whole number or \"auto\", not 10.0"),
        ("prune", "method", "sops-h", r"\[prune\] method='sops-h' is not known. Did you mean 'sosp-h'\?"),
        ("prune", "exclude", "layer1", r"\[prune\] exclude should be a list of strings, not 'layer1'"),
        ("prune", "downsampling", 1, r"\[prune\] downsampling should be true or false, not 1"),
        (
            "prune",
            "ratios",
            "conv1",
            r"\[prune\] ratios should be a number for each layer, such as layer1=0.5, not 'conv1'",
        ),
        ("prune", "ratios", {"conv1": "x"}, r"\[prune\] ratios should be a number for each layer"),
        ("prune", "scope", "layers", r"\[prune\] scope='layers' is not known. Did you mean 'layer'\?"),
        ("train", "schedule", "cifr", r"\[train\] schedule='cifr' is not known. Did you mean 'cifar'\?"),
        ("train", "milestones", [0.5, "x"], r"\[train\] milestones should be a list of numbers"),
        ("train", "milestones", [1.5], r"\[train\] milestones=1.5 must be a number, from 0 to 1"),
        ("train", "rate", float("nan"), r"\[train\] rate should be a number, not nan"),
        ("finetune", "shape", "step", r"\[finetune\] shape='step' is not known. Did you mean 'steps'\?"),
        ("model", "input", "3 by 32", r"\[model\] input should be a shape such as 3x32x32, not '3 by 32'"),
        (
            "model",
            "width",
            "layer1",
            r"\[model\] width should be a number, or a number for each layer, such as layer1=0.5, not 'layer1'",
        ),
        ("model", "weights", "", r"\[model\] weights should be a string, not ''"),
        ("run", "seed", -1, r"\[run\] seed=-1 must be a whole number, from 0"),
    ],
)
def test_what_is_wrong_is_refused_by_section_and_key(section: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build_config(with_key(section, key, value))


def test_flags_are_refused_by_the_name_of_the_flag() -> None:
    with pytest.raises(ArgumentError, match='--round-to=0 must be a whole number or "auto", at least 1'):
        build_config(with_key("prune", "round_to", 0), format_flag)
    with pytest.raises(ArgumentError, match="--data-dir should be a string"):
        build_config(with_key("data", "folder", 3), format_flag)


def test_samples_are_for_methods_that_draw_them() -> None:
    with pytest.raises(ArgumentError, match="samples is only for 'sosp-i'"):
        PruningSection(method="sosp-h", samples=3)


def test_several_budgets() -> None:
    assert PruningSection(ratio=0.3, macs=0.5).budget == {"ratio": 0.3, "macs": 0.5}
    assert PruningSection().budget == {"ratio": 0.5}


def test_a_network_must_be_named() -> None:
    with pytest.raises(ArgumentError, match=r"\[model\] name is missing"):
        build_config({"prune": {}})
    with pytest.raises(ArgumentError, match="prune = 3 is not a section"):
        build_config({"model": {"name": "a"}, "prune": 3})


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="there is no such file"):
        read_config(tmp_path / "nowhere.toml")
    with pytest.raises(ArgumentError, match="is a folder"):
        read_config(tmp_path)
    with pytest.raises(ArgumentError, match=r"config.toml: is not valid TOML .*line 1"):
        read_config(written(tmp_path, "[model\nname = 3"))
    with pytest.raises(ArgumentError, match=r"config.toml: \[model\] nam is not known. Did you mean 'name'"):
        read_config(written(tmp_path, "[model]\nnam = 'a'"))


def test_widths_from_the_command_line() -> None:
    assert build_config(with_key("model", "width", "0.5"), format_flag).model.width == 0.5
    assert build_config(with_key("model", "width", "layer1=2,conv1=1.5"), format_flag).model.width == {
        "layer1": 2,
        "conv1": 1.5,
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"prune": {"ratio": 0.6}}, "[prune] ratio was 0.5 and is 0.6"),
        ({"prune": {}}, "[prune] ratio was 0.5 and is not given"),
        ({"model": {"name": "b"}}, '[model] name was "a" and is "b"'),
        ({"train": {}}, "[train] is new"),
        ({"prune": None}, "[prune] is missing here"),
    ],
)
def test_the_first_difference_in_words(change: dict[str, Any], expected: str | None) -> None:
    then: dict[str, Any] = {"model": {"name": "a"}, "prune": {"ratio": 0.5}}
    now = {key: value for key, value in {**then, **change}.items() if value is not None}
    assert find_first_difference(now, then) == expected


def test_a_config_is_a_value() -> None:
    one, other = (Config(ModelSection("a"), DataSection()) for _ in range(2))
    assert one == other
