"""Show a progress bar for training: epoch, time left, loss and accuracy, images per second."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sosp.core.progress import ACTIVE_BARS
from sosp.training import Moment


class ProgressBar:
    """Drawn below the lines that are printed; only on a terminal, and gone when it is cleared."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.drawn: Progress | None = None

    def update(self, stage: str, done: int, total: int, moment: Moment) -> None:
        if self.console.quiet or not self.console.is_terminal or os.environ.get("SOSP_PROGRESS") == "0":
            return
        words = describe_moment(stage, moment)
        if self.drawn is None:
            self.drawn = Progress(*COLUMNS, console=self.console, transient=True)
            self.drawn.add_task(stage, total=total, **words)
            self.drawn.start()
            ACTIVE_BARS.append(self.drawn)  # so that no other bar appears inside it
        self.drawn.update(self.drawn.task_ids[0], completed=done, total=total, **words)

    def clear(self) -> None:
        if self.drawn is not None:
            self.drawn.stop()
            ACTIVE_BARS.remove(self.drawn)
            self.drawn = None


def describe_moment(stage: str, moment: Moment) -> dict[str, Any]:
    loss = "" if moment.loss is None else f"loss {moment.loss:.3f}"
    right = "" if moment.accuracy is None else f"accuracy {moment.accuracy:.1%}"
    return {
        "where": f"{stage} epoch {moment.epoch}",
        "seen": "  ".join(filter(None, [loss, right, f"{moment.images_per_second:,.0f} images/s"])),
    }


COLUMNS = (
    TextColumn("{task.fields[where]}", markup=False),
    BarColumn(),
    TextColumn("{task.percentage:.0f} %", markup=False),
    TimeRemainingColumn(),
    TextColumn("{task.fields[seen]}", markup=False),
)
