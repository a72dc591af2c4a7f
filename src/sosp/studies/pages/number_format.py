"""Numbers as the page prints them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sosp.studies.cells import Cell, PrunedCell
from sosp.studies.pages.result_rows import ResultRow, Stat

NONE = "–"
GATELESS = ("random", "slimming", "eigendamage", "amc")  # methods that scale nothing by a gate
BLIND = ("random", "slimming")  # methods that need no data


def format_percent(stat: Stat | None) -> str:
    """``93.15 ± 0.15``, of shares; the deviation where there are several."""
    return format_spread(None if stat is None else Stat(100 * stat.mean, 100 * stat.std, stat.count))


def format_spread(stat: Stat | None) -> str:
    if stat is None:
        return NONE
    return f"{stat.mean:.2f}" + (f" ± {stat.std:.2f}" if stat.count > 1 else "")


def format_published(value: float | None, std: float | None = None) -> str:
    """A number of the paper, and its deviation."""
    if value is None:
        return NONE
    return f"{value:.2f}" + ("" if std is None else f" ± {std:.2f}")


def format_size(number: float | None) -> str:
    """``338 k``, ``1.06 M``, ``1.10 G``."""
    if number is None:
        return NONE
    for unit, name in ((1e9, "G"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number / 1e3:.0f} k" if number >= 1e4 else f"{number:.0f}"


def format_published_size(number: float | None) -> str:
    """A size of the paper, with no more digits than it prints: ``338 k``, ``55 M``, ``1.82 G``."""
    if number is None:
        return NONE
    unit, name = next((pair for pair in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if number >= pair[0]), (1.0, ""))
    return f"{number / unit:.3g}{name}"


def format_seconds(stat: Stat | None) -> str:
    """Three digits: they span four orders of magnitude."""
    if stat is None:
        return NONE
    return f"{stat.mean:.3g} s" + (f" ± {stat.std:.2g}" if stat.count > 1 else "")


def format_cell_budget(cell: Cell) -> str:
    """The budget: ``0.5 of the structures removed``."""
    if not isinstance(cell, PrunedCell):
        return NONE
    what, value = cell.budget
    if what == "ratio":
        return f"{value:g} removed"
    word = {"params": "parameters", "macs": "MACs"}[what]
    return f"{100 * value:.2f} % of {word} left" if value <= 1 else f"{format_size(value)} {word} left"


def format_gate(cell: Cell) -> str:
    """What a method scales, if it does."""
    return cell.gate if isinstance(cell, PrunedCell) and cell.method not in GATELESS else NONE


def format_example_count(cell: Cell) -> str:
    """How many examples; some methods look at none."""
    return str(cell.examples) if isinstance(cell, PrunedCell) and cell.method not in BLIND else NONE


def format_example_suffix(cell: PrunedCell) -> str:
    """Where they are not as many as the paper has."""
    return "" if cell.examples == PrunedCell.examples else f", {cell.examples} examples"


def format_seeds(row: ResultRow) -> str:
    return f"{len(row.done)} of {row.wanted}"


def format_table(heads: Iterable[str], lines: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Markdown; so many columns of text, then numbers. Columns in which there is nothing are left out."""
    lines, heads = list(lines), list(heads)
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    used = [k for k in range(len(heads)) if any(line[k] != NONE for line in lines)]
    return [f"| {' | '.join(cells[k] for k in used)} |" for cells in (heads, rule, *lines)]
