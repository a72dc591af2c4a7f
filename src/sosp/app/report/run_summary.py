"""The first thing to see: every network of a run with its figures, and what the last has left of the first."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosp.app.report.run_facts import RunFacts
from sosp.app.report.run_history import Figures, Step
from sosp.app.report.section import (
    FormattedNumber,
    ReportTable,
    TableCell,
    format_count,
    make_large_cell,
    make_milliseconds_cell,
    make_share_cell,
    make_size_cell,
    make_whole_cell,
)

TRAINED = {"train": "trained", "finetune": "fine-tuned"}
LARGE_LOSS = 0.1  # of accuracy: 10 points
# Key of the figures -> its name, and how it is shown.
FIGURE_FORMATS: dict[str, tuple[str, Callable[[Any], TableCell]]] = {
    "top1": ("accuracy", make_share_cell),
    "params": ("parameters", make_whole_cell),
    "macs": ("MACs", make_large_cell),
    "latency": ("latency", make_milliseconds_cell),
    "bytes": ("size", make_size_cell),
}


@dataclass(frozen=True)
class FigureCard:
    """One figure, before and after."""

    name: str
    before: TableCell | None
    after: TableCell
    change: str
    left: float | None  # share, for a bar


def list_networks(steps: Iterable[Step]) -> list[tuple[str, Figures]]:
    """Return every network that the stages measured, by name.

    Latencies are those that a pruning measured side by side: fine-tuning changes numbers, not shapes.
    """
    rows: list[tuple[str, Figures]] = []
    latency: dict[str, float] = {}  # of the network after the last pruning
    for stage, facts in steps:
        if stage == "prune":
            name, before = rows[-1] if rows else ("before", facts["before"])
            repaired = ", repaired" if facts.get("repair") else ""
            rows[-1:] = [(name, {**before, "latency": facts["before"]["latency"]})]
            rows.append((f"pruned by {facts['method']}{repaired}", facts))
            latency = {"latency": facts["latency"]}
        elif stage in TRAINED:
            rows.append((TRAINED[stage], {**facts, **latency}))
    return rows


def build_cards(facts: RunFacts) -> list[FigureCard]:
    """Return the figures of the last network, compared with the first."""
    rows = [figures for _, figures in list_networks(facts.steps)]
    if not rows:
        return []
    first = rows[0] if len(rows) > 1 else None
    return [_card(key, first, rows[-1]) for key in FIGURE_FORMATS if rows[-1].get(key) is not None]


def _card(key: str, first: Figures | None, last: Figures) -> FigureCard:
    name, show = FIGURE_FORMATS[key]
    before = None if first is None or first.get(key) is None else show(first[key])
    return create_card(name, before, show(last[key]))


def create_card(name: str, before: TableCell | None, after: TableCell) -> FigureCard:
    """Return a figure with the words that compare it with the one before."""
    if not isinstance(before, FormattedNumber) or not isinstance(after, FormattedNumber):
        return FigureCard(name, None, after, "", None)
    if name == "accuracy":
        points = f"{100 * (after.value - before.value):+.2f} points".replace("-", "−")
        return FigureCard(name, before, after, points, None)
    left = after.value / before.value if before.value else 1.0
    words = speed(left) if name.startswith("latency") else f"{left:.1%} left"
    return FigureCard(name, before, after, words, left)


def speed(left: float) -> str:
    return f"{1 / left:.2f} times as fast" if left > 0 else ""


def build_networks_table(facts: RunFacts) -> ReportTable | None:
    """A row for every network."""
    rows = list_networks(facts.steps)
    if not rows:
        return None
    keys = [key for key in FIGURE_FORMATS if any(figures.get(key) is not None for _, figures in rows)]
    cells = tuple((name, *(_shown(key, figures) for key in keys)) for name, figures in rows)
    before = " and of the runs before it" if facts.earlier else ""
    return ReportTable(
        f"The networks of this run{before}", ("network", *(FIGURE_FORMATS[key][0] for key in keys)), cells
    )


def _shown(key: str, figures: Figures) -> TableCell:
    return "" if figures.get(key) is None else FIGURE_FORMATS[key][1](figures[key])


# --- words ----------------------------------------------------------------------------------------------


def format_title(facts: RunFacts) -> str:
    """``resnet56 on cifar10``."""
    config = facts.record.config
    network = config.model.name.partition(":")[2] or config.model.name
    return f"{network} on {config.data.name}" if config.data.name else network


def summarize_run(facts: RunFacts) -> list[str]:
    """What was done, in a few sentences."""
    said = [describe_way(facts.steps)] if len(measure_way(facts.steps)) > 1 else []
    results, config = facts.results, facts.record.config
    if "train" in results:
        said.append(f"Trained for {format_count(results['train']['epochs'], 'epoch')}.")
    if "prune" in results:
        cut = results["prune"]
        ratio = cut["removed"] / cut["structures"] if cut["structures"] else 0.0
        said.append(f"{cut['method']} removed {cut['removed']:,} of {cut['structures']:,} structures ({ratio:.1%}).")
    if "finetune" in results:
        said.append(f"Fine-tuned for {format_count(results['finetune']['epochs'], 'epoch')}.")
    if facts.summaries:
        methods, ratios = ({getattr(s, key) for s in facts.summaries} for key in ("method", "ratio"))
        said.append(f"{format_count(len(methods), 'method')} compared at {format_count(len(ratios), 'ratio')}.")
    if "expand" in results:
        said.append(
            f"{format_count(len(results['expand']['points']), 'network')} expanded, widened or unchanged, then pruned "
            "and compared."
        )
    if missing := [stage for stage in config.stages if stage not in results]:
        said.append(f"Not finished: {', '.join(missing)}.")
    return said


def measure_way(steps: Iterable[Step]) -> list[tuple[str, float]]:
    """Return the name and accuracy of every network whose accuracy was measured, from the first to the last."""
    return [(name, figures["top1"]) for name, figures in list_networks(steps) if figures.get("top1") is not None]


def describe_way(steps: Iterable[Step]) -> str:
    """``Accuracy 95.60 % → 95.20 % → 96.00 %: trained; pruned by sosp-i, repaired; fine-tuned.``"""
    way = measure_way(steps)
    return f"Accuracy {' → '.join(f'{100 * x:.2f} %' for _, x in way)}: {'; '.join(name for name, _ in way)}."


def explain_large_loss(steps: Sequence[Step], folder: Path) -> list[str]:
    """Return that a pruning lost much accuracy and what to try against it; nothing where it did not."""
    way = measure_way(steps)
    cuts = [figures for stage, figures in steps if stage == "prune"]
    if not cuts or len(way) < 2 or way[0][1] - way[-1][1] <= LARGE_LOSS:
        return []
    kept = cuts[-1]["macs"] / cuts[-1]["before"]["macs"]
    repair = cuts[-1].get("repair") or {}
    tuned = steps[-1][0] == "finetune"
    errors = sorted((x for x in repair.get("layers", ()) if not x.get("why")), key=lambda x: -x["after"])
    worst = " ".join(f"--exclude {shlex.quote(x['layer'])}" for x in errors[:2])
    return [
        f"The accuracy is {100 * (way[0][1] - way[-1][1]):.1f} points lower than before. What to try:",
        "Fine-tune for more epochs (--epochs)." if tuned else f"Fine-tune: sosp finetune {shlex.quote(str(folder))}",
        f"Prune less: this network has {kept:.0%} of the MACs, try --macs {(1 + kept) / 2:.2g}.",
        f"Repair with more inputs than {repair['examples']:,}."
        if repair.get("examples")
        else "Repair the network after pruning it: this needs no labels.",
        "Keep the layers with the largest error after the repair: " + worst
        if worst
        else "Keep important layers as they are: --exclude LAYER.",
    ]
