"""Checkpoints of a training: one file each, the last two are kept, the newest good one is where it goes on."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sosp.archive import read, write
from sosp.errors import CheckpointError
from sosp.training import ranks
from sosp.training.learner import Learner
from sosp.training.schedule import Schedule, difference

NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")
KEPT = 2


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written or read; training goes on without it."""


@dataclass(frozen=True)
class Place:
    """Where a training stands: so many batches of this epoch are done."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Identity:
    """What must be the same for a training to go on from a checkpoint."""

    schedule: Schedule
    seeds: Mapping[str, int]
    examples: int  # in the training set
    shapes: Mapping[str, Mapping[str, list[int]]]  # network -> tensor -> shape

    @classmethod
    def of(
        cls, learners: Mapping[str, Learner], schedule: Schedule, seeds: Mapping[str, int], examples: int
    ) -> Identity:
        shapes = {n: {k: list(x.shape) for k, x in a.model.state_dict().items()} for n, a in learners.items()}
        return cls(schedule, dict(seeds), examples, shapes)

    def document(self) -> dict[str, Any]:
        shapes = {n: dict(s) for n, s in self.shapes.items()}
        return {"schedule": asdict(self.schedule), "seeds": self.seeds, "examples": self.examples, "shapes": shapes}

    def refusal(self, other: dict[str, Any]) -> str | None:
        """How a stored training differs from this one, in words; None where it does not."""
        if (gap := difference(self.schedule, other["schedule"])) is not None:
            return f"the schedule's {gap}"
        if other["seeds"] != self.seeds:
            return f"the seed was {_plain(other['seeds'])} and is {_plain(self.seeds)}"
        if other["examples"] != self.examples:
            return f"there were {other['examples']} training examples and are {self.examples}"
        return _other_network(self.shapes, other["shapes"])


def _plain(seeds: Mapping[str, int]) -> Any:
    return next(iter(seeds.values())) if len(set(seeds.values())) == 1 else dict(seeds)


def _other_network(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    if mine.keys() != other.keys():
        return f"it holds the networks {sorted(other)} and these are {sorted(mine)}"
    for name, shapes in mine.items():
        for key in sorted(shapes.keys() ^ other[name].keys()):
            return f"it is of another network: {key!r} is in one of the two only"
        for key, shape in shapes.items():
            if other[name][key] != shape:
                return f"it is of another network: {key!r} had shape {tuple(other[name][key])} and has {tuple(shape)}"
    return None


def files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    found = [p for p in folder.iterdir() if NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(NAME.fullmatch(p.name)[1]), reverse=True)  # type: ignore[index]


def prepare(folder: Path) -> None:
    """Make the folder, and see that it can be written to before hours are spent."""
    trial = folder / ".sosp-trial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_text("")
        trial.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{folder}: checkpoints cannot be written there ({type(error).__name__}: {error.strerror}). "
            "Give a folder that can be written to, or folder=None to train without checkpoints."
        ) from error


def save(
    folder: Path, learners: Mapping[str, Learner], identity: Identity, place: Place, history: dict[str, Any]
) -> Path | None:
    """Write a checkpoint, then remove all but the last two; None, with a warning, where it could not be written."""
    if not ranks.is_main():
        return None
    steps = max(int(learner.count) for learner in learners.values())
    path = folder / f"checkpoint-{steps:08d}.safetensors"
    document = {"training": identity.document(), "place": asdict(place), "history": history}
    try:
        write(path, json.dumps(document), _tensors(learners))
    except CheckpointError as error:
        warnings.warn(f"{path}: {error} Training goes on; the older checkpoint stays.", CheckpointWarning, stacklevel=2)
        return None
    for old in files(folder)[KEPT:]:
        with suppress(OSError):
            old.unlink()
    return path


def _tensors(learners: Mapping[str, Learner]) -> dict[str, Tensor]:
    """Copies on the CPU, none of which share memory."""
    found = {f"{k}/{n}": x for k, a in enumerate(learners.values()) for n, x in a.tensors().items()}
    found["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["random/cuda"] = torch.cuda.get_rng_state()
    return {n: x.detach().to("cpu", copy=True).contiguous() for n, x in found.items()}


def resume(folder: Path, learners: Mapping[str, Learner], identity: Identity) -> tuple[Place, dict[str, Any]]:
    """Take the numbers of the newest checkpoint that can be read; where training stands, and its history."""
    for path in files(folder):
        try:
            text, tensors = read(path)
            document = json.loads(text)
            stored, place, history = document["training"], Place(**document["place"]), document["history"]
        except (CheckpointError, ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"{path} cannot be used ({error}); looking for an older one.", CheckpointWarning, stacklevel=2
            )
            continue
        if (gap := identity.refusal(stored)) is not None:
            raise CheckpointError(f"{path} is of another training: {gap}. Give another folder, or remove this one.")
        _restore(learners, tensors)
        return place, history
    return Place(), {name: [] for name in learners}


def _restore(learners: Mapping[str, Learner], tensors: dict[str, Tensor]) -> None:
    for k, learner in enumerate(learners.values()):
        start = f"{k}/"
        learner.restore({n.removeprefix(start): x for n, x in tensors.items() if n.startswith(start)})
    torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
