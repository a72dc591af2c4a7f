"""The commands that make a run: train, prune, finetune, run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sosp.app.cli.flags import DryRun, Resume, Sections, takes
from sosp.app.cli.output import Screen
from sosp.app.cli.tables import budget, comparison_table, duration, expansion_table, large, results_table
from sosp.app.cli.targets import before_pruning, sections_for
from sosp.app.config import Config, as_flag, build, placed, read
from sosp.app.report import keep_report
from sosp.app.report.steps import loading
from sosp.app.run import (
    FLEXIBLE,
    TABLE,
    Job,
    carry_out,
    check_comparison,
    check_expansion,
    describe,
    estimate,
    name_of,
    prepare,
)
from sosp.app.run.folder import Record, Run, is_run, opened, read_record, refuse_folder
from sosp.core import distributed
from sosp.errors import ArgumentError
from sosp.nets.by_name import parse

NAMES = "sosp:resnet56, torchvision:resnet50, timm:convnext_atto, hf:FOLDER, file.py:function or module:function"
Network = Annotated[str, typer.Argument(metavar="MODEL", help=f"{NAMES}.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN", help=f"{NAMES}; or the folder of a run, which says its network, weights and data."
    ),
]


@takes("model", "data", "train", "run")
def train(model: Network, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Train a network.

    sosp train sosp:resnet56 --data cifar10 --data-dir datasets
    """
    sections, _ = sections_for(model, given)
    launch(build(sections, as_flag), "train", screen, dry_run, resume)


@takes("model", "data", "prune", "run")
def prune(model: Target, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Score a trained network, remove what it needs least, and save the smaller one.

    sosp prune runs/train-resnet56-cifar10-seed0 --macs 0.5
    sosp prune torchvision:resnet50 --weights r50.pth --data imagenet --data-dir imagenet --ratio 0.3
    """
    sections, _ = sections_for(model, given)
    launch(build(sections, as_flag), "prune", screen, dry_run, resume)


@takes("model", "data", "finetune", "run")
def finetune(model: Target, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Train a pruned network further.

    sosp finetune runs/prune-resnet56-cifar10-sosp-h-macs0.5-seed0 --epochs 40 --rate 0.01
    """
    sections, record = sections_for(model, given)
    how, name = sections["finetune"], None
    if record is not None:
        folder = Path(model).resolve() if is_run(model) else Path(model).resolve().parent
        seed = given["run"].get("seed", 0)
        name = f"finetune-{folder.name}" + (f"-seed{seed}" if seed else "")
        if how.get("distill") and "teacher" not in how and (teacher := before_pruning(record, folder)) is not None:
            sections["finetune"] = {**how, "teacher": teacher}
    launch(build(sections, as_flag), "finetune", screen, dry_run, resume, name=name)


@takes(
    *("model", "data", "compare", "prune.gate", "prune.groups", "prune.exclude", "prune.downsampling"),
    *("prune.examples", "finetune", "run"),
)
def compare(model: Target, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Prune one network by many methods at many ratios, and compare what is left. Fine-tunes if --epochs is given.

    sosp compare sosp:resnet56 --weights resnet56.safetensors --data cifar10 --data-dir datasets
    --methods sosp-h,sosp-i,taylor --ratios 0.3,0.5 --seeds 3
    """
    sections, _ = sections_for(model, given)
    if not given["finetune"]:
        del sections["finetune"]
    elif "epochs" not in given["finetune"]:
        raise ArgumentError("options of fine-tuning without --epochs: for how long?")
    launch(build(sections, as_flag), "compare", screen, dry_run, resume)


@takes("run")
def run(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN", help="A TOML file; or the folder of a run to go on with.")
    ],
    given: Sections,
    screen: Screen,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Train, prune and fine-tune as a file says, or go on with a run.

    The file has the sections \\[model], \\[data], \\[train], \\[prune], \\[finetune] and \\[run]. Their keys are the
    options of the commands, with name in \\[model], and name and folder in \\[data] for --data and --data-dir. A stage
    runs if its section is there. Paths in it start from the current folder.
    """
    if is_run(config):
        _go_on(config, given, screen, dry_run)
        return
    found = placed(read(config), given["run"])
    if not found.stages:
        raise ArgumentError(f"{config}: says nothing to do; write a section [train], [prune] or [finetune].")
    launch(found, "run", screen, dry_run, resume, name=Path(config).stem)


def _go_on(folder: str, given: Sections, screen: Screen, dry_run: bool) -> None:
    """With the run that is in a folder; only the device may be another."""
    if extra := [key for key in given["run"] if key != "device"]:
        raise ArgumentError(f"{folder} is a run already: {as_flag('run', extra[0])} cannot be changed.")
    config = placed(read_record(folder).config, {**given["run"], "out": folder})
    launch(config, "run", screen, dry_run, True)


# --- what they share ------------------------------------------------------------------------------------


def launch(
    config: Config, command: str, screen: Screen, dry_run: bool, resume: bool, *, name: str | None = None
) -> None:
    """Carry a config out in its folder, or say what that would be."""
    job = prepare(config)
    check_comparison(job)
    check_expansion(job)
    if job.config.train is None:
        warn_if_fresh(job, screen)
    place = job.config.run
    if place.name and Path(place.name).name != place.name:
        raise ArgumentError(f"name={place.name!r} is a path: name the folder with --out (out in [run]).")
    folder = Path(place.out) if place.out else Path("runs") / (place.name or name or name_of(job.config, command))
    record = describe(job.config, ["sosp", *sys.argv[1:]])
    if dry_run:
        refuse_folder(folder, record, must_exist=resume)
        show_plan(job, folder, screen)
        return
    with everywhere(folder, record, resume) as run:
        screen.run = run
        screen.tell({"event": "run", "folder": str(folder), "config": job.config.as_dict()})
        screen.say(f"Run {folder}: {job.config.model.name} on {job.dataset.name}, {job.device}")
        before = run.results
        results = carry_out(job, run, screen)
        page = keep_report(run.folder, screen.warn, anew=results != before) if run.writes else None
        show_results(job.config, run, results, page, screen)


def warn_if_fresh(job: Job, screen: Screen) -> None:
    """A network of ours or of a package without weights is as good as random."""
    if job.config.model.weights is None and parse(job.config.model.name)[0] in FLEXIBLE:
        screen.warn(f"{job.config.model.name} has no weights (--weights): it is as it was initialised.")


@contextmanager
def everywhere(folder: Path, record: Record, resume: bool) -> Iterator[Run]:
    """The run, opened by the first process; the others read along."""
    with ExitStack() as stack:
        if distributed.is_main():
            found = stack.enter_context(opened(folder, record, must_exist=resume))
        distributed.wait()
        if not distributed.is_main():
            found = stack.enter_context(opened(folder, record, writes=False))
        yield found


def show_results(config: Config, run: Run, results: Mapping[str, Any], page: Path | None, screen: Screen) -> None:
    file = run.file(config.stages[-1])
    told = {"event": "result", "folder": str(run.folder), "report": page and str(page)}
    report = [] if page is None else [f"Report: {page}"]
    if config.compare is not None:
        screen.tell({**told, "results": results})
        screen.say(comparison_table(results["compare"]["summaries"]), *report, f"Saved: {file}, {run.folder / TABLE}")
        return
    if config.expand is not None:
        screen.tell({**told, "results": results})
        screen.say(expansion_table(results["expand"]), *report, f"Saved: {file}, {run.folder}/seed*/networks")
        return
    screen.tell({**told, "network": str(file), "results": results})
    lines = (f"  {line}" for line in loading(config, str(file)))
    screen.say(results_table(results), *report, f"Saved: {file}", *lines)


def show_plan(job: Job, folder: Path, screen: Screen) -> None:
    """A dry run: what would be done, in which folder, at what cost."""
    found = estimate(job)
    screen.tell({"event": "plan", "folder": str(folder), "config": job.config.as_dict(), **found})
    network = found.pop("network")
    size = f"{network['params']:,} parameters, {large(network['macs'])} MACs"
    screen.say(f"{job.config.model.name}: {size}, on {network['device']}")
    for stage, facts in found.items():
        screen.say(f"{stage}: {plan_words(facts)}")
    state = "is there already" if is_run(folder) else "would be made"
    screen.say(f"Run {folder} {state}. Nothing was done.")


def plan_words(facts: Mapping[str, Any]) -> str:
    if "cells" in facts:
        tuning = f", each fine-tuned for {facts['tuning']} epochs" if facts["tuning"] else ""
        methods, ratios = ", ".join(facts["methods"]), ", ".join(map(str, facts["ratios"]))
        return f"{facts['cells']} cells, {methods} at {ratios}{tuning}"
    if "courses" in facts:
        before = f"{facts['trainings']} networks for {facts['epochs_before']} epochs" if facts["trainings"] else "none"
        cut = f"each cut to {', '.join(facts['sizes'])} and trained for {facts['epochs_after']} epochs"
        return f"{', '.join(facts['courses'])}, {facts['seeds']} seeds; trained before the cut: {before}; {cut}"
    if "epochs" in facts:
        size = f"{facts['epochs']} epochs of {facts['images'] // max(facts['epochs'], 1):,} images"
        cost = f"{facts['steps']:,} steps, {large(facts['macs'])} MACs, about {duration(facts['seconds'])}"
        return f"{size} in batches of {facts['batch']}, {cost}"
    size = f"{facts['examples']:,} examples, {facts['structures']:,} structures"
    return f"{facts['method']} on {size}, {budget(facts['budget'])}"
