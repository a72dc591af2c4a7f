"""How training went: loss and accuracy, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import (
    ReportSection,
    ReportTable,
    format_count,
    make_figure_cell,
    make_share_cell,
    make_whole_cell,
)
from sosp.app.report.theme import KEPT, REMOVED, SMALL, Plot, create_figure, set_log_scale
from sosp.training import Epoch

NAMES = {"train": "training", "finetune": "fine-tuning"}


def build_section(facts: RunFacts) -> ReportSection | None:
    stages = {stage: epochs for stage, epochs in facts.epochs.items() if epochs and stage in NAMES}
    if not stages:
        return None
    words = tuple(summary(NAMES[stage], epochs) for stage, epochs in stages.items())
    plots = tuple(draw(stage, epochs) for stage, epochs in stages.items() for draw in (losses, accuracies))
    tables = tuple(table(NAMES[stage], epochs) for stage, epochs in stages.items())
    return ReportSection("training", "Training", words, plots, tables)


def summary(name: str, epochs: Sequence[Epoch]) -> str:
    tested = [e for e in epochs if e.test is not None]
    if not tested:
        return f"{name.capitalize()}: {format_count(len(epochs), 'epoch')}."
    last, best = tested[-1], max(tested, key=lambda e: e.test.top1)  # type: ignore[union-attr]
    assert last.test is not None
    assert best.test is not None
    return (
        f"{name.capitalize()}: {format_count(len(epochs), 'epoch')}, {last.test.top1:.2%} on the test data at the end, "
        f"{best.test.top1:.2%} at best (epoch {best.number})."
    )


def losses(stage: str, epochs: Sequence[Epoch]) -> Plot:
    drawn, axes = create_figure(SMALL, 2.9)
    known = [(e.number, e.loss) for e in epochs if e.loss is not None]
    _line(axes, known, "training data", KEPT, "-o")
    _line(axes, [(e.number, e.test.loss) for e in epochs if e.test is not None], "test data", REMOVED, "--s")
    values = [value for _, value in known]
    if values and max(values) > 10 * min(values) > 0:
        set_log_scale(axes)
    axes.set_title(f"{NAMES[stage]}: loss")
    _finish(axes)
    ends = f", from {known[0][1]:.3g} to {known[-1][1]:.3g} on the training data" if known else ""
    return Plot(f"{stage}-loss", drawn, f"Loss over {format_count(len(epochs), 'epoch')} of {NAMES[stage]}{ends}.")


def accuracies(stage: str, epochs: Sequence[Epoch]) -> Plot:
    drawn, axes = create_figure(SMALL, 2.9)
    _line(axes, [(e.number, e.accuracy) for e in epochs if e.accuracy is not None], "training data", KEPT, "-o")
    tested = [(e.number, e.test.top1) for e in epochs if e.test is not None]
    _line(axes, tested, "test data", REMOVED, "--s")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_title(f"{NAMES[stage]}: accuracy")
    _finish(axes)
    ends = f", from {tested[0][1]:.2%} to {tested[-1][1]:.2%} on the test data" if tested else ""
    return Plot(
        f"{stage}-accuracy", drawn, f"Accuracy over {format_count(len(epochs), 'epoch')} of {NAMES[stage]}{ends}."
    )


def _line(axes: Axes, points: Sequence[tuple[float, float]], label: str, colour: str, style: str) -> None:
    if points:
        mark = style if len(points) <= 40 else style.rstrip("os")
        axes.plot(*zip(*points, strict=True), mark, color=colour, label=label)


def _finish(axes: Axes) -> None:
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.legend()


def table(name: str, epochs: Sequence[Epoch]) -> ReportTable:
    rows = tuple(
        (
            make_whole_cell(e.number), make_figure_cell(e.loss), make_share_cell(e.accuracy),
            "" if e.test is None else make_figure_cell(e.test.loss),
            "" if e.test is None else make_share_cell(e.test.top1),
            make_figure_cell(e.rate),
        )
        for e in epochs
    )  # fmt: skip
    head = ("epoch", "loss", "accuracy", "test loss", "test accuracy", "rate")
    return ReportTable(f"Every epoch of {name}", head, rows, folded=True)
