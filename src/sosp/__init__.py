"""Second-order structured pruning: make trained networks smaller by what removing each structure does to the loss.

pruned = sosp.prune(model, data, macs=0.5)                 # all of it
curve = sosp.tradeoff(model, data)                         # at eight budgets, to choose one by looking

structures = sosp.find_structures(model, example)          # or step by step: what can be removed
saliency = sosp.score(model, data, method="sosp-h")        # what removing it does to the loss
mask = sosp.select(saliency, ratio=0.5)                    # what goes
small = sosp.shrink(model, mask, example)                  # the network without it
tuned = sosp.train(small, sosp.data.load("cifar10", "datasets/"), "cifar")    # and the accuracy back
sosp.save("small.safetensors", tuned.model, mask)
"""

from typing import TYPE_CHECKING

from sosp.core.lazy_imports import make_lazy_exports

if TYPE_CHECKING:  # for type checkers and editors; at run time a name is imported when it is first used
    from sosp import baselines as learned
    from sosp import data, errors, extend, nets
    from sosp.baselines.eigendamage import Eigendamaged, eigendamage
    from sosp.graph.flow import Flow, trace
    from sosp.graph.latency import Latency, latency
    from sosp.graph.mask import Mask, masked
    from sosp.graph.plan import Cost, count
    from sosp.graph.records import Layer, Saliency, Structures
    from sosp.graph.structures import downsampling, find_structures
    from sosp.pipeline.prune import prune
    from sosp.pipeline.pruned import Pruned, PruningWarning
    from sosp.pipeline.tradeoff import Tradeoff, TradeoffPoint, tradeoff
    from sosp.pipeline.train import train
    from sosp.refit import Repaired, repair
    from sosp.refit.repair_options import Repair
    from sosp.scoring.methods import METHODS
    from sosp.scoring.passes import SlowPathWarning
    from sosp.scoring.score import score
    from sosp.scoring.scoring_options import Scoring
    from sosp.selection.select import select
    from sosp.selection.selection_options import Selection
    from sosp.studies import paper as experiments
    from sosp.studies.bottlenecks.bottleneck_detection import bottlenecks
    from sosp.studies.bottlenecks.bottleneck_record import Bottlenecks
    from sosp.studies.compare.method_comparison import compare
    from sosp.studies.expand.expand_pruning import expand
    from sosp.surgery.checkpoint import inspect, load, save
    from sosp.surgery.shrink import shrink
    from sosp.surgery.widen import widen
    from sosp.training import SCHEDULES, Accuracy, Schedule, Speed, Trained, evaluate, recalibrate
else:
    _ROOMS = "core graph scoring selection surgery refit training nets data baselines studies extend errors"
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        names={
            "sosp.pipeline.prune": "prune",
            "sosp.pipeline.pruned": "Pruned PruningWarning",
            "sosp.pipeline.tradeoff": "tradeoff Tradeoff TradeoffPoint",
            "sosp.pipeline.train": "train",
            "sosp.graph.flow": "trace Flow",
            "sosp.graph.structures": "find_structures downsampling",
            "sosp.graph.records": "Structures Layer Saliency",
            "sosp.scoring.methods": "METHODS",
            "sosp.scoring.score": "score",
            "sosp.scoring.scoring_options": "Scoring",
            "sosp.scoring.passes": "SlowPathWarning",
            "sosp.selection.select": "select",
            "sosp.selection.selection_options": "Selection",
            "sosp.graph.mask": "Mask masked",
            "sosp.baselines.eigendamage": "eigendamage Eigendamaged",
            "sosp.surgery.shrink": "shrink",
            "sosp.surgery.widen": "widen",
            "sosp.graph.plan": "count Cost",
            "sosp.graph.latency": "latency Latency",
            "sosp.refit": "repair Repaired",
            "sosp.refit.repair_options": "Repair",
            "sosp.studies.compare.method_comparison": "compare",
            "sosp.studies.bottlenecks.bottleneck_detection": "bottlenecks",
            "sosp.studies.bottlenecks.bottleneck_record": "Bottlenecks",
            "sosp.studies.expand.expand_pruning": "expand",
            "sosp.training": "Trained Schedule SCHEDULES Speed evaluate Accuracy recalibrate",
            "sosp.surgery.checkpoint": "save load inspect",
        },
        modules={"learned": "sosp.baselines", "experiments": "sosp.studies.paper"}
        | {room: f"sosp.{room}" for room in _ROOMS.split()},
    )

__version__ = "0.1.0"

# In the order of the flow.
__all__ = [
    "prune", "Pruned", "PruningWarning", "tradeoff", "Tradeoff", "TradeoffPoint", "Scoring", "Selection", "Repair",
    "trace", "Flow", "find_structures", "downsampling", "Structures", "Layer",
    "score", "METHODS", "Saliency", "SlowPathWarning",
    "select", "Mask", "masked",
    "eigendamage", "Eigendamaged",
    "shrink", "widen", "count", "Cost", "latency", "Latency",
    "repair", "Repaired",
    "compare",
    "bottlenecks", "Bottlenecks", "expand",
    "train", "Trained", "Schedule", "SCHEDULES", "Speed", "evaluate", "Accuracy", "recalibrate",
    "save", "load", "inspect",
    "nets", "data", "learned", "experiments", "extend", "errors", "__version__",
]  # fmt: skip
