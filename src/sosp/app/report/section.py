"""What a page is made of: sections with figures and tables, numbers that keep their exact value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # with it comes matplotlib, which takes its time
    from sosp.app.report.theme import Plot


@dataclass(frozen=True)
class Number:
    """A number as it is shown, and as it is."""

    text: str
    value: float


Cell = str | Number


@dataclass(frozen=True)
class Table:
    """Rows under a head; the first cell of a row names it."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    folded: bool = False  # behind its caption, until somebody wants to see it


@dataclass(frozen=True)
class Section:
    """A question, its answer in a figure or a table, and how to read it."""

    key: str
    title: str
    words: tuple[str, ...]
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    code: tuple[tuple[str, str], ...] = ()  # what for, and the lines to type


# --- numbers in words -----------------------------------------------------------------------------------


def many(count: int, word: str) -> str:
    """``1 epoch``, ``2 epochs``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def share(value: float | None) -> Cell:
    return "" if value is None else Number(f"{100 * value:.2f} %", value)


def whole(value: float) -> Cell:
    return Number(f"{value:,.0f}", value)


def large(value: float) -> Cell:
    """``125.5 M``."""
    for unit, one in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= one:
            return Number(f"{value / one:.4g} {unit}", value)
    return whole(value)


def milliseconds(seconds: float) -> Cell:
    return Number(f"{1e3 * seconds:.3g} ms", seconds)


def size(count: float) -> Cell:
    """``1.08 MB``."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return Number(f"{count / one:.3g} {unit}", count)
    return Number(f"{count:.0f} bytes", count)


def figure(value: float | None) -> Cell:
    """To three digits."""
    return "" if value is None else Number(f"{value:.3g}", value)


def times(shape: Iterable[int] | None) -> str:
    """``16 × 3 × 3 × 3``."""
    return "" if shape is None else " × ".join(map(str, shape))
