"""Methods that are no look at a network: what they say comes out of a training or a search, in ``sosp.learned``."""

from __future__ import annotations

from torch import Tensor

from sosp.criteria.options import Options
from sosp.passes import Problem


def learned(problem: Problem, options: Options) -> Tensor:
    """Nothing can be said of the network as it is; the need "training" refuses before this is called."""
    raise AssertionError("a method that is learned was asked to score")
