"""Handle Ctrl-C and SIGTERM between two steps, so that no step is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A request to stop the training, made by a signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def wanted(self) -> bool:
        """Return whether a signal asked to stop."""
        return self.signal is not None

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Record SIGINT and SIGTERM instead of acting on them; other threads than the main one cannot catch signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._record) for s in SIGNALS}
        try:
            yield
        finally:
            for s, handler in before.items():
                # None: the handler was not set from Python, so Python cannot restore it.
                signal.signal(s, signal.SIG_DFL if handler is None else handler)

    def _record(self, number: int, frame: Any) -> None:
        if self.signal is not None:  # the second signal stops at once
            raise KeyboardInterrupt
        self.signal = number

    def exit(self) -> None:
        """Raise the exception of the signal: SystemExit for SIGTERM, KeyboardInterrupt for Ctrl-C."""
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
