"""The tables of a page: ours beside the paper's, and the rows of the paper that nothing of ours stands beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sosp.studies.cells import PrunedCell, TimedCell, TrainedCell
from sosp.studies.experiment import PublishedRow
from sosp.studies.pages.number_format import (
    NONE,
    format_cell_budget,
    format_example_count,
    format_gate,
    format_percent,
    format_published,
    format_published_size,
    format_seconds,
    format_seeds,
    format_size,
    format_table,
)
from sosp.studies.pages.result_rows import ResultRow

LEGEND = (
    "Accuracies on the test data in percent; [how to read it](index.md#how-to-read-it) explains methods and gates. "
    "{tuned}Before fine-tuning: in θ∖M the weights of the removed structures are zero and batch norms stay (the "
    "paper's definition); *cut* is the network that is built, in which the shift of their batch norms is gone as well; "
    "*renewed* is the same with batch norm statistics taken anew. {first}Parameters and MACs are those of the module "
    "that is built; the alternative count is that of App. D. Lines are those of the paper's source."
)
ENDED = (
    "Fine-tuned: the *final* accuracy, and the *best* of all epochs. The paper's accuracy stands beside our {beside} "
    "one. *Lost* are points: what the network that was pruned ended with, less our {beside} accuracy; the paper's are "
    "worked out from its accuracies as well. "
)
FIRST = "*Epoch 1* is after the first one of the fine-tuning. "


def make_tables(
    rows: Sequence[ResultRow], published: Sequence[PublishedRow], beside: str, *, legend: bool = True
) -> list[str]:
    """The networks, then a part for each of them, times, and the rest of the paper's rows."""
    used = {row.beside.line for row in rows if row.beside is not None}
    pruned = [row for row in rows if isinstance(row.cell, PrunedCell)]
    parts = [_part("Networks", NETWORKS, [row for row in rows if isinstance(row.cell, TrainedCell)], 3)]
    words = ("", "") if beside == "zeroed" else (ENDED.format(beside=beside), FIRST)
    parts += [[LEGEND.format(tuned=words[0], first=words[1])]] if pruned and legend else []
    for place in dict.fromkeys(row.cell.place for row in pruned):
        mine = sorted((row for row in pruned if row.cell.place == place), key=_budget)
        parts.append(_part(f"{place}: accuracy", _accuracy(beside), mine, 3))
        sized = [row for row in mine if row.done or (row.beside is not None and _has_size(row.beside))]
        parts.append(_part(f"{place}: size", SIZE, mine if sized else (), 3))
    parts.append(
        _part("Seconds of the pruning step", TIMES, [row for row in rows if isinstance(row.cell, TimedCell)], 3)
    )
    parts.append(_rest([row for row in published if row.line not in used and row.accuracy is not None]))
    return [line for part in parts if part for line in (*part, "")]


def _has_size(row: PublishedRow) -> bool:
    return any(value is not None for value in (row.params, row.macs, row.params_cut, row.macs_cut))


def _budget(row: ResultRow) -> tuple[str, float]:
    """Light pruning first; among equals the order of the cells stays."""
    assert isinstance(row.cell, PrunedCell)
    what, value = row.cell.budget
    return what, value if what == "ratio" else -value


Columns = Mapping[str, Callable[[ResultRow], str]]


def _part(title: str, columns: Columns, rows: Sequence[ResultRow], left: int) -> list[str]:
    """A table with its title; nothing without rows."""
    if not rows:
        return []
    return [
        f"### {title}",
        "",
        *format_table(columns, [[show(row) for show in columns.values()] for row in rows], left),
    ]


# --- ours -----------------------------------------------------------------------------------------------


def _share(name: str) -> Callable[[ResultRow], str]:
    return lambda row: format_percent(row.stat(name))


def _size(name: str) -> Callable[[ResultRow], str]:
    return lambda row: format_size(None if (stat := row.stat(name)) is None else stat.mean)


def _removed_share(name: str) -> Callable[[ResultRow], str]:
    return lambda row: NONE if (left := row.left(name)) is None else f"{100 * (1 - left):.2f} %"


def _time(name: str) -> Callable[[ResultRow], str]:
    return lambda row: format_seconds(row.stat(name))


def _count(name: str) -> Callable[[ResultRow], str]:
    return lambda row: NONE if (stat := row.stat(name)) is None else f"{stat.mean:.0f}"


def _fact(name: str) -> Callable[[ResultRow], str]:
    return lambda row: (
        ", ".join(dict.fromkeys(str(record.facts[name]) for record in row.done if name in record.facts)) or NONE
    )


def _source(row: ResultRow) -> str:
    """Where a network's weights are from; of one that no epoch has changed, from nowhere."""
    found = _fact("source")(row)
    untrained = isinstance(row.cell, TrainedCell) and row.cell.schedule.epochs == 0
    return "untrained" if untrained and found == "trained" else found


def _cap(row: ResultRow) -> str:
    return f"{row.cell.cap:g}" if isinstance(row.cell, PrunedCell) and row.cell.cap is not None else NONE


def _network(row: ResultRow) -> str:
    """With what makes it another one than the plain trained one."""
    start = row.cell
    more = [*(["L1"] if start.slimming else []), *start.how] if isinstance(start, TrainedCell) else []
    return ", ".join([start.place, *more])


# --- the paper's ----------------------------------------------------------------------------------------

SHOWN: Mapping[str, Callable[[PublishedRow], str]] = {
    "accuracy": lambda row: format_published(row.accuracy, row.std),
    "before": lambda row: format_published(row.before, row.before_std),
    "final": lambda row: format_published(row.final, row.final_std),
    "parameters": lambda row: format_published_size(row.params),
    "parameters removed": lambda row: NONE if row.params_cut is None else f"{row.params_cut:.2f} %",
    "MACs": lambda row: format_published_size(row.macs),
    "MACs removed": lambda row: NONE if row.macs_cut is None else f"{row.macs_cut:.2f} %",
    "alternative MACs": lambda row: format_published_size(row.macs_alternative),
    "seconds": lambda row: _seconds(row.seconds, row.seconds_std),
    "line": lambda row: ", ".join(str(line) for line in (row.line, row.final_line) if line is not None),
}


def _seconds(value: float | None, std: float | None) -> str:
    """Without a deviation it took longer than that."""
    if value is None:
        return NONE
    return f"> {value:.0f} s" if std is None else f"{value:.0f} s ± {std:.0f}"


def _paper(name: str) -> Callable[[ResultRow], str]:
    return lambda row: NONE if row.beside is None else SHOWN[name](row.beside)


def _lost(row: ResultRow) -> str:
    """By the paper's own numbers."""
    whole, pruned = (None if p is None else p.accuracy for p in (row.whole, row.beside))
    return NONE if whole is None or pruned is None else format_published(whole - pruned)


def _rest(rows: Sequence[PublishedRow]) -> list[str]:
    if not rows:
        return []
    names = [name for name in SHOWN if name != "seconds"]
    lines = [[f"{row.network}-{row.data}", row.method, *(SHOWN[name](row) for name in names)] for row in rows]
    return ["### Other rows of the paper", "", *format_table(("network", "method", *names), lines, 2)]


# --- columns --------------------------------------------------------------------------------------------

NAMED: Columns = {
    "method": lambda row: row.cell.label,
    "gate": lambda row: format_gate(row.cell),
    "asked for": lambda row: format_cell_budget(row.cell),
    "examples": lambda row: format_example_count(row.cell),
}
NETWORKS: Columns = {
    "network": _network,
    "weights": _source,
    "widened": _fact("widened"),
    "accuracy": _share("accuracy"),
    "parameters": _size("params"),
    "MACs": _size("macs"),
    "paper: accuracy": _paper("accuracy"),
    "line": _paper("line"),
}
TUNED: Columns = {
    **NAMED,
    "seeds": format_seeds,
    "final": _share("final"),
    "best": _share("best"),
    "paper: final": _paper("final"),
    "paper: accuracy": _paper("accuracy"),
}
BEFORE: Columns = {
    "θ∖M": _share("zeroed"),
    "paper: before": _paper("before"),
    "cut": _share("cut"),
    "renewed": _share("recalibrated"),
    "epoch 1": _share("first"),
}
SIZE: Columns = {
    **NAMED,
    "cap": _cap,
    "parameters": _size("params"),
    "paper: parameters": _paper("parameters"),
    "removed": _removed_share("params"),
    "paper: removed": _paper("parameters removed"),
    "MACs": _size("macs"),
    "paper: MACs": _paper("MACs"),
    "MACs removed": _removed_share("macs"),
    "paper: MACs removed": _paper("MACs removed"),
    "alternative MACs": _size("macs_alternative"),
    "paper: alternative MACs": _paper("alternative MACs"),
}
TIMES: Columns = {
    "network": _network,
    "inputs": _fact("inputs"),
    "method": lambda row: row.cell.label,
    "structures": _count("structures"),
    "outputs": _count("outputs"),
    "scoring": _time("score"),
    "selecting": _time("select"),
    "together": _time("seconds"),
    "paper: seconds": _paper("seconds"),
    "line": _paper("line"),
}


def _accuracy(beside: str) -> Columns:
    """What counts most first; with what was lost, where there is a fine-tuning to make up for it."""
    lost: Columns = {"lost": lambda row: format_percent(row.lost(beside)), "paper: lost": _lost}
    return {**TUNED, **({} if beside == "zeroed" else lost), **BEFORE, "line": _paper("line")}
