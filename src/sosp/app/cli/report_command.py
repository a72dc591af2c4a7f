"""Define the command that shows runs: report."""

from __future__ import annotations

from typing import Annotated

import typer

from sosp.app.cli.flags import Sections, add_flags
from sosp.app.cli.output import Screen
from sosp.app.report import write_figures, write_report


@add_flags()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs, finished or unfinished.")],
    given: Sections,
    screen: Screen,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File for the report.", show_default="report.html in the folder of one run"),
    ] = None,
    png: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder for PNG files of all figures, for papers.")
    ] = None,
) -> None:
    """Write the report of a run again, or one report that compares several runs.

    sosp report runs/train-a runs/prune-b --out both.html --png figures
    """
    page = write_report(runs, out)
    figures = [] if png is None else write_figures(runs, png)
    screen.print_json({"event": "result", "report": str(page), "figures": [str(path) for path in figures]})
    screen.print_lines(f"Report: {page}", *(f"Figure: {path}" for path in figures))
