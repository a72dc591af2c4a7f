"""Where the network is too narrow: what every block loses as more goes, and the widths that would even it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import PercentFormatter

from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import (
    FormattedNumber,
    ReportSection,
    ReportTable,
    TableCell,
    make_share_cell,
    make_whole_cell,
)
from sosp.app.report.sections.comparison import LINE_STYLES
from sosp.app.report.theme import MUTED, SMALL, Plot, create_figure

Part = Mapping[str, Any]  # name, structures, removed at each ratio, p, factor, verdict
DRAWN = 12  # blocks that still can be told apart, those first that are not as needed


def build_section(facts: RunFacts) -> ReportSection | None:
    found = facts.bottlenecks
    if found is None or not found["blocks"]:
        return None
    words = [
        "If all structures were equally important, every block would lose the same share as the whole network: the "
        "dotted line. Blocks below the line are too narrow; blocks above it are wider than they need to be.",
        f"Recommended: {found['advice']}." + _price(found),
    ]
    chosen = sorted(found["blocks"], key=lambda part: part["verdict"] == "as needed")[:DRAWN]
    plots = (lines([part for part in found["blocks"] if part in chosen], found["ratios"]),)
    return ReportSection("bottlenecks", "Bottlenecks", tuple(words), plots, (table(found["blocks"]),))


def _price(found: Mapping[str, Any]) -> str:
    before, after = found.get("before"), found.get("after")
    if not before or not after or before == after:
        return ""
    return (
        f" That network would have {after['params'] / before['params']:.2f} times the parameters and "
        f"{after['macs'] / before['macs']:.2f} times the MACs."
    )


def lines(blocks: Sequence[Part], ratios: Sequence[float]) -> Plot:
    drawn, axes = create_figure(SMALL, 3.3 + 0.17 * -(-len(blocks) // 3))
    axes.plot([0, 1], [0, 1], ":", color=MUTED, linewidth=1.2)
    for part, (colour, marker, dash) in zip(blocks, LINE_STYLES, strict=False):
        axes.plot(ratios, part["removed"], linestyle=dash, marker=marker, color=colour, label=part["name"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("structures removed from the network")
    axes.set_title("structures removed from a block")
    drawn.legend(loc="outside lower left", ncols=3)
    said = "; ".join(f"{part['name']} is {part['verdict']}" for part in blocks)
    return Plot("bottlenecks", drawn, f"Share that each block loses as more of the network is removed. {said}.")


def table(blocks: Sequence[Part]) -> ReportTable:
    """A row per block."""
    head = ("block", "layers", "structures", "at half of all", "factor", "chance", "verdict")
    return ReportTable("Every block", head, tuple(map(_row, blocks)))


def _row(part: Part) -> tuple[TableCell, ...]:
    middle = part["removed"][len(part["removed"]) // 2]
    return (
        part["name"],
        make_whole_cell(len(part["layers"])),
        make_whole_cell(part["structures"]),
        make_share_cell(middle),
        FormattedNumber(f"× {part['factor']:.2f}", part["factor"]),
        FormattedNumber(f"{part['p']:.2g}", part["p"]),
        part["verdict"],
    )
