"""A criterion of your own, beside those of the library: the mean activation of a channel.

python examples/own_criterion.py         a few seconds on one CPU core; downloads nothing
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

import sosp
from sosp.extend import Method, Problem, sum_channels
from sosp.studies import ComparisonPlan


def activity(problem: Problem, options: object) -> Tensor:
    """``E |o_s|``: how much a channel says, behind its own normalisation, on average over examples and positions."""
    layers = problem.structures.layers
    total: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    hooks = [
        problem.model.get_submodule((layer.norms or (layer.name,))[-1]).register_forward_hook(
            lambda module, args, output, layer=layer: add(total, layer, output)
        )
        for layer in layers
    ]
    try:
        with torch.no_grad():
            for chunk in problem.chunks:
                chunk.run(problem.model)
    finally:
        for hook in hooks:
            hook.remove()
    return sum_channels(problem.structures, [total[layer.name] for layer in layers])


def add(total: dict[str, Tensor], layer: sosp.Layer, output: Tensor) -> None:
    channels = output.movedim(layer.axis, 0).flatten(1)
    total[layer.name] = total[layer.name] + channels.abs().mean(1) * len(output)


def main() -> None:
    about = "mean size of a channel's output"
    sosp.METHODS["activity"] = Method(activity, about, "this file", ("filters",), scope="layer")

    torch.manual_seed(0)
    data = sosp.data.digits()
    schedule = replace(sosp.SCHEDULES["digits"], epochs=3)
    model = sosp.train(sosp.nets.digits_resnet(), data, schedule).model
    print(f"trained: {sosp.evaluate(model, data.test).top1:.1%}")

    plan = ComparisonPlan(methods=("activity", "sosp-h", "magnitude-l2", "random"), ratios=(0.3,), examples=500)
    for cell in sosp.compare(model, data, plan):
        share = f"{cell.recalibrated:.1%}" if not cell.refusal else "refused"
        print(f"{cell.method:<14}{cell.ratio:.0%} removed: {share:>7}, {cell.params:>7,} parameters")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
