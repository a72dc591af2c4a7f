"""Say in one sentence how a network was pruned: scored by what, removed in which order, repaired on how many inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sosp.graph.records import Saliency
from sosp.scoring.methods import METHODS
from sosp.selection.priced_order import STEPS
from sosp.selection.select import resolve_rule, resolve_step
from sosp.selection.selection_options import Selection

if TYPE_CHECKING:
    from sosp.pipeline.cut import PruningCall
    from sosp.pipeline.pruned import Pruned


def describe_settings(call: PruningCall, found: Pruned, groups: Any) -> str:
    """Return the settings that a call has chosen, or was given."""
    repaired = found.repaired
    rounds = "" if call.repair is None or call.repair.rounds == 1 else f" in {call.repair.rounds} rounds"
    parts = [
        f"scored by {describe_scoring(call, found.saliency)}",
        describe_structures(call.selection, groups),
        describe_order(found.saliency, call.selection),
        "not repaired" if repaired is None else f"repaired on {repaired.examples:,} inputs{rounds}",
    ]
    return "; ".join(filter(None, parts))


def describe_scoring(call: PruningCall, saliency: Saliency) -> str:
    """Return the method, its targets and the number of examples."""
    from sosp.pipeline.cut import choose_scoring

    method, how = METHODS[saliency.method], choose_scoring(saliency.structures, call)
    if not method.data:
        return f"{saliency.method} on the weights alone"
    targets = f" on {saliency.targets}" if saliency.targets else ""
    sampled = f", {how['classes']} random cotangents each" if how["classes"] else ""
    return f"{saliency.method}{targets}, {saliency.examples:,} inputs{sampled}"


def describe_structures(options: Selection, groups: Any) -> str:
    if options.kind != "filters":
        return f"whole {options.kind}"
    return f"{groups} {'channels' if groups == 'coupled' else 'filters'}" if isinstance(groups, str) else "given groups"


def describe_order(saliency: Saliency, options: Selection) -> str:
    """Return what was removed first, and the steps of the widths."""
    options = resolve_rule(saliency, options)
    step = resolve_step(saliency, options)
    order = f"lowest {'rise of the loss per cost saved' if options.rule == 'priced' else 'saliency'} first"
    if isinstance(step, str):
        return f"{order}, widths in steps of {STEPS[step]} or, in narrow layers, fewer"
    return order if step == 1 else f"{order}, widths in steps of {step}"
