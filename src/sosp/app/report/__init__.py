"""Show what a run did: one page of HTML that needs nothing else, figures for papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sosp.app.run.run_folder import REPORT
from sosp.core.optional_packages import import_package
from sosp.core.text_files import write_text
from sosp.errors import ArgumentError, RunError

if TYPE_CHECKING:
    from sosp.app.demo import DemoRow
    from sosp.pipeline.tradeoff import TradeoffPoint

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


def write_demo_page(folder: Path, rows: Sequence[DemoRow]) -> Path:
    """Write ``report.html`` of the demo into its folder."""
    require_packages()
    from sosp.app.report.demo_page import render_demo_page

    write_text(folder / REPORT, render_demo_page(folder, rows))
    return folder / REPORT


def write_tradeoff_page(
    path: str | Path,
    points: Sequence[TradeoffPoint],
    *,
    title: str = "Trade-off curve",
    quality: str = "agreement with the unpruned network",
    words: Sequence[str] = (),
) -> Path:
    """Write one page about a trade-off curve.

    Args:
        path: File to write. Another file than a report is not replaced.
        points: The networks in the order of the page; one with ``budget=1`` is the unpruned network.
        title: Heading of the page, such as the name of the network.
        quality: Name of the quality, such as ``"accuracy on 10,000 test images"``.
        words: Sentences below the heading: what was measured, and how.

    Returns:
        The path.

    Raises:
        ArgumentError: There are no points.
        RunError: The file cannot be written, or is not a report.
    """
    require_packages()
    from sosp.app.report.tradeoff_page import render_tradeoff_page

    if not points:
        raise ArgumentError("a trade-off curve needs at least one point.")
    refuse_foreign(Path(path))
    write_text(Path(path), render_tradeoff_page(points, title=title, quality=quality, words=words))
    return Path(path)


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


__all__ = ["keep_report", "write_demo_page", "write_figures", "write_report", "write_tradeoff_page"]
