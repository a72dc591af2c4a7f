"""Runs for tests of the report that nobody has to wait for: the facts of a made-up pruning, of any size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from sosp.app.config import build_config
from sosp.app.report.run_facts import LayerWidths, LossCurve, LossPoint, ReportLayer, RunFacts
from sosp.app.run.run_folder import RunRecord
from sosp.selection.saved_saliency import SavedSaliency
from sosp.training import Accuracy, Epoch


def bottleneck_network() -> list[tuple[str, int, int]]:
    """(name, inputs, outputs) of the 53 convolutions of a ResNet-50."""
    found, inputs = [("conv1", 3, 64)], 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), 1):
        for k in range(blocks):
            front = f"layer{stage}.{k}"
            found += [(f"{front}.conv1", inputs, width), (f"{front}.conv2", width, width)]
            found += [(f"{front}.conv3", width, 4 * width)]
            found += [(f"{front}.downsample.0", inputs, 4 * width)] if k == 0 else []
            inputs = 4 * width
    return found


def saliency(layers: list[tuple[str, int, int]], method: str = "sosp-i") -> SavedSaliency:
    """Lognormal costs, half of which go."""
    generator = torch.Generator().manual_seed(0)
    index = torch.cat([torch.full((out,), i) for i, (_, _, out) in enumerate(layers)])
    scores = torch.randn(len(index), generator=generator, dtype=torch.float64).mul(2).exp()
    order = scores.argsort()
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    pairs = torch.rand(len(layers), len(layers), generator=generator, dtype=torch.float64)
    names = tuple(name for name, _, _ in layers)
    return SavedSaliency(
        method, "individual", "global", 100, names, index, rank, rank < len(rank) // 2, scores, scores, scores,
        pairs + pairs.T if method == "sosp-i" else None,
    )  # fmt: skip


def widths(layers: list[tuple[str, int, int]]) -> tuple[LayerWidths, ...]:
    """A main stream per stage, and two inside every block."""
    found, main = [], 0
    for free, (name, inputs, outputs) in enumerate(layers, 1):
        last = name.endswith(("conv3", "downsample.0")) or name == "conv1"
        if name == "conv1" or name.endswith(".0.conv1"):
            main += 1000
        before = main - 1000 if name.endswith((".0.conv1", "downsample.0")) else main
        reads = 0 if name == "conv1" else free - 1 if name.endswith(("conv2", "conv3")) else before
        found.append(LayerWidths(name, reads, main if last else free, (inputs, inputs // 2), (outputs, outputs // 2)))
    return tuple(found)


def results(structures: int, removed: int, method: str) -> dict[str, Any]:
    before = {"top1": 0.7613, "top5": 0.93, "loss": 0.96, "examples": 50000, "params": 25557032, "macs": 4089184256}
    after = {"top1": 0.7512, "top5": 0.92, "loss": 1.02, "examples": 50000, "params": 12000000, "macs": 2000000000}
    return {
        "prune": {
            "method": method, "structures": structures, "removed": removed, "scoring_seconds": 3.0,
            "before": {**before, "latency": 0.8, "bytes": 102_000_000}, **after, "latency": 0.5, "bytes": 48_000_000,
        }
    }  # fmt: skip


def made_up(folder: Path, layers: list[tuple[str, int, int]], method: str = "sosp-i", epochs: int = 90) -> RunFacts:
    """A pruning with everything that a report can show of it."""
    saved = saliency(layers, method)
    counts = [int((saved.removed & (saved.index == i)).sum()) for i in range(len(layers))]
    shown = [ReportLayer(n, o, k, (o, i, 3, 3), (o - k, i, 3, 3)) for (n, i, o), k in zip(layers, counts, strict=True)]
    points = [LossPoint(100 * k, 0.1 + 0.02 * k * k, 1 / (1 + k), 0.01 * k, 0.03 * k) for k in range(9)]
    history = [
        Epoch(n + 1, 2 * math.exp(-n / 20), 0.8, Accuracy(0.7, 0.9, 1.1, 500), 0.1, 1.0, 10.0) for n in range(epochs)
    ]
    config = build_config(
        {"model": {"name": "sosp:resnet50"}, "data": {"name": "imagenet"}, "prune": {"method": method}}
    )
    origin = {"command": ["sosp", "prune", "sosp:resnet50"], "commit": "abc", "torch": "2.13.0"}
    return RunFacts(
        folder=folder,
        record=RunRecord(config, {}, origin),
        results=results(len(saved.index), sum(counts), method),
        epochs={"train": tuple(history)},
        layers=tuple(shown),
        widths=widths(layers),
        loss_curve=LossCurve(256, tuple(points)),
        bottlenecks=None,
        saliency=saved,
        summaries=(),
    )
