"""An expansion as a run: seed by seed, each in a folder of its own; all points in one table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from sosp import nets
from sosp.app.config import PruningSection
from sosp.app.run.job import RunJob
from sosp.app.run.run_folder import RunFolder
from sosp.core.text_files import write_text
from sosp.errors import ArgumentError
from sosp.graph.structures import downsampling
from sosp.nets.by_name import parse_network_name
from sosp.studies.expand.expand_pruning import expand
from sosp.studies.expand.expansion_plan import ExpansionPlan, ExpansionSetup
from sosp.studies.expand.expansion_points import ExpansionPoint
from sosp.studies.expand.widenable_networks import NetworkFunction, WidenableNetwork, check_widths, make_widenable
from sosp.training import Epoch

if TYPE_CHECKING:
    from sosp.app.run.stages import StageInput
    from sosp.training.watcher import Watcher

COLUMNS = [f.name for f in fields(ExpansionPoint) if f.name not in ("blocks", "layers")]


def plan_expansion(job: RunJob) -> ExpansionPlan:
    """What the sections [expand] and [prune] say."""
    how, section = (job.config.prune or PruningSection()).settle(), job.config.expand
    assert section is not None
    keep = (*(how.exclude or ()), *(() if how.downsampling else downsampling(job.start)))
    same = {name: getattr(how, name) for name in ("method", "examples", "gate", "groups", "cap")}
    return section.build_plan(exclude=keep, **same)


def choose_network(job: RunJob) -> nn.Module | NetworkFunction:
    """Ours by their width; any other as it is."""
    source, name = parse_network_name(job.config.model.name)
    if source != "sosp":
        return job.original
    return lambda width: nets.make(name, classes=job.config.model.classes, width=width)


def make_growth(job: RunJob) -> WidenableNetwork:
    return make_widenable(choose_network(job), job.example, job.config.model.width or 1.0)


def check_expansion(job: RunJob) -> None:
    """Refuse before hours of training what would be refused after them: above all widths that are fixed."""
    section, train = job.config.expand, job.config.train
    if section is None:
        return
    if train is None or job.config.finetune is not None or job.config.compare is not None:
        raise ArgumentError(
            "an expansion needs a section [train], which also holds its fine-tuning options. Remove [finetune] and "
            "[compare]."
        )
    if train.build_schedule().distill or train.slimming is not None:
        raise ArgumentError("an expansion cannot use distillation or slimming: leave them out.")
    if getattr(job.start, "sosp_recipes", ()):
        raise ArgumentError("the network is already pruned: start from an unpruned one, or from the name of a network.")
    check_widths(make_growth(job), section.factor)


def run_expansion(stage: str, job: RunJob, stand: StageInput, run: RunFolder, watch: Watcher) -> dict[str, Any]:
    """What is missing of every seed; the choices, and all points."""
    section, plan = job.config.expand, plan_expansion(job)
    assert section is not None
    watch.event("begin", {"stage": stage, "method": plan.method, "budget": {"widen": plan.factor}})
    trained = None if job.config.model.weights is None else stand.model
    choices: list[dict[str, Any]] = []
    points: list[ExpansionPoint] = []
    for seed in range(job.config.run.seed, job.config.run.seed + section.seeds):
        setup = setup_for(job, run, watch, seed)
        found = expand(
            choose_network(job), job.dataset, plan, setup, trained=trained, base=job.config.model.width or 1.0
        )
        choices.append({"seed": seed, **asdict(found.choice)})
        points += found.points
    if run.writes:
        write_text(run.file(stage), as_csv(points))
    return {"choices": choices, "points": [asdict(point) for point in points]}


def setup_for(job: RunJob, run: RunFolder, watch: Watcher, seed: int) -> ExpansionSetup:
    section, train = job.config.expand, job.config.train
    assert section is not None and train is not None
    schedule = train.build_schedule()
    tuning = schedule if section.tuning is None else replace(schedule, epochs=section.tuning)

    def on_epoch(name: str, epoch: Epoch) -> None:
        epochs = (schedule if name in ("vanilla", "expand", "widen") else tuning).epochs
        watch.event("epoch", {"stage": name, "epochs": epochs, **asdict(epoch)})

    def on_point(point: ExpansionPoint) -> None:
        watch.event("point", asdict(point))

    return ExpansionSetup(
        schedule,
        tuning,
        seed=seed,
        folder=run.folder / f"seed{seed}",
        device=job.device,
        speed=train.speed,
        on_point=on_point,
        on_epoch=on_epoch,
        on_step=lambda done, total, moment: watch.step("expand", done, total, moment),
    )


def as_csv(points: Sequence[ExpansionPoint]) -> str:
    """A line per point."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(point, name) for name in COLUMNS] for point in points)
    return text.getvalue()
