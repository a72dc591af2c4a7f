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
from sosp.app.report.next_steps import format_load_code


@add_flags()
def demo(
    given: Sections,
    screen: Screen,
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for the pruned network.")] = "runs/demo",
) -> None:
    """Train a small residual network on digits, remove half of it, fine-tune, and compare with random pruning.

    Takes under a minute on two CPU cores and downloads nothing. Needs scikit-learn: pip install 'sosp\\[demo]'.
    """
    started = time.perf_counter()
    rows = shown.run_demo(Path(out), screen.print_lines)
    table = create_table("network", "accuracy", "parameters", "MACs", "latency")
    for row in rows:
        time_taken = f"{1e3 * row.latency:.2f} ms"
        table.add_row(
            row.network, format_share(row.accuracy), f"{row.params:,}", format_large_number(row.macs), time_taken
        )
    file = Path(out) / shown.NETWORK
    screen.print_json({"event": "result", "network": str(file), "rows": [asdict(row) for row in rows]})
    config = build_config({"model": {"name": "sosp:digits_resnet"}})
    screen.print_lines(
        table,
        "Accuracy on 500 test images; latency of one pass over them on one thread. Pruned: half of the structures "
        "removed, batch-norm statistics re-estimated, no training. On data this easy, fine-tuning makes up for any "
        f"choice of structures, even a random one. Done in {time.perf_counter() - started:.0f} s.",
        f"The fine-tuned network is in {file}. Load it with:",
        *(f"  {line}" for line in format_load_code(config, str(file))),
    )
