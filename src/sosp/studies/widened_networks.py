"""Networks that are wider where another one, pruned, loses least: what is widened is chosen once and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sosp import nets
from sosp.core.documents import read_json, write_json
from sosp.graph.structures import downsampling
from sosp.studies.cells import Grown, Trained
from sosp.studies.expand.growth import Growth, growth_of
from sosp.studies.expand.plan import ExpansionPlan, Setup
from sosp.studies.expand.search import chosen
from sosp.studies.setting import Bench


def fresh(bench: Bench, start: Trained) -> nn.Module:
    """The network as it is initialised, on the device; a grown one by the choice that was kept."""
    if start.grown is None:
        return bench.plain(start)
    return growth(bench, start).make(factors(bench, start.grown), start.seed).to(bench.device)


def growth(bench: Bench, start: Trained) -> Growth:
    """The network as a function of its widths."""
    classes = len(bench.data(start.data).classes)
    example = bench.example(start.data).cpu()
    return growth_of(lambda width: nets.make(start.network, classes=classes, width=width), example, start.width)


def choose(bench: Bench, grown: Grown, root: nn.Module) -> None:
    """Find what is widened, by the bottlenecks of ``root``, and keep it; scoring again might round otherwise."""
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
    setup = Setup(seed=grown.of.seed, device=bench.device)
    found = chosen(growth(bench, grown.of), root, bench.data(grown.of.data), plan, setup)
    known = {"blocks": found.blocks, "removed_by_block": dict(found.removed), "factors": dict(found.factors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**known, "constant": found.constant.factor})


def factors(bench: Bench, grown: Grown) -> dict[str, float]:
    """Layer -> factor: of what is too narrow, or of all layers alike."""
    kept = read_json(_file(bench, grown))
    if grown.how == "expand":
        return dict(kept["factors"])
    return dict.fromkeys(growth(bench, grown.of).layers, kept["constant"])


def facts(bench: Bench, start: Trained) -> dict[str, Any]:
    """What a record says about the growth of its network."""
    if start.grown is None:
        return {}
    kept = read_json(_file(bench, start.grown))
    known = {"removed_by_block": kept["removed_by_block"], "factors": factors(bench, start.grown)}
    if start.grown.how == "expand":
        return {**known, "widened": f"{', '.join(kept['blocks'])} ×{start.grown.factor:g}"}
    return {**known, "widened": f"all layers ×{kept['constant']:g}"}


def _file(bench: Bench, grown: Grown) -> Path:
    """Both ways of growing share a choice."""
    return bench.setting.work / "networks" / f"{grown.of.name}-bottlenecks.json"
