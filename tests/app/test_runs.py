"""The folder of a run: who may write into it, who goes on with it, and that nothing is overwritten."""

import json
from pathlib import Path
from typing import Any

import pytest

from sosp.app.config import build_config
from sosp.app.run.run_folder import CONFIG, RunFolder, RunRecord, find_last_network, is_run, open_run, read_record
from sosp.core.text_files import write_json
from sosp.errors import RunError


def record(digests: dict[str, str] | None = None, **sections: Any) -> RunRecord:
    config = build_config({"model": {"name": "sosp:resnet20"}, "prune": {"ratio": 0.5}, **sections})
    return RunRecord(config, digests or {}, {"sosp": "0.1.0"})


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_new_run_keeps_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with open_run(folder, record()) as run:
        assert run.folder == folder
    assert is_run(folder)
    again = read_record(folder)
    assert (again.config, again.origin["sosp"]) == (record().config, "0.1.0")


def test_the_same_run_goes_on(tmp_path: Path) -> None:
    with open_run(tmp_path, record()) as run:
        run.record_stage("prune", {"top1": 0.5})
    elsewhere = record(run={"device": "cpu", "name": "other"})
    with open_run(tmp_path, elsewhere, must_exist=True) as run:
        assert run.results == {"prune": {"top1": 0.5}}


@pytest.mark.parametrize(
    ("other", "gap"),
    [
        (record(prune={"ratio": 0.6}), r"\[prune\] ratio was 0.5 and is 0.6"),
        (record(run={"seed": 1}), r"\[run\] seed was 0 and is 1"),
        (record(train={}), r"\[train\] is new"),
        (
            record({"model.weights": "abc"}, model={"name": "sosp:resnet20", "weights": "w"}),
            r"\[model\] weights was not",
        ),
    ],
)
def test_another_run_is_refused_and_nothing_changes(other: RunRecord, gap: str, tmp_path: Path) -> None:
    with open_run(tmp_path, record()) as run:
        run.record_stage("prune", {"top1": 0.5})
    before = contents(tmp_path)
    with pytest.raises(RunError, match=f"contains a different run: {gap}"), open_run(tmp_path, other):
        pass
    assert contents(tmp_path) == before


def test_files_are_compared_by_what_is_in_them(tmp_path: Path) -> None:
    here, moved, changed = (
        record({"model.weights": digest}, model={"name": "sosp:resnet20", "weights": path})
        for digest, path in (("a1", "one.pth"), ("a1", "two.pth"), ("b2", "one.pth"))
    )
    with open_run(tmp_path, here):
        pass
    with open_run(tmp_path, moved):
        pass
    with pytest.raises(RunError, match='weights was "sha256 a1" and is "sha256 b2"'), open_run(tmp_path, changed):
        pass


def test_weights_and_teachers_are_identified_by_their_digests() -> None:
    digests = {"model.weights": "a1", "train.teacher": "b2", "finetune.teacher": "c3"}
    files = {"train": {"teacher": "big.pth"}, "finetune": {"teacher": "large.pth"}}
    found = record(digests, model={"name": "sosp:resnet20", "weights": "r20.pth"}, **files).identity()
    assert found["model"]["weights"] == "sha256 a1"
    assert found["train"]["teacher"] == "sha256 b2"
    assert found["finetune"]["teacher"] == "sha256 c3"


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match=r"contains thesis.tex, but no run"), open_run(tmp_path, record()):
        pass
    with pytest.raises(RunError, match="is a file; a run needs a folder"), open_run(tmp_path / "thesis.tex", record()):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_nothing_to_resume(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="there is no run to resume"),
        open_run(tmp_path / "new", record(), must_exist=True),
    ):
        pass
    assert not (tmp_path / "new").exists()


def test_only_one_process_writes(tmp_path: Path) -> None:
    with open_run(tmp_path, record()):
        with pytest.raises(RunError, match="another process is writing there"), open_run(tmp_path, record()):
            pass
        with open_run(tmp_path, record(), writes=False) as reader:
            reader.record_stage("prune", {})
            reader.append_metrics({"event": "x"})
    assert contents(tmp_path).keys() == {CONFIG, ".lock"}
    with open_run(tmp_path, record()) as run:
        assert run.writes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "was not written by sosp, or was written by a newer version"),
        ('{"format": 2}', "was not written by sosp, or was written by a newer version"),
        ('{"format": 1}', "is not the config of a run"),
        (
            '{"format": 1, "digests": {}, "config": {"model": {"nam": "a"}}}',
            "is not the config of a run .*Did you mean",
        ),
    ],
)
def test_a_damaged_config(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(RunError, match=message):
        read_record(tmp_path)


def test_the_network_of_a_run_is_that_of_its_last_stage(tmp_path: Path) -> None:
    with open_run(tmp_path, record(train={})) as run:
        with pytest.raises(RunError, match=r"no stage of this run is done\. Resume it: sosp run"):
            find_last_network(tmp_path)
        run.file("train").write_bytes(b"")
        run.record_stage("train", {})
        run.record_stage("prune", {})  # but its file is not there
        assert find_last_network(tmp_path)[1] == tmp_path / "model.safetensors"
        run.file("prune").write_bytes(b"")
        assert find_last_network(tmp_path)[1] == tmp_path / "small.safetensors"


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append_metrics({"epoch": 1})
    run.append_metrics({"epoch": 2, "folder": Path("x")})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"epoch": 1}, {"epoch": 2, "folder": "x"}]


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"good": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"bad": float("nan")})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"good": 1}
