"""Train, prune, fine-tune: the stages of a run, one after the other, each resumed where it was left. Prints nothing."""

from sosp.pipeline.bottlenecks import look, prepare_look
from sosp.pipeline.comparing import TABLE, check_comparison
from sosp.pipeline.estimate import estimate
from sosp.pipeline.expanding import check_expansion
from sosp.pipeline.job import FLEXIBLE, Job, prepare
from sosp.pipeline.origin import describe, name_of
from sosp.pipeline.stages import carry_out

__all__ = [
    "FLEXIBLE",
    "TABLE",
    "Job",
    "carry_out",
    "check_comparison",
    "check_expansion",
    "describe",
    "estimate",
    "look",
    "name_of",
    "prepare",
    "prepare_look",
]
