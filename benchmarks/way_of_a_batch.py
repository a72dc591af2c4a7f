"""Count what one `sosp.prune` passes through: modules of sosp, functions, and forward passes of the user's model.

python benchmarks/way_of_a_batch.py            # without repair
python benchmarks/way_of_a_batch.py --list     # and the modules, in the order in which they are entered
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import sosp


def main() -> None:
    """Prune a small residual network and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="Print the modules as well.")
    asked = parser.parse_args()
    torch.manual_seed(0)
    model, data = sosp.nets.digits_resnet(), (torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))
    passes = count_forward_passes(type(model))
    _ = sosp.prune  # imported here, not in the count
    way = Way()
    sys.setprofile(way)
    sosp.prune(model, data, macs=0.5, repair=False)
    sys.setprofile(None)
    meta = passes.count("meta")
    print(f"modules          {len(way.modules):>7,}")
    print(f"functions        {len(way.functions):>7,}")
    print(f"module to module {len(way.edges):>7,}")
    print(f"calls            {way.calls:>7,}")
    print(f"forward passes   {len(passes):>7,}")
    print("  scoring              1")
    print(f"  meta device    {meta:>7,}")
    print(f"  others         {len(passes) - 1 - meta:>7,}")
    if asked.list:
        print("\n".join(way.modules))


class Way:
    """A profiler that notes which functions of sosp are entered, and from where."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.functions: set[tuple[str, str, int]] = set()
        self.edges: set[tuple[str, str]] = set()
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call of one of our functions."""
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("sosp") or module.startswith("sosp.nets"):
            return
        if frame.f_code.co_name == "<module>":
            return  # imported now, which is no call
        self.modules.setdefault(module)
        self.functions.add((module, frame.f_code.co_name, frame.f_code.co_firstlineno))
        self.calls += 1
        caller = frame.f_back.f_globals.get("__name__", "") if frame.f_back is not None else ""
        if caller.startswith("sosp") and caller != module:
            self.edges.add((caller, module))


def count_forward_passes(network: type[torch.nn.Module]) -> list[str]:
    """Return a list that grows by the type of the device with every forward pass of networks of this class."""
    passes: list[str] = []
    forward: Callable[..., Any] = network.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(next(self.parameters()).device.type)
        return forward(self, *args, **kwargs)

    network.forward = counted  # type: ignore[method-assign]
    return passes


if __name__ == "__main__":
    main()
