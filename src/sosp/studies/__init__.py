"""Many prunings: compare methods, find and widen bottlenecks, redo the paper's experiments."""

from typing import TYPE_CHECKING

from sosp.core.lazy import attach

if TYPE_CHECKING:
    from sosp.studies import paper
    from sosp.studies.compare.cells import Cell, ComparisonPlan
    from sosp.studies.compare.summary import Summary, summaries
    from sosp.studies.expand.courses import run_courses
    from sosp.studies.expand.plan import Course, ExpansionPlan, Setup
    from sosp.studies.expand.points import Point
    from sosp.studies.expand.search import Choice, Expanded, init_or_trained
    from sosp.training.initial_statistics import settled
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "sosp.studies.compare.cells": "ComparisonPlan Cell",
            "sosp.studies.compare.summary": "Summary summaries",
            "sosp.studies.expand.plan": "ExpansionPlan Setup Course",
            "sosp.studies.expand.courses": "run_courses",
            "sosp.studies.expand.points": "Point",
            "sosp.studies.expand.search": "Expanded Choice init_or_trained",
            "sosp.training.initial_statistics": "settled",
        },
        {"paper": "sosp.studies.paper"},
    )

# Comparisons, expansions, the paper's experiments.
__all__ = [
    "ComparisonPlan", "Cell", "Summary", "summaries",
    "ExpansionPlan", "Setup", "Course", "Point", "Choice", "Expanded", "run_courses", "init_or_trained", "settled",
    "paper",
]  # fmt: skip
