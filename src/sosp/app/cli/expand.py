"""The commands about widths: expand, bottlenecks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import sosp
from sosp.app.cli.flags import DryRun, Resume, Sections, takes
from sosp.app.cli.output import Screen
from sosp.app.cli.runs import Target, launch, warn_if_fresh
from sosp.app.cli.tables import bottlenecks_table, large
from sosp.app.cli.targets import before_pruning, data_for, refuse_weights, sections_for
from sosp.app.config import as_flag, build
from sosp.app.options import RATIOS
from sosp.app.run import look, prepare_look
from sosp.app.run.folder import SALIENCY, is_run, read_record
from sosp.errors import ArgumentError, whole_number
from sosp.selection.saved_saliency import SavedSaliency, read_saliency

SCORING = ("prune.method", "prune.groups", "prune.gate", "prune.exclude", "prune.downsampling", "prune.examples")


@takes("model", "data", "expand", *SCORING, "prune.cap", "train", "run")
def expand(model: Target, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Train, find what is too narrow, widen it, train anew and prune; beside it the network as it is, and a wider one.

    sosp expand sosp:resnet56 --data cifar10 --data-dir datasets --ratios 0.3,0.5,0.7
    """
    sections, _ = sections_for(model, given)
    launch(build(sections, as_flag), "expand", screen, dry_run, resume)


@takes("model", "data", *SCORING, "prune.objective", "prune.samples", "run.seed", "run.device")
def bottlenecks(
    model: Target,
    given: Sections,
    screen: Screen,
    ratios: Annotated[str | None, typer.Option(help="Overall shares to remove.", show_default="0.1 to 0.9")] = None,
    subsamples: Annotated[int, typer.Option(help="Disjoint sets of examples to score besides.")] = 3,
    alpha: Annotated[float, typer.Option(help="Chance of any false verdict.")] = 0.05,
) -> None:
    """Say which layers and blocks are too narrow, which are over-wide, and what widths would even that out.

    Uses the saliency that a run of prune kept, or scores the network.

    sosp bottlenecks runs/prune-resnet56-cifar10-sosp-h-ratio0.5-seed0
    """
    whole_number("--subsamples", subsamples, least=0)
    sections, kept = sections_to_look(model, given)
    job = prepare_look(build(sections, as_flag), data=kept is None or subsamples > 0)
    warn_if_fresh(job, screen)
    found = look(job, kept, ratios=shares(ratios), alpha=alpha, subsamples=subsamples)
    screen.tell({"event": "result", **found.as_dict()})
    facts = found.as_dict()
    screen.say(bottlenecks_table(facts["blocks"], facts["ratios"], "block"))
    screen.say(bottlenecks_table(facts["layers"], facts["ratios"], "layer"))
    screen.say(f"{found.method}, by {'the saliency of the run' if kept else 'a saliency of now'}. {verdict(found)}")


def sections_to_look(word: str, given: Sections) -> tuple[Sections, SavedSaliency | None]:
    """Of a run that pruned, the network before that, and the saliency it kept unless another one is asked for."""
    record = read_record(word) if is_run(word) else None
    if record is None or (record.config.prune is None and record.config.compare is None):
        return sections_for(word, given)[0], None
    refuse_weights(word, given)
    before, folder = record.config.as_dict(), Path(word)
    weights = record.config.model.weights if record.config.compare else before_pruning(record, folder)
    model = {**before["model"], **given["model"]} | ({} if weights is None else {"weights": weights})
    sections = {
        **given,
        "model": model,
        "data": data_for(before, given),
        "prune": {**before.get("prune", {}), **given["prune"]},
    }
    kept = folder / SALIENCY
    return sections, read_saliency(kept) if kept.is_file() and not given["prune"] else None


def shares(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        found: tuple[float, ...] = RATIOS.read(text)
    except ValueError:
        raise ArgumentError(f"--ratios should be {RATIOS.wanted}, not {text!r}.") from None
    return found


def verdict(found: sosp.Bottlenecks) -> str:
    """The advice, and what it costs."""
    if found.before is None or found.after is None:
        return f"Advice: {found.advice}. What that costs is not known: {found.note}"
    was, would = found.before, found.after
    size = f"{was.params:,} -> {would.params:,} parameters, {large(was.macs)} -> {large(would.macs)} MACs"
    return f"Advice: {found.advice} ({size})."
