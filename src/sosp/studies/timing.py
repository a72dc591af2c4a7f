"""Measure how long the pruning step takes, after a warm-up and with repeats."""

from __future__ import annotations

import time
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from sosp.graph.plan import count
from sosp.graph.records import Structures
from sosp.graph.structures import downsampling, find_structures
from sosp.scoring.score import score
from sosp.selection.select import select
from sosp.studies.cell_records import CellRecord
from sosp.studies.cells import TimedCell, encode_cell
from sosp.studies.workspace import Workspace, make_network
from sosp.training import recalibrate

# Channels, edge and classes of a dataset's images, used if its files are missing.
SHAPES = {"cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "imagenet": (3, 224, 1000), "digits": (1, 8, 10)}
BATCH = 250
FEW = 32  # examples for the warm-up if one pass takes minutes

Batches = list[tuple[Tensor, Tensor]]


def measure_cell(bench: Workspace, cell: TimedCell, experiment: str) -> CellRecord:
    """Return the record of a cell: mean and standard deviation over repeats, and means of scoring and selecting."""
    batches, classes, source = make_batches(bench, cell)
    network = make_network(cell.network, classes, cell.width, cell.seed).to(bench.device)
    network = recalibrate(network, batches)
    example = batches[0][0][:8]
    found = find_structures(network, example, gate=cell.gate, exclude=downsampling(network))
    _once(bench, cell, network, found, batches if cell.repeats > 1 else [(x[:FEW], y[:FEW]) for x, y in batches[:1]])
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    times = [_once(bench, cell, network, found, batches) for _ in range(cell.repeats)]
    cost, whole = count(network, example), [scoring + selecting for scoring, selecting in times]
    metrics = {
        "seconds": mean(whole),
        "seconds_std": stdev(whole) if len(whole) > 1 else 0.0,
        "score": mean(scoring for scoring, _ in times),
        "select": mean(selecting for _, selecting in times),
        "structures": len(found),
        "params": cost.params,
        "macs": cost.macs,
        "outputs": classes,
    }
    if bench.device.type == "cuda":
        metrics["peak_bytes"] = torch.cuda.max_memory_allocated(bench.device)
    return CellRecord(
        encode_cell(cell),
        cell.name,
        experiment,
        "done",
        metrics=metrics,
        history={"seconds": whole},
        facts={"inputs": source},
        origin=bench.setting.origin,
    )


def _once(
    bench: Workspace, cell: TimedCell, network: nn.Module, structures: Structures, batches: Batches
) -> tuple[float, float]:
    """Return the seconds of scoring and of selecting."""
    begun = _clock(bench.device)
    random = torch.Generator().manual_seed(cell.seed)
    examples = sum(len(y) for _, y in batches)
    saliency = score(network, batches, method=cell.method, structures=structures, examples=examples, generator=random)
    scored = _clock(bench.device)
    select(saliency, ratio=cell.ratio)
    return scored - begun, _clock(bench.device) - scored


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_batches(bench: Workspace, cell: TimedCell) -> tuple[Batches, int, str]:
    """Return batches on the device, the number of classes, and the name of the inputs."""
    if bench.has_data(cell.data):
        data = bench.data(cell.data)
        few = data.train.subset(min(cell.examples, len(data.train)), cell.seed)
        return list(few.to(bench.device).ordered(batch=BATCH)), len(data.classes), cell.data
    channels, edge, classes = SHAPES[cell.data]
    random = torch.Generator().manual_seed(cell.seed)
    options: dict[str, Any] = {"generator": random}
    whole = torch.randn(cell.examples, channels, edge, edge, **options).to(bench.device)
    labels = torch.randint(classes, (cell.examples,), **options).to(bench.device)
    return list(zip(whole.split(BATCH), labels.split(BATCH), strict=True)), classes, "random numbers"
