"""The network drawn as streams: how wide the channels flow between its layers, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from sosp.app.report.layer_axis import compute_figure_width, compute_layer_step, label_layers
from sosp.app.report.run_facts import LayerWidths, RunFacts
from sosp.app.report.section import ReportSection, ReportTable, make_whole_cell
from sosp.app.report.theme import BEFORE, INK, KEPT, MUTED, Plot, create_figure

PITCH = 1.35  # from one lane to the next, the widest stream being 1


@dataclass(frozen=True)
class StreamSegment:
    """A stream from one reader to the next: as wide as the layer at its end reads it."""

    stream: int
    start: float
    end: float
    before: int
    left: int
    reader: str


def build_section(facts: RunFacts) -> ReportSection | None:
    if not facts.widths:
        return None
    words = (
        "A band is a stream: channels that are added or concatenated, from the layers that write them to the layers "
        "that read them. Each layer is a line from the stream it reads to the stream it writes. The height of a band "
        "is the width of the stream before pruning, on a square-root scale; the filled part is the share of channels "
        "left.",
    )
    return ReportSection(
        "streams", "Streams of the network", words, (plot_streams(facts.widths),), (table(facts.widths),)
    )


def plot_streams(widths: Sequence[LayerWidths]) -> Plot:
    found = split_streams(widths)
    lane = assign_lanes(found)
    names = [x.name for x in widths]
    depth = max(lane.values()) + 1
    figure, axes = create_figure(compute_figure_width(names), 1.6 + 0.62 * depth)
    label_layers(axes, names)
    widest = max(piece.before for piece in found)
    tips: dict[str, str] = {}
    for i, piece in enumerate(found):
        _band(axes, piece, -PITCH * lane[piece.stream], sqrt(piece.before / widest), f"piece-{i}")
        tips[f"piece-{i}-before"] = tips[f"piece-{i}-left"] = describe(piece)
    _numbers(axes, found, lane, compute_layer_step(len(names)))
    _layers(axes, widths, found, lane)
    axes.set_ylim(-PITCH * (depth - 1) - 0.75, 0.95)
    axes.set_xlim(-1.4, len(widths) + 0.4)
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    return Plot("streams", figure, describe_plot(widths), tips)


# --- layout ---------------------------------------------------------------------------------------------


def split_streams(widths: Sequence[LayerWidths]) -> list[StreamSegment]:
    """From left to right, stream by stream; what the last layers write ends one place behind them."""
    found = []
    for stream in dict.fromkeys([0, *(x.writes for x in widths)]):
        readers = [(i, x) for i, x in enumerate(widths) if x.reads == stream]
        writers = [i for i, x in enumerate(widths) if x.writes == stream]
        first = readers[0][0] if readers else len(widths)
        # All that is written before the first reader flows from the last of these writers on.
        start = float(max((i for i in writers if i < first), default=-1))
        for i, x in readers:
            found.append(StreamSegment(stream, start, i, *x.into, reader=x.name))
            start = i
        if not readers and writers:
            found.append(StreamSegment(stream, start, start + 1, *widths[writers[-1]].out, reader="the output"))
    return found


def assign_lanes(found: Sequence[StreamSegment]) -> dict[int, int]:
    """Stream -> its lane: the first that is free when it begins, long ones first."""
    spans: dict[int, tuple[float, float]] = {}
    for piece in found:
        start, end = spans.get(piece.stream, (piece.start, piece.end))
        spans[piece.stream] = (min(start, piece.start), max(end, piece.end))
    taken: list[list[tuple[float, float]]] = []
    lane: dict[int, int] = {}
    for stream, (start, end) in sorted(spans.items(), key=lambda item: item[1][0] - item[1][1]):
        free = [k for k, row in enumerate(taken) if all(end <= a or b <= start for a, b in row)]
        lane[stream] = free[0] if free else len(taken)
        if not free:
            taken.append([])
        taken[lane[stream]].append((start, end))
    return lane


# --- drawing --------------------------------------------------------------------------------------------


def _band(axes: Axes, piece: StreamSegment, middle: float, height: float, gid: str) -> None:
    span = piece.end - piece.start
    for part, colour, name in ((1.0, BEFORE, "before"), (piece.left / max(piece.before, 1), KEPT, "left")):
        low = middle - part * height / 2
        axes.add_patch(
            Rectangle((piece.start, low), span, part * height, color=colour, linewidth=0, gid=f"{gid}-{name}")
        )


def _numbers(axes: Axes, found: Sequence[StreamSegment], lane: Mapping[int, int], step: float) -> None:
    """The width of a lane where it changes, if there is room; a layer has ``step`` inches."""
    widest, last = max(piece.before for piece in found), dict.fromkeys(lane.values(), 0)
    ordered = sorted(found, key=lambda piece: (lane[piece.stream], piece.start))
    for (row, before), group in groupby(ordered, key=lambda piece: (lane[piece.stream], piece.before)):
        same = list(group)
        if before != last[row] and 0.07 * len(str(before)) <= step * (same[-1].end - same[0].start):
            top = -PITCH * row + sqrt(before / widest) / 2
            axes.text(same[0].start + 0.1, top + 0.05, str(before), va="bottom", color=MUTED, fontsize=8)
            last[row] = before


def _layers(axes: Axes, widths: Sequence[LayerWidths], found: Sequence[StreamSegment], lane: Mapping[int, int]) -> None:
    """A line from the stream that a layer reads to the one it writes; a tick where both lie in one lane."""
    starts: dict[int, float] = {}
    for piece in found:
        starts.setdefault(piece.stream, piece.start)
    ticks, lines = [], []
    for i, layer in enumerate(widths):
        here, there = -PITCH * lane.get(layer.reads, 0), -PITCH * lane.get(layer.writes, 0)
        if here == there:
            ticks.append([(i, here - 0.12), (i, here + 0.12)])
        else:
            lines.append([(i, here), (max(i, starts.get(layer.writes, i)), there)])
    axes.add_collection(LineCollection([*ticks, *lines], colors=INK, linewidths=1, zorder=2), autolim=False)
    axes.plot([a[0] for a, _ in lines], [a[1] for a, _ in lines], "o", markersize=3, color=INK, linestyle="none")
    for marker, up in (("^", True), ("v", False)):
        ends = [b for a, b in lines if (b[1] > a[1]) is up]
        axes.plot([x for x, _ in ends], [y for _, y in ends], marker, markersize=4.5, color=INK, linestyle="none")


# --- words ----------------------------------------------------------------------------------------------


def describe(piece: StreamSegment) -> str:
    share = piece.left / max(piece.before, 1)
    return f"into {piece.reader}: {piece.left} of {piece.before} channels left ({share:.1%})"


def describe_plot(widths: Sequence[LayerWidths]) -> str:
    narrow = min(widths, key=lambda x: x.into[1] / max(x.into[0], 1))
    return (
        f"The {len(widths)} layers of the network and the streams between them, with the widths before and after. "
        f"The stream into {narrow.name} shrank most, from {narrow.into[0]} to {narrow.into[1]} channels."
    )


def table(widths: Sequence[LayerWidths]) -> ReportTable:
    rows = tuple(
        (
            x.name,
            make_whole_cell(x.into[0]),
            make_whole_cell(x.into[1]),
            make_whole_cell(x.out[0]),
            make_whole_cell(x.out[1]),
        )
        for x in widths
    )
    head = ("layer", "reads, before", "reads, left", "writes, before", "writes, left")
    return ReportTable("Every layer's widths", head, rows, folded=True)
