"""Checkpoints of a training: one file each, the last two are kept, the newest good one is where it goes on."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sosp.core import distributed
from sosp.core.safetensors_files import read_safetensors, write_safetensors
from sosp.errors import CheckpointError
from sosp.training.learner import Learner
from sosp.training.schedule import Schedule, describe_schedule_change

NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")
KEPT = 2
# What a killed writer leaves behind: our own file, and the one that safetensors renames to it.
LEFT = re.compile(r"\.checkpoint-\d{8,}\.safetensors\.[0-9a-f]{16}\.tmp|\.tmp[A-Za-z0-9]{6}")
OURS = b'{"__metadata__":{"sosp":'


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written or read; training goes on without it."""


@dataclass(frozen=True)
class TrainingPosition:
    """Where a training stands: so many batches of this epoch are done."""

    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0  # that they took


@dataclass(frozen=True)
class TrainingIdentity:
    """What must be the same for a training to go on from a checkpoint."""

    schedule: Schedule
    seeds: Mapping[str, int]
    examples: int  # in the training set
    shapes: Mapping[str, Mapping[str, list[int]]]  # network -> tensor -> shape

    @classmethod
    def of(
        cls, learners: Mapping[str, Learner], schedule: Schedule, seeds: Mapping[str, int], examples: int
    ) -> TrainingIdentity:
        shapes = {n: a.shapes() for n, a in learners.items()}
        return cls(schedule, dict(seeds), examples, shapes)

    def document(self) -> dict[str, Any]:
        shapes = {n: dict(s) for n, s in self.shapes.items()}
        return {"schedule": asdict(self.schedule), "seeds": self.seeds, "examples": self.examples, "shapes": shapes}

    def refusal(self, other: dict[str, Any]) -> str | None:
        """How a stored training differs from this one, in words; None where it does not."""
        if (gap := describe_schedule_change(self.schedule, other["schedule"])) is not None:
            return f"the schedule's {gap}"
        if (names := other["shapes"].keys()) != self.shapes.keys():
            return f"it holds the networks {sorted(names)} and these are {sorted(self.shapes)}"
        if other["seeds"] != self.seeds:
            return f"the seed was {_plain(other['seeds'])} and is {_plain(self.seeds)}"
        if other["examples"] != self.examples:
            return f"there were {other['examples']} training examples and are {self.examples}"
        return _describe_shape_mismatch(self.shapes, other["shapes"])


def _plain(seeds: Mapping[str, int]) -> Any:
    return next(iter(seeds.values())) if len(set(seeds.values())) == 1 else dict(seeds)


def _describe_shape_mismatch(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name, shapes in mine.items():
        for key in sorted(shapes.keys() ^ other[name].keys()):
            return f"it is of another network: {key!r} is in one of the two only"
        for key, shape in shapes.items():
            if other[name][key] != shape:
                return f"it is of another network: {key!r} had shape {tuple(other[name][key])} and has {tuple(shape)}"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    found = [p for p in folder.iterdir() if NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(NAME.fullmatch(p.name)[1]), reverse=True)  # type: ignore[index]


def prepare_folder(folder: Path) -> None:
    """Make the folder, and see that it can be written to before hours are spent."""
    trial = folder / ".sosp-trial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_text("")
        trial.unlink()
        for path in folder.iterdir():
            if LEFT.fullmatch(path.name) and _is_ours(path):
                path.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{folder}: checkpoints cannot be written there ({type(error).__name__}: {error.strerror}). "
            "Give a folder that can be written to, or folder=None to train without checkpoints."
        ) from error


def _is_ours(path: Path) -> bool:
    """Nothing yet, or the start of a checkpoint: other programs have files with such names as well."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        start = file.read(8 + len(OURS))
    return not start or (len(start) > 8 and OURS.startswith(start[8:]))


def save_checkpoint(
    folder: Path,
    learners: Mapping[str, Learner],
    identity: TrainingIdentity,
    place: TrainingPosition,
    history: dict[str, Any],
) -> Path | None:
    """Write a checkpoint, then remove all but the last two; None, with a warning, where it could not be written."""
    steps = max(int(learner.count) for learner in learners.values())
    path = folder / f"checkpoint-{steps:08d}.safetensors"
    document = {"training": identity.document(), "place": asdict(place), "history": history}
    try:
        write_safetensors(path, json.dumps(document), _tensors(learners))
    except CheckpointError as error:
        warnings.warn(f"{path} {error} Training goes on; older checkpoints stay.", CheckpointWarning, stacklevel=2)
        return None
    for old in list_checkpoints(folder)[KEPT:]:
        with suppress(OSError):
            old.unlink()
    return path


def _tensors(learners: Mapping[str, Learner]) -> dict[str, Tensor]:
    """Copies on the CPU, none of which share memory."""
    found = {f"{k}/{n}": x for k, a in enumerate(learners.values()) for n, x in a.stored().items()}
    found["random/cpu"] = torch.get_rng_state()
    device = next(iter(learners.values())).device
    if device.type == "cuda":
        found["random/cuda"] = torch.cuda.get_rng_state(device)
    return {n: x.contiguous() for n, x in found.items()}


@dataclass(frozen=True, eq=False)
class TrainingCheckpoint:
    """What a checkpoint holds."""

    place: TrainingPosition
    history: Mapping[str, Any]
    names: tuple[str, ...]  # of the networks, in the order of their numbers
    tensors: Mapping[str, Tensor]


def read_newest_checkpoint(folder: Path, identity: TrainingIdentity) -> TrainingCheckpoint | None:
    """The newest checkpoint that can be read; one that cannot gets another name, so that it is not in the way."""
    for path in list_checkpoints(folder):
        try:
            text, tensors = read_safetensors(path)
            document = json.loads(text)
            stored, place, history = document["training"], TrainingPosition(**document["place"]), document["history"]
        except (CheckpointError, ValueError, KeyError, TypeError) as error:
            aside = _set_aside(path)
            found = f"{path} {error}" if isinstance(error, CheckpointError) else f"{path} is no checkpoint of training."
            warnings.warn(f"{found} {aside}", CheckpointWarning, stacklevel=2)
            continue
        if (gap := identity.refusal(stored)) is not None:
            raise CheckpointError(f"{path} is of another training: {gap}. Give another folder, or remove this one.")
        return TrainingCheckpoint(place, history, tuple(stored["shapes"]), tensors)
    return None


def _set_aside(path: Path) -> str:
    with suppress(OSError):
        path.replace(path.with_name(f"{path.name}.damaged"))
        return f"It is now called {path.name}.damaged, and an older one is looked for."
    return "An older one is looked for."


def run_on_main(act: Callable[[], Any]) -> Any:
    """What ``act`` gives or raises on the first rank, for all of them."""
    if distributed.count_ranks() == 1:
        return act()
    found: list[Any] = [None, None]
    if distributed.is_main():
        try:
            found[0] = act()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def resume_learners(
    folder: Path, learners: Mapping[str, Learner], identity: TrainingIdentity
) -> TrainingCheckpoint | None:
    """Give the learners the numbers of the newest checkpoint; None where there is none."""

    def look() -> TrainingCheckpoint | None:
        prepare_folder(folder)
        return read_newest_checkpoint(folder, identity)

    found: TrainingCheckpoint | None = run_on_main(look)
    if found is not None:
        for name, learner in learners.items():
            start = f"{found.names.index(name)}/"
            kept = {n.removeprefix(start): x for n, x in found.tensors.items() if n.startswith(start)}
            learner.take(kept)
        _restore_random_numbers(found.tensors, next(iter(learners.values())).device)
    return found


def _restore_random_numbers(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
