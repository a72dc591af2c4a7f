"""Draw the page of a trade-off curve: quality against cost, and the widths of every point under the mouse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, PercentFormatter

from sosp.app.report.page import create_environment
from sosp.app.report.section import FormattedNumber, ReportTable, TableCell, make_share_cell
from sosp.app.report.theme import KEPT, SMALL, Plot, create_figure, render_svg, use_plot_settings
from sosp.pipeline.tradeoff import TradeoffPoint

Place = tuple[float, float]  # of a point in its figure: shares from the left and from the top
WORTH = 0.01  # the point shown first is the smallest network that loses at most this much quality


@dataclass(frozen=True, eq=False)
class CurveFigure:
    """A figure, and where its points are: on the page, each can be pointed at."""

    svg: Markup
    wide: bool
    places: tuple[Place | None, ...]


def render_tradeoff_page(points: Sequence[TradeoffPoint], *, title: str, quality: str, words: Sequence[str]) -> str:
    """Return the HTML of a trade-off curve; it contains everything that it needs."""
    with use_plot_settings():
        costs = {"macs": "MACs left", "milliseconds": "latency in milliseconds"}
        known = {c: label for c, label in costs.items() if any(getattr(point, c) is not None for point in points)}
        figures = [draw_curve(points, c, label, quality, wide=len(known) == 1) for c, label in known.items()]
        template = create_environment().get_template("tradeoff.html")
        return template.render(
            title=title,
            words=words,
            figures=figures,
            points=points,
            names=[name_point(point) for point in points],
            numbers=[list_numbers(point, quality) for point in points],
            first=choose_first(points),
            table=build_table(points, quality),
        )


def choose_first(points: Sequence[TradeoffPoint]) -> int:
    """Return the index of the smallest network whose quality is near the best."""
    best = max(point.quality for point in points)
    good = [i for i, point in enumerate(points) if point.quality >= best - WORTH]
    return min(good, key=lambda i: points[i].macs)


def draw_curve(points: Sequence[TradeoffPoint], cost: str, label: str, quality: str, *, wide: bool) -> CurveFigure:
    """Return quality against ``cost``, a field of the points; those where it was not measured are left out."""
    figure, axes = create_figure(SMALL, 3.4)
    known = sorted((x, p.quality) for p in points if (x := getattr(p, cost)) is not None)
    axes.plot(*zip(*known, strict=True), "-o", color=KEPT, markersize=6)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}" if cost == "macs" else f"{x:g}"))
    axes.set_xlabel(label)
    axes.set_title(quality)
    axes.margins(0.07, 0.1)
    says = f"{quality} of {len(known)} networks against {label}: from {known[0][1]:.1%} to {known[-1][1]:.1%}."
    svg = render_svg(Plot(f"tradeoff-{cost}", figure, says), wide=wide)
    inside = figure.transFigure.inverted()  # of the layout that rendering has made

    def place(point: TradeoffPoint) -> Place | None:
        if getattr(point, cost) is None:
            return None
        x, y = inside.transform(axes.transData.transform((getattr(point, cost), point.quality)))
        return float(x), float(1 - y)

    return CurveFigure(svg, wide, tuple(map(place, points)))


# --- words ----------------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[TradeoffPoint], TableCell]] = {
    "MACs left": lambda point: make_share_cell(point.macs),
    "parameters left": lambda point: make_share_cell(point.params),
    "latency": lambda point: "not measured" if point.milliseconds is None else make_time_cell(point.milliseconds),
}


def make_time_cell(milliseconds: float) -> TableCell:
    return FormattedNumber(f"{milliseconds:.3g} ms", milliseconds)


def name_point(point: TradeoffPoint) -> str:
    return "unpruned" if point.budget >= 1 else f"MACs {point.budget:g}"


def list_numbers(point: TradeoffPoint, quality: str) -> dict[str, TableCell]:
    """Return what the page says about a point, by name."""
    return {quality: make_share_cell(point.quality), **{name: make(point) for name, make in COLUMNS.items()}}


def build_table(points: Sequence[TradeoffPoint], quality: str) -> ReportTable:
    rows = tuple((name_point(point), *list_numbers(point, quality).values()) for point in points)
    return ReportTable("All points", ("budget", quality, *COLUMNS), rows)
