"""How good the approximation was: the loss as structures go, measured and as the derivatives predicted it."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from sosp.app.report.run_facts import LossCurve, LossPoint, RunFacts
from sosp.app.report.section import (
    ReportSection,
    ReportTable,
    TableCell,
    make_figure_cell,
    make_share_cell,
    make_whole_cell,
)
from sosp.app.report.theme import GREEN, INK, KEPT, REMOVED, SMALL, Plot, create_figure, set_log_scale

FACTOR = 2  # predictions within it are called good
# Method -> what its second-order prediction adds up.
SECOND = {
    "sosp-h": "the slopes and half of SOSP-H's terms, the Hessian times all structures at once",
    "sosp-i": "the slopes and half of all Gauss-Newton pairs of removed structures",
    "exact": "the slopes and half of all pairs of removed structures in the exact Hessian",
    "sosp-i-diagonal": "the slopes and half of each structure's own Gauss-Newton term, without pairs",
}


def build_section(facts: RunFacts) -> ReportSection | None:
    course, pruned = facts.loss_curve, facts.results.get("prune")
    if course is None or pruned is None or len(course.points) < 2:
        return None
    method = str(pruned["method"])
    words = [
        f"The loss on {course.examples} of the examples used for scoring, measured while structures are removed in the "
        "order of their ranks. The rest of the network is unchanged: no re-estimated batch-norm statistics, no "
        "repair, no training."
    ]
    if any(point.first is not None for point in course.points):
        second = f" Second order: {SECOND[method]}." if method in SECOND else ""
        words.append(f"First order: the sum of the slopes of the removed structures.{second} {verdict(course, pruned)}")
    plots = (changes(course, pruned["structures"]), accuracies(course, pruned["structures"]))
    return ReportSection("losses", "Predicted and measured loss", tuple(words), plots, (table(course, pruned),))


def verdict(course: LossCurve, pruned: dict[str, int]) -> str:
    """How far the best prediction there is stays near what was measured."""
    order = "second" if course.points[-1].second is not None else "first"
    start, good = course.points[0], 0
    for point in course.points[1:]:
        found, wanted = getattr(point, order), change(point, start)
        if found is None or wanted is None or not near(found, wanted):
            break
        good = point.removed
    if not good:
        return f"The {order}-order prediction is off by more than a factor of {FACTOR} from the first point on."
    return (
        f"The {order}-order prediction stays within a factor of {FACTOR} of the measured change up to {good:,} removed "
        f"structures ({good / pruned['structures']:.0%})."
    )


def near(found: float, wanted: float) -> bool:
    """The same sign, and within the factor of each other: a loss may also fall."""
    return found * wanted >= 0 and abs(wanted) / FACTOR <= abs(found) <= abs(wanted) * FACTOR


def change(point: LossPoint, start: LossPoint) -> float | None:
    return None if point.loss is None or start.loss is None else point.loss - start.loss


def changes(course: LossCurve, structures: int) -> Plot:
    drawn, axes = create_figure(SMALL, 3.1)
    start, points = course.points[0], course.points[1:]
    lines = (
        ("measured", INK, "o", "-", [change(p, start) for p in points]),
        ("first order", GREEN, "^", "--", [p.first for p in points]),
        ("second order", REMOVED, "s", "--", [p.second for p in points]),
    )
    for label, colour, marker, style, values in lines:
        known = [(p.removed / structures, v) for p, v in zip(points, values, strict=True) if v is not None]
        if known:
            axes.plot(*zip(*known, strict=True), style, color=colour, marker=marker, label=label)
    positive = [v for *_, values in lines for v in values if v is not None]
    if positive and min(positive) > 0:
        set_log_scale(axes)
    axes.set_title("change of the loss")
    _format_axes(axes)
    drawn.legend(loc="outside lower left", ncols=3)
    return Plot("losses", drawn, describe_plot(course, start))


def accuracies(course: LossCurve, structures: int) -> Plot:
    drawn, axes = create_figure(SMALL, 3.1)
    known = [(p.removed / structures, p.top1) for p in course.points if p.top1 is not None]
    axes.plot(*zip(*known, strict=True), "-o", color=KEPT)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("accuracy on these examples")
    _format_axes(axes)
    first, last = known[0][1], known[-1][1]
    return Plot("cut-accuracy", drawn, f"Accuracy as structures are removed, from {first:.1%} to {last:.1%}.")


def _format_axes(axes: Axes) -> None:
    axes.set_xlabel("structures removed")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(left=0)


def describe_plot(course: LossCurve, start: LossPoint) -> str:
    last = course.points[-1]
    found = change(last, start)
    measured = "no number" if found is None else f"{found:.3g}"
    guess = "" if last.second is None else f", predicted {last.second:.3g} to second order"
    return (
        f"Change of the loss as structures are removed. With all {last.removed:,} removed: measured {measured}{guess}."
    )


def table(course: LossCurve, pruned: dict[str, int]) -> ReportTable:
    start = course.points[0]
    rows = tuple(_row(p, start, pruned["structures"]) for p in course.points)
    head = ("structures removed", "share", "loss", "change", "first order", "second order", "accuracy")
    return ReportTable("The points, in numbers", head, rows, folded=True)


def _row(p: LossPoint, start: LossPoint, structures: int) -> tuple[TableCell, ...]:
    cells = (
        make_figure_cell(p.loss),
        make_figure_cell(change(p, start)),
        make_figure_cell(p.first),
        make_figure_cell(p.second),
        make_share_cell(p.top1),
    )
    return (make_whole_cell(p.removed), make_share_cell(p.removed / structures), *cells)
