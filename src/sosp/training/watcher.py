"""Define the interface of objects that show the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sosp.training.results import Moment


class Watcher(Protocol):
    """An observer of the progress of a run."""

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Report an event that is worth a line of output."""
        ...

    def step(self, stage: str, done: int, total: int, moment: Moment) -> None:
        """Report that ``done`` of ``total`` steps of a training are done."""
        ...
