"""Define the commands that write nothing: eval, count, trace, data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from torch import nn

import sosp
from sosp.app.cli.flags import Sections, add_flags
from sosp.app.cli.output import Screen
from sosp.app.cli.run_commands import Target, warn_without_weights
from sosp.app.cli.targets import require_mask, resolve_target
from sosp.app.cli.terminal_tables import create_cost_table, create_table, format_share
from sosp.app.config import ModelSection, build_config, format_flag
from sosp.app.run import prepare_job
from sosp.errors import check_whole_number
from sosp.graph.plan import CONVENTIONS
from sosp.nets import by_name


@add_flags("model", "data", "run.device")
def evaluate(
    model: Target,
    given: Sections,
    screen: Screen,
    batch: Annotated[int, typer.Option(help="Number of images per batch.")] = 256,
    limit: Annotated[int | None, typer.Option(help="Number of test images to use.", show_default="all")] = None,
) -> None:
    """Measure the accuracy of a network on the test data.

    sosp eval sosp:resnet56 --weights resnet56.pth --data cifar10 --data-dir datasets
    """
    check_whole_number("--batch", batch)
    sections, _ = resolve_target(model, given)
    job = prepare_job(build_config(sections, format_flag))
    test = job.dataset.test
    warn_without_weights(job, screen)
    found = sosp.evaluate(job.start, test, batch=batch, device=job.device, limit=limit)
    cost = sosp.count(job.start, job.example)
    screen.print_json({"event": "result", **asdict(found), "params": cost.params, "macs": cost.macs})
    table = create_table("examples", "accuracy", "top 5", "loss", "parameters", "MACs")
    cells = (
        format_share(found.top1),
        format_share(found.top5),
        f"{found.loss:.4f}",
        f"{cost.params:,}",
        f"{cost.macs:,}",
    )
    table.add_row(f"{found.examples:,}", *cells)
    screen.print_lines(table)


@add_flags("model")
def count(
    model: Target,
    given: Sections,
    screen: Screen,
    mask: Annotated[
        str | None,
        typer.Option(metavar="RUN|FILE", help="Run or file with a mask. The pruned network is counted as well."),
    ] = None,
    convention: Annotated[
        str, typer.Option(help=f"Counting convention for a mask: {' or '.join(CONVENTIONS)}.")
    ] = "exact",
) -> None:
    """Count parameters and multiply-accumulates, layer by layer.

    sosp count torchvision:resnet50
    """
    network, example = make_network_and_example(model, given)
    before = sosp.count(network, example, convention=convention)
    after = None if mask is None else sosp.count(network, example, require_mask(mask), convention=convention)
    left = {} if after is None else {"left": asdict(after)}
    screen.print_json({"event": "result", **asdict(before), **left})
    screen.print_lines(create_cost_table(before, after))


@add_flags("model")
def trace(model: Target, given: Sections, screen: Screen) -> None:
    """Show how channels flow through a network: which are tied together, which cannot be removed, and why.

    sosp trace timm:convnext_atto
    """
    flow = sosp.trace(*make_network_and_example(model, given))
    pinned = [{"layers": p.layers, "op": p.op, "where": p.where, "why": p.why} for p in flow.pinned]
    screen.print_json(
        {"event": "result", "streams": [asdict(s) for s in flow.streams], "pinned": pinned, **_untraced(flow)}
    )
    screen.print_lines(str(flow))


def _untraced(flow: sosp.Flow) -> dict[str, Any]:
    return {"untraced": flow.untraced} if flow.untraced else {}


@add_flags()
def data(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a dataset, or its parent folder.")],
    given: Sections,
    screen: Screen,
) -> None:
    """Show which datasets a folder contains, whether they are complete, and where to download what is missing."""
    for finding in sosp.data.inspect(folder):
        screen.print_json({"event": "finding", **asdict(finding)})
        screen.print_lines(str(finding))


def make_network_and_example(word: str, given: Sections) -> tuple[nn.Module, Any]:
    """Return the network and an example input, without reading data."""
    chosen: ModelSection = build_config(resolve_target(word, given)[0], format_flag).model
    made = by_name.build_network(chosen.name, classes=chosen.classes, width=chosen.factor)
    network = made if chosen.weights is None else by_name.load_weights(made, chosen.weights)
    return network, by_name.make_example(chosen.name, made, chosen.shape)
