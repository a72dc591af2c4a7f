"""Look at the widths of a run's network: its saliency as it is kept, or scored; more subsamples for the stability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sosp.app.config import Config, DataSection, PruningSection
from sosp.app.run.expansion_stage import make_growth
from sosp.app.run.job import RunJob, find_job_structures, prepare_job
from sosp.errors import ArgumentError, RunError
from sosp.graph.records import Saliency, Structures
from sosp.nets.by_name import parse_network_name
from sosp.pipeline.cut import choose_targets
from sosp.scoring.score import check_structures, score
from sosp.selection.saved_saliency import SavedSaliency
from sosp.studies.bottlenecks.bottleneck_detection import bottlenecks
from sosp.studies.bottlenecks.bottleneck_record import Bottlenecks
from sosp.training.initial_statistics import recalibrate_untrained


def prepare_bottleneck_job(config: Config, *, data: bool) -> RunJob:
    """As ``prepare``; without the data where nothing is scored, so that it need not be there any more."""
    job = prepare_job(replace(config, prune=None, data=config.data if data else DataSection()))
    return replace(job, config=replace(job.config, prune=(config.prune or PruningSection()).settle(groups=None)))


def find_run_bottlenecks(
    job: RunJob,
    kept: SavedSaliency | None,
    *,
    ratios: Sequence[float] | None = None,
    alpha: float = 0.05,
    subsamples: int = 3,
) -> Bottlenecks:
    """By the saliency that a run kept, or else by one of the section [prune]; and by those of disjoint subsamples."""
    section = job.config.prune
    assert section is not None
    structures = find_job_structures(job, job.start)
    if kept is not None and list(kept.layers) != [layer.name for layer in structures.layers]:
        raise RunError("the saliency that the run saved does not match its network: their layers differ.")
    section = replace(section, method=section.method if kept is None else kept.method)
    check_structures(job.start, structures, section.method or "sosp-h")
    parts = split_examples(job, section, subsamples + (kept is None)) if subsamples or kept is None else []
    model = recalibrate_untrained(job.start, job.dataset.train, job.config.run.seed) if parts else job.start
    scored = [_scored(job, model, structures, section, part) for part in parts]
    given = kept if kept is not None else scored.pop(0)
    cost = (
        make_growth(job).cost
        if parse_network_name(job.config.model.name)[0] == "sosp" and not _is_pruned(job)
        else None
    )
    return bottlenecks(given, ratios=ratios, again=scored, structures=structures, alpha=alpha, cost=cost)


def _is_pruned(job: RunJob) -> bool:
    return bool(getattr(job.start, "sosp_recipes", ()))


def split_examples(job: RunJob, section: PruningSection, parts: int) -> list[tuple[Tensor, Tensor]]:
    """So many sets of examples that share none; rows in turn, since files come class by class."""
    source = job.dataset.train
    each = min(len(source) if section.examples is None else int(section.examples), len(source) // parts)
    if not each:
        raise ArgumentError(
            f"{len(source)} training examples are too few for {parts} subsamples: each needs at least one."
        )
    batches = list(source.subset(each * parts, job.config.run.seed).to(job.device).ordered(batch=250))
    images, labels = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    return [(images[i::parts], labels[i::parts]) for i in range(parts)]


def _scored(job: RunJob, model: nn.Module, structures: Structures, section: PruningSection, examples: Any) -> Saliency:
    return score(
        model,
        examples,
        method=section.method or "sosp-h",
        structures=structures,
        examples=None,
        generator=torch.Generator().manual_seed(job.config.run.seed),
        targets=choose_targets(section.method or "sosp-h", section.targets, labelled=True),
        objective=section.objective,
        classes=section.samples,
    )
