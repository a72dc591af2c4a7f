"""Format events and results as lines and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from sosp.app.report.run_summary import list_networks
from sosp.graph.plan import Cost
from sosp.studies.compare.summary import list_states

Facts = Mapping[str, Any]


def format_share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def format_large_number(number: float) -> str:
    """``125.5 M``."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"


def format_duration(seconds: float) -> str:
    """``2 h 5 min``."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.1f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def format_budget(given: Mapping[str, float]) -> str:
    """``macs 0.5``."""
    return ", ".join(f"{key} {value:g}" for key, value in given.items()) or "a share for each layer"


# --- events ---------------------------------------------------------------------------------------------


def _begin(facts: Facts) -> str:
    if "methods" in facts:
        return f"{facts['stage']}: {', '.join(facts['methods'])} at {', '.join(map(str, facts['ratios']))}"
    if "epochs" in facts:
        return f"{facts['stage']}: {facts['epochs']} epochs"
    return f"{facts['stage']}: {facts['method']}, {format_budget(facts['budget'])}"


def _epoch(facts: Facts) -> str:
    test = facts["test"] or {}
    tested = f"  test {format_share(test['top1'])}" if test else ""
    loss = "none" if facts["loss"] is None else f"{facts['loss']:.4f}"
    return (
        f"{facts['stage']} epoch {facts['number']:>3}/{facts['epochs']}  loss {loss}  train "
        f"{format_share(facts['accuracy'])}{tested}  lr {facts['rate']:.2g}"
    )


def _cell(facts: Facts) -> str:
    start = f"{facts['method']} {facts['ratio']:g}, seed {facts['seed']}:"
    if facts["refusal"]:
        return f"{start} {facts['refusal']}"
    more = {"repaired": "repaired", "tuned": "fine-tuned"}
    known = "".join(f", {word} {format_share(facts[key])}" for key, word in more.items() if facts.get(key) is not None)
    pruned, recalibrated = format_share(facts["masked"]), format_share(facts["recalibrated"])
    return f"{start} pruned {pruned}, recalibrated {recalibrated}{known}"


def _point(facts: Facts) -> str:
    start = f"{facts['course']}, {facts['budget']} {facts['size']:g}, seed {facts['seed']}:"
    if facts["refusal"]:
        return f"{start} {facts['refusal']}"
    tuned = "pruned" if facts["tuned"] is None else f"{format_share(facts['tuned'])}"
    return f"{start} {tuned}, {facts['params']:,} parameters, {format_large_number(facts['macs'])} MACs"


def _end(facts: Facts) -> str:
    if "cells" in facts:
        return f"{facts['stage']}: {facts['cells']} cells done"
    if "points" in facts:
        return f"{facts['stage']}: {len(facts['points'])} points done"
    accuracy, macs = format_share(facts.get("top1")), format_large_number(facts["macs"])
    found = f"{accuracy} on the test data, {facts['params']:,} parameters, {macs} MACs"
    if "removed" in facts:
        how = "".join(f"\n{words}" for key in ("settings", "search") if (words := facts.get(key)))
        return f"{facts['removed']:,} of {facts['structures']:,} structures removed: {found}{how}"
    return f"{facts['stage']}: {found}, {format_duration(facts['seconds'])}"


EVENT_FORMATS: dict[str, Callable[[Facts], str]] = {
    "begin": _begin,
    "epoch": _epoch,
    "cell": _cell,
    "point": _point,
    "end": _end,
}


# --- results --------------------------------------------------------------------------------------------


def create_results_table(steps: Iterable[tuple[str, Facts]]) -> Table:
    """Return a row for every network that a run, and the runs before it, measured."""
    table = create_table("network", "accuracy", "parameters", "MACs", "latency")
    for name, facts in list_networks(steps):
        time = f"{1e3 * facts['latency']:.2f} ms"
        table.add_row(
            name, format_share(facts.get("top1")), f"{facts['params']:,}", format_large_number(facts["macs"]), time
        )
    return table


COMPARED = {
    "tuned": "accuracy after fine-tuning",
    "repaired": "accuracy after repair, not fine-tuned",
    "recalibrated": "accuracy after re-estimating batch-norm statistics, not fine-tuned",
    "masked": "accuracy right after pruning",
}


def create_comparison_table(found: list[Facts]) -> Table:
    """A row per method, a column per ratio: the accuracy fine-tuned, or repaired, or with new batch norm statistics."""
    what = next(iter(list_states(s["means"] for s in found)), "recalibrated")
    ratios = list(dict.fromkeys(s["ratio"] for s in found))
    table = create_table("method", "scoring", *(f"{ratio:g}" for ratio in ratios))
    for method in dict.fromkeys(s["method"] for s in found):
        row = {s["ratio"]: s for s in found if s["method"] == method}
        times = [s["means"]["seconds"] for s in row.values() if "seconds" in s["means"]]
        cells = [_mean(row[ratio], what) for ratio in ratios]
        table.add_row(method, f"{times[0]:.2f} s" if times else "", *cells)
    table.title = COMPARED[what]
    return table


def create_expansion_table(found: Facts) -> Table:
    """A row per point: what it was cut from, to what, and what it can do in the end."""
    points = found["points"]
    table = create_table("network", "unpruned", "pruned to", "parameters", "MACs", "accuracy")
    choices = {choice["seed"]: choice for choice in found["choices"]}
    for point in points:
        choice = choices[point["seed"]]
        widened = {"expand": f" {', '.join(choice['blocks'])}", "widen": f" all x{choice['constant']['factor']:.3g}"}
        size = f"{point['budget']} {point['size']:g}"
        cells = ["refused", "", ""]
        if not point["refusal"]:
            cells = [f"{point['params']:,}", format_large_number(point["macs"]), format_share(point["tuned"])]
        name = point["course"] + widened.get(point["course"], "")
        table.add_row(name, format_share(point["whole"]), size, *cells)
    return table


def create_bottlenecks_table(parts: Sequence[Facts], ratios: Sequence[float], title: str) -> Table:
    """A row per layer or block: what it loses as the network loses more and more, and what that says."""
    table = create_table(title, _percent(ratios), "factor", "verdict", "stable")
    table.columns[1].no_wrap = True
    table.caption = (
        "Percentages of structures removed from each row, when the network loses the percentages in the header."
    )
    for part in parts:
        stable = "" if part["stability"] is None else f"{part['stability']:.0%}"
        table.add_row(part["name"], _percent(part["removed"]), f"{part['factor']:.2f}", part["verdict"], stable)
    return table


def _percent(shares: Sequence[float]) -> str:
    """`` 3 12 20``, so that rows stand below each other."""
    return " ".join(f"{100 * share:2.0f}" for share in shares)


def _mean(summary: Facts, what: str) -> str:
    if what not in summary["means"]:
        return "refused"
    spread = f"±{100 * summary['stds'][what]:.2f}" if summary["seeds"] > 1 else ""
    return f"{100 * summary['means'][what]:.2f}{spread}"


def create_table(first: str, *others: str) -> Table:
    """An empty table: text on the left, numbers on the right."""
    table = Table(caption_justify="left")
    table.add_column(first, overflow="fold")  # a name is never cut short
    for name in others:
        table.add_column(name, justify="right")
    return table


def create_cost_table(before: Cost, after: Cost | None = None) -> Table:
    """A row per layer; with what is left of it."""
    if after is None:
        table = create_table("layer", "parameters", "MACs")
        for x in before.layers:
            table.add_row(x.name or "(whole model)", f"{x.params:,}", f"{x.macs:,}")
        table.add_row("total", f"{before.params:,}", f"{before.macs:,}", style="bold")
        return table
    left = {x.name: x for x in after.layers}
    table = create_table("layer", "parameters", "kept", "MACs", "kept")
    for x in before.layers:
        y = left[x.name]
        table.add_row(x.name or "(whole model)", f"{x.params:,}", f"{y.params:,}", f"{x.macs:,}", f"{y.macs:,}")
    whole = (before.params, after.params, before.macs, after.macs)
    table.add_row("total", *(f"{number:,}" for number in whole), style="bold")
    return table
