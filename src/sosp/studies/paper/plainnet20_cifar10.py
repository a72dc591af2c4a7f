"""PlainNet-20 on CIFAR-10: SOSP against shares of layers that a search has learned (App. A.4)."""

from __future__ import annotations

from sosp.studies.cells import PrunedCell, TrainedCell
from sosp.studies.experiment import Claim, Experiment, PublishedRow

SEEDS = (0, 1, 2)
NETWORK = ("plainnet20", "cifar10")
PAIR = ("sosp-h", "amc")
FEWER_PARAMETERS, AS_MANY_MACS = ("ratio", 0.3), ("ratio", 0.4)  # than AMC leaves, in the paper


def amc_plainnet20() -> Experiment:
    """SOSP-H at the paper's two ratios, and AMC's search for half of the MACs."""
    start = TrainedCell(*NETWORK)
    wanted = (("sosp-h", FEWER_PARAMETERS), ("sosp-h", AS_MANY_MACS), ("amc", ("macs", 0.5)))
    return Experiment(
        "amc-plainnet20",
        "PlainNet-20 on CIFAR-10: SOSP and AMC",
        "App. A.4",
        tuple(PrunedCell(start, method, budget, seed=seed) for seed in SEEDS for method, budget in wanted),
        (
            PublishedRow(1075, *NETWORK, "amc", 90.23, 0.10, params=132e3, macs=20.9e6),
            PublishedRow(1077, *NETWORK, "sosp-h", 90.93, 0.17, ratio=0.3, params=124e3, macs=26.7e6),
            PublishedRow(1079, *NETWORK, "sosp-h", 90.14, 0.15, ratio=0.4, params=90e3, macs=22.7e6),
        ),
        (
            Claim("SOSP is better than AMC over parameters", 363, *PAIR, same_terms=False, budget=FEWER_PARAMETERS),
            Claim("SOSP is on par with AMC over MACs", 363, *PAIR, "final", "equal", False, budget=AS_MANY_MACS),
        ),
        notes=(
            "The paper takes AMC's published shares and keeps the filters of largest Euclidean norm; here AMC's search "
            "is run, which keeps those of largest absolute sum.",
        ),
    )
