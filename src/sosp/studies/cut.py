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
from sosp.baselines.eigendamage import Basis, basis, rebuild
from sosp.core.documents import read_json, write_json
from sosp.errors import ArgumentError, SospError
from sosp.graph.cost import alternative
from sosp.graph.flow import Flow, follow
from sosp.graph.mask import Mask, masked
from sosp.graph.plan import plan_removal
from sosp.graph.records import Saliency
from sosp.graph.structures import downsampling, find_structures
from sosp.scoring.score import METHODS, check_structures
from sosp.selection.select import select
from sosp.studies import train_groups
from sosp.studies.cells import Pruned, Trained
from sosp.studies.compare.cells import ComparisonPlan
from sosp.studies.setting import Bench
from sosp.studies.starting_networks import begun_with, opened
from sosp.studies.workload import BATCH, Work, prepared
from sosp.surgery.checkpoint import load, save
from sosp.surgery.shrink import shrink
from sosp.training import evaluate, recalibrate

NETWORK, FIGURES = "small.safetensors", "cut.json"
HALVINGS = 10  # of the ratio, until EigenDamage leaves the share of parameters that was asked for


@dataclass(frozen=True, eq=False)
class Cut:
    """A smaller network and its figures."""

    model: nn.Module
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    facts: Mapping[str, Any]


class Cutter:
    """Cuts cells that begin with the same network; a saliency is kept while cells ask for it one after the other."""

    def __init__(self, bench: Bench, start: Trained) -> None:
        self.bench, self.model = bench, opened(bench, start)
        self.start = begun_with(bench, start)["sha256"]
        self.works: dict[tuple[str, int, str], Work] = {}
        self.scored: tuple[Any, Saliency, float] | None = None

    def cut(self, cell: Pruned, folder: Path) -> Cut:
        """From the folder where it is there already, cut from this very network; else made, and kept there."""
        path = folder / FIGURES
        if not path.is_file() or read_json(path).get("start") != self.start:
            train_groups.forget_any(folder.parent, cell.name)
            self._make(cell, folder)
        kept = read_json(path)
        back = rebuild if cell.method == "eigendamage" else load
        return Cut(back(folder / NETWORK, self.model), kept["metrics"], kept["seconds"], kept["facts"])

    def _make(self, cell: Pruned, folder: Path) -> None:
        found = CHOOSERS.get(cell.method, _selected)(self, cell)
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / NETWORK, found.model, found.facts.get("mask"))
        facts = {k: v for k, v in found.facts.items() if k != "mask"}
        figures = {"metrics": dict(found.metrics), "seconds": dict(found.seconds), "facts": facts}
        write_json(folder / FIGURES, {"start": self.start, **figures})  # last: with it, the cut is whole

    def work(self, cell: Pruned) -> Work:
        """Structures as the cell wants them: all layers but the last and those on the downsampling path."""
        key = (cell.gate, cell.examples, cell.method if "coupled" in METHODS[cell.method].needs else "")
        if key not in self.works:
            plan = ComparisonPlan(
                (cell.method,), examples=cell.examples, gate=cell.gate, exclude=downsampling(self.model)
            )
            self.works[key] = prepared(self._seen(cell), self.bench.data(cell.start.data), plan, self.bench.device)
        return self.works[key]

    def _seen(self, cell: Pruned) -> nn.Module:
        """The network that is scored: an untrained one with statistics of its own in its batch norms, not 0 and 1."""
        if cell.start.schedule.epochs:
            return self.model
        return recalibrate(self.model, self.bench.data(cell.start.data).train, seed=cell.seed)

    def saliency(self, cell: Pruned) -> tuple[Saliency, float]:
        key = (cell.gate, cell.examples, cell.method, cell.seed)
        if self.scored is None or self.scored[0] != key:
            self.scored = None  # before the next one: pairs are large
            self.scored = (key, *self.work(cell).saliency(cell.method, cell.seed))
        return self.scored[1], self.scored[2]


def unsuited(bench: Bench, cell: Pruned) -> SospError | None:
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


def _selected(cutter: Cutter, cell: Pruned) -> Cut:
    saliency, scoring = cutter.saliency(cell)
    begun = time.perf_counter()
    mask = select(saliency, cap=cell.cap, scale=cell.scale, **dict([cell.budget]))  # type: ignore[arg-type]
    selecting = time.perf_counter() - begun
    if cell.shuffled:
        mask = mask.shuffled(torch.Generator().manual_seed(cell.seed), saliency.structures)
    return _shrunk(cutter, cell, mask, saliency.structures.flow, {"score": scoring, "select": selecting})


def _searched(cutter: Cutter, cell: Pruned) -> Cut:
    data = cutter.bench.data(cell.start.data)
    example = cutter.bench.example(cell.start.data)
    structures = find_structures(cutter.model, example, exclude=downsampling(cutter.model))
    warmup = cell.episodes // 4
    begun = time.perf_counter()
    options: dict[str, Any] = {"episodes": cell.episodes, "warmup": warmup, **dict([cell.budget])}
    mask = amc(cutter.model, data, structures=structures, seed=cell.seed, **options)
    return _shrunk(cutter, cell, mask, structures.flow, {"search": time.perf_counter() - begun})


def _rotated(cutter: Cutter, cell: Pruned) -> Cut:
    """EigenDamage, at the smallest ratio of directions that leaves at most the share of parameters."""
    what, share = cell.budget
    begun = time.perf_counter()
    if what != "params":
        raise ArgumentError(f"{cell.name}: EigenDamage is asked for a share of parameters here, not of {what}.")
    data = cutter.bench.data(cell.start.data).train
    examples = min(cell.examples, len(data))
    turned = basis(
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
        tried = _tried(turned, middle, cap)
        if tried is not None and tried.cost_after.params > share * tried.cost_before.params:
            low = middle
        else:
            found, high = tried or found, middle
    if found is None:
        raise ArgumentError(f"{cell.name}: no ratio of directions leaves {share:g} of the parameters.")
    metrics = {"structures": found.directions, "removed": found.lost}
    metrics |= {"params": found.cost_after.params, "macs": found.cost_after.macs}
    metrics |= _accuracies(cutter.bench, cell, {"cut": found.model})
    return Cut(found.model, metrics, {"search": time.perf_counter() - begun}, {"ratio": high})


def _tried(turned: Basis, ratio: float, cap: float) -> Any:
    """None where that many directions cannot go."""
    try:
        return turned.without(ratio, cap, "smaller")
    except ArgumentError:
        return None


CHOOSERS: dict[str, Callable[[Cutter, Pruned], Cut]] = {"amc": _searched, "eigendamage": _rotated}


# --- measuring ------------------------------------------------------------------------------------------


def _shrunk(cutter: Cutter, cell: Pruned, mask: Mask, flow: Flow | None, seconds: dict[str, float]) -> Cut:
    """The smaller network, compared with the masked one; what it costs and what it can still do."""
    model, bench = cutter.model, cutter.bench
    begun = time.perf_counter()
    flow = flow or follow(model, bench.example(cell.start.data))
    plan = plan_removal(flow, mask)
    small, exact = shrink(model, plan, bench.example(cell.start.data)), plan.cost
    seconds["shrink"] = time.perf_counter() - begun
    other = alternative(flow, flow.removed(mask.removed, mask.places))
    again = recalibrate(small, bench.data(cell.start.data).train, examples=5000, seed=cell.seed)
    four = {"zeroed": zeroed(model, mask), "masked": masked(model, mask), "cut": small, "recalibrated": again}
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
    return Cut(small, metrics, seconds, {"mask": mask, "removed_by_layer": layers})


def _accuracies(bench: Bench, cell: Pruned, networks: Mapping[str, nn.Module]) -> dict[str, float]:
    test = bench.data(cell.start.data).test
    return {name: evaluate(network, test).top1 for name, network in networks.items()}


@torch.no_grad()
def zeroed(model: nn.Module, mask: Mask) -> nn.Module:
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
