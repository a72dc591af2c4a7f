"""ResNet-56 before any fine-tuning: how far the choice alone goes, by gate and by number of examples (App. A.1)."""

from __future__ import annotations

from dataclasses import replace

from sosp.studies.cells import PAPER, PrunedCell, TrainedCell
from sosp.studies.experiment import Claim, Experiment
from sosp.studies.paper.resnet56_cifar10 import BEFORE, SECOND, SEEDS, make_averaged_rows

RATIOS = (0.1, 0.3, 0.5, 0.7)
METHODS = {"weights": ("sosp-h", "sosp-i", "first-order", "random"), "features": ("sosp-h", "sosp-i", "first-order")}
MORE = 5000  # examples, at a half
NEVER = replace(PAPER, epochs=0)
MEASURED = ("zeroed", "cut", "recalibrated")  # the paper's definition first


def before_tuning() -> Experiment:
    """The paper's ratios with its gate and ours; at a half also with more examples. Nothing is trained."""
    return Experiment(
        "before-tuning",
        "ResNet-56 before fine-tuning: gates and examples",
        "App. A.1",
        tuple(cell for seed in SEEDS for gate in METHODS for cell in _cells(gate, seed)),
        tuple(replace(row, accuracy=None, std=None) for row in make_averaged_rows("cifar10")),
        tuple(Claim(BEFORE, 850, method, "first-order", by=by) for by in MEASURED for method in SECOND),
        compared_metric="zeroed",
        notes=(
            "Looks for the reason where accuracies before fine-tuning differ from the paper's: the place of the gate, "
            "the number of examples, or what is done with batch norms.",
        ),
    )


def _cells(gate: str, seed: int) -> list[PrunedCell]:
    """Cells that one saliency serves come one after the other."""
    start = TrainedCell("resnet56", "cifar10")
    found = [
        PrunedCell(start, method, ("ratio", ratio), NEVER, seed, gate) for method in METHODS[gate] for ratio in RATIOS
    ]
    half = [cell for cell in found if cell.budget == ("ratio", 0.5) and cell.method != "random"]
    return [*found, *(replace(cell, examples=MORE) for cell in half)]
