"""Options that a criterion takes in addition to the problem."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """Options of a criterion that the user gives to ``sosp.score``."""

    classes: int | None = None  # labels sampled per example instead of all outputs (SOSP-I)
    generator: torch.Generator | None = None  # source of randomness
