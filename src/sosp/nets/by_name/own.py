"""Networks that a function of the user's makes."""

from __future__ import annotations

from typing import Any

from torch import nn

from sosp.core.user_code import function
from sosp.core.user_errors import users_code
from sosp.errors import ArgumentError
from sosp.nets import Width
from sosp.nets.by_name.source import Source


def _make(name: str, classes: int | None, width: Width) -> Any:
    if classes is not None:
        raise ArgumentError(f"classes is not for {name!r}, which is called without arguments.")
    with users_code(name):
        return function(name)()


def _example(name: str, model: nn.Module) -> Any:
    raise ArgumentError(f"it is not known what inputs {name!r} takes: say it (input 3x32x32), or name a dataset.")


OWN = Source(_make, _example)
