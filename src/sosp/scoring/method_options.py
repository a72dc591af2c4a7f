"""What a criterion may be told besides the problem."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """``classes``: labels sampled per example instead of all outputs (SOSP-I); ``generator``: the source of chance."""

    classes: int | None = None
    generator: torch.Generator | None = None
