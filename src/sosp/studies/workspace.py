"""Provide the folders, the device, the datasets and the initial networks of experiments."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.core.text_files import lock_file
from sosp.data import Dataset, load
from sosp.errors import ArgumentError, DataError, RunError, suggest_name
from sosp.nets import by_name
from sosp.studies.cells import TrainedCell
from sosp.studies.record_origin import describe_origin

EMBEDDED = ("digits",)
LOCK = ".lock"
ROWS = 8  # batch size of the example
GROUP_SIZES = {False: 1, True: 8}  # networks side by side, without and with CUDA; on a CPU they would save no time


@dataclass(frozen=True)
class ExperimentSettings:
    """The user's settings for experiments."""

    results: Path
    work: Path  # checkpoints and networks
    device: torch.device
    data_dir: Path | None = None
    weights: Mapping[str, Path] = field(default_factory=dict)  # "resnet56" or "resnet56-cifar10" -> file
    origin: Mapping[str, Any] = field(default_factory=dict)  # for every record; by default that of this machine
    save_every: float = 120.0  # seconds between two checkpoints within an epoch

    def __post_init__(self) -> None:
        for name in ("results", "work", "data_dir"):  # may be strings
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else Path(value))
        object.__setattr__(self, "weights", {name: Path(file) for name, file in self.weights.items()})
        object.__setattr__(self, "device", torch.device(self.device))
        object.__setattr__(self, "origin", self.origin or describe_origin(self.device))


class Workspace:
    """The settings of an experiment, and the datasets that were loaded so far."""

    def __init__(self, setting: ExperimentSettings) -> None:
        self.setting = setting
        self.device = setting.device
        self.loaded: dict[str, Dataset] = {}
        self.refusals: dict[str, DataError] = {}

    # --- folders ----------------------------------------------------------------------------------------

    @contextmanager
    def lock_folders(self) -> Iterator[None]:
        """Create the folders, check that they are writable, and keep other processes out."""
        work = self.setting.work
        for folder in (work, self.setting.results):
            _make(folder)
        with open(work / LOCK, "w") as file:
            try:
                lock_file(file)
            except OSError as error:
                raise RunError(f"{work}: another process is working there. Wait for it.") from error
            yield

    def network_file(self, start: TrainedCell) -> Path:
        """Return the file of a trained network."""
        return self.setting.work / "networks" / f"{start.name}.safetensors"

    def group_size(self, most: int) -> int:
        """Return the number of networks to train side by side."""
        return min(most, GROUP_SIZES[self.device.type == "cuda"])

    # --- data -------------------------------------------------------------------------------------------

    def data(self, name: str) -> Dataset:
        """Return the dataset on the device."""
        if name in self.refusals:
            raise self.refusals[name]
        if name not in self.loaded:
            try:
                self.loaded[name] = self._load(name)
            except DataError as error:
                self.refusals[name] = error
                raise
        return self.loaded[name]

    def _load(self, name: str) -> Dataset:
        if name in EMBEDDED:
            found = load(name)
        elif self.setting.data_dir is None:
            raise DataError(f"{name} is read from files: give their folder with --data-dir DIR.")
        else:
            found = load(name, self.setting.data_dir)
        return replace(found, train=found.train.to(self.device), test=found.test.to(self.device))

    def has_data(self, name: str) -> bool:
        """Return True if the dataset can be loaded."""
        try:
            self.data(name)
        except DataError:
            return False
        return True

    def example(self, name: str) -> Any:
        images, _ = next(iter(self.data(name).train.ordered(batch=ROWS, limit=ROWS)))
        return images

    # --- networks ---------------------------------------------------------------------------------------

    def find_given_file(self, start: TrainedCell) -> Path | None:
        """Return the file that the user gives for a network, or None."""
        if not is_loadable(start):
            return None
        return self.setting.weights.get(start.place) or self.setting.weights.get(start.network)

    def make_initial(self, start: TrainedCell) -> nn.Module:
        """Return the initial network without widening, on the device."""
        classes = len(self.data(start.data).classes)
        return make_network(start.network, classes, start.width, start.seed).to(self.device)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to ({error.strerror}).") from error


def is_loadable(start: TrainedCell) -> bool:
    """Return True if the user may give weights: for a plain, trained network of the first seed."""
    return not (start.seed or start.slimming or start.width != 1.0 or start.grown) and start.schedule.epochs > 0


def make_network(network: str, classes: int, width: float, seed: int) -> nn.Module:
    return by_name.build_network(f"sosp:{network}", classes=classes, width=width, seed=seed)


def parse_weights(given: list[str], known: list[str]) -> dict[str, Path]:
    """Return name -> file from the ``NAME=FILE`` words of the command line."""
    found = {}
    for word in given:
        name, equals, file = word.partition("=")
        if not equals or not file:
            raise ArgumentError(f"--weights {word!r} must be NAME=FILE, for instance resnet56=resnet56.safetensors.")
        if not known:
            raise ArgumentError(f"--weights {word!r}: no cell starts from weights that can be given.")
        if name not in known:
            raise ArgumentError(
                f"--weights {word!r}: no cell starts from {name!r}.{suggest_name(name, known)} Known: "
                f"{', '.join(known)}."
            )
        if not Path(file).is_file():
            raise ArgumentError(f"--weights {word!r}: there is no file {file}.")
        found[name] = Path(file)
    return found
