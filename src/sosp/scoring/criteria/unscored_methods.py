"""Methods that are no look at the structures of a network: a training, a search, or another basis says what goes."""

from __future__ import annotations

from torch import Tensor

from sosp.scoring.method_options import Options
from sosp.scoring.passes import Problem


def refuse_scoring(problem: Problem, options: Options) -> Tensor:
    """Nothing can be said of the network as it is; the need "training" or "rotation" refuses before this is called."""
    raise AssertionError("a method that ranks no structures was asked to score")
