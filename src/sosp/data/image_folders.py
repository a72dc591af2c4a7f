"""Image folders in the style of ImageNet: one folder for each class, in train/ and val/."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from sosp.core.progress import track_progress
from sosp.data import folder_contents
from sosp.data.batch_source import Dataset
from sosp.data.image_decoding import find_image_error, import_pillow
from sosp.data.image_files import Folder, warn_unreadable
from sosp.data.scale import IMAGENET_MEAN, IMAGENET_STD, Scale
from sosp.errors import ArgumentError, DataError, check_whole_number, suggest_name

SLAB = 256  # files that a thread looks at in one go
NAMED = 10  # folders that a message lists
THREADS = 8  # more wait for each other: 16 decoded fewer images a second
WANTED = (
    "Expected one folder per class that contains its images. If the labels are in a list, as for ImageNet's val/, "
    "move the images into such folders first."
)


def folder(
    path: str | os.PathLike[str],
    *,
    size: int = 224,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    workers: int | None = None,
    checked: bool = True,
    name: str = "folder",
) -> Dataset:
    """``path/train/CLASS/*.JPEG`` and ``path/val/CLASS/*.JPEG`` (or ``path/test``); any suffix of an image.

    A class's number is the rank of its folder's name in train/; val/ may lack some. A folder that holds the class
    folders itself is for evaluation: train and test are then the same images.

    Training images are random crops (8 to 100 % of the area, 3:4 to 4:3) resized to ``size``, mirrored with probability
    1/2; test images are resized to 256/224 of ``size`` and cut in the middle. Every file's first bytes are looked at
    once; what is no image is named in an ``UnreadableWarning`` and left out (``checked=False`` spares the look).
    """
    root = folder_contents.check_folder(path)
    check_whole_number("size", size)
    threads = min(THREADS, os.cpu_count() or 1) if workers is None else check_whole_number("workers", workers)
    import_pillow()
    trees = read_parts(root)
    classes = tuple(trees[0].files)
    bad = find_unreadable([file for tree in trees for file in tree.all()], threads) if checked else {}
    scale = Scale.of(mean, std, 255.0)
    if scale.mean.shape[1] != 3:
        raise ArgumentError(f"mean={tuple(mean)} must have three numbers, for red, green and blue.")
    sources = [_source(tree, classes, bad, size, scale, threads) for tree in trees]
    return Dataset(name, train=sources[0], test=sources[-1], classes=classes, shape=(3, size, size))


def _source(
    tree: ClassFolders, classes: Sequence[str], bad: dict[str, str], size: int, scale: Scale, threads: int
) -> Folder:
    number = {name: i for i, name in enumerate(classes)}
    rows = [(file, number[name]) for name, files in tree.files.items() for file in files if file not in bad]
    if not rows:
        raise DataError(f"none of the images in {tree.root} can be read.")
    files, labels = zip(*rows, strict=True)
    return Folder(files, torch.tensor(labels), size, round(size * 256 / 224), scale, threads)


# --- which files there are ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassFolders:
    """The images of each class, by name."""

    root: Path
    files: dict[str, list[str]]

    def all(self) -> list[str]:
        return [file for files in self.files.values() for file in files]


def read_parts(root: Path) -> list[ClassFolders]:
    """The trees of train/ and val/, or the only one."""
    both = folder_contents.find_parts(root)
    if both is None:
        return [read_class_folders(check_single_part(root))]
    train, test = (read_class_folders(part) for part in both)
    if strange := [name for name in test.files if name not in train.files]:
        raise DataError(
            f"{test.root} has classes that {train.root} does not have: "
            f"{_list(strange)}.{suggest_name(strange[0], train.files)} Classes are numbered by the sorted folder "
            "names in train/, so val/ cannot have other classes."
        )
    return [train, test]


def check_single_part(root: Path) -> Path:
    """A folder without train/ and val/ must hold classes."""
    for name, other in (("train", "val"), ("val", "train"), ("test", "train")):
        if folder_contents.has_classes(root / name):
            raise DataError(
                f"{root} has {name}/ but no {other}/. Unpack that too, or give {root / name}, whose images are then "
                "both training and test set."
            )
    inside = folder_contents.list_folders(root)
    deeper = [
        at for at in inside if folder_contents.find_parts(at) or (len(inside) == 1 and folder_contents.has_classes(at))
    ]
    if deeper and not folder_contents.has_classes(root):
        raise DataError(f"{root} is one folder too high: give {deeper[0]}.")
    return root


def read_class_folders(root: Path) -> ClassFolders:
    """The images under each class folder, sorted."""
    found = ClassFolders(root, {at.name: list_images(at) for at in folder_contents.list_folders(root)})
    if not found.files:
        raise DataError(f"{root} {folder_contents.describe_folder(root)}. {WANTED}")
    if not any(found.files.values()):
        raise DataError(f"there is no image in {root}, which {folder_contents.describe_folder(root)}. {WANTED}")
    if empty := [name for name, files in found.files.items() if not files]:
        many = f"{len(empty)} of {len(found.files)} class folders in {root}"
        raise DataError(
            f"{many} contain no images: {_list(empty)}. Was the archive unpacked completely? Remove folders that are "
            "not classes."
        )
    return found


def list_images(at: Path) -> list[str]:
    """Every image below a folder."""
    found: list[str] = []
    for where, inner, names in os.walk(at):
        inner[:] = [name for name in inner if not name.startswith(".")]  # not entered
        found += [os.path.join(where, name) for name in names if folder_contents.is_image(name)]
    return sorted(found)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


# --- can they be read? ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileCheck:
    """Some files after a look at their first bytes."""

    count: int
    bad: dict[str, str]


def _check_files(files: Sequence[str]) -> FileCheck:
    complaints = ((file, find_image_error(file)) for file in files)
    return FileCheck(len(files), {file: why for file, why in complaints if why is not None})


def find_unreadable(files: list[str], threads: int) -> dict[str, str]:
    """The files that are no images, with the reason; a warning names them."""
    slabs = [files[i : i + SLAB] for i in range(0, len(files), SLAB)]
    bad: dict[str, str] = {}
    with ThreadPoolExecutor(threads) as pool:
        for looked in track_progress(
            pool.map(_check_files, slabs), "looking at image files", total=len(files), weight="count"
        ):
            bad |= looked.bad
    if bad:
        warn_unreadable(list(bad.items()), len(files), "are left out")
    return bad
