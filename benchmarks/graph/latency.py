"""How much faster a shrunk ResNet-50 runs: coupled and independent masks at equal MACs, rounded widths or not.

python benchmarks/graph/latency.py [--device cuda] [--batch 8 1] [--ratio 0.3 0.5] [--compile] [--out latency.md]
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import sosp
from sosp.core.layers import Scatter


@dataclass(frozen=True)
class Variant:
    """A network to time, and what it costs."""

    name: str
    model: nn.Module
    cost: sosp.Cost
    scatters: int


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    device = torch.device(options.device)
    if device.type == "cpu" and options.threads:
        torch.set_num_threads(options.threads)
    model = sosp.nets.make("resnet50").eval()
    variants = make(model, options.ratio, options.size)
    lines = [f"ResNet-50, {options.size} px, {hardware(device)}, torch {torch.__version__}", ""]
    lines += ["| network | parameters | MACs | scatters | " + " | ".join(columns(options)) + " |"]
    lines += ["|---|---:|---:|---:|" + "---:|" * len(columns(options))]
    times = {c: measure(variants, c, device, options) for c in columns(options)}
    for v in variants:
        cells = [cell(times[c], v.name) for c in columns(options)]
        lines.append(
            f"| {v.name} | {v.cost.params / 1e6:.2f} M | {v.cost.macs / 1e9:.2f} G | {v.scatters} | "
            + " | ".join(cells)
            + " |"
        )
    text = "\n".join([*lines, ""])
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.3, 0.5])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--compile", action="store_true", help="also compiled")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class Graphed(nn.Module):
    """The whole network as one CUDA graph: no time is lost in launching its kernels."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        super().__init__()
        self.model, self.x = model, x.clone()
        with torch.inference_mode():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    model(self.x)
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y = model(self.x)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.y


def make(model: nn.Module, ratios: list[float], size: int) -> list[Variant]:
    """The network itself, and for every ratio coupled and independent masks of equal MACs, rounded to 8 or not."""
    x = torch.randn(2, 3, size, size)
    data = (torch.randn(2, 3, 64, 64), torch.zeros(2, dtype=torch.long))
    found = [Variant("original", model, sosp.count(model, x), 0)]
    saliency = {
        groups: sosp.score(model, data, method="random", structures=sosp.find_structures(model, x, groups=groups))
        for groups in ("coupled", "independent")
    }
    for ratio in ratios:
        macs = 1.0
        for round_to in (1, 8):
            mask = sosp.select(saliency["coupled"], ratio=ratio, round_to=round_to)
            found.append(variant(model, mask, x, f"coupled {ratio:.0%}" + f", rounded to {round_to}" * (round_to > 1)))
            macs = found[-1].cost.macs if round_to == 1 else macs
        for round_to, join in ((1, "scatter"), (8, "scatter"), (8, "zeros"), (32, "zeros")):
            mask = sosp.select(saliency["independent"], macs=macs, round_to=round_to)
            name = f"independent, {join}, MACs of coupled {ratio:.0%}" + f", rounded to {round_to}" * (round_to > 1)
            found.append(variant(model, mask, x, name, join, round_to))
    return found


def variant(
    model: nn.Module, mask: sosp.Mask, x: torch.Tensor, name: str, join: str = "scatter", round_to: int = 1
) -> Variant:
    small = sosp.shrink(model, mask, x, join=join, round_to=round_to)
    scatters = sum(isinstance(m, Scatter) for m in small.modules())
    return Variant(name, small, sosp.count(small, x), scatters)


def columns(options: argparse.Namespace) -> list[str]:
    ways = ["eager", *(["CUDA graph"] if options.device == "cuda" else []), *(["compiled"] if options.compile else [])]
    return [f"batch {b}, {way}" for b in options.batch for way in ways]


def measure(
    variants: list[Variant], column: str, device: torch.device, options: argparse.Namespace
) -> dict[str, sosp.Latency]:
    """All variants in one run, taking turns."""
    batch, way = column.removeprefix("batch ").split(", ")
    x = torch.randn(int(batch), 3, options.size, options.size)
    models = {v.name: v.model.to(device) for v in variants}
    if way == "compiled":
        torch._dynamo.reset()
        models = {name: torch.compile(m.eval()) for name, m in models.items()}
    if way == "CUDA graph":
        models = {name: Graphed(m.eval(), x.to(device)) for name, m in models.items()}
    return sosp.latency(models, x, device=device, runs=options.runs, warmup=8)


def cell(times: dict[str, sosp.Latency], name: str) -> str:
    mine, whole = times[name], times["original"]
    return f"{1e3 * mine.median:.2f} ms ({mine.median / whole.median:.2f})"


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"


if __name__ == "__main__":
    main()
