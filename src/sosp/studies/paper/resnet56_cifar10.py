"""ResNet-56 on CIFAR: SOSP against first order and random pruning, from light to heavy (Fig. 1, App. A.1)."""

from __future__ import annotations

from sosp.studies.cells import PrunedCell, TrainedCell
from sosp.studies.experiment import Claim, Experiment, PublishedRow

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
LATER = "App. A.14"
# Line, method, ratio, accuracy, its deviation, percent of the parameters removed, percent of the MACs.
MEANS = (
    (1393, "baseline", None, 93.39, None, 0, 0),
    (1395, "sosp-i", 0.1, 94.22, 0.10, 12.95, 12.78),
    (1396, "sosp-h", 0.1, 94.25, 0.14, 14.90, 13.11),
    (1397, "sosp-i", 0.3, 93.85, 0.09, 36.36, 33.31),
    (1398, "sosp-h", 0.3, 93.71, 0.11, 39.70, 36.86),
    (1399, "sosp-i", 0.5, 93.25, 0.16, 58.19, 52.53),
    (1400, "sosp-h", 0.5, 93.27, 0.06, 60.95, 56.74),
    (1402, "sosp-i", 0.7, 92.35, 0.25, 77.98, 71.04),
    (1403, "sosp-h", 0.7, 91.97, 0.11, 79.29, 75.07),
    (1405, "sosp-i", 0.8, 90.8, 0.18, 86.68, 81.79),
    (1406, "sosp-h", 0.8, 90.78, 0.14, 87.31, 83.42),
)
# Line, method, accuracy of the best trial, 10⁶ parameters, 10⁶ MACs. SOSP's rows of that table are those above.
OTHERS = (
    (1345, "baseline", 93.88, 0.85, 125),
    (1346, "GAL", 92.98, 0.75, 78),
    (1349, "HRank", 93.52, 0.71, 89),
    (1352, "FPGM", 93.01, 0.49, 81),
    (1354, "HRank", 93.17, 0.49, 63),
    (1359, "GAL", 90.36, 0.29, 50),
    (1360, "HRank", 90.72, 0.27, 32),
)
BEFORE = "second-order information increases the accuracy before fine-tuning"
AFTER = "second-order information increases the accuracy after fine-tuning"
SECOND = ("sosp-h", "sosp-i")  # second order, each against first order
CLAIMS = (
    *(Claim(AFTER, 850, method, "first-order") for method in SECOND),
    *(Claim(BEFORE, 850, method, "first-order", by=by) for by in ("zeroed", "cut") for method in SECOND),
    Claim("SOSP-H and SOSP-I perform on par", 443, "sosp-h", "sosp-i", relation="equal"),
    *(Claim("SOSP is better than random pruning", None, method, "random") for method in SECOND),
    Claim("first order is better than random pruning", None, "first-order", "random"),
)


def resnet56() -> Experiment:
    """Four methods at five ratios with the paper's gate, both of SOSP's with ours at a half; then CIFAR-100."""
    start, hard = TrainedCell("resnet56", "cifar10"), TrainedCell("resnet56", "cifar100")
    return Experiment(
        "resnet56-cifar10",
        "ResNet-56 on CIFAR: second order, first order, random",
        "Fig. 1a and b, App. A.1, App. A.14",
        (*_cells(start, METHODS, RATIOS, ("sosp-h", "sosp-i")), *_cells(hard, ("sosp-h", "first-order"), RATIOS[:-1])),
        (
            *make_averaged_rows("cifar10"),
            *make_averaged_rows("cifar100"),
            *make_mean_rows("resnet56", MEANS),
            *make_layerwise_rows("resnet56", OTHERS),
        ),
        CLAIMS,
        notes=(
            "The seed draws the examples to score with and the order of the fine-tuning; all start from one network.",
            "Skips subsample and pad with zeros; the paper's network has a few more parameters.",
            "The paper has two means of SOSP-H for most ratios, in App. A.1 and in App. A.14; the first stand beside "
            "ours. Of SOSP-I there are those of App. A.14, which it prints a second time as those of the best trial.",
            "It has two accuracies of the whole network as well; beside ours, and in what is lost, stands the one "
            "of the table of means. Its gaps are to the other one, in the table of best trials.",
            "Ratios of App. A.14 are not printed: its sizes are those of these ratios in App. A.1, and the last one is "
            "estimated. MACs of App. A.1 are taken in millions, as its other tables have them, against the head of "
            "their column.",
        ),
    )


def _cells(
    start: TrainedCell, methods: tuple[str, ...], ratios: tuple[float, ...], featured: tuple[str, ...] = ()
) -> tuple[PrunedCell, ...]:
    """Seed by seed; with each the variants that are gated behind the batch norm."""
    found: list[PrunedCell] = []
    for seed in SEEDS:
        for ratio in ratios:
            found += [PrunedCell(start, method, ("ratio", ratio), seed=seed) for method in methods]
            if ratio == 0.3:  # after what fills the first group
                found += [PrunedCell(start, m, ("ratio", 0.5), seed=seed, gate="features") for m in featured]
    return tuple(found)


def make_averaged_rows(data: str) -> tuple[PublishedRow, ...]:
    """Rows with the mean of several trials."""
    return tuple(
        PublishedRow(line, "resnet56", data, method, accuracy, std, before, spread, ratio, 1e3 * params, 1e6 * macs)
        for (method, ratio), (line, accuracy, std, before, spread, params, macs) in AVERAGED[data].items()
    )


Mean = tuple[int, str, float | None, float, float | None, float, float]
Other = tuple[int, str, float, float, float]


def make_mean_rows(network: str, rows: tuple[Mean, ...]) -> tuple[PublishedRow, ...]:
    """Rows of the table of means in App. A.14."""
    return tuple(
        PublishedRow(
            line,
            network,
            "cifar10",
            method,
            accuracy,
            std,
            ratio=ratio,
            params_cut=params,
            macs_cut=macs,
            table=LATER,
        )
        for line, method, ratio, accuracy, std, params, macs in rows
    )


def make_layerwise_rows(network: str, rows: tuple[Other, ...]) -> tuple[PublishedRow, ...]:
    """Methods that prune layer by layer, of App. A.14."""
    return tuple(
        PublishedRow(line, network, "cifar10", method, accuracy, params=1e6 * params, macs=1e6 * macs)
        for line, method, accuracy, params, macs in rows
    )
