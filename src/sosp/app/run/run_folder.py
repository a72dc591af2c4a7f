"""The folder of a run: config, log, metrics, checkpoints, results; open to the same run, closed to any other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sosp.app.config import Config, build_config, find_first_difference
from sosp.core.text_files import lock_file, read_json, write_json
from sosp.errors import ArgumentError, RunError

CONFIG, LOG, METRICS, RESULT, LOCK = "config.json", "log.txt", "metrics.jsonl", "result.json", ".lock"
FILES = {"train": "model.safetensors", "prune": "small.safetensors", "finetune": "tuned.safetensors"}
CELLS = "cells.jsonl"  # what a comparison leaves behind
POINTS = "points.csv"  # what an expansion leaves behind
SALIENCY = "saliency.safetensors"  # what pruning saw in the structures
DETAILS = "details.json"  # what a report shows of a pruning beside its figures
REPORT = "report.html"
# What may differ between two halves of one run; files are compared by what is in them.
FREE = (
    *(("run", "name"), ("run", "out"), ("run", "device")),
    *(("train", "save_every"), ("finetune", "save_every"), ("prune", "curve")),
)
FILE_KEYS = (("model", "weights"), ("train", "teacher"), ("finetune", "teacher"))


@dataclass(frozen=True)
class RunRecord:
    """A config, and where it came from."""

    config: Config
    digests: Mapping[str, str]  # "model.weights" -> sha256 of that file
    origin: Mapping[str, Any]  # versions, command line, commit, time

    def identity(self) -> dict[str, Any]:
        """What makes it this run and no other."""
        found = {name: dict(section) for name, section in self.config.as_dict().items()}
        for section, key in FREE:
            found.get(section, {}).pop(key, None)
        for section, key in FILE_KEYS:
            if f"{section}.{key}" in self.digests:
                found[section][key] = f"sha256 {self.digests[f'{section}.{key}']}"
        return found


@dataclass(frozen=True)
class RunFolder:
    """A folder that belongs to one run. ``writes`` is False for the processes that only read along."""

    folder: Path
    writes: bool = True

    def file(self, stage: str) -> Path:
        """What a stage leaves behind: a network, the cells of a comparison, or the points of an expansion."""
        return self.folder / {**FILES, "compare": CELLS, "expand": POINTS}[stage]

    def checkpoints(self, stage: str) -> Path:
        return self.folder / "checkpoints" / stage

    @property
    def results(self) -> dict[str, Any]:
        """Stage -> its figures, of the stages that are done."""
        path = self.folder / RESULT
        found = read_json(path) if path.is_file() else {}
        if not isinstance(found, dict) or not all(isinstance(figures, dict) for figures in found.values()):
            raise RunError(f"{path}: does not contain the results of the stages. Remove it to run the stages again.")
        return found

    def is_done(self, stage: str) -> bool:
        return stage in self.results and self.file(stage).is_file()

    def record_stage(self, stage: str, figures: Mapping[str, Any]) -> None:
        """Keep the figures of a stage; its network must be there by now."""
        if self.writes:
            write_json(self.folder / RESULT, {**self.results, stage: dict(figures)})

    def append_metrics(self, event: Mapping[str, Any]) -> None:
        """One line of the metrics."""
        if self.writes:
            with open(self.folder / METRICS, "a", encoding="utf-8") as file:
                file.write(json.dumps(event, allow_nan=False, default=str) + "\n")

    def open_log(self) -> IO[str]:
        """The log, to be written to and closed."""
        return open(self.folder / LOG, "a", encoding="utf-8")


# --- opening --------------------------------------------------------------------------------------------


@contextmanager
def open_run(
    folder: str | Path, record: RunRecord, *, must_exist: bool = False, writes: bool = True
) -> Iterator[RunFolder]:
    """The run in this folder, new or to be gone on with. Another one is refused and nothing is overwritten."""
    path = Path(folder)
    refuse_folder(path, record, must_exist=must_exist)
    if writes and not (path / CONFIG).is_file():
        _make(path, record)
    with _locked(path) if writes else _skip_lock():
        yield RunFolder(path, writes)


def refuse_folder(path: Path, record: RunRecord, *, must_exist: bool) -> None:
    """A folder in which this run can neither begin nor go on."""
    if (path / CONFIG).is_file():
        _refuse_other(path, record)
    else:
        _refuse_occupied(path, must_exist)


def _refuse_occupied(path: Path, must_exist: bool) -> None:
    if must_exist:
        raise RunError(f"{path}: there is no run to resume. Leave out --resume to start one.")
    if path.exists() and not path.is_dir():
        raise RunError(f"{path}: is a file; a run needs a folder.")
    if path.is_dir() and (names := sorted(p.name for p in path.iterdir() if p.name != LOCK)):
        raise RunError(
            f"{path}: contains {', '.join(names[:3])}, but no run. Choose another folder, or empty this one."
        )


def _make(path: Path, record: RunRecord) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(
            path / CONFIG,
            {"format": 1, **record.origin, "config": record.config.as_dict(), "digests": dict(record.digests)},
        )
    except OSError as error:
        raise RunError(f"{path}: cannot be written to ({error.strerror}).") from error


def _refuse_other(path: Path, record: RunRecord) -> None:
    there = read_record(path)
    if (gap := find_first_difference(record.identity(), there.identity())) is not None:
        on = f"resume the existing run: sosp run {path}"
        if record.config == there.config:  # only files that it names are others now
            on = "restore the files that the run started with"
        raise RunError(
            f"{path}: contains a different run: {gap}. Nothing was changed. Choose another name or folder, or {on}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time writes into a run."""
    with open(path / LOCK, "w") as file:
        try:
            lock_file(file)
        except OSError as error:
            raise RunError(f"{path}: another process is writing there. Wait for it, or choose another name.") from error
        yield


@contextmanager
def _skip_lock() -> Iterator[None]:
    yield


# --- reading --------------------------------------------------------------------------------------------


def is_run(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def read_record(folder: str | Path) -> RunRecord:
    """What a run is, from its config.json."""
    path = Path(folder) / CONFIG
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != 1:
        raise RunError(f"{path}: was not written by sosp, or was written by a newer version.")
    try:
        config, digests = build_config(found.pop("config")), dict(found.pop("digests"))
    except (ArgumentError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: is not the config of a run ({error}).") from error
    return RunRecord(config, digests, found)


def find_last_network(folder: str | Path) -> tuple[RunRecord, Path]:
    """The config of a run, and the network of its last stage that is done."""
    record, run = read_record(folder), RunFolder(Path(folder), writes=False)
    if record.config.compare is not None:
        raise RunError(f"{folder}: contains a comparison, which saves no networks.")
    if record.config.expand is not None:
        raise RunError(
            f"{folder}: contains an expansion, which saves several networks (seed*/networks). Give one of their files."
        )
    done = [stage for stage in record.config.stages if run.is_done(stage)]
    if not done:
        raise RunError(f"{folder}: no stage of this run is done. Resume it: sosp run {folder}")
    return record, run.file(done[-1])
