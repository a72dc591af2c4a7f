"""An expansion as a run: seed by seed, each in a folder of its own; all points in one table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from sosp import nets
from sosp.app.config import Pruning
from sosp.app.run.folder import Run
from sosp.app.run.job import Job
from sosp.core.documents import write_text
from sosp.errors import ArgumentError
from sosp.graph.structures import downsampling
from sosp.nets.by_name import parse
from sosp.studies.expand.growth import Growth, Make, check_growth, growth_of
from sosp.studies.expand.plan import ExpansionPlan, Setup
from sosp.studies.expand.points import Point
from sosp.studies.expand.search import expand
from sosp.training import Epoch

if TYPE_CHECKING:
    from sosp.app.run.stages import Stand
    from sosp.training.watcher import Watcher

COLUMNS = [f.name for f in fields(Point) if f.name not in ("blocks", "layers")]


def plan_for(job: Job) -> ExpansionPlan:
    """What the sections [expand] and [prune] say."""
    how, section = job.config.prune or Pruning(), job.config.expand
    assert section is not None
    keep = (*(how.exclude or ()), *(() if how.downsampling else downsampling(job.start)))
    same = {name: getattr(how, name) for name in ("method", "examples", "gate", "groups", "cap")}
    return section.plan(exclude=keep, **same)


def network_for(job: Job) -> nn.Module | Make:
    """Ours by their width; any other as it is."""
    source, name = parse(job.config.model.name)
    if source != "sosp":
        return job.original
    return lambda width: nets.make(name, classes=job.config.model.classes, width=width)


def growth_for(job: Job) -> Growth:
    return growth_of(network_for(job), job.example, job.config.model.width or 1.0)


def check_expansion(job: Job) -> None:
    """Refuse before hours of training what would be refused after them: above all widths that are fixed."""
    section, train = job.config.expand, job.config.train
    if section is None:
        return
    if train is None or job.config.finetune is not None or job.config.compare is not None:
        raise ArgumentError(
            "an expansion trains and fine-tunes as [train] says; [finetune] and [compare] have no place."
        )
    if train.plan().distill or train.slimming is not None:
        raise ArgumentError("an expansion trains without a teacher and without slimming.")
    if getattr(job.start, "sosp_recipes", ()):
        raise ArgumentError("the network is pruned already: begin with one that is not, or with the name of a network.")
    check_growth(growth_for(job), section.factor)


def run_expansion(stage: str, job: Job, stand: Stand, run: Run, watch: Watcher) -> dict[str, Any]:
    """What is missing of every seed; the choices, and all points."""
    section, plan = job.config.expand, plan_for(job)
    assert section is not None
    watch.event("begin", {"stage": stage, "method": plan.method, "budget": {"widen": plan.factor}})
    trained = None if job.config.model.weights is None else stand.model
    choices: list[dict[str, Any]] = []
    points: list[Point] = []
    for seed in range(job.config.run.seed, job.config.run.seed + section.seeds):
        setup = setup_for(job, run, watch, seed)
        found = expand(network_for(job), job.dataset, plan, setup, trained=trained, base=job.config.model.width or 1.0)
        choices.append({"seed": seed, **asdict(found.choice)})
        points += found.points
    if run.writes:
        write_text(run.file(stage), as_csv(points))
    return {"choices": choices, "points": [asdict(point) for point in points]}


def setup_for(job: Job, run: Run, watch: Watcher, seed: int) -> Setup:
    section, train = job.config.expand, job.config.train
    assert section is not None and train is not None
    schedule = train.plan()
    tuning = schedule if section.tuning is None else replace(schedule, epochs=section.tuning)

    def on_epoch(name: str, epoch: Epoch) -> None:
        epochs = (schedule if name in ("vanilla", "expand", "widen") else tuning).epochs
        watch.event("epoch", {"stage": name, "epochs": epochs, **asdict(epoch)})

    def on_point(point: Point) -> None:
        watch.event("point", asdict(point))

    return Setup(
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


def as_csv(points: Sequence[Point]) -> str:
    """A line per point."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(point, name) for name in COLUMNS] for point in points)
    return text.getvalue()
