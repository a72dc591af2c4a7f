"""Define the command that reproduces the paper's experiments: list, show status, run, write pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sosp.app.cli.flags import DryRun, Sections, add_flags
from sosp.app.cli.output import Screen
from sosp.app.cli.terminal_tables import create_table, format_duration, format_large_number, format_share
from sosp.app.report.section import format_count
from sosp.app.run.job import choose_device
from sosp.errors import ArgumentError
from sosp.studies import paper, starting_networks
from sosp.studies.experiment import list_starts
from sosp.studies.pages import write_page, write_pages
from sosp.studies.paper import Cell, Experiment, ExperimentSettings, PrunedCell
from sosp.studies.runner import list_missing
from sosp.studies.workspace import Workspace, is_loadable, parse_weights
from sosp.training import Moment

FEW = 12  # cells that a dry run names
EVERY = 10  # epochs between two lines


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


Flag = {"show_default": False}


@add_flags("run.device")
def reproduce(
    given: Sections,
    screen: Screen,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of an experiment. --list shows all names.", show_default=False),
    ] = None,
    list_: Annotated[bool, _option("List the experiments.", "--list", **Flag)] = False,
    status: Annotated[
        bool, _option("Show which cells are done, refused, failed or missing.", "--status", **Flag)
    ] = False,
    tiny: Annotated[
        bool, _option("Run the same steps on small images of digits, in seconds.", "--tiny", **Flag)
    ] = False,
    data_dir: Annotated[str | None, _option("Folder that contains the datasets.", metavar="DIR")] = None,
    weights: Annotated[
        list[str] | None,
        _option(
            "Weights of a network that would otherwise be trained first, such as resnet56=FILE.", metavar="NAME=FILE"
        ),
    ] = None,
    only: Annotated[
        str | None, _option("Run only the cells whose name matches this regular expression.", metavar="REGEX")
    ] = None,
    seeds: Annotated[int | None, _option("Run only the cells of the first seeds, up to this number of seeds.")] = None,
    epochs: Annotated[
        int | None,
        _option("Number of epochs of every training, in place of the paper's. The results are separate cells."),
    ] = None,
    retry: Annotated[bool, _option("Run refused and failed cells again.", "--retry", **Flag)] = False,
    results: Annotated[str, _option("Folder for the records.", metavar="DIR")] = "results",
    work: Annotated[str, _option("Folder for checkpoints and networks.", metavar="DIR")] = "runs/reproduce",
    page: Annotated[
        str | None, _option("Folder to which the results pages are written, from the records.", metavar="DIR")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Reproduce an experiment of the paper. Finished parts are kept, interrupted parts are resumed.

    sosp reproduce resnet56-cifar10 --data-dir datasets --weights resnet56=resnet56.safetensors
    """
    place = Path(results)
    if list_:
        show_list(screen)
        return
    _check(name, place, data_dir, status=status, page=page, some=(only, seeds) != (None, None))
    chosen = [_build_experiment(n, tiny, epochs) for n in ([name] if name else paper.EXPERIMENTS)]
    if status:
        some = [replace(e, cells=_select_cells(e, only, seeds)) for e in chosen]
        show_status(some, place, screen, cells=name is not None)
        return
    if name is None:
        show_pages(write_pages(chosen, place, Path(str(page))), screen)
        return
    (experiment,) = chosen
    cells = _select_cells(experiment, only, seeds)
    setting = _setting(experiment, place, Path(work), data_dir, weights or [], given["run"].get("device"))
    if dry_run:
        show_plan(experiment, cells, setting, retry, screen)
        return
    run_experiment(experiment, cells, setting, retry, screen)
    if page is not None:
        show_pages(write_page(experiment, place, Path(page)), screen)


def _check(
    name: str | None, results: Path, data_dir: str | None, *, status: bool, page: str | None, some: bool
) -> None:
    """Raise ArgumentError for options that would have no effect or contradict each other."""
    if name is None and not status and page is None:
        raise ArgumentError(
            f"no experiment is named. Choose one of {', '.join(paper.EXPERIMENTS)}, or use --list or --status."
        )
    if name is None and some:
        raise ArgumentError("--only and --seeds select cells of one experiment: name the experiment.")
    if status and page is not None:
        raise ArgumentError("--status and --page cannot be combined: --status writes no page. Leave out one of them.")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ArgumentError(f"--data-dir {data_dir}: there is no such folder.")
    if results.exists() and not results.is_dir():
        raise ArgumentError(f"--results {results}: is not a folder.")
    if name is None and page is not None and not any(results.glob("*/*.json")):
        raise ArgumentError(f"--results {results}: there are no records to write pages from.")


def _setting(
    experiment: Experiment, results: Path, work: Path, data_dir: str | None, weights: list[str], device: str | None
) -> ExperimentSettings:
    """What was given, refused where it names nothing."""
    where = choose_device(device)
    plain = [start for start in list_starts(experiment) if is_loadable(start)]
    known = [word for start in plain for word in (start.network, start.place)]
    files = parse_weights(weights, list(dict.fromkeys(known)))
    return ExperimentSettings(results, work, where, Path(data_dir) if data_dir else None, files)


def _build_experiment(name: str, tiny: bool, epochs: int | None) -> Experiment:
    found = paper.make_experiment(name)
    found = paper.make_tiny(found) if tiny else found
    return found if epochs is None else paper.set_epochs(found, epochs)


def _select_cells(experiment: Experiment, only: str | None, seeds: int | None) -> tuple[Cell, ...]:
    found = experiment if seeds is None else paper.limit_seeds(experiment, seeds)
    return (found if only is None else paper.select_cells(found, only)).cells


# --- doing ----------------------------------------------------------------------------------------------


def run_experiment(
    experiment: Experiment, cells: tuple[Cell, ...], setting: ExperimentSettings, retry: bool, screen: Screen
) -> None:
    """Run it; stopped, say how to go on."""
    screen.print_lines(
        f"{experiment.name}: {format_count(len(cells), 'cell')}, records in {setting.results}, on {setting.device}"
    )
    try:
        found = paper.run_experiment(experiment, setting, ExperimentWatcher(screen), cells=cells, retry=retry)
    except (KeyboardInterrupt, SystemExit):
        screen.bar.clear()
        screen.print_lines("Finished cells are kept. Run the same command again to resume.")
        raise
    facts = {how: found.count(how) for how in ("done", "refused", "failed")}
    screen.print_json({"event": "result", "experiment": experiment.name, **facts, "missing": found.missing})
    screen.print_lines(", ".join(f"{number} {how}" for how, number in facts.items()) + f", {found.missing} missing")


class ExperimentWatcher:
    """Tells people and machines how it goes, and how long it will take at the pace so far."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.missing, self.done, self.begun = 0, 0, time.monotonic()
        self.lead, self.epochs, self.since = "", 0, 0.0  # of the networks that train side by side: one that is watched

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        self.screen.print_json({"event": name, **facts})
        if name == "plan":
            self.missing = facts["missing"]
        if name == "begin":
            self.lead, self.epochs, self.since = facts["cells"][0], 0, time.monotonic()
        if name == "epoch":
            self._epoch(facts)
        if name == "network":
            self.lead = ""
            self.begun = self.begun if self.done else time.monotonic()  # the pace is that of cells
        if name == "cell":
            self.done += 1
        if name in ("cell", "network"):
            self.screen.bar.clear()
        if name in LINES:
            timed = name == "begin" or (name == "cell" and not self.lead)  # where nothing is trained: cell by cell
            self.screen.print_lines(LINES[name](facts) + (self._left() if timed else ""))

    def step(self, stage: str, done: int, total: int, moment: Moment) -> None:
        self.screen.step(stage, done, total, moment)

    def _left(self) -> str:
        if not 0 < self.done < self.missing:
            return ""
        seconds = (time.monotonic() - self.begun) / self.done * (self.missing - self.done)
        return f"; about {format_duration(seconds)} left for the missing cells"

    def _epoch(self, facts: Mapping[str, Any]) -> None:
        """A line now and then, also where there is no bar."""
        if facts["cell"] != self.lead:
            return
        self.epochs += 1
        number, whole = facts["number"], facts["epochs"]
        if self.epochs == 1 and number > 1:
            self.screen.print_lines(f"resuming at epoch {number}")
        if number % EVERY == 0:
            seconds = (time.monotonic() - self.since) / self.epochs * (whole - number)
            self.screen.print_lines(
                f"epoch {number} of {whole}: {format_share(facts['test'])}, about {format_duration(seconds)} left"
            )


def _cell(facts: Mapping[str, Any]) -> str:
    if facts["state"] != "done":
        return f"{facts['cell']}: {facts['state']}, {facts['reason']}"
    if "seconds" in facts:
        return f"{facts['cell']}: {facts['seconds']:.3g} s, {facts['structures']:,} structures"
    size = f"{facts['params']:,} parameters, {format_large_number(facts['macs'])} MACs"
    if "final" in facts:
        return f"{facts['cell']}: {format_share(facts['final'])} (best {format_share(facts['best'])}), {size}"
    return f"{facts['cell']}: {format_share(facts['accuracy'] if 'accuracy' in facts else facts['cut'])}, {size}"


LINES = {
    "absent": lambda facts: f"waiting for {facts['data']}: {format_count(facts['cells'], 'cell')}. {facts['reason']}",
    "given": lambda facts: f"{facts['cell']}: testing {facts['file']}",
    "begin": lambda facts: f"training {', '.join(facts['cells'])}: {format_count(facts['epochs'], 'epoch')}",
    "cut": lambda facts: (
        f"{facts['cell']}: {format_share(facts['cut'])} before fine-tuning, {facts['params']:,} parameters"
    ),
    "cell": _cell,
    "network": _cell,
}


# --- looking --------------------------------------------------------------------------------------------


def show_list(screen: Screen) -> None:
    table = create_table("experiment", "cells", "in the paper")
    table.columns[2].justify = "left"
    for name, make in paper.EXPERIMENTS.items():
        found = make()
        screen.print_json({"event": "experiment", "name": name, "title": found.title, "cells": len(found.cells)})
        table.add_row(name, str(len(found.cells)), f"{found.title}: {found.where}")
    screen.print_lines(table)


def show_status(chosen: list[Experiment], results: Path, screen: Screen, *, cells: bool) -> None:
    """A row per experiment; of a single one, a line per cell."""
    table = create_table("experiment", "cells", "done", "refused", "failed", "missing")
    for experiment in chosen:
        found = paper.read_experiment_state(experiment, results)
        numbers = [found.count(how) for how in ("done", "refused", "failed")] + [found.missing]
        facts = dict(zip(("done", "refused", "failed", "missing"), numbers, strict=True))
        screen.print_json({"event": "status", "name": experiment.name, "cells": len(experiment.cells), **facts})
        table.add_row(experiment.name, str(len(experiment.cells)), *map(str, numbers))
        for name, record in found.records.items() if cells else ():
            word = "missing" if record is None else f"{record.state} {record.reason}".strip()
            screen.print_json({"event": "cell", "cell": name, "state": "missing" if record is None else record.state})
            screen.print_lines(f"{name}: {word}")
    screen.print_lines(table)


def show_pages(written: list[Path], screen: Screen) -> None:
    screen.print_json({"event": "pages", "files": [str(path) for path in written]})
    screen.print_lines(f"Written: {', '.join(map(str, written))}")


def show_plan(
    experiment: Experiment, cells: tuple[Cell, ...], setting: ExperimentSettings, retry: bool, screen: Screen
) -> None:
    """A dry run: what would be measured, which networks would be trained first, and for how long in all."""
    todo = list_missing(experiment, cells, setting.results, retry)
    first = starting_networks.list_untrained(Workspace(setting), todo)
    tuned = [cell.tuning.epochs * cell.cycles for cell in todo if isinstance(cell, PrunedCell)]
    trained = [epochs for epochs in (*tuned, *(start.schedule.epochs for start in first)) if epochs]
    names, before = [cell.name for cell in todo], [start.name for start in first]
    facts = {"missing": len(todo), "cells": names, "networks": before, "epochs": sum(trained)}
    screen.print_json({"event": "plan", "experiment": experiment.name, **facts})
    screen.print_lines(
        f"{experiment.name}: {len(todo)} of {format_count(len(cells), 'cell')} missing", *_shorten_list(names)
    )
    if first:
        screen.print_lines(f"to train first: {format_count(len(first), 'network')}", *_shorten_list(before))
    if trained:
        screen.print_lines(f"total: {format_count(len(trained), 'training')}, {format_count(sum(trained), 'epoch')}")
    screen.print_lines("Nothing was done.")


def _shorten_list(names: list[str]) -> list[str]:
    return [*names[:FEW], *([f"and {len(names) - FEW} more"] if len(names) > FEW else [])]
