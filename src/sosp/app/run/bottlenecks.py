"""Look at the widths of a run's network: its saliency as it is kept, or scored; more subsamples for the stability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sosp.app.config import Config, Data, Pruning
from sosp.app.run.expand import growth_for
from sosp.app.run.job import Job, prepare, structures_for
from sosp.errors import ArgumentError, RunError
from sosp.graph.records import Saliency, Structures
from sosp.nets.by_name import parse
from sosp.scoring.score import check_structures, score
from sosp.selection.saved_saliency import SavedSaliency
from sosp.studies.bottlenecks.find import bottlenecks
from sosp.studies.bottlenecks.record import Bottlenecks
from sosp.training.initial_statistics import settled


def prepare_look(config: Config, *, data: bool) -> Job:
    """As ``prepare``; without the data where nothing is scored, so that it need not be there any more."""
    job = prepare(replace(config, prune=None, data=config.data if data else Data()))
    return replace(job, config=replace(job.config, prune=config.prune or Pruning()))


def look(
    job: Job,
    kept: SavedSaliency | None,
    *,
    ratios: Sequence[float] | None = None,
    alpha: float = 0.05,
    subsamples: int = 3,
) -> Bottlenecks:
    """By the saliency that a run kept, or else by one of the section [prune]; and by those of disjoint subsamples."""
    section = job.config.prune
    assert section is not None
    structures = structures_for(job, job.start)
    if kept is not None and list(kept.layers) != [layer.name for layer in structures.layers]:
        raise RunError("the saliency that the run kept is of other layers than its network has.")
    check_structures(job.start, structures, section.method)
    parts = disjoint(job, section, subsamples + (kept is None)) if subsamples or kept is None else []
    model = settled(job.start, job.dataset.train, job.config.run.seed) if parts else job.start
    scored = [_scored(job, model, structures, section, part) for part in parts]
    given = kept if kept is not None else scored.pop(0)
    cost = growth_for(job).cost if parse(job.config.model.name)[0] == "sosp" and not _is_pruned(job) else None
    return bottlenecks(given, ratios=ratios, again=scored, structures=structures, alpha=alpha, cost=cost)


def _is_pruned(job: Job) -> bool:
    return bool(getattr(job.start, "sosp_recipes", ()))


def disjoint(job: Job, section: Pruning, parts: int) -> list[tuple[Tensor, Tensor]]:
    """So many sets of examples that share none; rows in turn, since files come class by class."""
    source = job.dataset.train
    each = min(section.examples, len(source) // parts)
    if not each:
        raise ArgumentError(f"{parts} subsamples of {len(source)} training examples leave none for each.")
    batches = list(source.subset(each * parts, job.config.run.seed).to(job.device).ordered(batch=250))
    images, labels = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    return [(images[i::parts], labels[i::parts]) for i in range(parts)]


def _scored(job: Job, model: nn.Module, structures: Structures, section: Pruning, examples: Any) -> Saliency:
    return score(
        model,
        examples,
        method=section.method,
        structures=structures,
        examples=None,
        generator=torch.Generator().manual_seed(job.config.run.seed),
        objective=section.objective,
        classes=section.samples,
    )
