"""How long the pruning step takes: SOSP-H and SOSP-I on the paper's networks and over width (Fig. 2, App. A.6)."""

from __future__ import annotations

from sosp.studies.cells import TimedCell
from sosp.studies.experiment import Claim, Experiment, PublishedRow

METHODS = ("sosp-h", "sosp-i")
NETWORKS = ("resnet56", "resnet32x4", "densenet40", "vgg19")
WIDTHS = (2.0, 4.0, 8.0)
MINUTE, HOUR = 60.0, 3600.0

# Network, dataset: line, seconds, their deviation (None: it took longer than that).
SECONDS: dict[str, dict[tuple[str, str], tuple[int, float, float | None]]] = {
    "sosp-h": {
        ("resnet56", "cifar10"): (1120, 50, 2),
        ("resnet32x4", "cifar10"): (1120, 123, 4),
        ("densenet40", "cifar10"): (1120, 67, 2),
        ("vgg19", "cifar10"): (1120, 110, 3),
        ("resnet50", "imagenet"): (1120, 40 * MINUTE, 2 * MINUTE),
    },
    "sosp-i": {
        ("resnet56", "cifar10"): (1122, 926, 26),
        ("resnet32x4", "cifar10"): (1122, 1355, 38),
        ("densenet40", "cifar10"): (1122, 635, 18),
        ("vgg19", "cifar10"): (1122, 1647, 44),
        ("resnet50", "imagenet"): (1122, 48 * HOUR, None),
    },
}


def runtime() -> Experiment:
    """Every network of the table, ResNet-50 with all of its outputs, and ResNet-56 up to eight times as wide."""
    table = [TimedCell(network, "cifar10", method) for network in NETWORKS for method in METHODS]
    wider = [TimedCell("resnet56", "cifar10", method, width) for width in WIDTHS for method in METHODS]
    large = [TimedCell("resnet50", "imagenet", "sosp-h"), TimedCell("resnet50", "imagenet", "sosp-i", repeats=1)]
    return Experiment(
        "runtime",
        "Seconds of the pruning step",
        "Fig. 2, App. A.6",
        (*table, *wider, *large),
        tuple(
            PublishedRow(line, network, data, method, seconds=seconds, seconds_std=std)
            for method, rows in SECONDS.items()
            for (network, data), (line, seconds, std) in rows.items()
        ),
        (Claim("SOSP-H is more efficient than SOSP-I", 448, "sosp-h", "sosp-i", by="seconds"),),
        notes=(
            "Scoring and selecting half of the structures; finding the structures and all training are left out.",
            "Means over five runs, of SOSP-I on ResNet-50 a single one, after a run that is not counted: on a GPU the "
            "first one of a process takes seconds longer.",
            "Times do not depend on the weights: networks are as they are initialised, with batch norms that know the "
            "data. Where the data is not there, inputs are random numbers of its shape, and the table says so.",
        ),
    )
