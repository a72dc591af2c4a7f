"""What a repair without training brought: the error of every layer's output, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sosp.report.axis import label_layers, width_for
from sosp.report.facts import Facts
from sosp.report.look import BLUE, LINE, VERMILLION, Plot, blank
from sosp.report.section import Section, Table, figure

Errors = Sequence[Mapping[str, Any]]  # of each layer: layer, before, after


def section(facts: Facts) -> Section | None:
    found: Errors = (facts.results.get("prune", {}).get("repair") or {}).get("layers") or ()
    if not found:
        return None
    words = (
        "The weights that are left were fitted anew so that every layer gives again what it gave before, without "
        "labels and without training. The error is what is missing of a layer's output, relative to that output.",
    )
    return Section("repair", "What the repair brought", words, (errors(found),), (table(found),))


def errors(found: Errors) -> Plot:
    names = [str(x["layer"]) for x in found]
    drawn, axes = blank(width_for(names), 3.2)
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


def table(found: Errors) -> Table:
    rows = tuple((str(x["layer"]), figure(float(x["before"])), figure(float(x["after"]))) for x in found)
    return Table("Every layer's error", ("layer", "before", "after"), rows, folded=True)
