"""Train several networks side by side in one folder, which names them and lets a killed training resume."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sosp.baselines import Slimming
from sosp.core.text_files import read_json, write_json
from sosp.data import Dataset
from sosp.pipeline.train import train
from sosp.studies.workspace import Workspace
from sosp.training import Epoch, Schedule, Trained
from sosp.training.watcher import Watcher

MEMBERS = "members.json"
PARTS = "parts.json"  # of a training that was moved: the first epoch on each machine
ORIGIN_KEYS = ("hardware", "torch", "commit")  # noted for each part


@dataclass(frozen=True)
class SharedTraining:
    """The settings that networks must share to be trained side by side."""

    data: str
    schedule: Schedule
    cycles: int = 1
    slimming: float = 0.0


@dataclass(frozen=True)
class TrainingGroup:
    """Names of networks that share a training, in the order of the checkpoint."""

    training: SharedTraining
    names: tuple[str, ...]

    def folder(self, place: Path) -> Path:
        digest = hashlib.sha256(repr((self.training, self.names)).encode()).hexdigest()
        return place / f"group-{digest[:12]}"


def form_groups(
    wanted: Mapping[str, SharedTraining], known: Mapping[str, SharedTraining], place: Path, most: int
) -> list[TrainingGroup]:
    """Return groups of at most ``most`` wanted networks; unfinished groups come first, unchanged, however large.

    An unfinished group may have members that are known but not wanted; they are trained to the end with it.
    """
    found: list[TrainingGroup] = []
    taken: set[str] = set()
    for group in _begun(known, place):
        if taken.isdisjoint(group.names) and not wanted.keys().isdisjoint(group.names):
            found.append(group)
            taken |= set(group.names)
    for training in dict.fromkeys(wanted.values()):
        names = [name for name, t in wanted.items() if t == training and name not in taken]
        found += [TrainingGroup(training, tuple(names[k : k + most])) for k in range(0, len(names), most)]
    return found


def _begun(known: Mapping[str, SharedTraining], place: Path) -> list[TrainingGroup]:
    """Return the groups of known networks that have a folder."""
    found = []
    for path in sorted(place.glob(f"group-*/{MEMBERS}")):
        names = tuple(read_json(path))
        trainings = {known.get(name) for name in names}
        training = next(iter(trainings))
        if len(trainings) == 1 and training is not None:
            group = TrainingGroup(training, names)
            found += [group] if group.folder(place) == path.parent else []
    return found


def train_group(
    bench: Workspace,
    group: TrainingGroup,
    networks: Mapping[str, nn.Module],
    seeds: Mapping[str, int],
    place: Path,
    watch: Watcher,
) -> dict[str, tuple[nn.Module, tuple[Epoch, ...]]]:
    """Return every network after all cycles, with the history of all cycles."""
    folder, training = group.folder(place), group.training
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MEMBERS, list(group.names))
    data = bench.data(training.data)
    found: dict[str, tuple[nn.Module, tuple[Epoch, ...]]] = {name: (networks[name], ()) for name in group.names}
    for cycle in range(training.cycles if training.schedule.epochs else 0):
        before = cycle * training.schedule.epochs
        now = {name: model for name, (model, _) in found.items()}
        shifted = {n: seeds[n] + 1000 * cycle for n in now}
        done = _cycle(bench, group, now, data, shifted, folder / str(cycle), before, watch)
        found = {name: (t.model, (*found[name][1], *t.history)) for name, t in done.items()}
    return found


def _cycle(
    bench: Workspace,
    group: TrainingGroup,
    networks: Mapping[str, nn.Module],
    data: Dataset,
    seeds: Mapping[str, int],
    folder: Path,
    before: int,
    watch: Watcher,
) -> dict[str, Trained]:
    training = group.training
    stage = f"{len(networks)} networks" if len(networks) > 1 else next(iter(networks))

    begun = False

    def on_epoch(name: str, epoch: Epoch) -> None:
        nonlocal begun
        if not begun:
            _begin_part(folder.parent / PARTS, before + epoch.number, bench.setting.origin)
            begun = True
        test = None if epoch.test is None else epoch.test.top1
        whole = training.schedule.epochs * training.cycles
        watch.event("epoch", {"cell": name, "number": before + epoch.number, "epochs": whole, "test": test})

    found: dict[str, Trained] = train(
        networks,
        data,
        training.schedule,
        folder=folder,
        seed=seeds,
        device=bench.device,
        companion=Slimming(training.slimming) if training.slimming else None,
        on_epoch=on_epoch,
        on_step=lambda done, total, moment: watch.step(stage, done, total, moment),
        save_every=bench.setting.save_every,
    )
    return found


def _begin_part(path: Path, epoch: int, origin: Mapping[str, Any]) -> None:
    """Note the origin from this epoch on, and remove notes on later epochs, which are trained again."""
    before = [part for part in (read_json(path) if path.is_file() else []) if part["from"] < epoch]
    if not before or _select_origin(before[-1]) != _select_origin(origin):
        before.append({"from": epoch, **_select_origin(origin)})
    write_json(path, before)


def describe_parts(group: TrainingGroup, place: Path, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a training for its record if some ran elsewhere; otherwise an empty dict."""
    path = group.folder(place) / PARTS
    found = read_json(path) if path.is_file() else []
    return {} if all(_select_origin(part) == _select_origin(origin) for part in found) else {"parts": found}


def _select_origin(origin: Mapping[str, Any]) -> dict[str, Any]:
    return {key: origin.get(key) for key in ORIGIN_KEYS}


def delete_member_checkpoints(place: Path, name: str) -> None:
    """Delete the checkpoints of all groups with this network, whose weights have changed."""
    for path in place.glob(f"group-*/{MEMBERS}"):
        if name in read_json(path):
            shutil.rmtree(path.parent, ignore_errors=True)


def delete_checkpoints(group: TrainingGroup, place: Path) -> None:
    """Delete the checkpoints of a group."""
    shutil.rmtree(group.folder(place), ignore_errors=True)
