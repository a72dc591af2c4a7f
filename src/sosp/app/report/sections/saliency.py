"""What structures cost: the saliencies of every layer, of those that went and of those that stayed, and the cut."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sosp.app.report.layer_axis import compute_figure_width, label_layers
from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import ReportSection, ReportTable, TableCell, make_figure_cell, make_whole_cell
from sosp.app.report.theme import INK, KEPT, REMOVED, Plot, create_figure, set_log_scale
from sosp.selection.saved_saliency import SavedSaliency

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def build_section(facts: RunFacts) -> ReportSection | None:
    if facts.saliency is None or not len(facts.saliency.index):
        return None
    found = facts.saliency.without_empty_layers()
    cut = threshold(found)
    words = [
        f"The saliency of a structure is the increase of the loss that {found.method} expects from removing it alone. "
        "Thin lines reach from the 5th to the 95th percentile of a layer's structures, thick lines from the 25th to "
        f"the 75th; the dot is the median.{explain_shared_structures(facts.saliency, found)}"
    ]
    if cut is None:
        words.append(
            "The saliencies of removed and kept structures overlap: the selection also considered the MACs or "
            "parameters that a structure saves, pairs of structures, a cap, or each layer by itself."
        )
    return ReportSection("saliency", "Saliencies", tuple(words), (spread(found, cut),), (table(found),))


def explain_shared_structures(whole: SavedSaliency | None, shown: SavedSaliency) -> str:
    """Where structures of several layers are, if there are any."""
    some = whole is not None and len(shown.layers) < len(whole.layers)
    return " Structures over several layers are shown at the first of them." if some else ""


def threshold(found: SavedSaliency) -> float | None:
    """The cost between the last structure that went and the first that stayed; None where they overlap."""
    gone, kept = found.scores[found.removed], found.scores[~found.removed]
    if not len(gone) or not len(kept) or float(gone.max()) > float(kept.min()):
        return None
    return (float(gone.max()) + float(kept.min())) / 2


def spread(found: SavedSaliency, cut: float | None) -> Plot:
    drawn, axes = create_figure(compute_figure_width(found.layers), 3.6)
    label_layers(axes, found.layers)
    floor = _scale(axes, found.scores.numpy())
    tips: dict[str, str] = {}
    for words, colour, shift in (("removed", REMOVED, -0.17), ("kept", KEPT, 0.17)):
        tips |= _boxes(axes, found, words, colour, shift, floor)
    if cut is not None:
        axes.axhline(max(cut, floor), color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "cut", (1, max(cut, floor)), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
            va="center", annotation_clip=False,
        )  # fmt: skip
    axes.set_ylabel("saliency")
    marks = [Line2D([], [], color=c, linewidth=4, label=w) for w, c in (("removed", REMOVED), ("kept", KEPT))]
    drawn.legend(handles=marks, loc="outside upper right", ncols=2)
    return Plot("saliency", drawn, describe_plot(found, cut), tips)


def _scale(axes: Axes, scores: np.ndarray) -> float:
    """Logarithmic where nearly all are positive; what is drawn for the others, and for values far below the rest."""
    positive = scores[scores > 0]
    if len(positive) < 0.9 * len(scores):
        return -np.inf
    set_log_scale(axes)
    return max(float(positive.min()), float(np.quantile(positive, 0.01)) / 100)


def _boxes(axes: Axes, found: SavedSaliency, words: str, colour: str, shift: float, floor: float) -> dict[str, str]:
    """The quantiles of every layer's structures that were ``words``; what they say under the mouse."""
    chosen = found.removed if words == "removed" else ~found.removed
    groups = {i: found.scores[(found.index == i) & chosen].numpy() for i in range(len(found.layers))}
    groups = {i: mine for i, mine in groups.items() if len(mine)}
    if not groups:
        return {}
    places = [i + shift for i in groups]
    low, lower, middle, upper, high = np.maximum([np.quantile(x, QUANTILES) for x in groups.values()], floor).T
    axes.vlines(places, low, high, colors=colour, linewidth=1)
    bars = axes.bar(places, upper - lower, width=0.24, bottom=lower, color=colour)
    axes.plot(places, middle, "o", markersize=3, color="white", markeredgecolor=colour, markeredgewidth=0.8)
    for i, bar in zip(groups, bars.patches, strict=True):
        bar.set_gid(f"{words}-{i}")
    return {
        f"{words}-{i}": f"{found.layers[i]}: {len(mine)} {words}, median {np.median(mine):.3g}"
        for i, mine in groups.items()
    }


def describe_plot(found: SavedSaliency, cut: float | None) -> str:
    line = f", with a cut at {cut:.3g}" if cut is not None else ""
    return (
        f"Saliencies of {len(found.index):,} structures in {len(found.layers)} layers by {found.method}, for each "
        f"layer those that were removed and those that were kept{line}."
    )


def table(found: SavedSaliency) -> ReportTable:
    def median(i: int, gone: bool) -> float | None:
        mine = found.scores[(found.index == i) & (found.removed == gone)]
        return float(mine.median()) if len(mine) else None

    def row(i: int, name: str) -> tuple[TableCell, ...]:
        counts = [make_whole_cell(int(((found.index == i) & (found.removed == gone)).sum())) for gone in (True, False)]
        return (name, counts[0], make_figure_cell(median(i, True)), counts[1], make_figure_cell(median(i, False)))

    rows = tuple(row(i, name) for i, name in enumerate(found.layers))
    head = ("layer", "removed", "median of these", "kept", "median of these")
    return ReportTable("Every layer's medians", head, rows, folded=True)
