"""The stages of a run: train, prune, fine-tune. Each takes a network and leaves a file and its figures behind."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from sosp.app.config import TrainingSection
from sosp.app.run.comparison_stage import run_comparison
from sosp.app.run.expansion_stage import run_expansion
from sosp.app.run.job import RunJob, load_teacher, open_pruning, read_mask
from sosp.app.run.report_details import collect_details, find_saved_bottlenecks
from sosp.app.run.run_folder import DETAILS, SALIENCY, RunFolder
from sosp.baselines import Slimming
from sosp.core import distributed
from sosp.core.text_files import write_json
from sosp.data import Source
from sosp.graph.latency import latency
from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, count
from sosp.pipeline.cut import LABELLED_EXAMPLES
from sosp.pipeline.largest_cut import prune_to_budget
from sosp.pipeline.train import train
from sosp.refit import Repaired
from sosp.selection.saved_saliency import save_saliency
from sosp.surgery.checkpoint import save
from sosp.training import Epoch, evaluate, recalibrate
from sosp.training.initial_statistics import recalibrate_untrained
from sosp.training.watcher import Watcher


@dataclass(frozen=True, eq=False)
class StageInput:
    """Where a run stands when a stage begins."""

    model: nn.Module
    before: nn.Module | None  # the network before pruning
    mask: Mask | None


# --- training and fine-tuning ---------------------------------------------------------------------------


def run_training(stage: str, job: RunJob, stand: StageInput, run: RunFolder, watch: Watcher) -> dict[str, Any]:
    """Train the network, save the result; its figures."""
    section: TrainingSection = getattr(job.config, stage)
    schedule = section.build_schedule()
    watch.event("begin", {"stage": stage, "epochs": schedule.epochs, "schedule": asdict(schedule)})

    def on_epoch(name: str, epoch: Epoch) -> None:
        watch.event("epoch", {"stage": stage, "epochs": schedule.epochs, **asdict(epoch)})

    started = time.perf_counter()
    trained = train(
        stand.model,
        job.dataset,
        schedule,
        folder=run.checkpoints(stage),
        seed=job.config.run.seed,
        device=job.device,
        speed=section.speed,
        teacher=load_teacher(job, stage, stand.before),
        companion=None if section.slimming is None else Slimming(section.slimming),
        on_epoch=on_epoch,
        on_step=lambda done, total, moment: watch.step(stage, done, total, moment),
        save_every=section.save_every,
    )
    model = restore_layout(trained.average if trained.average is not None else trained.model)
    seconds = time.perf_counter() - started
    _keep(run, stage, model, stand.mask)
    once = latency(model, job.example).median
    return {"epochs": schedule.epochs, "seconds": seconds, **measure_network(job, model, once)}


def restore_layout(model: nn.Module) -> nn.Module:
    """In eval mode and in the usual layout, whatever made training fast."""
    return model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]


# --- pruning --------------------------------------------------------------------------------------------


def run_pruning(stage: str, job: RunJob, stand: StageInput, run: RunFolder, watch: Watcher) -> dict[str, Any]:
    """Score, select, shrink, save; the figures before and after."""
    section = job.config.prune
    assert section is not None
    watch.event("begin", {"stage": stage, "method": section.method or "default", "budget": section.budget})
    model = recalibrate_untrained(stand.model, job.dataset.train, job.config.run.seed)
    budget: dict[str, Any] = section.budget
    found = prune_to_budget(open_pruning(job, model), **budget)
    small = found.model
    if section.recalibrate:
        small = recalibrate(small, job.dataset.train, seed=job.config.run.seed)
    times = latency({"before": stand.model, "after": small}, job.example)
    inside = collect_details(
        model, found, section, take_scoring_examples(job, found.saliency.examples or LABELLED_EXAMPLES)
    )
    if run.writes:
        save_saliency(run.folder / SALIENCY, found.saliency, found.mask)
        narrow = find_saved_bottlenecks(job, run.folder / SALIENCY, found.saliency.structures)
        write_json(run.folder / DETAILS, {**inside, "bottlenecks": narrow})
    _keep(run, stage, small, found.mask)
    return {
        **({} if found.repaired is None else {"repair": summarize_repair(found.repaired)}),
        **({} if found.search is None else {"search": str(found.search)}),
        "method": found.saliency.method,
        "settings": found.settings,
        "structures": found.mask.structures,
        "removed": found.mask.chosen,
        "scoring_seconds": found.seconds["scoring"],
        "before": measure_network(job, stand.model, times["before"].median, found.cost_before),
        **measure_network(job, small, times["after"].median, found.cost_after),
    }


def summarize_repair(repaired: Repaired) -> dict[str, Any]:
    """What a repair did, for the report."""
    names = ("agreement_before", "agreement_after", "examples", "seconds")
    return {"layers": [asdict(x) for x in repaired.layers], **{name: getattr(repaired, name) for name in names}}


def take_scoring_examples(job: RunJob, examples: int) -> Source:
    """The training examples that structures are scored with."""
    train_set = job.dataset.train
    return train_set.subset(min(examples, len(train_set)), job.config.run.seed).to(job.device)


# --- what all stages share ------------------------------------------------------------------------------


def measure_network(job: RunJob, model: nn.Module, seconds: float, cost: Cost | None = None) -> dict[str, Any]:
    """Accuracy on the test data, parameters, MACs, the bytes of its tensors, the time measured for the example."""
    cost = cost or count(model, job.example)
    tested = {} if job.data is None else asdict(evaluate(model, job.data.test, device=job.device))
    size = sum(x.numel() * x.element_size() for x in model.state_dict().values() if isinstance(x, torch.Tensor))
    return {**tested, "params": cost.params, "macs": cost.macs, "latency": seconds, "bytes": size}


def _keep(run: RunFolder, stage: str, model: nn.Module, mask: Mask | None) -> None:
    if run.writes:
        save(run.file(stage), model, mask)


STAGES = {
    "train": run_training,
    "prune": run_pruning,
    "finetune": run_training,
    "compare": run_comparison,
    "expand": run_expansion,
}


def run_stages(job: RunJob, run: RunFolder, watch: Watcher) -> dict[str, Any]:
    """All stages that are not done yet, one after the other; the results of all."""
    stand = StageInput(job.start, None, read_mask(job.config.model.weights))
    for stage in job.config.stages:
        if not run.is_done(stage):
            found = STAGES[stage](stage, job, stand, run, watch)
            run.record_stage(stage, found)
            watch.event("end", {"stage": stage, "file": str(run.file(stage)), **found})
        distributed.wait_for_ranks()
        if stage in ("compare", "expand"):
            continue
        # Always from the file: a run that was interrupted goes on with the same numbers as one that was not.
        model = job.load_network(run.file(stage))
        before = stand.model if stage == "prune" else stand.before
        stand = replace(stand, model=model, before=before, mask=read_mask(run.file(stage)))
    return run.results
