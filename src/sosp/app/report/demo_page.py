"""Write the page of the demo: the network before and after, and other rankings treated in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import PercentFormatter

from sosp.app.config import build_config
from sosp.app.demo import BATCHES, NETWORK, DemoRow, compare_rankings
from sosp.app.report.next_steps import format_load_code
from sosp.app.report.page import RunReport, render_chapters
from sosp.app.report.run_facts import ReportLayer
from sosp.app.report.run_summary import FigureCard, create_card
from sosp.app.report.section import (
    ReportSection,
    ReportTable,
    TableCell,
    make_large_cell,
    make_milliseconds_cell,
    make_share_cell,
    make_whole_cell,
)
from sosp.app.report.sections.comparison import LINE_STYLES
from sosp.app.report.sections.layers import build_layers_section
from sosp.app.report.theme import Plot, create_figure, use_plot_settings

NOTES = (
    "Accuracy: on 500 test images. Parameters and MACs: counted exactly, for one image. Latency: of one call on one "
    "thread, the 10th percentile of many; the networks are measured in turns."
)
OWN_CODE = """import sosp
pruned = sosp.prune(model, inputs, macs=0.5)  # inputs alone: no labels are needed
print(pruned)
pruned.save("small.safetensors")"""


def render_demo_page(folder: Path, rows: Sequence[DemoRow]) -> str:
    """Return the HTML of the demo; the first row is the trained network, the second the pruned one."""
    trained, pruned, *_ = rows
    way = {**trained.accuracies, **pruned.accuracies}
    story = [
        f"Accuracy {' → '.join(f'{100 * x:.2f} %' for x in way.values())}: {', '.join(way)}.",
        "A residual network was trained on images of digits, pruned by one call of sosp.prune with images alone, and "
        "fine-tuned.",
    ]
    with use_plot_settings():
        sections = [build_comparison(rows), build_layers(pruned), build_next_steps(folder)]
        chapter = RunReport(
            "", "demo", "digits_resnet on digits", story, [], None, build_cards(trained, pruned), None, sections
        )
        return render_chapters([chapter], notes=NOTES)


def list_figures(row: DemoRow) -> dict[str, float]:
    times = {f"latency, batch {batch}": row.milliseconds[batch] / 1e3 for batch in BATCHES}
    return {"accuracy": row.accuracy, "parameters": row.params, "MACs": row.macs, **times}


def build_cards(trained: DemoRow, pruned: DemoRow) -> list[FigureCard]:
    before, after = list_figures(trained), list_figures(pruned)
    return [create_card(name, _cell(name, before[name]), _cell(name, after[name])) for name in before]


def _cell(name: str, value: float) -> TableCell:
    if name.startswith("latency"):
        return make_milliseconds_cell(value)
    return {"accuracy": make_share_cell, "parameters": make_whole_cell, "MACs": make_large_cell}[name](value)


def build_comparison(rows: Sequence[DemoRow]) -> ReportSection:
    words = (
        "Every pruned network was treated in the same way: the same budget of MACs, the same repair without labels, "
        f"the same fine-tuning. {compare_rankings(list(rows))}",
    )
    steps = list(rows[-1].accuracies)
    cells = tuple(
        (
            row.network,
            *(make_share_cell(row.accuracies.get(step, row.accuracy if step == steps[-1] else None)) for step in steps),
            *(_cell(name, value) for name, value in list_figures(row).items() if name != "accuracy"),
        )
        for row in rows
    )
    head = ("network", *steps, *(name for name in list_figures(rows[0]) if name != "accuracy"))
    tables = (ReportTable("The networks, with their accuracy after each step", head, cells),)
    return ReportSection("comparison", "Rankings at the same MACs", words, (plot_steps(rows),), tables)


def plot_steps(rows: Sequence[DemoRow]) -> Plot:
    """Return the accuracy of each pruned network after each step, from the trained network on."""
    start, *others = rows
    figure, axes = create_figure(4.5, 3.2)
    steps = ["trained", *others[0].accuracies]
    for row, (colour, marker, dash) in zip(others, LINE_STYLES, strict=False):
        values = [start.accuracy, *row.accuracies.values()]
        axes.plot(steps, values, linestyle=dash, color=colour, marker=marker, label=row.network)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.03)
    axes.set_title("accuracy after each step")
    figure.legend(loc="outside lower left", ncols=len(others))
    said = "; ".join(f"{row.network}: {', '.join(f'{x:.1%}' for x in row.accuracies.values())}" for row in others)
    return Plot("steps", figure, f"Accuracy after each step. {said}.")


def build_layers(pruned: DemoRow) -> ReportSection:
    layers = [ReportLayer(name, old, old - new, None, None) for name, (old, new) in pruned.widths.items()]
    return build_layers_section(layers)


def build_next_steps(folder: Path) -> ReportSection:
    config = build_config({"model": {"name": "sosp:digits_resnet"}})
    load = "\n".join(format_load_code(config, str(folder / NETWORK)))
    code = (("Load the network", load), ("Prune a network of your own", OWN_CODE))
    return ReportSection("next", "What to do next", (), code=code)
