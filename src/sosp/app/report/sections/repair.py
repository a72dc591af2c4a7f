"""What a repair without training brought: the error of every layer's output, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sosp.app.report.layer_axis import compute_figure_width, label_layers
from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import ReportSection, ReportTable, TableCell, format_count, make_figure_cell
from sosp.app.report.theme import BLUE, LINE, VERMILLION, Plot, create_figure

Errors = Sequence[Mapping[str, Any]]  # of each layer: layer, before, after; and why, where it was left as it is


def build_section(facts: RunFacts) -> ReportSection | None:
    repair: Mapping[str, Any] = facts.results.get("prune", {}).get("repair") or {}
    found: Errors = repair.get("layers") or ()
    if not found:
        return None
    words = [
        "The remaining weights were fitted, layer by layer, to the outputs of the unpruned network, without labels "
        "and without training. The error is the share of the variance of a layer's output that is not reproduced, on "
        "inputs that were not used for the fit, with all layers before it repaired.",
    ]
    if "agreement_after" in repair:
        words.append(
            f"Outputs that agree with the unpruned network: {repair['agreement_before']:.1%} before the repair, "
            f"{repair['agreement_after']:.1%} after it. The repair took {format_count(repair['examples'], 'input')} "
            f"and {repair['seconds']:.1f} s."
        )
    refitted = [x for x in found if not x.get("why")]
    plots = (errors(refitted),) if refitted else ()
    return ReportSection("repair", "Repair", tuple(words), plots, (table(found),))


def errors(found: Errors) -> Plot:
    names = [str(x["layer"]) for x in found]
    drawn, axes = create_figure(compute_figure_width(names), 3.2)
    label_layers(axes, names)
    before, after = [float(x["before"]) for x in found], [float(x["after"]) for x in found]
    tips: dict[str, str] = {}
    for i, (name, b, a) in enumerate(zip(names, before, after, strict=True)):
        axes.plot([i, i], [b, a], color=LINE, linewidth=3, gid=f"layer-{i}")
        tips[f"layer-{i}"] = f"{name}: {b:.3g} before, {a:.3g} after"
    axes.plot(range(len(names)), before, "o", color=VERMILLION, label="before the repair")
    axes.plot(range(len(names)), after, "s", color=BLUE, label="after")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("relative error")
    drawn.legend(loc="outside upper right", ncols=2)
    says = (
        f"Relative error of {len(names)} layers' outputs, mean {sum(before) / len(before):.3g} before the repair and "
    )
    return Plot("repair", drawn, f"{says}{sum(after) / len(after):.3g} after.", tips)


def table(found: Errors) -> ReportTable:
    return ReportTable("Every layer's error", ("layer", "before", "after"), tuple(map(_row, found)), folded=True)


def _row(x: Mapping[str, Any]) -> tuple[TableCell, ...]:
    name = str(x["layer"])
    return (
        (name, str(x["why"]), "")
        if x.get("why")
        else (name, make_figure_cell(float(x["before"])), make_figure_cell(float(x["after"])))
    )
