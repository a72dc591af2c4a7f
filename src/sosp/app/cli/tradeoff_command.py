"""Define the command that prunes one network to several budgets: tradeoff."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sosp.app.cli.flags import Sections, add_flags
from sosp.app.cli.output import Screen
from sosp.app.cli.run_commands import Target, warn_without_weights
from sosp.app.cli.targets import resolve_target
from sosp.app.cli.terminal_tables import create_table
from sosp.app.config import PruningSection, build_config, format_flag
from sosp.app.report import require_packages, write_tradeoff_page
from sosp.app.run import name_run, prepare_job
from sosp.app.run.job import open_pruning
from sosp.core.options import RATIOS, collect_options
from sosp.core.text_files import write_json
from sosp.errors import ArgumentError, RunError
from sosp.pipeline.tradeoff import BUDGETS, Tradeoff, check_shares, format_quality, trace_curve
from sosp.training.initial_statistics import recalibrate_untrained

NOT_HERE = {"ratio", "params", "macs", "max_drop", "recalibrate", "curve"}
HOW = tuple(f"prune.{key}" for key in collect_options(PruningSection) if key not in NOT_HERE)
PAGE, TABLE = "tradeoff.html", "tradeoff.json"


@add_flags("model", "data", *HOW, "run.out", "run.seed", "run.device")
def tradeoff(
    model: Target,
    given: Sections,
    screen: Screen,
    budgets: Annotated[
        str | None,
        typer.Option(help="Shares of the MACs to keep, such as 0.8,0.6,0.4.", show_default="0.9 to 0.2"),
    ] = None,
) -> None:
    """Prune one network to several budgets, and compare quality, MACs and latency: a table and a page.

    sosp tradeoff runs/train-digits_resnet-digits-seed0 --budgets 0.8,0.6,0.4
    """
    require_packages()
    shares = parse_budgets(budgets)
    sections, _ = resolve_target(model, given)
    job = prepare_job(build_config(sections, format_flag))
    warn_without_weights(job, screen)
    name = name_run(replace(job.config, prune=None), "tradeoff")
    folder = Path(job.config.run.out or Path("runs") / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to ({error.strerror}).") from error
    network = recalibrate_untrained(job.start, job.dataset.train, job.config.run.seed)
    curve = trace_curve(open_pruning(job, network), shares)
    refused = [f"MACs {budget:g}: {why}" for budget, why in curve.refused.items()]
    facts = {"quality": curve.quality, "settings": curve.settings, "refused": refused}
    points = [asdict(point) for point in curve.points]
    page = write_tradeoff_page(
        folder / PAGE,
        curve.points,
        title=job.config.model.name,
        quality=curve.quality,
        words=[curve.settings, *refused],
    )
    write_json(folder / TABLE, {"model": job.config.model.name, **facts, "points": points})
    screen.print_json({"event": "result", "folder": str(folder), "report": str(page), **facts, "points": points})
    screen.print_lines(create_curve_table(curve), *refused, curve.settings)
    screen.print_lines(f"Report: {page}", f"Saved: {folder / TABLE}", "Prune to one of the budgets: sosp prune --macs")


def parse_budgets(text: str | None) -> tuple[float, ...]:
    if text is None:
        return BUDGETS
    try:
        found: tuple[float, ...] = RATIOS.read(text)
    except ValueError:
        raise ArgumentError(f"--budgets should be {RATIOS.wanted}, not {text!r}.") from None
    return tuple(check_shares(found))


def create_curve_table(curve: Tradeoff) -> Table:
    """Return a row per network."""
    table = create_table("budget", "MACs left", "parameters left", "latency", curve.quality)
    for point in curve.points:
        time = "" if point.milliseconds is None else f"{point.milliseconds:.3g} ms"
        name = "unpruned" if point.budget >= 1 else f"MACs {point.budget:g}"
        cells = (f"{point.macs:.1%}", f"{point.params:.1%}", time)
        table.add_row(name, *cells, format_quality(point, curve.qualities.get(point.budget)))
    return table
