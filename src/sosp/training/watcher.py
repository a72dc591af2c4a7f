"""The interface of whoever shows the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sosp.training.results import Moment


class Watcher(Protocol):
    """Who is told how a run goes."""

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Something happened that is worth a line."""
        ...

    def step(self, stage: str, done: int, total: int, moment: Moment) -> None:
        """So many steps of a training are done."""
        ...
