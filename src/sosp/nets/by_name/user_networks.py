"""Networks that a function of the user's makes."""

from __future__ import annotations

from typing import Any

from torch import nn

from sosp.core.user_code import load_function
from sosp.core.user_errors import convert_user_errors
from sosp.errors import ArgumentError
from sosp.nets import Width
from sosp.nets.by_name.network_source import NetworkSource


def _make(name: str, classes: int | None, width: Width) -> Any:
    if classes is not None:
        raise ArgumentError(f"classes cannot be set for {name!r}, which is called without arguments.")
    with convert_user_errors(name):
        return load_function(name)()


def _example(name: str, model: nn.Module) -> Any:
    raise ArgumentError(f"the input shape of {name!r} is not known: give it (input 3x32x32), or name a dataset.")


OWN = NetworkSource(_make, _example)
