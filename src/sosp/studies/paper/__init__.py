"""The paper's tables and figures as experiments: a function each, that returns what is measured and what was published.

>>> experiment = sosp.experiments.make("resnet56-cifar10")
>>> setting = sosp.experiments.Setting("results", "runs/reproduce", "cuda", data_dir="datasets")
>>> sosp.experiments.run(experiment, setting)                          # `sosp reproduce resnet56-cifar10`
>>> sosp.experiments.run(sosp.experiments.tiny(experiment), setting)   # on digits, in seconds
"""

from collections.abc import Callable

from sosp.errors import check_choice
from sosp.studies.cell_records import CellRecord
from sosp.studies.cells import Cell, PrunedCell, TimedCell, TrainedCell
from sosp.studies.experiment import Claim, Experiment, PublishedRow, limit_seeds, make_tiny, select_cells, set_epochs
from sosp.studies.paper.before_finetuning import before_tuning
from sosp.studies.paper.densenet40_cifar10 import densenet40
from sosp.studies.paper.global_pruning import global_high, global_medium
from sosp.studies.paper.imagenet_resnets import imagenet
from sosp.studies.paper.layer_correlations import correlations
from sosp.studies.paper.plainnet20_cifar10 import amc_plainnet20
from sosp.studies.paper.resnet56_cifar10 import resnet56
from sosp.studies.paper.scoring_time import runtime
from sosp.studies.paper.widened_bottlenecks import expand, expand_init, init_vs_trained, shuffle
from sosp.studies.runner import ExperimentState, read_experiment_state, run_experiment
from sosp.studies.workspace import ExperimentSettings

EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    "resnet56-cifar10": resnet56,
    "before-tuning": before_tuning,
    "runtime": runtime,
    "global-high": global_high,
    "global-medium": global_medium,
    "densenet40-cifar10": densenet40,
    "amc-plainnet20": amc_plainnet20,
    "correlations": correlations,
    "imagenet": imagenet,
    "expand": expand,
    "expand-init": expand_init,
    "init-vs-trained": init_vs_trained,
    "shuffle": shuffle,
}


def make_experiment(name: str) -> Experiment:
    """The experiment of that name, with the paper's settings."""
    check_choice("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]()


__all__ = [
    "EXPERIMENTS", "make_experiment", "Experiment", "PublishedRow", "Claim",
    "Cell", "TrainedCell", "PrunedCell", "TimedCell",
    "make_tiny", "set_epochs", "limit_seeds", "select_cells",
    "run_experiment", "read_experiment_state", "ExperimentState", "ExperimentSettings", "CellRecord",
]  # fmt: skip
