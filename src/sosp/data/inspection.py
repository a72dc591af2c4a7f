"""Which known datasets lie in a folder, whether they are complete, and where to get what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sosp.data import glance
from sosp.data.cifar import damaged, images_of
from sosp.data.folders import pictures
from sosp.data.official import ADDRESS, SETS, Cifar, Version, home

NETTE = "n01440764 n02102040 n02979186 n03000684 n03028079 n03394916 n03417042 n03425413 n03445777 n03888257"
State = Literal["complete", "incomplete", "packed", "absent"]


@dataclass(frozen=True)
class Finding:
    """One dataset and how much of it is there."""

    name: str  # as ``sosp.data.load`` takes it, or that of a set of image folders
    path: Path
    state: State
    details: tuple[str, ...]  # what is there, what is missing or damaged
    advice: str = ""  # what to do next

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.state}" + ("" if self.state == "absent" else f", {self.path}")]
        return "\n  ".join([*lines, *self.details, *filter(None, [self.advice])])


@dataclass(frozen=True)
class Images:
    """A published set of image folders."""

    name: str
    classes: int
    train: int
    test: int
    archive: str  # how the names of its archives begin
    address: str
    names: frozenset[str] = frozenset()  # of its classes, where they are few


IMAGENETTE = Images(
    name="imagenette",
    classes=10,
    train=9_469,
    test=3_925,
    archive="imagenette",
    address="https://github.com/fastai/imagenette",
    names=frozenset(NETTE.split()),
)
IMAGENET = Images("imagenet", 1000, 1_281_167, 50_000, "ilsvrc", "https://image-net.org/download")


def inspect(folder: str | os.PathLike[str]) -> list[Finding]:
    """What is in ``folder`` and in the folders directly inside it; every file of CIFAR is checked."""
    root = glance.existing(folder)
    images = list(_image_folders(root))
    found = {finding.name for finding in images}
    missing = [_nowhere(known, root) for known in (IMAGENET, IMAGENETTE) if known.name not in found]
    return [_cifar(known, root) for known in SETS] + images + missing


# --- CIFAR ----------------------------------------------------------------------------------------------


def _cifar(known: Cifar, root: Path) -> Finding:
    """The most complete version."""
    places = [(version, at) for version in known.versions for at in [home(version, root)] if at]
    if places:
        return max((_version(known, *place) for place in places), key=lambda finding: finding.state == "complete")
    for version in known.versions:
        if (archive := root / version.archive).is_file():
            return Finding(known.name, archive, "packed", ("not unpacked yet",), glance.how_to_unpack(archive))
    return Finding(known.name, root, "absent", (), f"get {known.versions[0].archive} from {ADDRESS}")


def _version(known: Cifar, version: Version, at: Path) -> Finding:
    missing = [f"{name} is missing" for name in version.files if name not in version.present(at)]
    wrong = [*missing, *damaged(known, version, at)]
    if wrong:
        return Finding(known.name, at, "incomplete", tuple(wrong), f"get {version.archive} from {ADDRESS}")
    count = sum(images_of(known, version, name) for name in version.train)
    return Finding(known.name, at, "complete", (f"{count:,} training and {known.test:,} test images",))


# --- image folders --------------------------------------------------------------------------------------


def _image_folders(root: Path) -> Iterator[Finding]:
    for at in (root, *glance.folders(root)):
        if glance.parts(at) and any(map(glance.has_classes, glance.parts(at) or ())):
            yield _divided(at)
            if at == root:
                return
        elif at == root and glance.has_classes(at):
            yield _undivided(at)
            return


def _divided(at: Path) -> Finding:
    train, test = ({part.name: len(pictures(part)) for part in glance.folders(half)} for half in glance.parts(at) or ())
    known = _which(set(train))
    there = f"{len(train)} classes, {sum(train.values()):,} training and {sum(test.values()):,} test images"
    wrong = list(_wrong(train, test, known))
    name, advice = (known.name, f"the whole set: {known.address}") if known else ("folder", "")
    return Finding(name, at, "incomplete" if wrong else "complete", (there, *wrong), advice if wrong else "")


def _wrong(train: dict[str, int], test: dict[str, int], known: Images | None) -> Iterator[str]:
    for half, counts in (("training", train), ("test", test)):
        if empty := [name for name, count in counts.items() if not count]:
            yield f"{len(empty)} {half} folders without images, the first {empty[0]}"
    if strange := sorted(set(test) - set(train)):
        yield f"{len(strange)} classes only among the test images, the first {strange[0]}"
    if known and (sum(train.values()), sum(test.values())) != (known.train, known.test):
        yield f"the published {known.name} has {known.train:,} and {known.test:,}"


def _which(classes: set[str]) -> Images | None:
    if classes == IMAGENETTE.names:
        return IMAGENETTE
    wordnet = all(name.startswith("n") and name[1:].isdigit() for name in classes)
    return IMAGENET if wordnet and len(classes) == IMAGENET.classes else None


def _undivided(at: Path) -> Finding:
    counts = [len(pictures(part)) for part in glance.folders(at)]
    there = f"{len(counts)} classes, {sum(counts):,} images, not divided into train/ and val/"
    return Finding("folder", at, "complete", (there,), "good for evaluation; training would use the same images")


def _nowhere(known: Images, root: Path) -> Finding:
    packed = [at for at in glance.archives(root) if at.name.lower().startswith(known.archive)]
    if packed:
        return Finding(known.name, packed[0], "packed", ("not unpacked yet",), glance.how_to_unpack(packed[0]))
    return Finding(known.name, root, "absent", (), f"get it from {known.address}")
