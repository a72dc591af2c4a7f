"""The paper's tables and figures as experiments: a function each, that returns what is measured and what was published.

>>> experiment = sosp.experiments.make("resnet56-cifar10")
>>> setting = sosp.experiments.Setting("results", "runs/reproduce", "cuda", data_dir="datasets")
>>> sosp.experiments.run(experiment, setting)                          # `sosp reproduce resnet56-cifar10`
>>> sosp.experiments.run(sosp.experiments.tiny(experiment), setting)   # on digits, in seconds
"""

from collections.abc import Callable

from sosp.errors import one_of
from sosp.studies.cells import Cell, Pruned, Timed, Trained
from sosp.studies.experiment import Claim, Experiment, Published, in_epochs, only, tiny, with_seeds
from sosp.studies.paper.amc import amc_plainnet20
from sosp.studies.paper.before_finetuning import before_tuning
from sosp.studies.paper.densenet40_cifar10 import densenet40
from sosp.studies.paper.expansion import expand, expand_init, init_vs_trained, shuffle
from sosp.studies.paper.global_pruning import global_high, global_medium
from sosp.studies.paper.imagenet_resnets import imagenet
from sosp.studies.paper.layer_correlations import correlations
from sosp.studies.paper.resnet56_cifar10 import resnet56
from sosp.studies.paper.scoring_time import runtime
from sosp.studies.runner import State, run, state
from sosp.studies.setting import Setting
from sosp.studies.store import Record

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


def make(name: str) -> Experiment:
    """The experiment of that name, with the paper's settings."""
    one_of("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]()


__all__ = [
    "EXPERIMENTS", "make", "Experiment", "Published", "Claim", "Cell", "Trained", "Pruned", "Timed",
    "tiny", "in_epochs", "with_seeds", "only",
    "run", "state", "State", "Setting", "Record",
]  # fmt: skip
