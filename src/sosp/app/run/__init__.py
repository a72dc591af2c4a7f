"""Train, prune, fine-tune: the stages of a run, one after the other, each resumed where it was left. Prints nothing."""

from sosp.app.run.bottlenecks import look, prepare_look
from sosp.app.run.compare import TABLE, check_comparison
from sosp.app.run.estimates import estimate
from sosp.app.run.expand import check_expansion
from sosp.app.run.job import FLEXIBLE, Job, prepare
from sosp.app.run.provenance import describe, name_of
from sosp.app.run.stages import carry_out

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
