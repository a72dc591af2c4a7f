"""SOSP-I with and without the correlations between structures (App. A.2)."""

from __future__ import annotations

from sosp.studies.cells import PrunedCell, TrainedCell
from sosp.studies.experiment import Claim, Experiment

METHODS = ("sosp-i", "sosp-i-diagonal")
RATIOS = {"resnet56": (0.5, 0.7, 0.3), "vgg19": (0.7, 0.8, 0.5)}
CAPS = {"vgg19": 0.95}
SEEDS = (0, 1, 2)
TEXT = "correlations between structures increase the accuracy"


def correlations() -> Experiment:
    """Both variants on ResNet-56 and VGG; the paper shows curves and prints no numbers."""
    return Experiment(
        "correlations",
        "SOSP-I with and without off-diagonal terms",
        "App. A.2",
        tuple(
            PrunedCell(TrainedCell(network, "cifar10"), method, ("ratio", ratio), seed=seed, cap=CAPS.get(network))
            for network, ratios in RATIOS.items()
            for seed in SEEDS
            for ratio in ratios
            for method in METHODS
        ),
        claims=(
            Claim(f"{TEXT} after fine-tuning", 930, *METHODS),
            Claim(f"{TEXT} before fine-tuning", 930, *METHODS, by="zeroed"),
            Claim(f"{TEXT} before fine-tuning", 930, *METHODS, by="cut"),
        ),
    )
