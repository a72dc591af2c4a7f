"""Names that a package offers and imports only when they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_lazy_exports(
    package: str, names: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: The name of the package.
        names: Module -> the names that come from it, separated by spaces.
        modules: Name -> the module that it stands for.
    """
    places = {name: module for module, given in names.items() for name in given.split()}
    modules = modules or {}

    def getattr_(name: str) -> Any:
        if name in places:
            found = getattr(import_module(places[name]), name)
        elif name in modules:
            found = import_module(modules[name])
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        setattr(sys.modules[package], name, found)  # from now on it is an attribute like any other
        return found

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *modules})

    return getattr_, dir_
