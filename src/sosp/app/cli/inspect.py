"""The commands that only look: eval, count, trace, data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from torch import nn

import sosp
from sosp.app.cli.flags import Sections, takes
from sosp.app.cli.output import Screen
from sosp.app.cli.runs import Target, warn_if_fresh
from sosp.app.cli.tables import columns, cost_table, share
from sosp.app.cli.targets import mask_in, sections_for
from sosp.app.config import Model, as_flag, build
from sosp.app.run import prepare
from sosp.errors import whole_number
from sosp.graph.plan import CONVENTIONS
from sosp.nets import by_name


@takes("model", "data", "run.device")
def evaluate(
    model: Target,
    given: Sections,
    screen: Screen,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 256,
    limit: Annotated[int | None, typer.Option(help="Only so many test images.", show_default="all")] = None,
) -> None:
    """Measure the accuracy of a network on the test data.

    sosp eval sosp:resnet56 --weights resnet56.pth --data cifar10 --data-dir datasets
    """
    whole_number("--batch", batch)
    sections, _ = sections_for(model, given)
    job = prepare(build(sections, as_flag))
    test = job.dataset.test
    warn_if_fresh(job, screen)
    found = sosp.evaluate(job.start, test, batch=batch, device=job.device, limit=limit)
    cost = sosp.count(job.start, job.example)
    screen.tell({"event": "result", **asdict(found), "params": cost.params, "macs": cost.macs})
    table = columns("examples", "accuracy", "top 5", "loss", "parameters", "MACs")
    cells = (share(found.top1), share(found.top5), f"{found.loss:.4f}", f"{cost.params:,}", f"{cost.macs:,}")
    table.add_row(f"{found.examples:,}", *cells)
    screen.say(table)


@takes("model")
def count(
    model: Target,
    given: Sections,
    screen: Screen,
    mask: Annotated[
        str | None, typer.Option(metavar="RUN|FILE", help="Count what is left under the mask of this run.")
    ] = None,
    convention: Annotated[str, typer.Option(help=f"How to count under a mask: {' or '.join(CONVENTIONS)}.")] = "exact",
) -> None:
    """Count parameters and multiply-accumulates, layer by layer.

    sosp count torchvision:resnet50
    """
    network, example = network_for(model, given)
    before = sosp.count(network, example, convention=convention)
    after = None if mask is None else sosp.count(network, example, mask_in(mask), convention=convention)
    left = {} if after is None else {"left": asdict(after)}
    screen.tell({"event": "result", **asdict(before), **left})
    screen.say(cost_table(before, after))


@takes("model")
def trace(model: Target, given: Sections, screen: Screen) -> None:
    """Show how the channels of a network flow: which are tied together, what cannot be removed and why.

    sosp trace timm:convnext_atto
    """
    flow = sosp.trace(*network_for(model, given))
    pinned = [{"layers": p.layers, "op": p.op, "where": p.where, "why": p.why} for p in flow.pinned]
    screen.tell({"event": "result", "streams": [asdict(s) for s in flow.streams], "pinned": pinned, **_untraced(flow)})
    screen.say(str(flow))


def _untraced(flow: sosp.Flow) -> dict[str, Any]:
    return {"untraced": flow.untraced} if flow.untraced else {}


@takes()
def data(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder, or one above it.")],
    given: Sections,
    screen: Screen,
) -> None:
    """Say which datasets lie in a folder, whether they are complete, and where to get what is missing."""
    for finding in sosp.data.inspect(folder):
        screen.tell({"event": "finding", **asdict(finding)})
        screen.say(str(finding))


def network_for(word: str, given: Sections) -> tuple[nn.Module, Any]:
    """The network and an example of what it takes; no data is read."""
    chosen: Model = build(sections_for(word, given)[0], as_flag).model
    made = by_name.make(chosen.name, classes=chosen.classes, width=chosen.factor)
    network = made if chosen.weights is None else by_name.weighted(made, chosen.weights)
    return network, by_name.example(chosen.name, made, chosen.shape)
