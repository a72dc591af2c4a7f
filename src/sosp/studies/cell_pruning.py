"""Prune the network of a cell: score, select, shrink, and measure it before any fine-tuning."""

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
from sosp.baselines.eigendamage import Eigenbases, find_eigenbases, rebuild_bottlenecks
from sosp.core.text_files import read_json, write_json
from sosp.errors import ArgumentError, SospError
from sosp.graph.flow import Flow, follow_channels
from sosp.graph.mask import Mask, masked
from sosp.graph.plan import compute_alternative_cost, plan_removal
from sosp.graph.records import Saliency
from sosp.graph.structures import downsampling, find_structures
from sosp.scoring.methods import METHODS
from sosp.scoring.score import check_structures
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
HALVINGS = 10  # of the interval of ratios, to find where EigenDamage leaves the requested share of parameters


@dataclass(frozen=True, eq=False)
class CellPruningResult:
    """A pruned network and its figures."""

    model: nn.Module
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    facts: Mapping[str, Any]


class CellPruner:
    """A pruner for cells that begin with the same network; consecutive cells share a saliency where they can."""

    def __init__(self, bench: Workspace, start: TrainedCell) -> None:
        self.bench, self.model = bench, open_network(bench, start)
        self.start = describe_start(bench, start)["sha256"]
        self.works: dict[tuple[str, int, str], PruningTask] = {}
        self.scored: tuple[Any, Saliency, float] | None = None

    def prune(self, cell: PrunedCell, folder: Path) -> CellPruningResult:
        """Return the pruned network from the folder; prune and save it first if the folder has none of this network."""
        path = folder / FIGURES
        if not path.is_file() or read_json(path).get("start") != self.start:
            training_groups.delete_member_checkpoints(folder.parent, cell.name)
            self._make(cell, folder)
        kept = read_json(path)
        back = rebuild_bottlenecks if cell.method == "eigendamage" else load
        return CellPruningResult(back(folder / NETWORK, self.model), kept["metrics"], kept["seconds"], kept["facts"])

    def _make(self, cell: PrunedCell, folder: Path) -> None:
        found = CHOOSERS.get(cell.method, _prune_by_saliency)(self, cell)
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / NETWORK, found.model, found.facts.get("mask"))
        facts = {k: v for k, v in found.facts.items() if k != "mask"}
        figures = {"metrics": dict(found.metrics), "seconds": dict(found.seconds), "facts": facts}
        write_json(folder / FIGURES, {"start": self.start, **figures})  # last: it marks the result as complete

    def get_task(self, cell: PrunedCell) -> PruningTask:
        """Return the task of a cell; it prunes all layers except the last and those on the downsampling path."""
        key = (cell.gate, cell.examples, cell.method if "coupled" in METHODS[cell.method].needs else "")
        if key not in self.works:
            plan = ComparisonPlan(
                (cell.method,), examples=cell.examples, gate=cell.gate, exclude=downsampling(self.model)
            )
            self.works[key] = prepare_task(self._seen(cell), self.bench.data(cell.start.data), plan, self.bench.device)
        return self.works[key]

    def _seen(self, cell: PrunedCell) -> nn.Module:
        """Return the network to score; an untrained one gets re-estimated batch-norm statistics instead of 0 and 1."""
        if cell.start.schedule.epochs:
            return self.model
        return recalibrate(self.model, self.bench.data(cell.start.data).train, seed=cell.seed)

    def saliency(self, cell: PrunedCell) -> tuple[Saliency, float]:
        """Return the saliency of a cell and the seconds it took."""
        key = (cell.gate, cell.examples, cell.method, cell.seed)
        if self.scored is None or self.scored[0] != key:
            self.scored = None  # free it before the next one is computed: pairs are large
            self.scored = (key, *self.get_task(cell).saliency(cell.method, cell.seed))
        return self.scored[1], self.scored[2]


def find_refusal(bench: Workspace, cell: PrunedCell) -> SospError | None:
    """Return the error of a method that this network does not allow, or None; called before hours of training."""
    if cell.method in CHOOSERS or not METHODS[cell.method].needs:
        return None
    model = bench.make_initial(cell.start)
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
    """Prune by EigenDamage, at the smallest ratio of directions that leaves at most the share of parameters."""
    what, share = cell.budget
    begun = time.perf_counter()
    if what != "params":
        raise ArgumentError(f"{cell.name}: EigenDamage needs a share of parameters as its budget here, not of {what}.")
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
    """Return the network without this ratio of directions, or None if that many cannot be removed."""
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
    """Shrink the network; measure its cost and its accuracy, next to the zeroed and the masked network."""
    model, bench = cutter.model, cutter.bench
    begun = time.perf_counter()
    flow = flow or follow_channels(model, bench.example(cell.start.data))
    plan = plan_removal(flow, mask)
    small, exact = shrink(model, plan, bench.example(cell.start.data)), plan.cost
    seconds["shrink"] = time.perf_counter() - begun
    other = compute_alternative_cost(flow, flow.find_removed_outputs(mask.removed, mask.own_norms))
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
    """Return a copy with zero weights into the removed structures and unchanged batch norms.

    The paper's theta without M (Sec. 2). It keeps the shifts of batch norms, which no smaller network computes.
    """
    twin = copy.deepcopy(model)
    for name, channels in mask.removed.items():
        layer: Any = twin.get_submodule(name)
        layer.weight[channels.to(layer.weight.device)] = 0
        if layer.bias is not None:
            layer.bias[channels.to(layer.bias.device)] = 0
    return twin
