"""Widen what is too narrow and prune again: expand- and widen-pruning, and pruning before or after training.

>>> found = sosp.expand(lambda width: sosp.nets.resnet56(width=width), data)
>>> found.choice.blocks, found.choice.constant.factor
"""

from sosp.studies.expand.courses import run_courses, scored
from sosp.studies.expand.growth import Growth, growth_of
from sosp.studies.expand.matching_width import Constant, matching
from sosp.studies.expand.plan import Course, Plan, Setup
from sosp.studies.expand.points import Point, Points
from sosp.studies.expand.search import Choice, Expanded, choice_of, chosen, expand, init_or_trained
from sosp.training.initial_statistics import settled

__all__ = [
    "expand", "init_or_trained", "run_courses", "Plan", "Setup", "Course", "Expanded", "Choice", "Point", "Points",
    "chosen", "choice_of", "scored", "settled", "growth_of", "Growth", "matching", "Constant",
]  # fmt: skip
