"""Which known datasets lie in a folder, whether they are complete, and where to get what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sosp.data import folder_contents
from sosp.data.cifar import count_images, find_damage
from sosp.data.cifar_files import ADDRESS, CIFAR_SETS, Cifar, CifarVersion, find_version_folder
from sosp.data.image_folders import list_images

NETTE = "n01440764 n02102040 n02979186 n03000684 n03028079 n03394916 n03417042 n03425413 n03445777 n03888257"
DatasetState = Literal["complete", "incomplete", "packed", "absent"]


@dataclass(frozen=True)
class DatasetFinding:
    """One dataset and how much of it is there."""

    name: str  # as ``sosp.data.load`` takes it, or that of a set of image folders
    path: Path
    state: DatasetState
    details: tuple[str, ...]  # what is there, what is missing or damaged
    advice: str = ""  # what to do next

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.state}" + ("" if self.state == "absent" else f", {self.path}")]
        return "\n  ".join([*lines, *self.details, *filter(None, [self.advice])])


@dataclass(frozen=True)
class PublishedImageSet:
    """A published set of image folders."""

    name: str
    classes: int
    train: int
    test: int
    archive: str  # how the names of its archives begin
    address: str
    names: frozenset[str] = frozenset()  # of its classes, where they are few


IMAGENETTE = PublishedImageSet(
    name="imagenette",
    classes=10,
    train=9_469,
    test=3_925,
    archive="imagenette",
    address="https://github.com/fastai/imagenette",
    names=frozenset(NETTE.split()),
)
IMAGENET = PublishedImageSet("imagenet", 1000, 1_281_167, 50_000, "ilsvrc", "https://image-net.org/download")


def inspect(folder: str | os.PathLike[str]) -> list[DatasetFinding]:
    """What is in ``folder`` and in the folders directly inside it; every file of CIFAR is checked."""
    root = folder_contents.check_folder(folder)
    images = list(_image_folders(root))
    found = {finding.name for finding in images}
    missing = [_report_missing(known, root) for known in (IMAGENET, IMAGENETTE) if known.name not in found]
    return [_cifar(known, root) for known in CIFAR_SETS] + images + missing


# --- CIFAR ----------------------------------------------------------------------------------------------


def _cifar(known: Cifar, root: Path) -> DatasetFinding:
    """The most complete version."""
    places = [(version, at) for version in known.versions for at in [find_version_folder(version, root)] if at]
    if places:
        return max((_version(known, *place) for place in places), key=lambda finding: finding.state == "complete")
    for version in known.versions:
        if (archive := root / version.archive).is_file():
            return DatasetFinding(
                known.name, archive, "packed", ("not unpacked yet",), folder_contents.advise_unpacking(archive)
            )
    return DatasetFinding(known.name, root, "absent", (), f"download {known.versions[0].archive} from {ADDRESS}")


def _version(known: Cifar, version: CifarVersion, at: Path) -> DatasetFinding:
    missing = [f"{name} is missing" for name in version.files if name not in version.present(at)]
    wrong = [*missing, *find_damage(known, version, at)]
    if wrong:
        return DatasetFinding(known.name, at, "incomplete", tuple(wrong), f"download {version.archive} from {ADDRESS}")
    count = sum(count_images(known, version, name) for name in version.train)
    return DatasetFinding(known.name, at, "complete", (f"{count:,} training and {known.test:,} test images",))


# --- image folders --------------------------------------------------------------------------------------


def _image_folders(root: Path) -> Iterator[DatasetFinding]:
    for at in (root, *folder_contents.list_folders(root)):
        if folder_contents.find_parts(at) and any(
            map(folder_contents.has_classes, folder_contents.find_parts(at) or ())
        ):
            yield _divided(at)
            if at == root:
                return
        elif at == root and folder_contents.has_classes(at):
            yield _undivided(at)
            return


def _divided(at: Path) -> DatasetFinding:
    train, test = (
        {part.name: len(list_images(part)) for part in folder_contents.list_folders(half)}
        for half in folder_contents.find_parts(at) or ()
    )
    known = _recognise_classes(set(train))
    there = f"{len(train)} classes, {sum(train.values()):,} training and {sum(test.values()):,} test images"
    wrong = list(_find_problems(train, test, known))
    name, advice = (known.name, f"full dataset: {known.address}") if known else ("folder", "")
    return DatasetFinding(name, at, "incomplete" if wrong else "complete", (there, *wrong), advice if wrong else "")


def _find_problems(train: dict[str, int], test: dict[str, int], known: PublishedImageSet | None) -> Iterator[str]:
    for half, counts in (("training", train), ("test", test)):
        if empty := [name for name, count in counts.items() if not count]:
            yield f"{len(empty)} {half} folders without images, the first is {empty[0]}"
    if strange := sorted(set(test) - set(train)):
        yield f"{len(strange)} classes occur only among the test images, the first is {strange[0]}"
    if known and (sum(train.values()), sum(test.values())) != (known.train, known.test):
        yield f"the published {known.name} has {known.train:,} and {known.test:,}"


def _recognise_classes(classes: set[str]) -> PublishedImageSet | None:
    if classes == IMAGENETTE.names:
        return IMAGENETTE
    wordnet = all(name.startswith("n") and name[1:].isdigit() for name in classes)
    return IMAGENET if wordnet and len(classes) == IMAGENET.classes else None


def _undivided(at: Path) -> DatasetFinding:
    counts = [len(list_images(part)) for part in folder_contents.list_folders(at)]
    there = f"{len(counts)} classes, {sum(counts):,} images, not divided into train/ and val/"
    return DatasetFinding(
        "folder", at, "complete", (there,), "use it for evaluation only: training would use the same images"
    )


def _report_missing(known: PublishedImageSet, root: Path) -> DatasetFinding:
    packed = [at for at in folder_contents.list_archives(root) if at.name.lower().startswith(known.archive)]
    if packed:
        return DatasetFinding(
            known.name, packed[0], "packed", ("not unpacked yet",), folder_contents.advise_unpacking(packed[0])
        )
    return DatasetFinding(known.name, root, "absent", (), f"download it from {known.address}")
