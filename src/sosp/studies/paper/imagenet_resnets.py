"""ResNet-18, ResNet-50 and MobileNetV2 on ImageNet (Tab. 2, App. A.5, App. A.7)."""

from __future__ import annotations

from sosp.studies.cells import PrunedCell, TrainedCell
from sosp.studies.experiment import Experiment, PublishedRow
from sosp.training import SCHEDULES

SCHEDULE = SCHEDULES["imagenet"]
SEEDS = (0, 1)  # two trials

# Line, method (* scaled by kernel size), accuracy, 10⁶ parameters, 10⁹ MACs. Ratios are printed for MobileNetV2 only.
PublishedResNet = tuple[int, str, float, float | None, float | None]
TABLES: dict[str, tuple[PublishedResNet, ...]] = {
    "resnet18": (
        (392, "baseline", 69.76, 11.7, 1.82),
        (394, "sosp-h", 69.63, 7.12, 1.37),
        (395, "FPGM", 68.41, 7.10, 1.06),
        (397, "sosp-h", 68.78, 6.42, 1.29),
    ),
    "resnet50": (
        (399, "baseline", 76.15, 25.5, 3.85),
        (406, "sosp-h", 76.56, 19.9, 3.06),
        (407, "sosp-h*", 76.60, 17.9, 2.79),
        (408, "Taylor", 75.48, 17.9, 2.66),
        (409, "HRank", 74.98, 16.2, 2.30),
        (410, "FPGM", 75.59, 15.9, 2.36),
        (412, "sosp-h", 75.85, 15.4, 2.44),
        (414, "Taylor", 74.50, 14.2, 2.25),
        (415, "HRank", 71.98, 13.8, 1.55),
        (417, "CCP", 75.21, None, None),
        (419, "sosp-h*", 75.21, 13.0, 2.13),
        (421, "sosp-h", 74.39, 11.8, 1.89),
        (422, "sosp-h*", 73.38, 9.9, 1.58),
    ),
    "mobilenet_v2": (
        (1098, "baseline", 71.88, 3.5, 0.30),
        (1099, "AMC", 70.80, None, 0.21),
        (1101, "sosp-h", 71.04, 2.5, 0.21),
    ),
}
RATIOS = {1101: 0.2}
# Line: 10⁹ MACs by the alternative count.
ALTERNATIVE = {
    392: 1.82,
    394: 1.31,
    397: 1.2,
    399: 3.85,
    406: 2.72,
    407: 2.47,
    412: 1.97,
    417: 1.77,
    419: 1.68,
    421: 1.38,
    422: 1.1,
}


def imagenet() -> Experiment:
    """SOSP-H, plain and scaled, at the sizes of the paper."""
    published = tuple(_published(network, row) for network, rows in TABLES.items() for row in rows)
    return Experiment(
        "imagenet",
        "ResNet-18, ResNet-50 and MobileNetV2 on ImageNet",
        "Tab. 2, App. A.5, App. A.7",
        tuple(_cell(row, seed) for seed in SEEDS for row in published if row.method.startswith("sosp")),
        published,
        group_size=1,
        notes=("The ratios of ResNets are not printed: cells are asked for the paper's number of parameters.",),
    )


def _published(network: str, row: PublishedResNet) -> PublishedRow:
    line, method, accuracy, params, macs = row
    return PublishedRow(
        line,
        network,
        "imagenet",
        method,
        accuracy,
        ratio=RATIOS.get(line),
        params=None if params is None else round(1e6 * params),
        macs=None if macs is None else 1e9 * macs,
        macs_alternative=1e9 * ALTERNATIVE[line] if line in ALTERNATIVE else None,
    )


def _cell(row: PublishedRow, seed: int) -> PrunedCell:
    assert row.budget is not None
    scale = "kernel" if row.method.endswith("*") else None
    start = TrainedCell(row.network, row.data, SCHEDULE)
    return PrunedCell(start, row.method.removesuffix("*"), row.budget, SCHEDULE, seed, scale=scale)
