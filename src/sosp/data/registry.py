"""Datasets by name: the known ones, and those that a function of the user's returns."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from sosp.core.user_code import load_function
from sosp.data.batch_source import Dataset
from sosp.data.cifar import cifar10, cifar100
from sosp.data.embedded_data import digits
from sosp.data.image_folders import folder as image_folder
from sosp.data.resident_images import Resident
from sosp.errors import ArgumentError, DataError, suggest_name

IN_FOLDERS: dict[str, Callable[[str | os.PathLike[str]], Dataset]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "imagenet": partial(image_folder, name="imagenet"),
    "folder": image_folder,
}
EMBEDDED: dict[str, Callable[[], Dataset]] = {"digits": digits}
FORMS = "a sosp.data.Dataset, or a pair (train, test) of pairs of tensors (images, labels)"


def load(name: str, folder: str | os.PathLike[str] | None = None) -> Dataset:
    """A known dataset (cifar10, cifar100, imagenet, folder: with ``folder``; digits), or the user's own.

    ``"path/to/file.py:function"`` or ``"package.module:function"`` calls the function, with ``folder`` if given. It
    returns a ``Dataset``, or a pair (train, test) of pairs of tensors (images, labels), taken without augmentation.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"name={name!r:.80} is a {type(name).__name__}; give the name of a dataset.")
    if name in IN_FOLDERS:
        if folder is None:
            raise ArgumentError(
                f"{name!r} is read from files: give their folder with folder=... (--data-dir on the command line)."
            )
        return IN_FOLDERS[name](folder)
    if name in EMBEDDED:
        if folder is not None:
            raise ArgumentError(f"{name!r} is not read from a folder; leave out folder={str(folder)!r}.")
        return EMBEDDED[name]()
    if ":" in name:
        return _load_user_dataset(name, folder)
    known = [*IN_FOLDERS, *EMBEDDED]
    raise ArgumentError(
        f"there is no dataset {name!r}.{suggest_name(name, known)} Choose one of: {', '.join(known)}; or name your "
        "own function: path/to/file.py:function or package.module:function."
    )


def _load_user_dataset(name: str, folder: str | os.PathLike[str] | None) -> Dataset:
    made = load_function(name)
    return convert_to_dataset(made() if folder is None else made(folder), name)


def convert_to_dataset(found: Any, name: str) -> Dataset:
    """What a user's function returned, as a Dataset."""
    if isinstance(found, Dataset):
        return found
    if not _is_pair(found) or not all(_is_pair(part) and all(isinstance(x, Tensor) for x in part) for part in found):
        raise DataError(f"{name} returned {_shape_of(found)}; it must return {FORMS}.")
    try:
        train, test = (Resident.of(*part) for part in found)
    except DataError as error:
        raise DataError(f"{name} returned {_shape_of(found)}: {error}") from None
    if train.shape != test.shape:
        raise DataError(f"{name} returned training images of shape {train.shape} and test images of {test.shape}.")
    classes = 1 + max(int(part.labels.max()) for part in (train, test))
    return Dataset(name, train, test, tuple(map(str, range(classes))), train.shape)


def _is_pair(found: Any) -> bool:
    return isinstance(found, (tuple, list)) and len(found) == 2


def _shape_of(found: Any, depth: int = 2) -> str:
    """``a tuple of (Tensor(10, 3), int)``."""
    if isinstance(found, Tensor):
        return f"Tensor{tuple(found.shape)}"
    if isinstance(found, (tuple, list)) and depth and 0 < len(found) <= 4:
        return f"a {type(found).__name__} of ({', '.join(_shape_of(x, depth - 1) for x in found)})"
    return f"{type(found).__name__}" + (f" of {len(found)}" if isinstance(found, (tuple, list, dict)) else "")
