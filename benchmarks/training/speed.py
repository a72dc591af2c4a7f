"""Seconds per epoch of ResNet-56 at batch 128: a plain eager loop, sosp.train alone, and several networks side by side.

python benchmarks/training/speed.py [--device cuda] [--networks 1 4 8] [--ratio 0.5] [--out speed.md]
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

import sosp

SPEEDS = {
    "usual": sosp.Speed(),
    "channels first": sosp.Speed(channels_last=False),
    "float32": sosp.Speed("float32"),
    "float32, channels first": sosp.Speed("float32", channels_last=False),
    "without room": sosp.Speed(pad_widths=False),
    "compiled": sosp.Speed(compile=True),
}
EPOCHS = 3  # the first one also captures graphs and chooses kernels; the median of the others counts


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    data = images(options.images, device)
    rows = [("plain eager loop, float32", 1, plain(network(options, 0).to(device), data.train, device))]
    for count in options.networks:
        for how in options.speeds:
            name = f"sosp.train{'' if how == 'usual' else f' ({how})'}"
            side = f", {count} side by side" if count > 1 else ""
            rows.append((name + side, count, ours(options, data, count, device, SPEEDS[how])))
    text = table(options, device, rows)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--net", default="resnet56")
    parser.add_argument("--networks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--ratio", type=float, default=0.0, help="prune the networks first, at random")
    parser.add_argument("--speeds", nargs="+", choices=list(SPEEDS), default=["usual"])
    parser.add_argument("--images", type=int, default=50000)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def images(count: int, device: torch.device) -> sosp.data.Dataset:
    """Random images of CIFAR's size: time does not depend on what they show."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (count,), generator=g)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    source = sosp.data.Resident.of(x, y, mean=mean, std=std, pad=4, flip=True).to(device)
    return sosp.data.Dataset("random", source, source.subset(128, 0), tuple("0123456789"), (3, 32, 32))


def plain(model: nn.Module, source: sosp.data.Resident, device: torch.device) -> float:
    """What anybody writes first; the data is on the device here too."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    times = []
    for number in range(EPOCHS):
        begun = clock(device)
        for x, y in source.epoch(number, batch=128, seed=0):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
        times.append(clock(device) - begun)
    return median(times[1:])


def network(options: argparse.Namespace, seed: int) -> nn.Module:
    """As it is made, or without a share of its structures, others for every seed."""
    model, example = sosp.nets.make(options.net), torch.zeros(2, 3, 32, 32)
    if not options.ratio:
        return model
    generator = torch.Generator().manual_seed(seed)
    structures = sosp.find_structures(model, example)
    batch = (example, torch.zeros(2, dtype=torch.long))
    saliency = sosp.score(model, batch, method="random", structures=structures, generator=generator)
    return sosp.shrink(model, sosp.select(saliency, ratio=options.ratio), example)


def ours(
    options: argparse.Namespace, data: sosp.data.Dataset, count: int, device: torch.device, speed: sosp.Speed
) -> float:
    """Seconds for an epoch of all of them."""
    models = {str(k): network(options, k) for k in range(count)}
    schedule, seeds = sosp.Schedule(epochs=EPOCHS, rate=0.01), {n: int(n) for n in models}
    trained = sosp.train(models, (data.train, None), schedule, device=device, seed=seeds, speed=speed)
    return median(epoch.seconds for epoch in trained["0"].history[1:])


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def table(options: argparse.Namespace, device: torch.device, rows: list[tuple[str, int, float]]) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    net = f"{options.net} without {options.ratio:.0%} of its structures" if options.ratio else options.net
    lines = [f"{net}, {options.images} images of 32 px, batch 128, {where}, torch {torch.__version__}", ""]
    lines += ["| | seconds per epoch | per network | times the plain loop |", "|---|---:|---:|---:|"]
    for name, count, seconds in rows:
        speed = rows[0][2] * count / seconds
        lines.append(f"| {name} | {seconds:.2f} | {seconds / count:.2f} | {speed:.1f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
