"""Run the fuzz test over many seeds in several processes: ``make fuzz N=10000 JOBS=2``."""

import argparse
import multiprocessing
import sys
import time
import traceback
import warnings
from typing import NamedTuple

import test_random_networks
import torch

from networks import random_networks as generator


class Failure(NamedTuple):
    """A seed that failed, and how."""

    seed: int
    network: str
    error: str
    where: str


def attempt(seed: int) -> Failure | None:
    """None where everything holds."""
    network = "the network could not be made"
    try:
        network = generator.network(seed).description
        test_random_networks.check_shrink(seed)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{f.filename.split('/')[-1]}:{f.lineno}" for f in frames[:-5:-1])
        return Failure(seed, network, f"{type(error).__name__}: {error}", where)
    return None


def prepare() -> None:
    """Every process: one thread, warnings are errors as in the tests."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")


def run(seeds: range, jobs: int) -> int:
    """Report failures as they come; returns how many there were."""
    failures, started = 0, time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs, prepare) as pool:
        for done, failure in enumerate(pool.imap_unordered(attempt, seeds, chunksize=4), 1):
            if failure is not None:
                failures += 1
                report(failure)
            if sys.stderr.isatty() or done % 100 == 0 or done == len(seeds):
                rate = done / (time.monotonic() - started)
                line = f"{done} of {len(seeds)} seeds, {failures} failed, {rate:.1f} per second"
                print(
                    line, end="\r" if sys.stderr.isatty() and done < len(seeds) else "\n", file=sys.stderr, flush=True
                )
    return failures


def report(failure: Failure) -> None:
    print(f"\nseed {failure.seed}: {failure.error}\n  {failure.network}\n  {failure.where}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="shrink random networks and compare them with the masked ones")
    parser.add_argument("seeds", type=int, help="how many seeds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    return 1 if run(range(options.start, options.start + options.seeds), options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
