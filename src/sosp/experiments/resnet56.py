"""ResNet-56 on CIFAR: SOSP against first order and chance, from light to heavy pruning (Fig. 2, App. A.1)."""

from __future__ import annotations

from sosp.experiments.cells import Pruned, Trained
from sosp.experiments.definition import Claim, Experiment, Published

METHODS = ("sosp-h", "sosp-i", "first-order", "random")
RATIOS = (0.5, 0.7, 0.3, 0.1, 0.8)  # those that decide most first; the last one on CIFAR-10 only
SEEDS = (0, 1, 2)

# Method, ratio: line, accuracy, its deviation, before fine-tuning, its deviation, 10³ parameters, 10⁶ MACs.
# The paper's head of the column says 10⁷, and its other tables 10⁶, which is what ResNet-56 has.
AVERAGED = {
    "cifar10": {
        ("first-order", 0.1): (883, 93.90, 0.13, 89.03, 0.09, 739, 108),
        ("sosp-h", 0.1): (887, 94.01, 0.05, 88.81, 0.62, 734, 109),
        ("first-order", 0.3): (891, 93.44, 0.19, 86.19, 0.48, 531, 76),
        ("sosp-h", 0.3): (895, 93.62, 0.13, 86.88, 0.31, 518, 79),
        ("first-order", 0.5): (899, 92.98, 0.09, 82.27, 1.46, 356, 50),
        ("sosp-h", 0.5): (903, 93.15, 0.15, 84.28, 0.65, 338, 55),
        ("first-order", 0.7): (907, 91.55, 0.29, 72.92, 3.25, 195, 28),
        ("sosp-h", 0.7): (911, 91.90, 0.13, 79.35, 0.28, 183, 31),
    },
    "cifar100": {
        ("first-order", 0.1): (884, 71.18, 0.1, 62.27, 0.40, 750, 105),
        ("sosp-h", 0.1): (888, 71.76, 0.39, 62.19, 0.24, 742, 107),
        ("first-order", 0.3): (892, 71.11, 0.07, 57.88, 0.70, 562, 71),
        ("sosp-h", 0.3): (896, 70.88, 0.66, 58.25, 0.46, 532, 77),
        ("first-order", 0.5): (900, 68.89, 0.09, 46.24, 1.54, 388, 45),
        ("sosp-h", 0.5): (904, 69.52, 0.03, 51.53, 0.75, 358, 51),
        ("first-order", 0.7): (908, 65.51, 0.18, 22.96, 6.16, 291, 23),
        ("sosp-h", 0.7): (912, 66.67, 0.28, 40.71, 0.91, 200, 29),
    },
}
# Line, method, ratio (None: another method's own), accuracy of the best trial, 10⁶ parameters, 10⁶ MACs.
BEST = (
    (1345, "baseline", None, 93.88, 0.85, 125),
    (1346, "GAL", None, 92.98, 0.75, 78),
    (1347, "sosp-i", 0.1, 94.22, 0.74, 110),
    (1348, "sosp-h", 0.1, 94.25, 0.73, 109),
    (1349, "HRank", None, 93.52, 0.71, 89),
    (1350, "sosp-i", 0.3, 93.85, 0.54, 84),
    (1351, "sosp-h", 0.3, 93.71, 0.52, 79),
    (1352, "FPGM", None, 93.01, 0.49, 81),
    (1354, "HRank", None, 93.17, 0.49, 63),
    (1357, "sosp-i", 0.5, 93.25, 0.36, 60),
    (1358, "sosp-h", 0.5, 93.27, 0.33, 54),
    (1359, "GAL", None, 90.36, 0.29, 50),
    (1360, "HRank", None, 90.72, 0.27, 32),
    (1361, "sosp-i", 0.7, 92.35, 0.19, 36),
    (1362, "sosp-h", 0.7, 91.97, 0.18, 31),
    (1363, "sosp-i", 0.8, 90.80, 0.11, 22),
    (1364, "sosp-h", 0.8, 90.78, 0.11, 21),
)
BEFORE = "second-order information increases the accuracy before fine-tuning"
CLAIMS = (
    Claim("second-order information increases the accuracy after fine-tuning", 850, "sosp-h", "first-order"),
    Claim(BEFORE, 850, "sosp-h", "first-order", by="zeroed"),
    Claim(f"{BEFORE}, measured on the network that is built", 850, "sosp-h", "first-order", by="cut"),
    Claim("both methods perform on par", 443, "sosp-h", "sosp-i", relation="equal"),
    Claim("SOSP is better than chance", 1188, "sosp-h", "random"),
)


def resnet56() -> Experiment:
    """Four methods at five ratios with the paper's gate, both of SOSP's with ours at a half; then CIFAR-100."""
    start, hard = Trained("resnet56", "cifar10"), Trained("resnet56", "cifar100")
    return Experiment(
        "resnet56-cifar10",
        "ResNet-56 on CIFAR: second order, first order, chance",
        "Fig. 2a and b, App. A.1, App. A.14",
        (*_cells(start, METHODS, RATIOS, ("sosp-h", "sosp-i")), *_cells(hard, ("sosp-h", "first-order"), RATIOS[:-1])),
        (*averaged("cifar10"), *averaged("cifar100"), *_best()),
        CLAIMS,
        notes=(
            "The seed draws the examples to score with and the order of the fine-tuning; all start from one network.",
            "Skips subsample and pad with zeros; the paper's network has a few more parameters.",
            "The paper's accuracies without a deviation are those of its best trial, ours of all trials.",
        ),
    )


def _cells(
    start: Trained, methods: tuple[str, ...], ratios: tuple[float, ...], featured: tuple[str, ...] = ()
) -> tuple[Pruned, ...]:
    """Seed by seed; with each the variants that are gated behind the batch norm."""
    found: list[Pruned] = []
    for seed in SEEDS:
        for ratio in ratios:
            found += [Pruned(start, method, ("ratio", ratio), seed=seed) for method in methods]
            if ratio == 0.3:  # after what fills the first group
                found += [Pruned(start, m, ("ratio", 0.5), seed=seed, gate="features") for m in featured]
    return tuple(found)


def averaged(data: str) -> tuple[Published, ...]:
    """Rows with the mean of several trials."""
    return tuple(
        Published(line, "resnet56", data, method, accuracy, std, before, spread, ratio, 1e3 * params, 1e6 * macs)
        for (method, ratio), (line, accuracy, std, before, spread, params, macs) in AVERAGED[data].items()
    )


def _best() -> tuple[Published, ...]:
    return tuple(
        Published(line, "resnet56", "cifar10", method, accuracy, ratio=ratio, params=1e6 * params, macs=1e6 * macs)
        for line, method, ratio, accuracy, params, macs in BEST
    )
