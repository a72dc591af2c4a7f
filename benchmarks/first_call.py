"""Measure the first call, `sosp.prune(model, inputs, macs=...)` with no other option and no labels, on CIFAR-10.

python benchmarks/first_call.py --data DIR --weights FILE [--net resnet56] [--macs 0.5 0.3] [--device cuda]

DIR is the folder of CIFAR-10, FILE the weights of the network. Prints accuracy on all test images, the MACs left, the
seconds of the call, and the latency left (eager, batch 1 and 32, both networks in turn).
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from safetensors.torch import load_file

import sosp


def main() -> None:
    """Prune once for each budget and print a line."""
    asked = _parse_arguments()
    device = torch.device(asked.device)
    data = sosp.data.load("cifar10", asked.data)
    model = sosp.nets.NETS[asked.net]()
    model.load_state_dict(load_file(asked.weights))
    model.to(device).eval()
    images = data.train.subset(asked.inputs, seed=asked.seed).to(device)
    inputs = torch.cat([x for x, _ in images.ordered(batch=500)])
    print(f"{asked.net}: {measure_accuracy(model, data):.2f} %, {len(inputs)} inputs, {asked.device}", flush=True)
    for macs in asked.macs:
        started = time.perf_counter()
        pruned = sosp.prune(model, inputs, macs=macs)
        seconds = time.perf_counter() - started
        left = pruned.cost_after.macs / pruned.cost_before.macs
        times = [measure_latency_left(model, pruned.model, inputs[:batch]) for batch in (1, 32)]
        print(
            f"macs={macs}: {measure_accuracy(pruned.model, data):.2f} %, {left:.3f} of the MACs, {seconds:.0f} s, "
            f"latency {times[0]:.2f} (batch 1), {times[1]:.2f} (batch 32)",
            flush=True,
        )


def measure_accuracy(model: torch.nn.Module, data: sosp.data.Dataset) -> float:
    """Return the accuracy on all test images, in percent."""
    return 100 * sosp.evaluate(model, data.test).top1


def measure_latency_left(model: torch.nn.Module, small: torch.nn.Module, inputs: torch.Tensor) -> float:
    """Return the latency of the pruned network as a share of the original's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sosp.latency({"original": model, "pruned": small}, inputs)
    return found["pruned"].median / found["original"].median


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="Folder of CIFAR-10.")
    parser.add_argument("--weights", required=True, help="Weights of the network, a safetensors file.")
    parser.add_argument("--net", default="resnet56", help="Name in sosp.nets.NETS.")
    parser.add_argument("--macs", type=float, nargs="+", default=[0.5, 0.3], help="Shares of the MACs to keep.")
    parser.add_argument("--inputs", type=int, default=1000, help="Number of training images to give, without labels.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the choice of images.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
