"""Find a function of the user's by its name: ``path/to/file.py:function`` or ``package.module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sosp.errors import ArgumentError, suggest_name


def load_function(name: str) -> Callable[..., Any]:
    """The function; the file or module it is in is run."""
    place, _, wanted = name.rpartition(":")
    module = _file(Path(place).expanduser()) if place.endswith(".py") else _module(place)
    found = getattr(module, wanted, None)
    if not callable(found):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ArgumentError(f"{place} has no function {wanted!r}.{suggest_name(wanted, public)}")
    return found


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ArgumentError(f"there is no file {path} (relative to {Path.cwd()}).")
    name = f"sosp_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in it look themselves up there
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)  # it may import the files that lie beside it, as when Python runs it
    spec.loader.exec_module(module)
    return module


def _module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise ArgumentError(
                f"there is no module {place!r} to import. For a file, give its path, which ends with .py."
            ) from error
        raise  # something that the user's module needs
    except (TypeError, ValueError) as error:  # '' or '.name'
        raise ArgumentError(
            f"{place!r} is not the name of a module. For a file, give its path, which ends with .py."
        ) from error
