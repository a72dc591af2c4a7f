"""Ctrl-C and the end of a job's time, heard between two steps: a step is done whole or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody wants it to end."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._hear) for s in SIGNALS}
        try:
            yield
        finally:
            for s, handler in before.items():
                # None: not set from Python, so it cannot be put back from there.
                signal.signal(s, signal.SIG_DFL if handler is None else handler)

    def _hear(self, number: int, frame: Any) -> None:
        if self.signal is not None:  # a second time: at once
            raise KeyboardInterrupt
        self.signal = number

    def go(self) -> None:
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
