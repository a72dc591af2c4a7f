"""Events and results in words: lines, tables, the Python that loads a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from sosp.config import Config
from sosp.cost import Cost
from sosp.models import parse

Facts = Mapping[str, Any]


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def large(number: float) -> str:
    """``125.5 M``."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """``2 h 5 min``."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.1f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def budget(given: Mapping[str, float]) -> str:
    """``macs 0.5``."""
    return ", ".join(f"{key} {value:g}" for key, value in given.items()) or "a share of every layer"


# --- events ---------------------------------------------------------------------------------------------


def _begin(facts: Facts) -> str:
    if "methods" in facts:
        return f"{facts['stage']}: {', '.join(facts['methods'])} at {', '.join(map(str, facts['ratios']))}"
    if "epochs" in facts:
        return f"{facts['stage']}: {facts['epochs']} epochs"
    return f"{facts['stage']}: {facts['method']}, {budget(facts['budget'])}"


def _epoch(facts: Facts) -> str:
    test = facts["test"] or {}
    tested = f"  test {share(test['top1'])}" if test else ""
    loss = "none" if facts["loss"] is None else f"{facts['loss']:.4f}"
    return (
        f"{facts['stage']} epoch {facts['number']:>3}/{facts['epochs']}  loss {loss}  accuracy "
        f"{share(facts['accuracy'])}{tested}  rate {facts['rate']:.2g}  {facts['images_per_second']:,.0f} images/s"
    )


def _cell(facts: Facts) -> str:
    start = f"{facts['method']} {facts['ratio']:g}, seed {facts['seed']}:"
    if facts["refusal"]:
        return f"{start} {facts['refusal']}"
    tuned = "" if facts["tuned"] is None else f", {share(facts['tuned'])} fine-tuned"
    return (
        f"{start} {share(facts['masked'])} cut, {share(facts['recalibrated'])} recalibrated{tuned}; "
        f"{facts['params']:,} parameters, {large(facts['macs'])} MACs"
    )


def _end(facts: Facts) -> str:
    if "cells" in facts:
        return f"{facts['stage']}: {facts['cells']} cells done"
    found = f"{share(facts.get('top1'))} on the test data, {facts['params']:,} parameters, {large(facts['macs'])} MACs"
    if "removed" in facts:
        return f"{facts['removed']:,} of {facts['structures']:,} structures removed: {found}"
    return f"{facts['stage']}: {found}, {duration(facts['seconds'])}"


WORDS: dict[str, Callable[[Facts], str]] = {"begin": _begin, "epoch": _epoch, "cell": _cell, "end": _end}


# --- results --------------------------------------------------------------------------------------------


def results_table(results: Mapping[str, Facts]) -> Table:
    """A row for every network that a run measured.

    Latencies are those that pruning measured side by side: fine-tuning changes numbers, not shapes.
    """
    rows: list[tuple[str, Facts]] = []
    cut = results.get("prune")
    times = {} if cut is None else {"train": cut["before"]["latency"], "finetune": cut["latency"]}
    for stage, facts in results.items():
        facts = {**facts, "latency": times.get(stage, facts["latency"])}
        if stage == "prune":
            rows = [*(rows or [("before", facts["before"])]), (f"pruned by {facts['method']}", facts)]
        else:
            rows.append(({"train": "trained", "finetune": "fine-tuned"}[stage], facts))
    table = columns("network", "accuracy", "parameters", "MACs", "latency")
    for name, facts in rows:
        time = f"{1e3 * facts['latency']:.2f} ms"
        table.add_row(name, share(facts.get("top1")), f"{facts['params']:,}", large(facts["macs"]), time)
    return table


def comparison_table(found: list[Facts]) -> Table:
    """A row per method, a column per ratio: the accuracy after fine-tuning, or with new batch norm statistics."""
    what = "tuned" if any("tuned" in s["means"] for s in found) else "recalibrated"
    ratios = list(dict.fromkeys(s["ratio"] for s in found))
    table = columns("method", "scoring", *(f"{ratio:g}" for ratio in ratios))
    for method in dict.fromkeys(s["method"] for s in found):
        row = {s["ratio"]: s for s in found if s["method"] == method}
        times = [s["means"]["seconds"] for s in row.values() if "seconds" in s["means"]]
        cells = [_mean(row[ratio], what) for ratio in ratios]
        table.add_row(method, f"{times[0]:.2f} s" if times else "", *cells)
    table.title = {"tuned": "accuracy, fine-tuned", "recalibrated": "accuracy, recalibrated, not fine-tuned"}[what]
    return table


def _mean(summary: Facts, what: str) -> str:
    if what not in summary["means"]:
        return "refused"
    spread = f" ± {100 * summary['stds'][what]:.2f}" if summary["seeds"] > 1 else ""
    return f"{100 * summary['means'][what]:.2f}{spread}"


def columns(first: str, *others: str) -> Table:
    """An empty table: text on the left, numbers on the right."""
    table = Table()
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def cost_table(before: Cost, after: Cost | None = None) -> Table:
    """A row per layer; with what is left of it."""
    if after is None:
        table = columns("layer", "parameters", "MACs")
        for x in before.layers:
            table.add_row(x.name or "(itself)", f"{x.params:,}", f"{x.macs:,}")
        table.add_row("total", f"{before.params:,}", f"{before.macs:,}", style="bold")
        return table
    left = {x.name: x for x in after.layers}
    table = columns("layer", "parameters", "left", "MACs", "left")
    for x in before.layers:
        y = left[x.name]
        table.add_row(x.name or "(itself)", f"{x.params:,}", f"{y.params:,}", f"{x.macs:,}", f"{y.macs:,}")
    whole = (before.params, after.params, before.macs, after.macs)
    table.add_row("total", *(f"{number:,}" for number in whole), style="bold")
    return table


def loading(config: Config, path: str) -> list[str]:
    """The lines of Python that load a network."""
    source, name = parse(config.model.name)
    classes = "" if config.model.classes is None else f", classes={config.model.classes}"
    width = "" if config.model.width in (None, 1.0) else f", width={config.model.width!r}"
    home = "sosp.nets" if source == "sosp" else "sosp.models"
    made = name if source == "sosp" else config.model.name
    return [
        "import sosp" if source == "sosp" else "import sosp, sosp.models",
        f"original = {home}.make({made!r}{classes}{width})",
        f"model = sosp.load({path!r}, original)",
    ]
