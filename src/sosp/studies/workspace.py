"""Where experiments are carried out: folders, device, datasets, and the networks that cells begin with."""

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
ROWS = 8  # of the example
GROUP_SIZES = {False: 1, True: 8}  # networks side by side: on a CPU one after the other takes as long


@dataclass(frozen=True)
class ExperimentSettings:
    """What the user chooses."""

    results: Path
    work: Path  # checkpoints and networks
    device: torch.device
    data_dir: Path | None = None
    weights: Mapping[str, Path] = field(default_factory=dict)  # "resnet56" or "resnet56-cifar10" -> file
    origin: Mapping[str, Any] = field(default_factory=dict)  # of every record; else what is found out here
    save_every: float = 120.0  # seconds between two checkpoints within an epoch

    def __post_init__(self) -> None:
        for name in ("results", "work", "data_dir"):  # as they are typed
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else Path(value))
        object.__setattr__(self, "weights", {name: Path(file) for name, file in self.weights.items()})
        object.__setattr__(self, "device", torch.device(self.device))
        object.__setattr__(self, "origin", self.origin or describe_origin(self.device))


class Workspace:
    """A setting, with what was loaded so far."""

    def __init__(self, setting: ExperimentSettings) -> None:
        self.setting = setting
        self.device = setting.device
        self.loaded: dict[str, Dataset] = {}
        self.refusals: dict[str, DataError] = {}

    # --- folders ----------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time works there; all folders are there and can be written to."""
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
        """Where a trained network is kept."""
        return self.setting.work / "networks" / f"{start.name}.safetensors"

    def together(self, most: int) -> int:
        """How many networks are trained side by side."""
        return min(most, GROUP_SIZES[self.device.type == "cuda"])

    # --- data -------------------------------------------------------------------------------------------

    def data(self, name: str) -> Dataset:
        """The dataset, on the device."""
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
            raise DataError(f"{name} is read from files: say where they are with --data-dir DIR.")
        else:
            found = load(name, self.setting.data_dir)
        return replace(found, train=found.train.to(self.device), test=found.test.to(self.device))

    def has(self, name: str) -> bool:
        try:
            self.data(name)
        except DataError:
            return False
        return True

    def example(self, name: str) -> Any:
        images, _ = next(iter(self.data(name).train.ordered(batch=ROWS, limit=ROWS)))
        return images

    # --- networks ---------------------------------------------------------------------------------------

    def given(self, start: TrainedCell) -> Path | None:
        """The file that the user names for a network."""
        if not is_loadable(start):
            return None
        return self.setting.weights.get(start.place) or self.setting.weights.get(start.network)

    def plain(self, start: TrainedCell) -> nn.Module:
        """As it is initialised, not grown; on the device."""
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
    """Only the plain one of the first seed, trained to its end."""
    return not (start.seed or start.slimming or start.width != 1.0 or start.grown) and start.schedule.epochs > 0


def make_network(network: str, classes: int, width: float, seed: int) -> nn.Module:
    return by_name.build_network(f"sosp:{network}", classes=classes, width=width, seed=seed)


def parse_weights(given: list[str], known: list[str]) -> dict[str, Path]:
    """``NAME=FILE``, as the command line has it."""
    found = {}
    for word in given:
        name, equals, file = word.partition("=")
        if not equals or not file:
            raise ArgumentError(f"--weights {word!r} must be NAME=FILE, for instance resnet56=resnet56.safetensors.")
        if not known:
            raise ArgumentError(f"--weights {word!r}: no cell begins with weights that can be given.")
        if name not in known:
            raise ArgumentError(
                f"--weights {word!r}: no cell begins with {name!r}.{suggest_name(name, known)} "
                f"Known: {', '.join(known)}."
            )
        if not Path(file).is_file():
            raise ArgumentError(f"--weights {word!r}: there is no file {file}.")
        found[name] = Path(file)
    return found
