"""Small files that several processes read and write: JSON and text, written whole or not at all, and locks."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from sosp.errors import RunError


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise RunError(f"{path}: is not valid JSON ({error}).") from error


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def lock_file(file: IO[str]) -> None:
    """Until the file is closed or the process ends; OSError where another process has it."""
    with suppress(ImportError):  # not on Windows, where two processes in one folder go unnoticed
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
