"""From a network to a smaller one: score, select, shrink, and what is left before any fine-tuning."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.baselines import amc
from sosp.baselines.eigendamage import Eigenbases, find_eigenbases, rebuild
from sosp.core.text_files import read_json, write_json
from sosp.errors import ArgumentError, SospError
from sosp.graph.cost import compute_alternative_cost
from sosp.graph.flow import Flow, follow_channels
from sosp.graph.mask import Mask, masked
from sosp.graph.plan import plan_removal
from sosp.graph.records import Saliency
from sosp.graph.structures import downsampling, find_structures
from sosp.scoring.score import METHODS, check_structures
from sosp.selection.select import select
from sosp.studies import training_groups
from sosp.studies.cells import PrunedCell, TrainedCell
from sosp.studies.compare.comparison_cells import ComparisonPlan
from sosp.studies.pruning_task import BATCH, PruningTask, prepare_task
from sosp.studies.starting_networks import describe_start, open_network
from sosp.studies.workspace import Workspace
from sosp.surgery.checkpoint import load, save
from sosp.surgery.shrink import shrink
from sosp.training import evaluate, recalibrate

NETWORK, FIGURES = "small.safetensors", "cut.json"
HALVINGS = 10  # of the ratio, until EigenDamage leaves the share of parameters that was asked for


@dataclass(frozen=True, eq=False)
class CellPruningResult:
    """A smaller network and its figures."""

    model: nn.Module
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    facts: Mapping[str, Any]


class CellPruner:
    """Cuts cells that begin with the same network; a saliency is kept while cells ask for it one after the other."""

    def __init__(self, bench: Workspace, start: TrainedCell) -> None:
        self.bench, self.model = bench, open_network(bench, start)
        self.start = describe_start(bench, start)["sha256"]
        self.works: dict[tuple[str, int, str], PruningTask] = {}
        self.scored: tuple[Any, Saliency, float] | None = None

    def cut(self, cell: PrunedCell, folder: Path) -> CellPruningResult:
        """From the folder where it is there already, cut from this very network; else made, and kept there."""
        path = folder / FIGURES
        if not path.is_file() or read_json(path).get("start") != self.start:
            training_groups.delete_member_checkpoints(folder.parent, cell.name)
            self._make(cell, folder)
        kept = read_json(path)
        back = rebuild if cell.method == "eigendamage" else load
        return CellPruningResult(back(folder / NETWORK, self.model), kept["metrics"], kept["seconds"], kept["facts"])

    def _make(self, cell: PrunedCell, folder: Path) -> None:
        found = CHOOSERS.get(cell.method, _prune_by_saliency)(self, cell)
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / NETWORK, found.model, found.facts.get("mask"))
        facts = {k: v for k, v in found.facts.items() if k != "mask"}
        figures = {"metrics": dict(found.metrics), "seconds": dict(found.seconds), "facts": facts}
        write_json(folder / FIGURES, {"start": self.start, **figures})  # last: with it, the cut is whole

    def work(self, cell: PrunedCell) -> PruningTask:
        """Structures as the cell wants them: all layers but the last and those on the downsampling path."""
        key = (cell.gate, cell.examples, cell.method if "coupled" in METHODS[cell.method].needs else "")
        if key not in self.works:
            plan = ComparisonPlan(
                (cell.method,), examples=cell.examples, gate=cell.gate, exclude=downsampling(self.model)
            )
            self.works[key] = prepare_task(self._seen(cell), self.bench.data(cell.start.data), plan, self.bench.device)
        return self.works[key]

    def _seen(self, cell: PrunedCell) -> nn.Module:
        """The network that is scored: an untrained one with statistics of its own in its batch norms, not 0 and 1."""
        if cell.start.schedule.epochs:
            return self.model
        return recalibrate(self.model, self.bench.data(cell.start.data).train, seed=cell.seed)

    def saliency(self, cell: PrunedCell) -> tuple[Saliency, float]:
        key = (cell.gate, cell.examples, cell.method, cell.seed)
        if self.scored is None or self.scored[0] != key:
            self.scored = None  # before the next one: pairs are large
            self.scored = (key, *self.work(cell).saliency(cell.method, cell.seed))
        return self.scored[1], self.scored[2]


def find_refusal(bench: Workspace, cell: PrunedCell) -> SospError | None:
    """Why this network does not allow the method, before hours are spent on training it; None if it does."""
    if cell.method in CHOOSERS or not METHODS[cell.method].needs:
        return None
    model = bench.plain(cell.start)
    groups = "coupled" if "coupled" in METHODS[cell.method].needs else "independent"
    example = bench.example(cell.start.data)
    try:
        found = find_structures(model, example, gate=cell.gate, groups=groups, exclude=downsampling(model))
        check_structures(model, found, cell.method)
    except SospError as error:
        return error
    return None


# --- choosing -------------------------------------------------------------------------------------------


def _prune_by_saliency(cutter: CellPruner, cell: PrunedCell) -> CellPruningResult:
    saliency, scoring = cutter.saliency(cell)
    begun = time.perf_counter()
    mask = select(saliency, cap=cell.cap, scale=cell.scale, **dict([cell.budget]))  # type: ignore[arg-type]
    selecting = time.perf_counter() - begun
    if cell.shuffled:
        mask = mask.shuffled(torch.Generator().manual_seed(cell.seed), saliency.structures)
    return _shrink_and_measure(cutter, cell, mask, saliency.structures.flow, {"score": scoring, "select": selecting})


def _prune_by_search(cutter: CellPruner, cell: PrunedCell) -> CellPruningResult:
    data = cutter.bench.data(cell.start.data)
    example = cutter.bench.example(cell.start.data)
    structures = find_structures(cutter.model, example, exclude=downsampling(cutter.model))
    warmup = cell.episodes // 4
    begun = time.perf_counter()
    options: dict[str, Any] = {"episodes": cell.episodes, "warmup": warmup, **dict([cell.budget])}
    mask = amc(cutter.model, data, structures=structures, seed=cell.seed, **options)
    return _shrink_and_measure(cutter, cell, mask, structures.flow, {"search": time.perf_counter() - begun})


def _prune_by_eigendamage(cutter: CellPruner, cell: PrunedCell) -> CellPruningResult:
    """EigenDamage, at the smallest ratio of directions that leaves at most the share of parameters."""
    what, share = cell.budget
    begun = time.perf_counter()
    if what != "params":
        raise ArgumentError(f"{cell.name}: EigenDamage is asked for a share of parameters here, not of {what}.")
    data = cutter.bench.data(cell.start.data).train
    examples = min(cell.examples, len(data))
    turned = find_eigenbases(
        cutter.model,
        data.subset(examples, cell.seed).ordered(batch=BATCH),
        loss="cross_entropy",
        examples=examples,
        fisher="sampled",
        exclude=downsampling(cutter.model),
        generator=torch.Generator().manual_seed(cell.seed),
    )
    cap = 0.95 if cell.cap is None else cell.cap
    found, low, high = None, 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tried = _try_ratio(turned, middle, cap)
        if tried is not None and tried.cost_after.params > share * tried.cost_before.params:
            low = middle
        else:
            found, high = tried or found, middle
    if found is None:
        raise ArgumentError(f"{cell.name}: no ratio of directions leaves {share:g} of the parameters.")
    metrics = {"structures": found.directions, "removed": found.lost}
    metrics |= {"params": found.cost_after.params, "macs": found.cost_after.macs}
    metrics |= _accuracies(cutter.bench, cell, {"cut": found.model})
    return CellPruningResult(found.model, metrics, {"search": time.perf_counter() - begun}, {"ratio": high})


def _try_ratio(turned: Eigenbases, ratio: float, cap: float) -> Any:
    """None where that many directions cannot go."""
    try:
        return turned.without(ratio, cap, "smaller")
    except ArgumentError:
        return None


CHOOSERS: dict[str, Callable[[CellPruner, PrunedCell], CellPruningResult]] = {
    "amc": _prune_by_search,
    "eigendamage": _prune_by_eigendamage,
}


# --- measuring ------------------------------------------------------------------------------------------


def _shrink_and_measure(
    cutter: CellPruner, cell: PrunedCell, mask: Mask, flow: Flow | None, seconds: dict[str, float]
) -> CellPruningResult:
    """The smaller network, compared with the masked one; what it costs and what it can still do."""
    model, bench = cutter.model, cutter.bench
    begun = time.perf_counter()
    flow = flow or follow_channels(model, bench.example(cell.start.data))
    plan = plan_removal(flow, mask)
    small, exact = shrink(model, plan, bench.example(cell.start.data)), plan.cost
    seconds["shrink"] = time.perf_counter() - begun
    other = compute_alternative_cost(flow, flow.removed(mask.removed, mask.places))
    again = recalibrate(small, bench.data(cell.start.data).train, examples=5000, seed=cell.seed)
    four = {"zeroed": zero_structures(model, mask), "masked": masked(model, mask), "cut": small, "recalibrated": again}
    metrics = {
        "structures": mask.structures,
        "removed": mask.chosen,
        "params": exact.params,
        "macs": exact.macs,
        "params_alternative": other.params,
        "macs_alternative": other.macs,
        **_accuracies(bench, cell, four),
    }
    layers = {layer.name: len(mask.removed.get(layer.name, ())) / layer.channels for layer in mask.layers}
    return CellPruningResult(small, metrics, seconds, {"mask": mask, "removed_by_layer": layers})


def _accuracies(bench: Workspace, cell: PrunedCell, networks: Mapping[str, nn.Module]) -> dict[str, float]:
    test = bench.data(cell.start.data).test
    return {name: evaluate(network, test).top1 for name, network in networks.items()}


@torch.no_grad()
def zero_structures(model: nn.Module, mask: Mask) -> nn.Module:
    """A copy in which the weights into the removed structures are zero and batch norms stay as they are.

    The paper's theta without M (Sec. 2). The shift of a batch norm survives in it, which no smaller network computes.
    """
    twin = copy.deepcopy(model)
    for name, channels in mask.removed.items():
        layer: Any = twin.get_submodule(name)
        layer.weight[channels.to(layer.weight.device)] = 0
        if layer.bias is not None:
            layer.bias[channels.to(layer.bias.device)] = 0
    return twin
