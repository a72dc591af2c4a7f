"""Widen what is too narrow and prune again: expand- and widen-pruning, and pruning before or after training.

>>> found = sosp.expand(lambda width: sosp.nets.resnet56(width=width), data)
>>> found.choice.blocks, found.choice.constant.factor
"""

from sosp.expansion.constant import Constant, matching
from sosp.expansion.courses import run_courses, scored
from sosp.expansion.expand import Choice, Expanded, choice_of, chosen, expand, init_or_trained
from sosp.expansion.growth import Growth, growth_of
from sosp.expansion.plan import Course, Plan, Setup
from sosp.expansion.points import Point, Points
from sosp.training.initial_statistics import settled

__all__ = [
    "expand", "init_or_trained", "run_courses", "Plan", "Setup", "Course", "Expanded", "Choice", "Point", "Points",
    "chosen", "choice_of", "scored", "settled", "growth_of", "Growth", "matching", "Constant",
]  # fmt: skip
