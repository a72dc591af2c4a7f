"""Where the time of a repair goes: seconds of each phase, after the default cut to half of the MACs.

python benchmarks/refit/repair_time.py [--net resnet56] [--data DIR] [--weights FILE] [--device cuda] [--inputs 1000]
python benchmarks/refit/repair_time.py --net torchvision:resnet18 --inputs 220

Without --data, inputs are random numbers (3 x 32 x 32, or --size); without --weights, weights are the initial ones. The
first repair also loads the device's libraries. Phases are timed in one more repair, in which the device is waited for
before and after each, so their sum is larger than the time of the repairs before.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import sosp

PHASES = {  # what is timed -> the phase; what one phase calls of another counts for the latter
    "refit.track_networks": "plan",
    "refit.plan_tasks": "plan",
    "refit.collect_outputs": "held-out outputs",
    "refit.reestimate_norms": "batch-norm statistics",
    "equations.ObservationCollector.values": "network",
    "equations.LayerUse.inputs": "rows",
    "refit.build_equations": "rows",
    "refit.build_two_layer_equations": "rows",
    "least_squares.products": "Gram matrices",
    "least_squares.StandardisedInputs.solve": "solves",
    "least_squares.RidgeSearch.errors": "held-out errors",
    "least_squares.RidgeSearch.towards": "moving targets",
    "two_layer_fit.TwoLayerSearch.best": "two layers",
    "refit.write_fit": "writing",
}


class PhaseClock:
    """Seconds of each phase, without those of the phases that it calls."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.calls = device, Counter[str](), Counter[str]()
        self.running: list[str] = []
        self.last = 0.0

    def read(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def switch(self) -> None:
        """Count the time since the last switch for the phase that runs."""
        now = self.read()
        self.seconds[self.running[-1] if self.running else "other"] += now - self.last
        self.last = now

    def wrap(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self.running.append(phase)
            self.calls[phase] += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.switch()
                self.running.pop()

        return timed


def main() -> None:
    asked = parse_arguments()
    device = torch.device(asked.device)
    model, x = make_network(asked), make_inputs(asked)
    model, x = model.to(device).eval(), x.to(device)
    pruned = sosp.prune(model, x, macs=asked.macs, repair=False)
    clock = PhaseClock(device)
    warnings.simplefilter("ignore")
    print(f"{asked.net}, {len(x)} inputs, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for k in range(asked.repeats):
        started, processor = clock.read(), time.process_time()
        repaired = sosp.repair(pruned.model, model, x)
        print(f"repair {k + 1}: {clock.read() - started:.2f} s, processor {time.process_time() - processor:.2f} s")
    print(repaired.summary)
    if asked.data:
        data = sosp.data.load("cifar10", asked.data)
        shares = [sosp.evaluate(net, data.test).top1 for net in (model, pruned.model, repaired.model)]
        print("accuracy: original {:.2%}, unrepaired {:.2%}, repaired {:.2%}".format(*shares))
    replace_calls(clock)
    clock.last = clock.read()
    started = clock.last
    sosp.repair(pruned.model, model, x)
    clock.switch()
    total = clock.last - started
    print("\n| phase | seconds | share | calls |\n|---|---:|---:|---:|")
    for phase, seconds in clock.seconds.most_common():
        print(f"| {phase} | {seconds:.2f} | {seconds / total:.0%} | {clock.calls[phase] or ''} |")
    print(f"| all | {total:.2f} | 100% | |")


def replace_calls(clock: PhaseClock) -> None:
    """Time the functions of ``PHASES``, wherever they were imported."""
    for path, phase in PHASES.items():
        module, *owner, name = path.split(".")
        place: Any = sys.modules[f"sosp.refit.{module}"]
        for part in owner:
            place = getattr(place, part)
        old = getattr(place, name)
        new = clock.wrap(phase, old)
        for other in [place, *(m for key, m in sys.modules.items() if key.startswith("sosp.refit."))]:
            if getattr(other, name, None) is old:
                setattr(other, name, new)


def make_network(asked: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = sosp.nets.make(asked.net)
    if asked.weights:
        model.load_state_dict(load_file(asked.weights))
    return model


def make_inputs(asked: argparse.Namespace) -> torch.Tensor:
    if not asked.data:
        size = asked.size or (224 if ":" in asked.net else 32)
        return torch.randn(asked.inputs, 3, size, size, generator=torch.Generator().manual_seed(0))
    images = sosp.data.load("cifar10", asked.data).train.subset(asked.inputs, seed=0)
    return torch.cat([x for x, _ in images.ordered(batch=500)])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet56", help="Name of a network, also of another package.")
    parser.add_argument("--data", help="Folder of CIFAR-10.")
    parser.add_argument("--weights", help="Weights of the network, a safetensors file.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    parser.add_argument("--inputs", type=int, default=1000, help="Number of inputs.")
    parser.add_argument("--size", type=int, help="Height and width of random inputs.")
    parser.add_argument("--macs", type=float, default=0.5, help="Share of the MACs to keep.")
    parser.add_argument("--repeats", type=int, default=2, help="Number of repairs before the phases are timed.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
