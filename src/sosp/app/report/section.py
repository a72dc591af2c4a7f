"""What a page is made of: sections with figures and tables, numbers that keep their exact value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # with it comes matplotlib, which takes its time
    from sosp.app.report.theme import Plot


@dataclass(frozen=True)
class FormattedNumber:
    """A number as it is shown, and as it is."""

    text: str
    value: float


TableCell = str | FormattedNumber


@dataclass(frozen=True)
class ReportTable:
    """Rows under a head; the first cell of a row names it."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    folded: bool = False  # behind its caption, until somebody wants to see it


@dataclass(frozen=True)
class ReportSection:
    """A question, its answer in a figure or a table, and how to read it."""

    key: str
    title: str
    words: tuple[str, ...]
    plots: tuple[Plot, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    code: tuple[tuple[str, str], ...] = ()  # what for, and the lines to type


# --- numbers in words -----------------------------------------------------------------------------------


def format_count(count: int, word: str) -> str:
    """``1 epoch``, ``2 epochs``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def make_share_cell(value: float | None) -> TableCell:
    return "" if value is None else FormattedNumber(f"{100 * value:.2f} %", value)


def make_whole_cell(value: float) -> TableCell:
    return FormattedNumber(f"{value:,.0f}", value)


def make_large_cell(value: float) -> TableCell:
    """``125.5 M``."""
    for unit, one in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= one:
            return FormattedNumber(f"{value / one:.4g} {unit}", value)
    return make_whole_cell(value)


def make_milliseconds_cell(seconds: float) -> TableCell:
    return FormattedNumber(f"{1e3 * seconds:.3g} ms", seconds)


def make_size_cell(count: float) -> TableCell:
    """``1.08 MB``."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return FormattedNumber(f"{count / one:.3g} {unit}", count)
    return FormattedNumber(f"{count:.0f} bytes", count)


def make_figure_cell(value: float | None) -> TableCell:
    """To three digits."""
    return "" if value is None else FormattedNumber(f"{value:.3g}", value)


def format_shape(shape: Iterable[int] | None) -> str:
    """``16 × 3 × 3 × 3``."""
    return "" if shape is None else " × ".join(map(str, shape))
