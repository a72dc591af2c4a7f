"""Define the commands that make a run: train, prune, finetune, compare, run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sosp.app.cli.flags import DryRun, Resume, Sections, add_flags
from sosp.app.cli.output import Screen
from sosp.app.cli.targets import find_unpruned_file, resolve_target
from sosp.app.cli.terminal_tables import (
    create_comparison_table,
    create_expansion_table,
    create_results_table,
    format_budget,
    format_duration,
    format_large_number,
)
from sosp.app.config import Config, build_config, format_flag, override_run_section, read_config
from sosp.app.report import keep_report
from sosp.app.report.next_steps import format_load_code
from sosp.app.report.run_history import read_steps
from sosp.app.report.run_summary import explain_large_loss
from sosp.app.run import (
    COMPARISON_FILE,
    FLEXIBLE,
    RunJob,
    check_comparison,
    check_expansion,
    describe_run,
    estimate_run,
    name_run,
    prepare_job,
    run_stages,
)
from sosp.app.run.run_folder import RunFolder, RunRecord, is_run, open_run, read_record, refuse_folder
from sosp.core import distributed
from sosp.errors import ArgumentError
from sosp.nets.by_name import parse_network_name

NAMES = "sosp:resnet56, torchvision:resnet50, timm:convnext_atto, hf:FOLDER, file.py:function or module:function"
Network = Annotated[str, typer.Argument(metavar="MODEL", help=f"Network: {NAMES}.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN",
        help=f"Network: {NAMES}; or the folder of a run, which supplies the network, weights and data.",
    ),
]


@add_flags("model", "data", "train", "run")
def train(model: Network, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Train a network.

    sosp train sosp:resnet56 --data cifar10 --data-dir datasets
    """
    sections, _ = resolve_target(model, given)
    launch_run(build_config(sections, format_flag), "train", screen, dry_run, resume)


@add_flags("model", "data", "prune", "run")
def prune(model: Target, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Rank the structures of a trained network, remove the least important ones, and save the smaller network.

    sosp prune runs/train-resnet56-cifar10-seed0 --macs 0.5
    sosp prune torchvision:resnet50 --weights r50.pth --data imagenet --data-dir imagenet --ratio 0.3
    """
    sections, _ = resolve_target(model, given)
    launch_run(build_config(sections, format_flag), "prune", screen, dry_run, resume)


@add_flags("model", "data", "finetune", "run")
def finetune(model: Target, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Train a pruned network further.

    sosp finetune runs/prune-resnet56-cifar10-sosp-h-macs0.5-seed0 --epochs 40 --rate 0.01
    """
    sections, record = resolve_target(model, given)
    how, name = sections["finetune"], None
    if record is not None:
        folder = Path(model).resolve() if is_run(model) else Path(model).resolve().parent
        seed = given["run"].get("seed", 0)
        name = f"finetune-{folder.name}" + (f"-seed{seed}" if seed else "")
        if how.get("distill") and "teacher" not in how and (teacher := find_unpruned_file(record, folder)) is not None:
            sections["finetune"] = {**how, "teacher": teacher}
    launch_run(build_config(sections, format_flag), "finetune", screen, dry_run, resume, name=name)


@add_flags(
    *("model", "data", "compare", "prune.gate", "prune.groups", "prune.exclude", "prune.downsampling"),
    *("prune.examples", "finetune", "run"),
)
def compare(model: Target, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Prune one network with several methods and ratios, and compare the results. --epochs adds fine-tuning.

    sosp compare sosp:resnet56 --weights resnet56.safetensors --data cifar10 --data-dir datasets
    --methods sosp-h,sosp-i,taylor --ratios 0.3,0.5 --seeds 3
    """
    sections, _ = resolve_target(model, given)
    if not given["finetune"]:
        del sections["finetune"]
    elif "epochs" not in given["finetune"]:
        raise ArgumentError("fine-tuning options need --epochs. Give the number of epochs, or leave the options out.")
    launch_run(build_config(sections, format_flag), "compare", screen, dry_run, resume)


@add_flags("run")
def run(
    config: Annotated[str, typer.Argument(metavar="CONFIG|RUN", help="TOML file, or folder of a run to resume.")],
    given: Sections,
    screen: Screen,
    dry_run: DryRun = False,
    resume: Resume = False,
) -> None:
    """Run the stages of a config file (train, prune, fine-tune), or resume a run.

    The file has the sections \\[model], \\[data], \\[train], \\[prune], \\[finetune] and \\[run]. Their keys are the
    options of the commands. \\[model] also has the key name, and \\[data] has name for --data, folder for --data-dir.
    A stage runs if its section is present. Relative paths start from the current folder.
    """
    if is_run(config):
        _resume_run(config, given, screen, dry_run)
        return
    found = override_run_section(read_config(config), given["run"])
    if not found.stages:
        raise ArgumentError(f"{config}: has no stage to run. Add a section [train], [prune] or [finetune].")
    launch_run(found, "run", screen, dry_run, resume, name=Path(config).stem)


def _resume_run(folder: str, given: Sections, screen: Screen, dry_run: bool) -> None:
    """With the run that is in a folder; only the device may be another."""
    if extra := [key for key in given["run"] if key != "device"]:
        raise ArgumentError(f"{folder} is an existing run: {format_flag('run', extra[0])} cannot be changed.")
    config = override_run_section(read_record(folder).config, {**given["run"], "out": folder})
    launch_run(config, "run", screen, dry_run, True)


# --- what they share ------------------------------------------------------------------------------------


def launch_run(
    config: Config, command: str, screen: Screen, dry_run: bool, resume: bool, *, name: str | None = None
) -> None:
    """Run a config in its folder, or print what would be done."""
    job = prepare_job(config)
    check_comparison(job)
    check_expansion(job)
    if job.config.train is None:
        warn_without_weights(job, screen)
    place = job.config.run
    if place.name and Path(place.name).name != place.name:
        raise ArgumentError(f"name={place.name!r} is a path: give the folder with --out (out in [run]).")
    folder = Path(place.out) if place.out else Path("runs") / (place.name or name or name_run(job.config, command))
    record = describe_run(job.config, ["sosp", *sys.argv[1:]])
    if dry_run:
        refuse_folder(folder, record, must_exist=resume)
        show_plan(job, folder, screen)
        return
    with open_in_all_processes(folder, record, resume) as run:
        screen.run = run
        screen.print_json({"event": "run", "folder": str(folder), "config": job.config.as_dict()})
        screen.print_lines(f"Run {folder}: {job.config.model.name} on {job.dataset.name}, {job.device}")
        before = run.results
        results = run_stages(job, run, screen)
        page = keep_report(run.folder, screen.warn, anew=results != before) if run.writes else None
        show_results(job.config, run, results, page, screen)


def warn_without_weights(job: RunJob, screen: Screen) -> None:
    """A network of ours or of a package without weights is as good as random."""
    if job.config.model.weights is None and parse_network_name(job.config.model.name)[0] in FLEXIBLE:
        screen.warn(f"{job.config.model.name} has no weights (--weights): its parameters are randomly initialised.")


@contextmanager
def open_in_all_processes(folder: Path, record: RunRecord, resume: bool) -> Iterator[RunFolder]:
    """The run, opened by the first process; the others read along."""
    with ExitStack() as stack:
        if distributed.is_main():
            found = stack.enter_context(open_run(folder, record, must_exist=resume))
        distributed.wait_for_ranks()
        if not distributed.is_main():
            found = stack.enter_context(open_run(folder, record, writes=False))
        yield found


def show_results(config: Config, run: RunFolder, results: Mapping[str, Any], page: Path | None, screen: Screen) -> None:
    file = run.file(config.stages[-1])
    told = {"event": "result", "folder": str(run.folder), "report": page and str(page)}
    report = [] if page is None else [f"Report: {page}"]
    if config.compare is not None:
        screen.print_json({**told, "results": results})
        screen.print_lines(
            create_comparison_table(results["compare"]["summaries"]),
            *report,
            f"Saved: {file}, {run.folder / COMPARISON_FILE}",
        )
        return
    if config.expand is not None:
        screen.print_json({**told, "results": results})
        screen.print_lines(
            create_expansion_table(results["expand"]), *report, f"Saved: {file}, {run.folder}/seed*/networks"
        )
        return
    screen.print_json({**told, "network": str(file), "results": results})
    lines = (f"  {line}" for line in format_load_code(config, str(file)))
    steps = read_steps(run.folder)
    screen.print_lines(create_results_table(steps), *explain_large_loss(steps, run.folder))
    screen.print_lines(*report, f"Saved: {file}", *lines)


def show_plan(job: RunJob, folder: Path, screen: Screen) -> None:
    """A dry run: what would be done, in which folder, at what cost."""
    found = estimate_run(job)
    screen.print_json({"event": "plan", "folder": str(folder), "config": job.config.as_dict(), **found})
    network = found.pop("network")
    size = f"{network['params']:,} parameters, {format_large_number(network['macs'])} MACs"
    screen.print_lines(f"{job.config.model.name}: {size}, on {network['device']}")
    for stage, facts in found.items():
        screen.print_lines(f"{stage}: {format_plan(facts)}")
    state = "already exists" if is_run(folder) else "would be created"
    screen.print_lines(f"Run {folder} {state}. Nothing was done.")


def format_plan(facts: Mapping[str, Any]) -> str:
    if "cells" in facts:
        tuning = f", each fine-tuned for {facts['tuning']} epochs" if facts["tuning"] else ""
        methods, ratios = ", ".join(facts["methods"]), ", ".join(map(str, facts["ratios"]))
        return f"{facts['cells']} cells, {methods} at {ratios}{tuning}"
    if "courses" in facts:
        before = f"{facts['trainings']} networks for {facts['epochs_before']} epochs" if facts["trainings"] else "none"
        cut = f"each pruned to {', '.join(facts['sizes'])} and trained for {facts['epochs_after']} epochs"
        return f"{', '.join(facts['courses'])}, {facts['seeds']} seeds; trained before pruning: {before}; {cut}"
    if "epochs" in facts:
        size = f"{facts['epochs']} epochs of {facts['images'] // max(facts['epochs'], 1):,} images"
        macs, time = format_large_number(facts["macs"]), format_duration(facts["seconds"])
        cost = f"{facts['steps']:,} steps, {macs} MACs, about {time}"
        return f"{size} in batches of {facts['batch']}, {cost}"
    size = f"{facts['examples']:,} examples, {facts['structures']:,} structures"
    return f"{facts['method']} on {size}, {format_budget(facts['budget'])}"
