"""The options of ``find_structures``, ``select`` and ``shrink`` as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sosp.core.options import AUTO_OR_WHOLE, NUMBER, SHARES, TEXT, define_option
from sosp.graph.layout import JOINS, LayoutStyle
from sosp.graph.records import SCOPES

SCALES = ("kernel", "macs", "params")
RULES = ("auto", "saliency", "priced")


@dataclass(frozen=True)
class Selection:
    """What may be removed, and what goes first; the options of ``find_structures``, ``select`` and ``shrink``."""

    groups: Any = define_option(  # noqa: RUF009
        TEXT,
        "Remove whole channels of a stream (coupled), which makes the network faster, or independent filters.",
        choices=("coupled", "independent"),
        shown="coupled, or independent where no channel can be removed as a whole",
    )
    kind: str = define_option(
        TEXT, "Structures to remove: filters or whole blocks.", "filters", choices=("filters", "blocks")
    )
    cap: float | None = define_option(NUMBER, "Largest share of structures to remove from one layer.", low=0, high=1)
    scope: str | None = define_option(
        TEXT,
        "Rank the structures of all layers together, or layer by layer.",
        choices=SCOPES,
        shown="scope of the method",
    )
    ratios: Mapping[str, float] | None = define_option(
        SHARES,
        "Shares to remove from layers or name patterns: layer1.*=0.3,conv1=0. Other layers use --ratio, or are not "
        "pruned.",
    )
    rule: str = define_option(
        TEXT,
        "Order of removal: by the rise of the loss per cost saved (priced), or by saliency.",
        "auto",
        choices=RULES,
        shown="priced where it applies",
    )
    scale: str | None = define_option(
        TEXT, "Measure of size by which to divide the saliency of each structure.", choices=SCALES
    )
    round_to: int | str = define_option(
        AUTO_OR_WHOLE,
        "Keep widths at multiples of this number.",
        "auto",
        low=1,
        shown="auto: with --rule priced 8 on a CPU and 32 on a GPU, less in narrow layers",
    )
    join: str = define_option(TEXT, "How to join branches of different widths.", "scatter", choices=JOINS)

    @property
    def style(self) -> LayoutStyle:
        """Return how the network is laid out."""
        return LayoutStyle(self.join, 1 if self.round_to == "auto" else self.round_to)  # type: ignore[arg-type]
