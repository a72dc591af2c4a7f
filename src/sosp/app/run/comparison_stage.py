"""A comparison as a run: every method that fits, cell by cell; the cells, a table of means and its CSV stay behind."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sosp.app.config import PruningSection
from sosp.app.run.job import RunJob
from sosp.app.run.run_folder import RunFolder
from sosp.core.text_files import write_text
from sosp.errors import ArgumentError, StructureError
from sosp.graph.plan import count
from sosp.graph.structures import downsampling, find_structures
from sosp.scoring.methods import METHODS
from sosp.studies.compare.comparison_cells import ComparisonPlan
from sosp.studies.compare.method_comparison import compare
from sosp.studies.compare.summary import FIGURES, ComparisonSummary, summarise_cells
from sosp.studies.pruning_task import check_method, prepare_task
from sosp.training import evaluate

if TYPE_CHECKING:
    from sosp.app.run.stages import StageInput
    from sosp.training.watcher import Watcher

SLOW = ("exact",)  # S Hessian-vector products; asked for by name only
COMPARISON_FILE = "comparison.csv"


def plan_comparison(job: RunJob) -> ComparisonPlan:
    """What the sections [compare] and [prune] say."""
    section, how = job.config.compare, (job.config.prune or PruningSection()).settle()
    scoring: dict[str, Any] = {"examples": how.examples, "gate": how.gate}
    assert section is not None
    keep = (*(how.exclude or ()), *(() if how.downsampling else downsampling(job.start)))
    plan = ComparisonPlan(
        methods=section.methods or ("sosp-h",),
        ratios=section.ratios,
        seeds=section.seeds,
        seed=job.config.run.seed,
        recalibrate=section.statistics,
        **scoring,
        groups=how.groups,
        exclude=keep,
        repair=section.repair,
    )
    return plan if section.methods is not None else _add_fitting_methods(job, plan)


def _add_fitting_methods(job: RunJob, plan: ComparisonPlan) -> ComparisonPlan:
    """Every method that this network allows."""
    fit = []
    options: dict[str, Any] = {"gate": plan.gate, "exclude": plan.exclude}
    found = {g: find_structures(job.start, job.example, groups=g, **options) for g in {plan.groups, "coupled"}}
    for name in METHODS:
        try:
            check_method(job.start, found[plan.groups_for(name)], name)
        except (ArgumentError, StructureError):
            continue
        fit += [name] * (name not in SLOW)
    return ComparisonPlan(**{**vars(plan), "methods": tuple(fit)})


def check_comparison(job: RunJob) -> None:
    """Refuse a method that does not fit before a run begins."""
    if job.config.compare is not None:
        prepare_task(job.start, job.dataset, plan_comparison(job), job.device)


def run_comparison(stage: str, job: RunJob, stand: StageInput, run: RunFolder, watch: Watcher) -> dict[str, Any]:
    """Measure the cells that are missing; the means over the seeds."""
    plan, tuning = plan_comparison(job), job.config.finetune
    watch.event("begin", {"stage": stage, "methods": list(plan.methods), "ratios": list(plan.ratios)})
    cells = compare(
        stand.model,
        job.dataset,
        plan,
        schedule=None if tuning is None else tuning.build_schedule(),
        folder=run.folder,
        device=job.device,
        speed=None if tuning is None else tuning.speed,
        on_cell=lambda cell: watch.event("cell", asdict(cell)),
    )
    found = summarise_cells(cells)
    if run.writes:
        write_text(run.folder / COMPARISON_FILE, as_csv(found))
    tested, cost = evaluate(stand.model, job.dataset.test, device=job.device), count(stand.model, job.example)
    before = {**asdict(tested), "params": cost.params, "macs": cost.macs}
    return {"cells": len(cells), "before": before, "summaries": [asdict(s) for s in found]}


def as_csv(found: list[ComparisonSummary]) -> str:
    """A line per method and ratio, every figure with its deviation."""
    text = io.StringIO()
    heads = [head for name in FIGURES for head in (name, f"{name}_std")]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "ratio", "seeds", *heads, "refusal"])
    for s in found:
        figures = [value for name in FIGURES for value in (s.means.get(name, ""), s.stds.get(name, ""))]
        writer.writerow([s.method, s.ratio, s.seeds, *figures, s.refusal])
    return text.getvalue()
