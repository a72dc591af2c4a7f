"""Make networks that are wider where a pruned one loses least; the choice is made once and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sosp import nets
from sosp.core.text_files import read_json, write_json
from sosp.graph.structures import downsampling
from sosp.studies.cells import TrainedCell, WideningSpec
from sosp.studies.expand.expand_pruning import choose_widening
from sosp.studies.expand.expansion_plan import ExpansionPlan, ExpansionSetup
from sosp.studies.expand.widenable_networks import WidenableNetwork, make_widenable
from sosp.studies.workspace import Workspace


def initialise_network(bench: Workspace, start: TrainedCell) -> nn.Module:
    """Return the initial network on the device; a widened one follows the saved choice."""
    if start.grown is None:
        return bench.make_initial(start)
    return make_start_widenable(bench, start).make(read_factors(bench, start.grown), start.seed).to(bench.device)


def make_start_widenable(bench: Workspace, start: TrainedCell) -> WidenableNetwork:
    """Return the network as a function of its widths."""
    classes = len(bench.data(start.data).classes)
    example = bench.example(start.data).cpu()
    return make_widenable(lambda width: nets.make(start.network, classes=classes, width=width), example, start.width)


def save_widening(bench: Workspace, grown: WideningSpec, root: nn.Module) -> None:
    """Choose what to widen by the bottlenecks of ``root`` and save it; scoring again might round differently."""
    path = _file(bench, grown)
    if path.is_file():
        return
    plan = ExpansionPlan(
        examples=grown.examples,
        gate=grown.gate,
        exclude=downsampling(root),
        factor=grown.factor,
        probe=grown.probe,
        when="trained" if grown.of.schedule.epochs else "init",
    )
    setup = ExpansionSetup(seed=grown.of.seed, device=bench.device)
    found = choose_widening(make_start_widenable(bench, grown.of), root, bench.data(grown.of.data), plan, setup)
    known = {"blocks": found.blocks, "removed_by_block": dict(found.removed), "factors": dict(found.factors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**known, "constant": found.constant.factor})


def read_factors(bench: Workspace, grown: WideningSpec) -> dict[str, float]:
    """Return layer -> factor: of the layers that are too narrow, or the same for all layers."""
    kept = read_json(_file(bench, grown))
    if grown.how == "expand":
        return dict(kept["factors"])
    return dict.fromkeys(make_start_widenable(bench, grown.of).layers, kept["constant"])


def describe_widening(bench: Workspace, start: TrainedCell) -> dict[str, Any]:
    """Return what a record states about the widening of its network."""
    if start.grown is None:
        return {}
    kept = read_json(_file(bench, start.grown))
    known = {"removed_by_block": kept["removed_by_block"], "factors": read_factors(bench, start.grown)}
    if start.grown.how == "expand":
        return {**known, "widened": f"{', '.join(kept['blocks'])} ×{start.grown.factor:g}"}
    return {**known, "widened": f"all layers ×{kept['constant']:g}"}


def _file(bench: Workspace, grown: WideningSpec) -> Path:
    """Return the file of the choice, which both ways of widening share."""
    return bench.setting.work / "networks" / f"{grown.of.name}-bottlenecks.json"
