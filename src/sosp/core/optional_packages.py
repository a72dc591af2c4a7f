"""Packages that not everybody needs: import one, or name the command that installs it."""

from __future__ import annotations

import importlib
from types import ModuleType

from sosp.core.user_errors import format_error_message
from sosp.errors import SospError

# Package -> the extra of sosp that brings it. Any other package is installed by its own name.
EXTRAS = {"typer": "cli", "rich": "cli", "jinja2": "report", "matplotlib": "report"}


def import_package(name: str) -> ModuleType:
    """Import an optional package, or a module of one.

    Raises:
        SospError: If it is not installed, with the command that installs it; or if it cannot be imported.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        absent = "is not installed" if missing == package else f"cannot be imported: it needs {missing}"
        command = f"pip install 'sosp[{EXTRAS[missing]}]'" if missing in EXTRAS else f"pip install {missing}"
        raise SospError(f"{package} {absent}: {command}") from error
    except Exception as error:  # whatever a package does when it is imported
        raise SospError(
            f"{name} is installed, but cannot be imported: {type(error).__name__}: {format_error_message(error)}. "
            f"Does it belong to this version of torch (python -c 'import {name}')?"
        ) from error
