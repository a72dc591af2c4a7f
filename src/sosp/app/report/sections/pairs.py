"""Which layers depend on each other: the pairs of SOSP-I, added up layer by layer."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import NullFormatter

from sosp.app.report.layer_axis import MAX_NAMED_LAYERS, shorten_name
from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import ReportSection, ReportTable, make_figure_cell, make_share_cell
from sosp.app.report.sections.saliency import explain_shared_structures
from sosp.app.report.theme import Plot, create_figure
from sosp.selection.saved_saliency import SavedSaliency

MOST = 10  # pairs of layers in the table
DECADES = 4  # of the colours at most, down from the largest


def build_section(facts: RunFacts) -> ReportSection | None:
    found = None if facts.saliency is None else facts.saliency.without_empty_layers()
    if found is None or found.pairs_by_layer is None or len(found.layers) < 2:
        return None
    Q = found.pairs_by_layer.numpy()
    if not Q.sum() > 0:
        return None
    between = 1 - np.trace(Q) / Q.sum()
    words = (
        "Sums of the absolute values of Q for two layers: how much removing structures of one layer changes the cost "
        f"of removing structures of the other. {between:.0%} of the total is between different layers, which a method "
        f"that ranks one layer at a time ignores.{explain_shared_structures(facts.saliency, found)}",
    )
    return ReportSection("pairs", "Which layers depend on each other", words, (matrix(found, Q),), (table(found, Q),))


def matrix(found: SavedSaliency, Q: np.ndarray) -> Plot:
    layers = len(found.layers)
    edge = min(8.2, 2.9 + 0.135 * layers)
    drawn, axes = create_figure(edge + 0.6, edge)
    high = float(Q.max())
    low = max(float(Q.min()), high / 10**DECADES)
    shown = axes.imshow(np.maximum(Q, low), cmap="cividis", norm=LogNorm(min(low, 0.9 * high), high))
    axes.grid(False)
    axes.tick_params(length=0)
    if layers <= MAX_NAMED_LAYERS:
        names = [shorten_name(name, "") for name in found.layers]
        axes.set_xticks(range(layers), names, rotation=90, fontsize=8)
        axes.set_yticks(range(layers), names, fontsize=8)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(f"{layers} layers, in the order of the network", loc="left")
    axes.spines[["left", "bottom"]].set_visible(False)
    bar = drawn.colorbar(shown, ax=axes, shrink=0.7, label="sum of |Q|")
    ticks = (low, (low * high) ** 0.5, high)
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    return Plot(
        "pairs", drawn, f"Heat map of the sums of |Q| between {layers} layers; the largest pairs are in the table."
    )


def table(found: SavedSaliency, Q: np.ndarray) -> ReportTable:
    """The pairs of different layers with the largest sums."""
    upper = np.triu(Q, 1)
    order = np.argsort(-upper, axis=None)[:MOST]
    places = [np.unravel_index(k, Q.shape) for k in order if upper.flat[k] > 0]
    rows = tuple(
        (
            found.layers[i],
            found.layers[j],
            make_figure_cell(float(Q[i, j])),
            make_share_cell(float((Q[i, j] + Q[j, i]) / Q.sum())),
        )
        for i, j in places
    )
    return ReportTable("The pairs of layers with the largest sums", ("layer", "and", "sum of |Q|", "of all"), rows)
