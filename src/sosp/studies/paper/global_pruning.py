"""SOSP against other global methods on VGG, a wide ResNet-32 and DenseNet-40 (Tab. 1, App. A.3, App. A.13)."""

from __future__ import annotations

from dataclasses import replace

from sosp.studies.cells import PAPER, PrunedCell, TrainedCell
from sosp.studies.experiment import BASELINE, Claim, Experiment, PublishedRow
from sosp.training import SCHEDULES

SEEDS = (0, 1, 2)
NETWORKS = {"vgg19": PAPER, "resnet32x4": PAPER, "densenet40": SCHEDULES["densenet"]}
CAPS = {"vgg19": 0.95}  # of what one layer may lose (Sec. 3.1)
DATA = ("cifar10", "cifar100")
STRENGTH = {"vgg19": 1e-4, "densenet40": 1e-5}  # of the L1 term, as NN Slimming has it for these networks
# How EigenDamage's published accuracies came about (github.com/alecwangcq/EigenDamage-Pytorch): the directions are
# chosen with all training images, and the fine-tuning is this.
ALL = 50_000
EIGENDAMAGE = replace(PAPER, epochs=150, rate=1e-3, milestones=(0.5, 0.75))

# Line, accuracy, its deviation, percent of the weights removed, percent of the MACs; by dataset.
PublishedPruning = tuple[int, float, float | None, float | None, float | None]
Table = dict[tuple[str, str], tuple[PublishedPruning, PublishedPruning]]

HIGH: Table = {
    ("vgg19", "baseline"): ((243, 94.18, None, None, None), (244, 73.45, None, None, None)),
    ("vgg19", "slimming"): ((247, 85.01, None, 97.85, 97.89), (248, 58.69, None, 97.76, 94.09)),
    ("vgg19", "slimming-l1"): ((251, 91.99, None, 97.93, 86.00), (252, 57.07, None, 97.59, 93.86)),
    ("vgg19", "obd-diagonal"): ((255, 92.34, 0.18, 97.68, 77.39), (256, 58.07, 0.60, 97.97, 77.55)),
    ("vgg19", "eigendamage"): ((259, 92.29, 0.21, 97.15, 86.51), (260, 65.18, 0.10, 97.31, 88.63)),
    ("vgg19", "sosp-i"): ((262, 92.62, 0.14, 97.79, 83.52), (263, 64.20, 0.23, 97.83, 87.02)),
    ("vgg19", "sosp-h"): ((266, 92.71, 0.19, 97.81, 86.32), (267, 64.59, 0.35, 97.81, 86.32)),
    ("resnet32x4", "baseline"): ((272, 95.30, None, None, None), (273, 76.8, None, None, None)),
    ("resnet32x4", "obd-diagonal"): ((278, 91.75, 0.42, 97.30, 93.50), (279, 59.52, 0.24, 97.74, 94.88)),
    ("resnet32x4", "eigendamage"): ((283, 93.05, 0.23, 96.05, 94.74), (284, 65.72, 0.04, 95.21, 94.62)),
    ("resnet32x4", "sosp-i"): ((288, 92.43, 0.09, 95.47, 94.07), (289, 67.36, 0.46, 92.69, 95.63)),
    ("resnet32x4", "sosp-h"): ((293, 92.23, 0.12, 95.26, 94.45), (294, 68.42, 0.21, 94.08, 95.06)),
    ("densenet40", "baseline"): ((301, 94.58, None, None, None), (302, 74.11, None, None, None)),
    ("densenet40", "slimming-l1"): ((306, 94.22, None, 54.21, None), (307, 73.19, None, 54.21, None)),
    ("densenet40", "sosp-i"): ((311, 94.21, 0.04, 47.00, 36.35), (312, 73.05, 0.11, 45.22, 42.05)),
    ("densenet40", "sosp-h"): ((316, 94.23, 0.05, 49.39, 38.86), (317, 73.05, 0.24, 48.58, 42.05)),
}
MEDIUM: Table = {
    ("vgg19", "baseline"): ((968, 94.18, None, None, None), (969, 73.45, None, None, None)),
    ("vgg19", "slimming"): ((972, 92.84, None, 80.07, 42.65), (973, 71.89, None, 74.60, 38.33)),
    ("vgg19", "slimming-l1"): ((977, 93.79, None, 83.45, 49.23), (978, 72.78, None, 76.53, 39.92)),
    ("vgg19", "obd-diagonal"): ((982, 94.04, 0.12, 82.01, 38.18), (983, 72.23, 0.15, 77.03, 33.70)),
    ("vgg19", "eigendamage"): ((987, 93.98, 0.06, 78.18, 37.13), (988, 72.90, 0.06, 76.64, 37.40)),
    ("vgg19", "sosp-i"): ((991, 93.99, 0.17, 85.75, 45.96), (992, 73.17, 0.11, 82.68, 44.87)),
    ("vgg19", "sosp-h"): ((996, 93.73, 0.16, 87.29, 57.74), (997, 73.11, 0.19, 79.20, 51.61)),
    ("resnet32x4", "baseline"): ((1003, 95.30, None, None, None), (1004, 76.8, None, None, None)),
    ("resnet32x4", "obd-diagonal"): ((1009, 95.11, 0.10, 70.36, 66.18), (1010, 75.70, 0.31, 66.68, 67.53)),
    ("resnet32x4", "eigendamage"): ((1015, 95.17, 0.12, 71.99, 70.25), (1016, 75.51, 0.11, 69.80, 71.62)),
    ("resnet32x4", "sosp-i"): ((1021, 95.06, 0.07, 72.33, 67.36), (1022, 75.33, 0.11, 63.83, 74.28)),
    ("resnet32x4", "sosp-h"): ((1027, 95.22, 0.12, 72.85, 67.85), (1028, 75.52, 0.20, 69.31, 71.60)),
    ("densenet40", "baseline"): ((1036, 94.58, None, None, None), (1037, 74.11, None, None, None)),
    ("densenet40", "slimming-l1"): ((1042, 94.32, None, 35.52, None), (1043, 73.76, None, 35.45, None)),
    ("densenet40", "sosp-i"): ((1047, 94.42, 0.03, 32.21, 22.03), (1048, 73.46, 0.05, 31.38, 29.98)),
    ("densenet40", "sosp-h"): ((1053, 94.41, 0.12, 34.78, 26.14), (1054, 73.60, 0.17, 34.15, 28.23)),
}
# Final accuracies and deviations, line by line: moderate and high ratios on CIFAR-10, then on CIFAR-100.
Final = tuple[int, tuple[tuple[float, float], ...]]  # with the first of the four lines
FINAL: dict[tuple[str, str], Final] = {
    ("vgg19", "sosp-i"): (1259, ((93.88, 0.21), (92.53, 0.13), (72.93, 0.28), (63.87, 0.06))),
    ("vgg19", "sosp-h"): (1265, ((93.65, 0.16), (92.59, 0.19), (72.94, 0.28), (64.24, 0.55))),
    ("resnet32x4", "sosp-i"): (1280, ((94.96, 0.08), (92.19, 0.07), (75.10, 0.10), (65.97, 0.52))),
    ("resnet32x4", "sosp-h"): (1287, ((95.17, 0.12), (91.97, 0.04), (75.39, 0.27), (67.37, 0.26))),
    ("densenet40", "sosp-i"): (1310, ((94.29, 0.04), (94.07, 0.07), (72.47, 0.47), (72.10, 0.10))),
    ("densenet40", "sosp-h"): (1317, ((94.28, 0.11), (94.15, 0.08), (72.88, 0.43), (72.09, 0.44))),
}
NOTES = (
    "The paper gives the share of weights removed, not the ratio of structures: every method is asked for that share.",
    "EigenDamage's ratio of directions is searched for the same share; its layers become bottlenecks.",
    "All methods are fine-tuned alike, by the paper's schedule; the best accuracy while fine-tuning is compared.",
    "EigenDamage, whose accuracies the paper cites, is there a second time as its own code has it: chosen with all "
    "training images, fine-tuned gently.",
    "One layer of VGG may lose at most the capped share, whatever the method, as the paper says of its own runs and of "
    "those it cites.",
    "C-OBD is `obd-diagonal`, as its authors' code has it. `obd`, which also knows how the weights of a filter act "
    "together, is not in the paper.",
    "Beside our best accuracies stand the paper's best; its final ones are those of App. A.13. Where it removes most, "
    "it has the same sizes of SOSP-H's VGG on CIFAR-10 and CIFAR-100, to the last digit.",
)
SOSP = ("sosp-h", "sosp-i")
EIGENDAMAGES = ("eigendamage", f"eigendamage, rate {EIGENDAMAGE.rate:g}")
# Networks and datasets of which the paper speaks.
PAR = ("vgg19-cifar10", "vgg19-cifar100", "resnet32x4-cifar10")
AHEAD = ("resnet32x4-cifar100",)
DENSE = ("densenet40-cifar10", "densenet40-cifar100")


def _best(text: str, line: int, ours: str, other: str, relation: str, places: tuple[str, ...] = ()) -> Claim:
    """Every method at a budget of its own, by the best accuracy."""
    return Claim(text, line, ours, other, "best", relation, same_terms=False, places=places)


HIGH_CLAIMS = (
    *(
        _best("at high ratios SOSP outperforms NN Slimming and C-OBD", 358, ours, other, "better")
        for ours in SOSP
        for other in ("slimming", "slimming-l1", "obd-diagonal")
    ),
    *(
        claim
        for other in EIGENDAMAGES
        for claim in (
            _best("SOSP performs on par with EigenDamage", 359, "sosp-h", other, "equal", PAR),
            _best("SOSP outperforms EigenDamage", 359, "sosp-h", other, "better", AHEAD),
        )
    ),
    *(_best("SOSP and NN Slimming are similar", 360, ours, "slimming-l1", "equal", DENSE) for ours in SOSP),
)
MEDIUM_CLAIMS = tuple(
    _best("at moderate ratios the accuracy is approximately retained", 354, ours, BASELINE, "equal", PAR)
    for ours in SOSP
)


def global_high() -> Experiment:
    """Where hardly anything is left."""
    return _experiment("global-high", "Global methods, high ratios", "Tab. 1, App. A.13", HIGH, HIGH_CLAIMS)


def global_medium() -> Experiment:
    """Where networks keep about their accuracy."""
    return _experiment("global-medium", "Global methods, moderate ratios", "App. A.3, App. A.13", MEDIUM, MEDIUM_CLAIMS)


def _experiment(name: str, title: str, where: str, table: Table, claims: tuple[Claim, ...]) -> Experiment:
    published = tuple(row for k, data in enumerate(DATA) for row in _published(table, data, k))
    cells = [cell for data in DATA for seed in SEEDS for cell in _cells(published, data, seed)]
    return Experiment(name, title, where, tuple(cells), published, claims, compared_metric="best", notes=NOTES)


def _published(table: Table, data: str, k: int) -> tuple[PublishedRow, ...]:
    found = []
    for (network, method), rows in table.items():
        line, accuracy, std, weights, macs = rows[k]
        row = PublishedRow(line, network, data, method, accuracy, std, params_cut=weights, macs_cut=macs)
        found.append(_with_final(row, 2 * k + (table is HIGH)))
    return tuple(found)


def _with_final(row: PublishedRow, which: int) -> PublishedRow:
    """The same with the paper's final accuracy, the so-manyth of its method."""
    if (row.network, row.method) not in FINAL:
        return row
    first, values = FINAL[row.network, row.method]
    final, std = values[which]
    return replace(row, final=final, final_std=std, final_line=first + which)


def _cells(published: tuple[PublishedRow, ...], data: str, seed: int) -> list[PrunedCell]:
    """A cell for every row of the paper, with the share of weights that it has; two for EigenDamage and for C-OBD."""
    cells = [_cell(row, seed) for row in published if row.data == data and row.method != BASELINE]
    own = [replace(cell, tuning=EIGENDAMAGE, examples=ALL) for cell in cells if cell.method == "eigendamage"]
    within = [replace(cell, method="obd") for cell in cells if cell.method == "obd-diagonal"]
    return cells + own + within


def _cell(row: PublishedRow, seed: int) -> PrunedCell:
    schedule = NETWORKS[row.network]
    start = TrainedCell(row.network, row.data, schedule)
    if row.method == "slimming-l1":
        start = replace(start, slimming=STRENGTH[row.network])
    assert row.budget is not None
    method = row.method.removesuffix("-l1")
    return PrunedCell(start, method, row.budget, schedule, seed, cap=CAPS.get(row.network))
