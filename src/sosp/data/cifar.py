"""CIFAR-10 and CIFAR-100 from the official files, in the python or the binary version."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sosp.data import folder_contents, pickles
from sosp.data.batch_source import Dataset
from sosp.data.cifar_files import ADDRESS, CIFAR10, CIFAR100, PIXELS, Cifar, CifarVersion, find_version_folder
from sosp.data.resident_images import Resident
from sosp.data.scale import IMAGENET_MEAN, IMAGENET_STD
from sosp.errors import DataError

LARGEST = 2**28  # bytes; the largest official file has 155 million
PAD = 4  # the augmentation of He et al. 2016: 4 zeros around, a random crop, a flip
Images = tuple[np.ndarray, np.ndarray]  # (n, 3072) uint8 and labels (n,)


def cifar10(
    folder: str | os.PathLike[str],
    *,
    checked: bool = True,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Dataset:
    """CIFAR-10 from ``folder``, the unpacked one (``cifar-10-batches-py`` or ``-bin``) or the one above it.

    Training images are padded by 4 zeros, cropped at random and mirrored. ``mean`` and ``std`` are by default those of
    ImageNet, which published CIFAR networks were often trained with. ``checked=False`` takes files other than the
    official ones: of the same form, with any number of images.
    """
    return _load(CIFAR10, folder, checked, mean, std)


def cifar100(
    folder: str | os.PathLike[str],
    *,
    checked: bool = True,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Dataset:
    """CIFAR-100 with its 100 fine labels from ``folder`` (``cifar-100-python`` or ``-binary``); see ``cifar10``."""
    return _load(CIFAR100, folder, checked, mean, std)


def _load(known: Cifar, folder: object, checked: bool, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    version, at = find_version(known, folder_contents.check_folder(folder))
    parts = _read_parts(known, version, at, checked)
    train, test = ((torch.from_numpy(x).view(-1, 3, 32, 32), torch.from_numpy(y)) for x, y in parts)
    return Dataset(
        name=known.name,
        train=Resident.of(*train, mean=mean, std=std, pad=PAD, flip=True),
        test=Resident.of(*test, mean=mean, std=std),
        classes=known.classes,
        shape=(3, 32, 32),
    )


# --- finding the files ----------------------------------------------------------------------------------


def find_version(known: Cifar, root: Path) -> tuple[CifarVersion, Path]:
    """The version that is complete, and where; otherwise say what is missing."""
    places = [(version, at) for version in known.versions if (at := find_version_folder(version, root))]
    for version, at in places:
        if len(version.present(at)) == len(version.files):
            return version, at
    raise DataError(describe_incomplete(known, *places[0]) if places else describe_missing(known, root))


def describe_incomplete(known: Cifar, version: CifarVersion, at: Path) -> str:
    missing = [name for name in version.files if name not in version.present(at)]
    return (
        f"{at} contains only a part of {known.title}; missing: {', '.join(missing)}. {_advise_unpacking(version, at)}"
    )


def _advise_unpacking(version: CifarVersion, at: Path) -> str:
    for archive in (at / version.archive, at.parent / version.archive):
        if archive.is_file():
            return f"Unpack again: tar xf {archive} -C {archive.parent}"
    return f"Download {version.archive} from {ADDRESS} and unpack it again."


def describe_missing(known: Cifar, root: Path) -> str:
    for version in known.versions:
        if (archive := root / version.archive).is_file():
            return f"{known.title} is in {root} as {archive.name}; {folder_contents.advise_unpacking(archive)}"
    version = known.versions[0]
    return (
        f"there is no {known.title} in {root}, which {folder_contents.describe_folder(root)}. Expected "
        f"{version.folder}/ with {version.files[0]} ...; download {version.archive} from {ADDRESS}"
    )


# --- reading them ---------------------------------------------------------------------------------------


def _read_parts(known: Cifar, version: CifarVersion, at: Path, checked: bool) -> tuple[Images, Images]:
    """The training and the test part."""
    train, test = (_join(known, version, at, names, checked) for names in (version.train, version.test))
    if checked:
        check_dataset(known, version, at, train, test)
    return train, test


def _join(known: Cifar, version: CifarVersion, at: Path, names: Sequence[str], checked: bool) -> Images:
    parts = [read_file(known, version, at / name, checked) for name in names]
    return np.concatenate([pixels for pixels, _ in parts]), np.concatenate([labels for _, labels in parts])


def read_file(known: Cifar, version: CifarVersion, path: Path, checked: bool) -> Images:
    """The images and labels of one file."""
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise DataError(f"has {size:,} bytes, far more than any file of {known.title}.")
        raw = path.read_bytes()
        if checked:
            check_bytes(known, version, path.name, raw)
        return _binary(raw, version, len(known.classes)) if version.label_bytes else _python(raw, len(known.classes))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except DataError as error:
        raise DataError(f"{path} {error}") from None


def _python(raw: bytes, classes: int) -> Images:
    """A dict with ``data`` and, for CIFAR-10, ``labels``; for CIFAR-100, ``fine_labels``."""
    found = pickles.parse_pickle(raw)
    if not isinstance(found, dict):
        raise DataError(f"holds a {type(found).__name__}, not a dict with images.")
    key = "labels" if classes == 10 else "fine_labels"
    if missing := [name for name in ("data", key) if name not in found]:
        raise DataError(f"has no {' and no '.join(map(repr, missing))} in it. Is it a file of another dataset?")
    pixels, labels = found["data"], found[key]
    if type(labels) is not list or not all(type(label) is int and 0 <= label < classes for label in labels):
        raise DataError(f"has labels that are not a list of numbers from 0 to {classes - 1}.")
    shape = (len(labels), PIXELS)
    if not isinstance(pixels, pickles.ByteArray) or pixels.shape != shape or len(pixels.raw) != len(labels) * PIXELS:
        raise DataError(f"has {len(labels)} labels, but not the same number of images of {PIXELS} bytes.")
    return _rows(pixels.raw, PIXELS), np.array(labels, dtype=np.int64)


def _binary(raw: bytes, version: CifarVersion, classes: int) -> Images:
    """Rows of one or two label bytes, the fine one last, and the pixels."""
    rows = _rows(raw, version.label_bytes + PIXELS)
    labels = rows[:, version.label_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        raise DataError(f"has a label {labels.max()}, but the classes are 0 to {classes - 1}.")
    return rows[:, version.label_bytes :], labels


def _rows(raw: bytes, width: int) -> np.ndarray:
    if not raw or len(raw) % width:
        raise DataError(f"has {len(raw):,} bytes of images, not a multiple of {width}.")
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, width)


# --- are they the official ones? ------------------------------------------------------------------------


def count_images(known: Cifar, version: CifarVersion, name: str) -> int:
    return known.test if name in version.test else known.train // len(version.train)


def check_bytes(known: Cifar, version: CifarVersion, name: str, raw: bytes) -> None:
    """The published md5; where there is none, the exact size."""
    images = count_images(known, version, name)
    size = images * (version.label_bytes + PIXELS)
    if version.label_bytes and len(raw) != size:
        raise DataError(f"has {len(raw):,} bytes, the official file {size:,}. {_advise_check(version)}")
    found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if name in version.md5 and found != version.md5[name]:
        raise DataError(f"is not the official file: md5 {found}, not {version.md5[name]}. {_advise_check(version)}")


def _advise_check(version: CifarVersion) -> str:
    return f"Is it truncated? Unpack {version.archive} again ({ADDRESS}), or skip the check with checked=False."


def check_dataset(known: Cifar, version: CifarVersion, at: Path, train: Images, test: Images) -> None:
    """Each class as often as any other, and the known sums of the pixels: what the binary version has for an md5."""
    for part, (pixels, labels) in (("training", train), ("test", test)):
        counts = np.bincount(labels, minlength=len(known.classes))
        if counts.min() != counts.max():
            raise DataError(
                f"{at}: the {part} classes have {counts.min()} to {counts.max()} images. {_advise_check(version)}"
            )
        if known.sums and version.label_bytes and hash_pixels(pixels) != known.sums[part == "test"]:
            raise DataError(f"{at}: the {part} images are not those of {known.title}. {_advise_check(version)}")


def hash_pixels(pixels: np.ndarray) -> str:
    """md5 of the sum over the images at each position, whatever their order."""
    return hashlib.md5(pixels.sum(0, dtype="<i8").tobytes(), usedforsecurity=False).hexdigest()


def find_damage(known: Cifar, version: CifarVersion, at: Path) -> list[str]:
    """What is wrong with each file that is there; if nothing, and all are, with the whole."""
    present = version.present(at)
    tries: list[Callable[[], object]] = [partial(read_file, known, version, at / name, True) for name in present]
    wrong = [text for attempt in tries if (text := _catch_error(attempt))]
    if not wrong and len(present) == len(version.files):
        wrong = [text] if (text := _catch_error(partial(_read_parts, known, version, at, True))) else []
    return [text.removeprefix(f"{at}{os.sep}") for text in wrong]


def _catch_error(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except DataError as error:
        return str(error)
    return None
