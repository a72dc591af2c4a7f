"""Compare methods, find and widen bottlenecks, and reproduce the paper's experiments."""

from typing import TYPE_CHECKING

from sosp.core.lazy_imports import make_lazy_exports

if TYPE_CHECKING:
    from sosp.studies import paper
    from sosp.studies.compare.comparison_cells import ComparisonCell, ComparisonPlan
    from sosp.studies.compare.summary import ComparisonSummary, summarise_cells
    from sosp.studies.expand.expand_pruning import Expanded, WideningChoice, compare_init_pruning
    from sosp.studies.expand.expansion_plan import ExpansionPlan, ExpansionSetup, PruningProtocol
    from sosp.studies.expand.expansion_points import ExpansionPoint
    from sosp.studies.expand.pruning_protocols import run_protocols
    from sosp.training.initial_statistics import recalibrate_untrained
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "sosp.studies.compare.comparison_cells": "ComparisonPlan ComparisonCell",
            "sosp.studies.compare.summary": "ComparisonSummary summarise_cells",
            "sosp.studies.expand.expansion_plan": "ExpansionPlan ExpansionSetup PruningProtocol",
            "sosp.studies.expand.pruning_protocols": "run_protocols",
            "sosp.studies.expand.expansion_points": "ExpansionPoint",
            "sosp.studies.expand.expand_pruning": "Expanded WideningChoice compare_init_pruning",
            "sosp.training.initial_statistics": "recalibrate_untrained",
        },
        {"paper": "sosp.studies.paper"},
    )

# Comparisons, expansions, the paper's experiments.
__all__ = [
    "ComparisonPlan", "ComparisonCell", "ComparisonSummary", "summarise_cells",
    "ExpansionPlan", "ExpansionSetup", "PruningProtocol", "ExpansionPoint", "WideningChoice", "Expanded",
    "run_protocols", "compare_init_pruning", "recalibrate_untrained",
    "paper",
]  # fmt: skip
