"""What was removed: the share that every layer lost, grouped by the parts of the network."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import PercentFormatter

from sosp.app.report.layer_axis import compute_figure_width, label_layers
from sosp.app.report.run_facts import ReportLayer, RunFacts
from sosp.app.report.section import ReportSection, ReportTable, format_shape, make_share_cell, make_whole_cell
from sosp.app.report.theme import INK, LINE, REMOVED, Plot, create_figure


def build_section(facts: RunFacts) -> ReportSection | None:
    return build_layers_section(facts.layers) if facts.layers else None


def build_layers_section(layers: Sequence[ReportLayer]) -> ReportSection:
    """Return the share of channels removed from each layer, as a figure and a table."""
    total, removed = sum(x.channels for x in layers), sum(x.removed for x in layers)
    words = (
        f"{removed:,} of {total:,} channels in {len(layers)} layers were removed. Layers that lost many channels had "
        "more than they needed; layers that lost few are the bottlenecks of this network.",
    )
    return ReportSection("layers", "What was removed", words, (bars(layers),), (table(layers),))


def bars(layers: Sequence[ReportLayer]) -> Plot:
    """The paper's figure: a bar per layer."""
    names = [x.name for x in layers]
    figure, axes = create_figure(compute_figure_width(names), 3.4)
    label_layers(axes, names)
    axes.bar(range(len(layers)), [1.0] * len(layers), width=0.8, color=LINE)
    found = axes.bar(range(len(layers)), [x.ratio for x in layers], width=0.8, color=REMOVED)
    tips = {}
    for i, (patch, layer) in enumerate(zip(found.patches, layers, strict=True)):
        axes.patches[i].set_gid(f"behind-{i}")
        patch.set_gid(f"bar-{i}")
        tips[f"bar-{i}"] = tips[f"behind-{i}"] = describe(layer)
    overall = sum(x.removed for x in layers) / sum(x.channels for x in layers)
    axes.axhline(overall, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"all: {overall:.0%}", (1, overall), xycoords=("axes fraction", "data"), xytext=(3, 0),
        textcoords="offset points", va="center", annotation_clip=False,
    )  # fmt: skip
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("channels removed")
    return Plot("layers", figure, describe_plot(layers, overall), tips)


def describe(layer: ReportLayer) -> str:
    shape = f", weight {format_shape(layer.shape)}" if layer.shape else ""
    kept = layer.channels - layer.removed
    return f"{layer.name}{shape}: {kept} of {layer.channels} channels kept, {layer.removed} removed ({layer.ratio:.1%})"


def describe_plot(layers: Sequence[ReportLayer], overall: float) -> str:
    most, least = max(layers, key=lambda x: x.ratio), min(layers, key=lambda x: x.ratio)
    return (
        f"Bar chart of the share of channels removed from each of {len(layers)} layers, {overall:.0%} in all. "
        f"Most from {most.name}, {most.ratio:.0%}; least from {least.name}, {least.ratio:.0%}."
    )


def table(layers: Sequence[ReportLayer]) -> ReportTable:
    rows = tuple(
        (
            x.name,
            format_shape(x.shape),
            format_shape(x.left),
            make_whole_cell(x.channels - x.removed),
            make_whole_cell(x.removed),
            make_share_cell(x.ratio),
        )
        for x in layers
    )
    head = ("layer", "weight before", "weight left", "channels kept", "removed", "share")
    return ReportTable("Every layer, in numbers", head, rows, folded=True)
