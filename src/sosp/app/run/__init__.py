"""Train, prune, fine-tune: the stages of a run, one after the other, each resumed where it was left. Prints nothing."""

from sosp.app.run.bottleneck_search import find_run_bottlenecks, prepare_bottleneck_job
from sosp.app.run.comparison_stage import COMPARISON_FILE, check_comparison
from sosp.app.run.estimates import estimate_run
from sosp.app.run.expansion_stage import check_expansion
from sosp.app.run.job import FLEXIBLE, RunJob, prepare_job
from sosp.app.run.run_provenance import describe_run, name_run
from sosp.app.run.stages import run_stages

__all__ = [
    "FLEXIBLE",
    "COMPARISON_FILE",
    "RunJob",
    "run_stages",
    "check_comparison",
    "check_expansion",
    "describe_run",
    "estimate_run",
    "find_run_bottlenecks",
    "name_run",
    "prepare_job",
    "prepare_bottleneck_job",
]
