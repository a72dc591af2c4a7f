"""Define the command that shows what the library does: demo."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sosp.app import demo as shown
from sosp.app.cli.flags import Sections, add_flags
from sosp.app.cli.output import Screen
from sosp.app.cli.terminal_tables import create_table, format_large_number, format_share
from sosp.app.config import build_config
from sosp.app.report import write_demo_page
from sosp.app.report.next_steps import format_load_code


@add_flags()
def demo(
    given: Sections,
    screen: Screen,
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for the pruned network and its report.")
    ] = "runs/demo",
) -> None:
    """Train a small residual network on digits, prune it to 30 % of its MACs, and compare other rankings.

    Takes under a minute on two CPU cores and downloads nothing. Needs scikit-learn: pip install 'sosp\\[demo]'.
    """
    started = time.perf_counter()
    rows = shown.run_demo(Path(out), screen.print_lines)
    file, page = Path(out) / shown.NETWORK, write_demo_page(Path(out), rows)
    table = create_table("network", "accuracy", "parameters", "MACs", *(f"ms, batch {b}" for b in shown.BATCHES))
    for row in rows:
        way = " → ".join(format_share(x) for x in row.accuracies.values())
        times = (f"{row.milliseconds[batch]:.2f}" for batch in shown.BATCHES)
        table.add_row(row.network, way, f"{row.params:,}", format_large_number(row.macs), *times)
    found = {"network": str(file), "report": str(page), "rows": [asdict(row) for row in rows]}
    screen.print_json({"event": "result", **found})
    config = build_config({"model": {"name": "sosp:digits_resnet"}})
    screen.print_lines(
        table,
        f"Accuracy on 500 test images: {' → '.join(rows[-1].accuracies)}. Repair needs no labels. Milliseconds: one "
        f"call on one thread, the 10th percentile of {shown.RUNS}, all networks measured in turns.",
        shown.compare_rankings(rows),
        f"Done in {time.perf_counter() - started:.0f} s.",
        f"Report: {page}",
        f"The fine-tuned network is in {file}. Load it with:",
        *(f"  {line}" for line in format_load_code(config, str(file))),
    )
