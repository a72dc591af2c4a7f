"""One safetensors file: written whole or not at all, and read only if it is exactly what was written."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sosp.errors import ArgumentError, CheckpointError

FORMAT = 1
KEY = "sosp"  # of the one entry in the metadata; safetensors writes several in random order
# The description starts with its format and the checksum of all that follows, so that both are known before it is
# parsed. Every later format starts like this.
START = re.compile(r'\{"format":([1-9][0-9]{0,8}),"sha256":"([0-9a-f]{64})",')
LONGEST = 100_000_000  # bytes of a header that safetensors reads


def parse_path(path: object) -> Path:
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path={path!r} is a {type(path).__name__}; give a str or a pathlib.Path.")
    return Path(path)


@contextmanager
def prefix_errors(path: Path) -> Iterator[None]:
    """Begin every refusal inside with the name of the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__


def write_safetensors(path: Path, description: str, tensors: Mapping[str, Tensor]) -> None:
    """``description`` is a JSON object with at least one key. A file that was there is replaced at the very end."""
    whole = f'{{"format":{FORMAT},"sha256":"{compute_checksum(description, tensors)}",{description[1:]}'
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise CheckpointError("already exists and is not a file; give the name of a file.")
        with _make_temporary_path(target) as temporary:
            _write(temporary, whole, tensors)
            os.replace(temporary, target)
        _sync_folder(target.parent)
    except CheckpointError:
        raise
    except Exception as error:  # a full disk has no exception of its own in safetensors
        raise CheckpointError(f"could not be written ({describe_error(error)}).") from error


@contextmanager
def _make_temporary_path(target: Path) -> Iterator[Path]:
    """A name in the same folder, for a file that is gone when the block ends, however it ends."""
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink()


def _write(temporary: Path, description: str, tensors: Mapping[str, Tensor]) -> None:
    """To the disk, and with the permissions that any new file gets here: safetensors lets nobody else read its own."""
    with open(temporary, "xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    save_file(dict(tensors), temporary, metadata={KEY: description})
    os.chmod(temporary, mode)
    with open(temporary, "r+b") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, on systems that can say."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_safetensors(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The description as it was given to ``write``, still to be parsed, and the tensors, in memory of their own."""
    _check_header(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            given, description = _open(file.metadata() or {})
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            found = compute_checksum(description, tensors)
    except CheckpointError:
        raise
    except Exception as error:  # torch adds exceptions of its own to those of safetensors
        raise CheckpointError(f"is truncated or damaged ({describe_error(error)}).") from error
    if found != given:
        raise CheckpointError("is damaged or was changed after it was written: its checksum does not match.")
    return description, tensors


def _check_header(path: Path) -> None:
    """Refuse what is not a safetensors file by its first bytes: the length of the header, then a JSON object."""
    try:
        if not path.is_file():
            raise CheckpointError("is not a file." if path.exists() else "there is no such file.")
        with open(path, "rb") as file:
            start, size = file.read(9), os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        raise CheckpointError(f"could not be opened ({describe_error(error)}).") from error
    header = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or header > LONGEST:
        hint = " It looks like a file of torch.save." if start.startswith(b"PK\x03\x04") else ""
        raise CheckpointError(f"is not a safetensors file, so it was not written by sosp.save.{hint}")
    if size < 8 + header:
        raise CheckpointError(f"is truncated: it has {size} bytes, but its header alone should have {8 + header}.")


def _open(metadata: Mapping[str, str]) -> tuple[str, str]:
    """The checksum and the description without its start."""
    start = START.match(metadata.get(KEY, ""))
    if start is None:
        raise CheckpointError(
            "is a safetensors file that was not written by sosp.save: it has no description of a model."
        )
    if int(start[1]) > FORMAT:
        raise CheckpointError(
            f"was written by a newer sosp (format {start[1]}; this one reads up to {FORMAT}). Upgrade sosp to read it."
        )
    return start[2], "{" + metadata[KEY][start.end() :]


def compute_checksum(description: str, tensors: Mapping[str, Tensor]) -> str:
    """sha256 of the description and of every tensor in the order of their names: name, type, shape, bytes."""
    found = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        x = tensors[name]
        found.update(f"\0{name}\0{x.dtype}\0{tuple(x.shape)}\0".encode())
        flat = x.contiguous().as_strided((x.numel(),), (1,))  # reshape leaves one element with any stride it has
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def describe_error(error: Exception) -> str:
    """The first line: torch's messages go on with its C++ stack."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
