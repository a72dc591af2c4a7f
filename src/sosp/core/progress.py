"""Show progress on a terminal or in a notebook for anything over a second; silent elsewhere or when asked."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")
BAR_DELAY = 1.0  # seconds of silence before the bar appears
ACTIVE_BARS: list[Any] = []  # a terminal has room for one: a bar inside another stays silent


def is_progress_wanted() -> bool:
    """Only on a terminal or in a notebook, and not where ``SOSP_PROGRESS=0`` asks for silence."""
    return (sys.stderr.isatty() or is_notebook()) and os.environ.get("SOSP_PROGRESS", "1") != "0"


def is_notebook() -> bool:
    """Return whether this runs in the kernel of a notebook."""
    return "ipykernel" in sys.modules


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
            ACTIVE_BARS.remove(bar)
            bar.stop()


def _bar(label: str, total: float | None) -> tuple[Any, Any]:
    """Return a bar of rich and its task; nothing where rich is not installed (``sosp[cli]`` brings it)."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None, None
    if is_notebook() and find_spec("ipywidgets") is None:
        return None, None  # rich draws in notebooks with it, and warns at every step without it
    console = Console(force_jupyter=True) if is_notebook() else Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    return bar, bar.add_task(label, total=total)
