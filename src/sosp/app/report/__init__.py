"""Show what a run did: one page of HTML that needs nothing else, figures for papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sosp.app.run.run_folder import REPORT
from sosp.core.optional_packages import import_package
from sosp.core.text_files import write_text
from sosp.errors import ArgumentError, RunError

MARK = '<meta name="generator" content="sosp">'  # of a file that is ours to replace


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """One page about these runs, finished or not: ``out``, or ``report.html`` in the folder of a single run."""
    require_packages()
    from sosp.app.report.page import render_page
    from sosp.app.report.run_facts import read_run

    if not runs:
        raise ArgumentError("there is nothing to report: name the folder of a run.")
    if out is None and len(runs) > 1:
        raise ArgumentError("a report of several runs needs a file name: give one with --out FILE.")
    path = Path(runs[0]) / REPORT if out is None else Path(out)
    found = [read_run(folder) for folder in runs]
    refuse_foreign(path)
    write_text(path, render_page(found))
    return path


def keep_report(run: Path, warn: Callable[[str], None], *, anew: bool) -> Path | None:
    """``report.html`` of a run that is done; where it cannot be drawn, a warning, for the run is worth more than it."""
    path = run / REPORT
    if path.is_file() and not anew:
        return path
    try:
        return write_report([run])
    except Exception as error:  # of a library that draws, of a disk that is full: whatever it is, the run is done
        warn(f"the report could not be written ({error}); try again: sosp report {run}")
        return None


def write_figures(runs: Sequence[str | Path], folder: str | Path) -> list[Path]:
    """Every figure of these runs as a PNG file of 300 dots per inch; the files."""
    require_packages()
    from sosp.app.report.page import save_figures
    from sosp.app.report.run_facts import read_run

    found, place = [read_run(run) for run in runs], Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{place}: cannot be written to ({error.strerror}).") from error
    return save_figures(found, place)


def require_packages() -> None:
    """Refuse to draw without the packages that draw; they take their time, so that nothing else imports them."""
    for name in ("jinja2", "matplotlib"):
        import_package(name)


def refuse_foreign(path: Path) -> None:
    """A report may take the place of a report, and of nothing else."""
    if path.is_dir() or not path.parent.is_dir():
        raise RunError(f"{path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}; name a file.")
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise RunError(f"{path}: already exists and is not a report. Choose another file.")


__all__ = ["keep_report", "write_figures", "write_report"]
