"""Define the commands about widths: expand, bottlenecks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import sosp
from sosp.app.cli.flags import DryRun, Resume, Sections, add_flags
from sosp.app.cli.output import Screen
from sosp.app.cli.run_commands import Target, launch_run, warn_without_weights
from sosp.app.cli.targets import find_unpruned_file, merge_data_section, refuse_weights, resolve_target
from sosp.app.cli.terminal_tables import create_bottlenecks_table, format_large_number
from sosp.app.config import build_config, format_flag
from sosp.app.run import find_run_bottlenecks, prepare_bottleneck_job
from sosp.app.run.run_folder import SALIENCY, is_run, read_record
from sosp.core.options import RATIOS
from sosp.errors import ArgumentError, check_whole_number
from sosp.selection.saved_saliency import SavedSaliency, read_saliency

SCORING = ("prune.method", "prune.groups", "prune.gate", "prune.exclude", "prune.downsampling", "prune.examples")


@add_flags("model", "data", "expand", *SCORING, "prune.cap", "train", "run")
def expand(model: Target, given: Sections, screen: Screen, dry_run: DryRun = False, resume: Resume = False) -> None:
    """Widen the narrowest blocks, retrain and prune. Compare with the original and a uniformly wider network.

    sosp expand sosp:resnet56 --data cifar10 --data-dir datasets --ratios 0.3,0.5,0.7
    """
    sections, _ = resolve_target(model, given)
    launch_run(build_config(sections, format_flag), "expand", screen, dry_run, resume)


@add_flags("model", "data", *SCORING, "prune.objective", "prune.samples", "run.seed", "run.device")
def bottlenecks(
    model: Target,
    given: Sections,
    screen: Screen,
    ratios: Annotated[
        str | None, typer.Option(help="Shares of all structures to remove.", show_default="0.1 to 0.9")
    ] = None,
    subsamples: Annotated[
        int,
        typer.Option(
            help="Number of additional disjoint sets of examples to score, to see how stable the verdicts are."
        ),
    ] = 3,
    alpha: Annotated[float, typer.Option(help="Probability that at least one verdict is false.")] = 0.05,
) -> None:
    """Show which layers and blocks are too narrow or too wide, and suggest widths that balance them.

    The verdicts use the saliency saved by a prune run. Without one, the network is scored.

    sosp bottlenecks runs/prune-resnet56-cifar10-sosp-h-ratio0.5-seed0
    """
    check_whole_number("--subsamples", subsamples, least=0)
    sections, kept = resolve_bottleneck_target(model, given)
    job = prepare_bottleneck_job(build_config(sections, format_flag), data=kept is None or subsamples > 0)
    warn_without_weights(job, screen)
    found = find_run_bottlenecks(job, kept, ratios=parse_ratios(ratios), alpha=alpha, subsamples=subsamples)
    screen.print_json({"event": "result", **found.as_dict()})
    facts = found.as_dict()
    screen.print_lines(create_bottlenecks_table(facts["blocks"], facts["ratios"], "block"))
    screen.print_lines(create_bottlenecks_table(facts["layers"], facts["ratios"], "layer"))
    screen.print_lines(
        f"{found.method}, from {'the saliency of the run' if kept else 'a newly computed saliency'}. "
        f"{format_advice(found)}"
    )


def resolve_bottleneck_target(word: str, given: Sections) -> tuple[Sections, SavedSaliency | None]:
    """Of a run that pruned, the network before that, and the saliency it kept unless another one is asked for."""
    record = read_record(word) if is_run(word) else None
    if record is None or (record.config.prune is None and record.config.compare is None):
        return resolve_target(word, given)[0], None
    refuse_weights(word, given)
    before, folder = record.config.as_dict(), Path(word)
    weights = record.config.model.weights if record.config.compare else find_unpruned_file(record, folder)
    model = {**before["model"], **given["model"]} | ({} if weights is None else {"weights": weights})
    sections = {
        **given,
        "model": model,
        "data": merge_data_section(before, given),
        "prune": {**before.get("prune", {}), **given["prune"]},
    }
    kept = folder / SALIENCY
    return sections, read_saliency(kept) if kept.is_file() and not given["prune"] else None


def parse_ratios(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        found: tuple[float, ...] = RATIOS.read(text)
    except ValueError:
        raise ArgumentError(f"--ratios should be {RATIOS.wanted}, not {text!r}.") from None
    return found


def format_advice(found: sosp.Bottlenecks) -> str:
    """Return the advice and its cost in parameters and MACs."""
    if found.before is None or found.after is None:
        return f"Advice: {found.advice}. Its cost is unknown: {found.note}"
    was, would = found.before, found.after
    macs = f"{format_large_number(was.macs)} -> {format_large_number(would.macs)} MACs"
    size = f"{was.params:,} -> {would.params:,} parameters, {macs}"
    return f"Advice: {found.advice} ({size})."
