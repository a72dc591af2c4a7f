"""Second-order structured pruning: make trained networks smaller by what removing each structure does to the loss.

pruned = sosp.prune(model, data, macs=0.5)                 # all of it

structures = sosp.find_structures(model, example)          # or step by step: what can be removed
saliency = sosp.score(model, data, method="sosp-h")        # what removing it does to the loss
mask = sosp.select(saliency, ratio=0.5)                    # what goes
small = sosp.shrink(model, mask, example)                  # the network without it
tuned = sosp.train(small, sosp.data.load("cifar10", "datasets/"), "cifar")    # and the accuracy back
sosp.save("small.safetensors", tuned.model, mask)
"""

from sosp import baselines as learned
from sosp import data, errors, nets
from sosp.baselines.eigendamage import Eigendamaged, eigendamage
from sosp.graph import Flow, trace
from sosp.graph.cost import Cost
from sosp.graph.latency import Latency, latency
from sosp.graph.mask import Mask, masked
from sosp.graph.plan import count
from sosp.graph.records import Layer, Saliency, Structures
from sosp.graph.structures import downsampling, find_structures
from sosp.pipeline import Pruned, prune, train
from sosp.refit import Repaired, repair
from sosp.scoring.passes import SlowPathWarning
from sosp.scoring.score import METHODS, score
from sosp.selection.select import select
from sosp.studies import paper as experiments
from sosp.studies.bottlenecks import Bottlenecks, bottlenecks
from sosp.studies.compare import compare
from sosp.studies.expand import expand
from sosp.surgery.checkpoint import load, save
from sosp.surgery.shrink import shrink
from sosp.surgery.widen import widen
from sosp.training import SCHEDULES, Accuracy, Schedule, Speed, Trained, evaluate, recalibrate

__version__ = "0.1.0"

# In the order of the flow.
__all__ = [
    "prune", "Pruned",
    "trace", "Flow", "find_structures", "downsampling", "Structures", "Layer",
    "score", "METHODS", "Saliency", "SlowPathWarning",
    "select", "Mask", "masked",
    "eigendamage", "Eigendamaged",
    "shrink", "widen", "count", "Cost", "latency", "Latency",
    "repair", "Repaired",
    "compare",
    "bottlenecks", "Bottlenecks", "expand",
    "train", "Trained", "Schedule", "SCHEDULES", "Speed", "evaluate", "Accuracy", "recalibrate",
    "save", "load",
    "nets", "data", "learned", "experiments", "errors", "__version__",
]  # fmt: skip
