"""Time every way to score against a plain gradient pass over the same examples, in one run and one table.

    PYTHONPATH=src python benchmarks/scoring/score.py --device cuda --save

What is timed, what is not, and how to read the ratios: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lines import BIG, METHODS, SIZES, Sizes, make_setup
from measure import measure
from table import Section, facts_of, save, show

from networks import NETWORKS

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Plan:
    """What to measure on one network."""

    name: str
    sizes: Sizes
    methods: list[str]
    big: bool = False  # every output of the network, everything but the plain pass only once


def run_section(plan: Plan, args: argparse.Namespace) -> Section:
    """Everything about one network; its memory is free again afterwards."""
    setup = make_setup(plan.name, plan.sizes, args, all_classes=plan.big)
    entries = measure(setup, plan.methods, args.repeats, once=plan.big)
    S, D, N = len(setup.features), NETWORKS[plan.name].classes, plan.sizes.examples
    title = f"{plan.name}, N={N}" + (f", D={D}" if plan.big else "")
    batches = f"plain pass over {N} examples in batches of {plan.sizes.batch}"
    about = f"{title}: {S:,} structures, {D} outputs, {batches}"
    if plan.big:
        about += f"; everything at once, timed once without a warm-up, Q is {S:,} x {S:,}"
    return Section(title, about, plan.sizes, S, entries)


def plans_of(args: argparse.Namespace) -> Iterator[Plan]:
    methods = ["plain", *(m for m in args.methods if m != "plain")]  # the ratios need it
    for name in args.networks:
        yield Plan(name, SIZES[name, args.device].overridden(args.examples, args.batch), methods)
    if args.big:
        yield Plan("resnet50", BIG, ["plain", "sosp-i"], big=True)


def sections_of(args: argparse.Namespace) -> list[Section]:
    sections = []
    for plan in plans_of(args):
        sections.append(run_section(plan, args))
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return sections


def _names(known: dict[str, Any]) -> Callable[[str], list[str]]:
    """An argparse type: names from ``known``, separated by commas."""

    def parse(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            given = ", ".join(unknown) or "nothing"
            raise argparse.ArgumentTypeError(f"{given}; choose from {', '.join(known)}")
        return [name for name in known if name in found]

    return parse


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    usual = ["resnet56", "resnet50"]
    tf32 = "sets torch.backends.cudnn.allow_tf32 for everything in the run; default: torch's"
    big = "add SOSP-I on ResNet-50, 1000 examples, all 1000 outputs, timed once"
    p.add_argument("--device", choices=("cpu", "cuda"), default=here)
    p.add_argument("--networks", type=_names(NETWORKS), default=usual, help=", ".join(NETWORKS))
    p.add_argument("--methods", type=_names(METHODS), default=list(METHODS), help=", ".join(METHODS))
    p.add_argument("--examples", type=_count, help="default: by network and device")
    p.add_argument("--batch", type=_count, help="of the plain pass; default: by network and device")
    p.add_argument("--repeats", type=_count, default=5)
    p.add_argument("--tf32", action=argparse.BooleanOptionalAction, default=None, help=tf32)
    p.add_argument("--channels-last", action="store_true", help="model and data, for everything in the run")
    p.add_argument("--big", action="store_true", help=big)
    where = "write score-<device>.md and .json (default: benchmarks/results)"
    p.add_argument("--save", nargs="?", const=str(RESULTS), metavar="DIR", help=where)
    return p.parse_args(argv)


def main() -> None:
    args = arguments()
    if args.tf32 is not None:
        torch.backends.cudnn.allow_tf32 = args.tf32
    sections = sections_of(args)
    facts = facts_of(args)
    show(sections, facts)
    if args.save:
        save(sections, facts, args)


if __name__ == "__main__":
    main()
