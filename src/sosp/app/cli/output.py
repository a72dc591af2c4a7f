"""Print what the user sees: text and a progress bar, or JSON lines; errors and how to resume after them."""

from __future__ import annotations

import json
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import typer
from rich.console import Console, RenderableType
from rich.text import Text

from sosp.app.cli.progress_bar import ProgressBar
from sosp.app.cli.terminal_tables import EVENT_FORMATS
from sosp.app.run.run_folder import RunFolder
from sosp.core import distributed
from sosp.errors import SospError, TrainingError
from sosp.training import Moment

REFUSED, FAILED, STOPPED = 2, 3, 130  # exit codes; 0 is done, 1 a bug with its traceback
UNLIMITED_WIDTH = 10_000  # columns, more than a table has
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # names with brackets stay what they are


class Screen:
    """Where a command prints. Of several processes only the first one does."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(quiet=as_json or not distributed.is_main(), **PLAIN)
        if not self.console.is_terminal:  # a file has lines of any length
            self.console.soft_wrap, self.console.width = True, UNLIMITED_WIDTH
        self.run: RunFolder | None = None
        self.bar = ProgressBar(self.console)
        self.warned: set[str] = set()

    # --- printing ---------------------------------------------------------------------------------------

    def print_lines(self, *lines: RenderableType) -> None:
        """Text or tables, for people; the log of the run gets them too."""
        for line in lines:
            self.console.print(wrap_text(line, self.console) if isinstance(line, str) else line)
        if self.run is not None and self.run.writes:
            with self.run.open_log() as file:
                log = Console(file=file, width=UNLIMITED_WIDTH, no_color=True, soft_wrap=True, **PLAIN)
                for line in lines:
                    log.print(line)

    def print_json(self, facts: Mapping[str, Any]) -> None:
        """One line of JSON, for machines."""
        if self.as_json and distributed.is_main():
            print(json.dumps(replace_nonfinite(facts), allow_nan=False, default=str), flush=True)

    # --- a run as it goes (pipeline.Watcher) ------------------------------------------------------------

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        facts = replace_nonfinite({"event": name, **facts})
        if self.run is not None:
            self.run.append_metrics(facts)
        self.print_json(facts)
        if name in EVENT_FORMATS:
            self.print_lines(EVENT_FORMATS[name](facts))
        if name == "end":
            self.bar.clear()

    def step(self, stage: str, done: int, total: int, moment: Moment) -> None:
        self.bar.update(stage, done, total, moment)

    # --- the end ----------------------------------------------------------------------------------------

    @contextmanager
    def handle_errors(self) -> Iterator[Screen]:
        """Refusals become one line and an exit code; Ctrl-C says how to go on; a bug keeps its traceback."""
        with warnings.catch_warnings():
            warnings.showwarning = self.warn
            try:
                yield self
            except SospError as error:
                self._fail(str(error), FAILED if isinstance(error, TrainingError) else REFUSED)
            except OSError as error:
                if error.filename is None:
                    raise
                self._fail(f"{error.filename}: cannot be read or written ({error.strerror}).", REFUSED)
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
                self._fail(f"the device ran out of memory ({reason}); use a smaller batch or another device.", REFUSED)
            except KeyboardInterrupt:
                self._fail(f"stopped.{self._go_on()}", STOPPED)
            except SystemExit as stop:  # the end of a job's time, after which training saved what it had
                if self.run is None:  # nobody reads what we print any more
                    raise
                self._fail(f"stopped.{self._go_on()}", stop.code if isinstance(stop.code, int) else 1)
            except typer.Exit:
                raise
            except Exception as error:
                self.print_json({"error": f"{type(error).__name__}: {error}"})
                raise
            finally:
                self.bar.clear()

    def _go_on(self) -> str:
        if self.run is None:
            return ""
        return f" Finished work is in {self.run.folder}. Resume with: sosp run {self.run.folder}"

    def _fail(self, message: str, code: int) -> None:
        self.bar.clear()
        self.print_json({"error": message, "code": code})
        self._complain(Text(f"sosp: {message}", style="red"))
        if self.run is not None and self.run.writes:
            with suppress(OSError), self.run.open_log() as file:
                file.write(f"sosp: {message}\n")
        raise typer.Exit(code)

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Once each; takes the place of ``warnings.showwarning``, which is given more than the message."""
        if str(message) in self.warned:
            return
        self.warned.add(str(message))
        self.print_json({"warning": str(message)})
        self._complain(Text(f"sosp: {message}"))

    def _complain(self, words: Text) -> None:
        """To people; one line, where it is not a terminal."""
        if distributed.is_main() and not self.as_json:
            console = Console(stderr=True, **PLAIN)
            words.plain = wrap_text(words.plain, console)
            console.print(words, soft_wrap=True)


def wrap_text(text: str, console: Console) -> str:
    """On a terminal: broken between words, what follows set in. A file has lines of any length."""
    if not console.is_terminal:
        return text
    return "\n".join(
        textwrap.fill(
            line,
            console.width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 4),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def replace_nonfinite(value: Any) -> Any:
    """Without the numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(k): replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
