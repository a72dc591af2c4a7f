"""What a run would do and cost, without doing it."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

from sosp.app.config import PruningSection
from sosp.app.run.comparison_stage import plan_comparison
from sosp.app.run.expansion_stage import plan_expansion
from sosp.app.run.job import RunJob, find_job_structures, open_pruning
from sosp.core.batches import call_model
from sosp.core.outputs import find_logits
from sosp.graph.plan import count
from sosp.pipeline.cut import choose_scoring

PASSES = 3  # a training step costs a forward pass and, in weights and activations, two more


def estimate_run(job: RunJob) -> dict[str, Any]:
    """Stage -> what it would do; the seconds are those of a small batch here and now, scaled up."""
    cost = count(job.start, job.example)
    found: dict[str, Any] = {"network": {"params": cost.params, "macs": cost.macs, "device": str(job.device)}}
    each = _seconds_per_image(job) if job.config.stages else 0.0
    for stage in job.config.stages:
        if stage == "compare":
            found[stage] = _comparing(job)
        elif stage == "expand":
            found[stage] = _expanding(job, cost.params)
        elif stage == "prune":
            assert job.config.prune is not None
            found[stage] = _pruning(job, job.config.prune)
        else:
            found[stage] = _training(job, stage, cost.macs, each)
    return found


def _training(job: RunJob, stage: str, macs: int, each: float) -> dict[str, Any]:
    schedule = getattr(job.config, stage).build_schedule()
    images = schedule.epochs * len(job.dataset.train)
    return {
        "epochs": schedule.epochs,
        "batch": schedule.batch,
        "steps": schedule.epochs * job.dataset.train.steps(schedule.batch),
        "images": images,
        "macs": PASSES * macs * images,
        "seconds": each * images,
    }


def _pruning(job: RunJob, section: PruningSection) -> dict[str, Any]:
    structures = find_job_structures(job, job.start)
    how = choose_scoring(structures, open_pruning(job, job.start))
    return {
        "method": how["method"],
        "structures": len(structures),
        "budget": section.budget,
        "examples": min(how["examples"], len(job.dataset.train)),
    }


def _comparing(job: RunJob) -> dict[str, Any]:
    plan = plan_comparison(job)
    cells = len(plan.methods) * len(plan.ratios) * plan.seeds
    tuning = job.config.finetune
    return {
        "methods": list(plan.methods),
        "ratios": list(plan.ratios),
        "cells": cells,
        "tuning": 0 if tuning is None else tuning.build_schedule().epochs,
    }


def _expanding(job: RunJob, params: int) -> dict[str, Any]:
    section, train = job.config.expand, job.config.train
    assert section is not None and train is not None
    each = 3 if job.config.model.weights is None else 2  # a network that is given is not trained
    before = each * section.seeds if section.when == "trained" else 0
    return {
        "courses": ["vanilla", "expand", "widen"],
        "sizes": [f"{kind} {size:g}" for kind, size in plan_expansion(job).budgets(params)],
        "seeds": section.seeds,
        "trainings": before,
        "epochs_before": train.build_schedule().epochs if before else 0,
        "epochs_after": train.build_schedule().epochs if section.tuning is None else section.tuning,
    }


def _seconds_per_image(job: RunJob) -> float:
    """Of a training step, on the example."""
    model = copy.deepcopy(job.start).train()
    _step(model, job.example)
    started = time.perf_counter()
    _step(model, job.example)
    return (time.perf_counter() - started) / len(job.example)


def _step(model: nn.Module, example: Any) -> None:
    with torch.enable_grad():
        logits = find_logits(call_model(model, example))
        torch.autograd.grad(logits.float().sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    if logits.is_cuda:
        torch.cuda.synchronize()
