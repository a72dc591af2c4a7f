"""Write, keep and read the checkpoints of a training: one file each, of which the last two are kept."""

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
# Temporary files of a killed writer: our own, and the one that safetensors renames to it.
LEFT = re.compile(r"\.checkpoint-\d{8,}\.safetensors\.[0-9a-f]{16}\.tmp|\.tmp[A-Za-z0-9]{6}")
OURS = b'{"__metadata__":{"sosp":'


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written or read; training continues without it."""


@dataclass(frozen=True)
class TrainingPosition:
    """The position of a training: the epoch and the number of its batches that are done."""

    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0  # that these batches took


@dataclass(frozen=True)
class TrainingIdentity:
    """The properties that must agree for a training to continue from a checkpoint."""

    schedule: Schedule
    seeds: Mapping[str, int]
    examples: int  # in the training set
    shapes: Mapping[str, Mapping[str, list[int]]]  # network -> tensor -> shape

    @classmethod
    def of(
        cls, learners: Mapping[str, Learner], schedule: Schedule, seeds: Mapping[str, int], examples: int
    ) -> TrainingIdentity:
        """Return the identity of a training of these learners."""
        shapes = {n: a.shapes() for n, a in learners.items()}
        return cls(schedule, dict(seeds), examples, shapes)

    def document(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        shapes = {n: dict(s) for n, s in self.shapes.items()}
        return {"schedule": asdict(self.schedule), "seeds": self.seeds, "examples": self.examples, "shapes": shapes}

    def describe_mismatch(self, other: dict[str, Any]) -> str | None:
        """Describe the first difference between a stored training and this one; None if they agree."""
        if (gap := describe_schedule_change(self.schedule, other["schedule"])) is not None:
            return f"the schedule's {gap}"
        if (names := other["shapes"].keys()) != self.shapes.keys():
            return f"it holds the networks {sorted(names)}, but this training has {sorted(self.shapes)}"
        if other["seeds"] != self.seeds:
            return f"the seed was {_plain(other['seeds'])} and is {_plain(self.seeds)}"
        if other["examples"] != self.examples:
            return f"there were {other['examples']} training examples and now there are {self.examples}"
        return _describe_shape_mismatch(self.shapes, other["shapes"])


def _plain(seeds: Mapping[str, int]) -> Any:
    return next(iter(seeds.values())) if len(set(seeds.values())) == 1 else dict(seeds)


def _describe_shape_mismatch(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name, shapes in mine.items():
        for key in sorted(shapes.keys() ^ other[name].keys()):
            return f"it belongs to another network: {key!r} is in only one of the two"
        for key, shape in shapes.items():
            if other[name][key] != shape:
                return (
                    f"it belongs to another network: {key!r} had shape {tuple(other[name][key])} and has {tuple(shape)}"
                )
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    found = [p for p in folder.iterdir() if NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(NAME.fullmatch(p.name)[1]), reverse=True)  # type: ignore[index]


def prepare_folder(folder: Path) -> None:
    """Create the folder and check that it is writable, before hours are spent on training."""
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
            "Give a writable folder, or folder=None to train without checkpoints."
        ) from error


def _is_ours(path: Path) -> bool:
    """Return whether a file is empty or begins like a checkpoint; other programs also use such file names."""
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
    """Write a checkpoint and remove all but the last two. If it cannot be written, warn and return None."""
    steps = max(int(learner.count) for learner in learners.values())
    path = folder / f"checkpoint-{steps:08d}.safetensors"
    document = {"training": identity.document(), "place": asdict(place), "history": history}
    try:
        write_safetensors(path, json.dumps(document), _tensors(learners))
    except CheckpointError as error:
        warnings.warn(
            f"{path} {error} Training continues; older checkpoints are kept.", CheckpointWarning, stacklevel=2
        )
        return None
    for old in list_checkpoints(folder)[KEPT:]:
        with suppress(OSError):
            old.unlink()
    return path


def _tensors(learners: Mapping[str, Learner]) -> dict[str, Tensor]:
    """Return copies of all tensors on the CPU; no two share memory."""
    found = {f"{k}/{n}": x for k, a in enumerate(learners.values()) for n, x in a.copy_tensors().items()}
    found["random/cpu"] = torch.get_rng_state()
    device = next(iter(learners.values())).device
    if device.type == "cuda":
        found["random/cuda"] = torch.cuda.get_rng_state(device)
    return {n: x.contiguous() for n, x in found.items()}


@dataclass(frozen=True, eq=False)
class TrainingCheckpoint:
    """The contents of a checkpoint."""

    place: TrainingPosition
    history: Mapping[str, Any]
    names: tuple[str, ...]  # of the networks, in the order of the indices in the file
    tensors: Mapping[str, Tensor]


def read_newest_checkpoint(folder: Path, identity: TrainingIdentity) -> TrainingCheckpoint | None:
    """Return the newest checkpoint that can be read; rename those that cannot, so that they do not get in the way."""
    for path in list_checkpoints(folder):
        try:
            text, tensors = read_safetensors(path)
            document = json.loads(text)
            stored, place, history = document["training"], TrainingPosition(**document["place"]), document["history"]
        except (CheckpointError, ValueError, KeyError, TypeError) as error:
            aside = _set_aside(path)
            found = f"{path} {error}" if isinstance(error, CheckpointError) else f"{path} is not a training checkpoint."
            warnings.warn(f"{found} {aside}", CheckpointWarning, stacklevel=2)
            continue
        if (gap := identity.describe_mismatch(stored)) is not None:
            raise CheckpointError(
                f"{path} belongs to another training: {gap}. Give another folder, or remove this one."
            )
        return TrainingCheckpoint(place, history, tuple(stored["shapes"]), tensors)
    return None


def _set_aside(path: Path) -> str:
    """Rename a damaged checkpoint and return a sentence about it."""
    with suppress(OSError):
        path.replace(path.with_name(f"{path.name}.damaged"))
        return f"It was renamed to {path.name}.damaged; an older one is used if there is one."
    return "An older one is used if there is one."


def run_on_main(act: Callable[[], Any]) -> Any:
    """Run ``act`` on the first rank, and return its result or raise its exception on all ranks."""
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
    """Load the newest checkpoint into the learners and return it; None if there is none."""

    def read() -> TrainingCheckpoint | None:
        prepare_folder(folder)
        return read_newest_checkpoint(folder, identity)

    found: TrainingCheckpoint | None = run_on_main(read)
    if found is not None:
        for name, learner in learners.items():
            start = f"{found.names.index(name)}/"
            kept = {n.removeprefix(start): x for n, x in found.tensors.items() if n.startswith(start)}
            learner.load_tensors(kept)
        _restore_random_numbers(found.tensors, next(iter(learners.values())).device)
    return found


def _restore_random_numbers(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
