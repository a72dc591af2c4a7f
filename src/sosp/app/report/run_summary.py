"""The first thing to see: every network of a run with its figures, and what the last has left of the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import (
    ReportTable,
    TableCell,
    format_count,
    make_large_cell,
    make_milliseconds_cell,
    make_share_cell,
    make_size_cell,
    make_whole_cell,
)

Figures = Mapping[str, Any]
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


def list_networks(results: Mapping[str, Figures]) -> list[tuple[str, Figures]]:
    """Every network that a run measured, by name.

    Latencies are those that pruning measured side by side: fine-tuning changes numbers, not shapes.
    """
    rows: list[tuple[str, Figures]] = []
    cut = results.get("prune")
    times = {} if cut is None else {"train": cut["before"]["latency"], "finetune": cut["latency"]}
    for stage, facts in results.items():
        if stage == "prune":
            rows = [*(rows or [("before", facts["before"])]), (f"pruned by {facts['method']}", facts)]
        elif stage in ("train", "finetune"):
            name = {"train": "trained", "finetune": "fine-tuned"}[stage]
            rows.append((name, {**facts, "latency": times.get(stage, facts["latency"])}))
    return rows


def build_cards(facts: RunFacts) -> list[FigureCard]:
    """What the last network of a run has, beside the first."""
    rows = [figures for _, figures in list_networks(facts.results)]
    if not rows:
        return []
    first = rows[0] if len(rows) > 1 else None
    return [_card(key, first, rows[-1]) for key in FIGURE_FORMATS if rows[-1].get(key) is not None]


def _card(key: str, first: Figures | None, last: Figures) -> FigureCard:
    name, show = FIGURE_FORMATS[key]
    after = last[key]
    before = None if first is None else first.get(key)
    if before is None:
        return FigureCard(name, None, show(after), "", None)
    if key == "top1":
        return FigureCard(
            name, show(before), show(after), f"{100 * (after - before):+.2f} points".replace("-", "−"), None
        )
    left = after / before if before else 1.0
    return FigureCard(name, show(before), show(after), f"{left:.1%} left" if key != "latency" else speed(left), left)


def speed(left: float) -> str:
    return f"{1 / left:.2f} times as fast" if left > 0 else ""


def build_networks_table(facts: RunFacts) -> ReportTable | None:
    """A row for every network."""
    rows = list_networks(facts.results)
    if not rows:
        return None
    keys = [key for key in FIGURE_FORMATS if any(figures.get(key) is not None for _, figures in rows)]
    cells = tuple((name, *(_shown(key, figures) for key in keys)) for name, figures in rows)
    return ReportTable("The networks of this run", ("network", *(FIGURE_FORMATS[key][0] for key in keys)), cells)


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
    said = []
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
            f"{format_count(len(results['expand']['points']), 'network')} expanded, widened or plain, cut and compared."
        )
    if missing := [stage for stage in config.stages if stage not in results]:
        said.append(f"Not finished: {', '.join(missing)}.")
    return said
