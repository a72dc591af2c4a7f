"""What a folder looks like at a glance, for messages about the wrong one."""

from __future__ import annotations

import os
from pathlib import Path

from sosp.data.cifar_files import CIFAR_SETS, find_version_folder
from sosp.errors import ArgumentError, DataError

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp", ".gif")
EVALUATION = ("val", "test")  # names of the part beside train/, the better one first
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")


def check_folder(folder: object) -> Path:
    """Refuse what is no folder."""
    if not isinstance(folder, (str, os.PathLike)):
        raise ArgumentError(f"folder={folder!r:.80} is a {type(folder).__name__}; give a path.")
    path = Path(folder).expanduser()
    if not path.exists():
        raise DataError(f"there is no folder {path}.{_nearest_parent(path)}")
    if not path.is_dir():
        unpack = advise_unpacking(path) if is_archive(path) else "give the folder that contains the data."
        raise DataError(f"{path} is a file; {unpack}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise DataError(f"{path} cannot be read by this user; change its permissions.")
    return path


def _nearest_parent(path: Path) -> str:
    parent = next((at for at in path.absolute().parents if at.is_dir()), None)
    return f" {parent} exists." if parent else ""


def is_image(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(SUFFIXES)


def is_archive(path: Path) -> bool:
    return path.name.endswith(ARCHIVES)


def list_archives(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if is_archive(entry))


def advise_unpacking(archive: Path) -> str:
    command = "unzip" if archive.suffix == ".zip" else "tar xf"
    where = f"-d {archive.parent}" if archive.suffix == ".zip" else f"-C {archive.parent}"
    return f"unpack it first: {command} {archive} {where}"


def list_folders(path: Path) -> list[Path]:
    """The folders in a folder, sorted by name; hidden ones and what macOS leaves in archives do not count."""
    entries = (entry for entry in path.iterdir() if not entry.name.startswith((".", "__MACOSX")) and entry.is_dir())
    return sorted(entries, key=lambda entry: entry.name)


def has_image(path: Path) -> bool:
    """Directly in it."""
    with os.scandir(path) as entries:
        return any(is_image(entry.name) and entry.is_file() for entry in entries)


def has_classes(path: Path) -> bool:
    """Folders with images in one of the first few."""
    return path.is_dir() and any(has_image(at) for at in list_folders(path)[:5])


def find_parts(path: Path) -> tuple[Path, Path] | None:
    """The folders of the training and the evaluation part, if this is how a folder is divided."""
    other = next((path / name for name in EVALUATION if (path / name).is_dir()), None)
    return (path / "train", other) if other and (path / "train").is_dir() else None


def describe_folder(path: Path) -> str:
    """``looks like CIFAR-100``, for the end of a message."""
    for known in CIFAR_SETS:
        if any(find_version_folder(version, path) for version in known.versions):
            return f"looks like {known.title}: sosp.data.{known.name}({str(path)!r})"
    if both := find_parts(path):
        return f"looks like an image folder with {both[0].name}/ and {both[1].name}/: sosp.data.folder({str(path)!r})"
    if has_classes(path):
        return f"looks like an image folder with a folder for each class: sosp.data.folder({str(path)!r})"
    if packed := list_archives(path):
        each = "unpack each archive into a folder with the same name"
        return f"contains {packed[0].name}; {advise_unpacking(packed[0]) if len(packed) == 1 else each}"
    if has_image(path):
        return "contains images, but no folder for each class"
    names = sorted(os.listdir(path))
    return f"contains {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}" if names else "is empty"
