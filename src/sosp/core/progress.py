"""Show progress on a terminal for anything over a second; silent elsewhere or when asked."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
BAR_DELAY = 1.0  # seconds of silence before the bar appears
ACTIVE_BARS: list[Any] = []  # a terminal has room for one: a bar inside another stays silent


def is_progress_wanted() -> bool:
    """Only on a terminal, and not where ``SOSP_PROGRESS=0`` asks for silence."""
    return sys.stderr.isatty() and os.environ.get("SOSP_PROGRESS", "1") != "0"


def track_progress(
    items: Iterable[T], label: str, total: float | None = None, weight: str | None = None
) -> Iterator[T]:
    """Yield the items; draw a bar once they have taken a second. ``weight`` names the attribute to count by."""
    bar, task = _bar(label, total) if is_progress_wanted() else (None, None)
    if bar is None:
        yield from items
        return
    start = time.monotonic()
    done = 0.0
    try:
        for item in items:
            yield item
            done += getattr(item, weight) if weight else 1
            if not ACTIVE_BARS and time.monotonic() - start > BAR_DELAY:
                bar.start()
                ACTIVE_BARS.append(bar)
            bar.update(task, completed=done)
    finally:
        if bar in ACTIVE_BARS:
            bar.stop()
            ACTIVE_BARS.remove(bar)


def _bar(label: str, total: float | None) -> tuple[Any, Any]:
    """Return a bar of rich and its task; nothing where rich is not installed (``sosp[cli]`` brings it)."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None, None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, transient=True)
    return bar, bar.add_task(label, total=total)
