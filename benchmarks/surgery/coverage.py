"""Prune every network of ``coverage_networks.py`` with ``sosp.prune`` and check what the smaller one computes.

    PYTHONPATH=src python benchmarks/surgery/coverage.py                    # everything that is not in the results yet
    PYTHONPATH=src python benchmarks/surgery/coverage.py 'timm/*' --again   # these again
    PYTHONPATH=src python benchmarks/surgery/coverage.py none --table       # only write the page

What is measured and how to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import coverage_networks as networks
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import sosp

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "coverage.jsonl"
PAGE = HERE.parents[1] / "docs" / "measurements" / "coverage.md"

BUDGET = 0.6  # of the MACs
ENOUGH = 2 / 3  # a network that keeps no more than this has really become smaller
EXAMPLES, BATCH, FRESH_BATCH = 8, 4, 3
FRESH_LENGTH = 17
REPAIRED_EVERY = 16  # one of so many networks is also repaired
MEMORY = 8 << 30  # bytes of a process
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "coupled": {"groups": "coupled"},
    "independent": {"groups": "independent"},
}
TOLERANCE = 1e-7  # of the largest output, in double precision; a thousand times what rounding does where that is more

Record = dict[str, Any]
Report = Callable[[Record], None]


def prune(model: nn.Module, data: Any, *, groups: str | None = None, repair: bool = False) -> sosp.Pruned:
    """The call that is tried out."""
    options = {} if groups is None else {"selection": sosp.Selection(groups=groups)}
    return sosp.prune(model, data, macs=BUDGET, scoring=sosp.Scoring(examples=EXAMPLES), repair=repair, **options)


# One network, in a process of its own ---------------------------------------------------------------------------------


def check_network(name: str, ways: list[str], report: Report) -> None:
    """Report what each way of pruning makes of a network."""
    network = networks.build(name)
    report({"parameters": sum(p.numel() for p in network.model.parameters()), "at": "prune"})
    for way in ways:
        report({way: measure(lambda found, o=WAYS[way]: check_way(network, o, found))})  # type: ignore[misc]
    if networks.names().index(name) % REPAIRED_EVERY == 0:
        report({"repaired": measure(lambda found: check_repair(network, found))})


def measure(work: Callable[[Record], None]) -> Record:
    """What ``work`` found, its seconds, and the refusal or crash that ended it."""
    found: Record = {}
    clock = time.perf_counter()
    try:
        work(found)
    except sosp.errors.SospError as error:
        found |= {"refused": f"{type(error).__name__}: {error}"[:600]}
        if isinstance(error, sosp.errors.SurgeryError):  # a bug that was noticed in time
            found |= {"crash": found.pop("refused")}
    except Exception as error:
        found |= {"crash": f"{type(error).__name__}: {error}"[:300], "lines": format_last_lines(error)}
    return found | {"seconds": round(time.perf_counter() - clock, 2)}


def check_way(network: networks.Network, options: Record, found: Record) -> None:
    """Prune, and compare with the masked network on the example and on a fresh input, in eval and in train mode."""
    data = draw_data(network)
    pruned = prune(network.model, data, **options)
    before, after = pruned.cost_before, pruned.cost_after
    found |= {"left": after.macs / max(before.macs, 1), "params": after.params / before.params}
    found |= {"method": pruned.saliency.method, "structures": len(pruned.saliency.structures)}
    masked = sosp.masked(network.model, pruned.mask)
    fresh = network.draw(FRESH_BATCH, FRESH_LENGTH)
    if not runs(network.model, fresh):
        fresh = network.draw(FRESH_BATCH, networks.LENGTH)
    for where, inputs in (("example", first_batch(data)), ("fresh", fresh)):
        for mode in ("eval", "train"):
            found[f"{where} {mode}"], limit = compare(pruned.model, masked, inputs, mode)
            if not found[f"{where} {mode}"] <= limit:
                found["wrong"] = f"{found[f'{where} {mode}']:.1e} on the {where} in {mode} mode"


def check_repair(network: networks.Network, found: Record) -> None:
    """Repair on the same data: the error against the original falls, and the network runs on a fresh input."""
    pruned = prune(network.model, draw_data(network), repair=True)
    assert pruned.repaired is not None
    found |= {"left": pruned.cost_after.macs / max(pruned.cost_before.macs, 1), "summary": pruned.repaired.summary}
    outputs = run(pruned.model, network.draw(FRESH_BATCH, networks.LENGTH), "eval")
    if not all(bool(torch.isfinite(x).all()) for x in outputs):
        found["wrong"] = "a repaired network gives numbers that are not finite"


def draw_data(network: networks.Network) -> Any:
    """Inputs alone: a tensor, or batches."""
    torch.manual_seed(1)
    batches = [network.draw(BATCH, networks.LENGTH) for _ in range(EXAMPLES // BATCH)]
    return torch.cat(batches) if isinstance(batches[0], Tensor) else batches


def first_batch(data: Any) -> Any:
    return data[:BATCH] if isinstance(data, Tensor) else data[0]


def runs(model: nn.Module, inputs: Any) -> bool:
    try:
        run(model, inputs, "eval")
    except Exception:
        return False
    return True


@torch.no_grad()
def run(model: nn.Module, inputs: Any, mode: str) -> list[Tensor]:
    """All floating-point tensors that a copy of the model returns."""
    model, inputs = copy.deepcopy(model).train(mode == "train"), copy.deepcopy(inputs)
    torch.manual_seed(networks.SEED)
    outputs = (
        model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    )
    leaves = tree_leaves(outputs)
    leaves += [x for leaf in leaves if hasattr(leaf, "__dict__") for x in tree_leaves(vars(leaf))]
    return [x.double() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def compare(small: nn.Module, masked: nn.Module, inputs: Any, mode: str) -> tuple[float, float]:
    """The difference of the outputs relative to the largest one, and the difference that counts as equal."""
    small, masked = copy.deepcopy(small).double(), copy.deepcopy(masked).double()
    double = to_double(inputs)
    try:
        theirs = run(masked, double, mode)
    except RuntimeError:  # the code names a precision
        small, masked, double = small.float(), masked.float(), inputs
        theirs = run(masked, double, mode)
    noise = measure_difference(theirs, run(round_parameters(masked), double, mode))
    return measure_difference(theirs, run(small, double, mode)), max(TOLERANCE, 1000 * noise)


def to_double(inputs: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


@torch.no_grad()
def round_parameters(model: nn.Module) -> nn.Module:
    """A copy whose parameters differ in the last digits."""
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        if p.is_floating_point():
            p.mul_(1 + torch.finfo(p.dtype).eps * torch.randn_like(p))
    return twin


def measure_difference(wanted: list[Tensor], found: list[Tensor]) -> float:
    """max |found - wanted| / max |wanted|, the largest over all outputs; infinite for other shapes."""
    if [x.shape for x in wanted] != [x.shape for x in found]:
        return math.inf
    worst = 0.0
    for a, b in zip(wanted, found, strict=True):
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return math.inf
        if bool(finite.any()):
            gap, size = float((a - b)[finite].abs().max()), float(a[finite].abs().max())
            worst = max(worst, gap / size if size else gap)
    return worst


def format_last_lines(error: BaseException) -> str:
    """The end of the traceback: file names without their folders."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return "\n".join(f"{Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in frames)[-900:]


# Many of them ---------------------------------------------------------------------------------------------------------


def run_child(name: str, ways: list[str], connection: Any) -> None:
    """The main function of a process: what is found is sent as it is found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        check_network(name, ways, connection.send)
    except Exception as error:
        connection.send({"broken": f"{type(error).__name__}: {error}"[:300], "lines": format_last_lines(error)})
    connection.send({"at": "end", "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10})


def watch_child(name: str, ways: list[str], limit: float) -> Record:
    """Everything a process found, and how it ended if it did not end well."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=run_child, args=(name, ways, theirs), daemon=True)
    clock = time.perf_counter()
    child.start()
    theirs.close()
    record: Record = {"name": name, "at": "build"}
    try:
        while record["at"] != "end" and ours.poll(max(0.0, limit - (time.perf_counter() - clock))):
            record |= ours.recv()
        if record["at"] != "end":
            record["timeout"] = f"out of time after {limit:g} s"
    except EOFError:
        child.join()
        record["died"] = f"the process ended with {child.exitcode}"
    child.kill()
    child.join()
    return record | {"seconds": round(time.perf_counter() - clock, 1)}


def load(path: Path) -> dict[str, Record]:
    """Network -> its record; the last one counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {record["name"]: record for record in map(json.loads, lines)}
    return {name: found[name] for name in networks.names() if name in found}


def cover(chosen: list[str], args: argparse.Namespace) -> None:
    """Measure what is missing; a line is appended for every network."""
    known = load(args.results)
    missing = [n for n in chosen if args.again or n not in known]
    share = missing[args.part :: args.parts]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(share):
        record = watch_child(name, args.ways, args.limit)
        with args.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{k + 1}/{len(share)} {name} {record['seconds']:.0f} s: {format_record(record)}", flush=True)


def list_ways(record: Record) -> Iterator[tuple[str, Record]]:
    yield from ((way, record[way]) for way in (*WAYS, "repaired") if way in record)


def judge(record: Record) -> str:
    """One word for a network: the worst of its ways counts, a refusal only if nothing worked."""
    found = [r for _, r in list_ways(record)]
    for word, keys in (("wrong", ("wrong",)), ("crash", ("crash", "died", "timeout", "broken"))):
        if any(key in r for r in (record, *found) for key in keys):
            return word
    left = [r["left"] for r in found if "left" in r]
    return "refused" if not left else "smaller" if min(left) <= ENOUGH else "large"


def format_record(record: Record) -> str:
    """A line for the terminal."""
    parts = [record[k] for k in ("died", "timeout", "broken") if k in record]
    for way, r in list_ways(record):
        state = next((f"{k}: {r[k][:150]}" for k in ("wrong", "crash", "refused") if k in r), "")
        left = f"{r['left']:.2f}" if "left" in r else "-"
        parts.append(f"{way} {left} {r['seconds']:.0f}s {state}".strip())
    return f"{judge(record)} | " + " | ".join(parts)


# The page -------------------------------------------------------------------------------------------------------------


def group_reasons(records: list[Record]) -> list[tuple[str, list[str]]]:
    """Reason of a refusal, crash or difference -> the networks and ways."""
    found: dict[str, list[str]] = {}
    for record in records:
        for key in ("died", "timeout", "broken"):
            if key in record:
                found.setdefault(f"{key}: {record[key]}", []).append(record["name"])
        for way, r in list_ways(record):
            for key in ("wrong", "crash", "refused"):
                if key in r:
                    text = re.sub(r"'[^']*'|\d[\d.,e%+-]*", "…", r[key].splitlines()[0])
                    found.setdefault(f"{key}: {text[:160]}", []).append(f"{record['name']} ({way})")
    return sorted(found.items(), key=lambda item: -len(item[1]))


def write_page(records: list[Record]) -> str:
    words = ("smaller", "large", "refused", "crash", "wrong")
    lines = ["| group | networks | " + " | ".join(HEADS) + " |", "|---|" + "---:|" * (len(HEADS) + 1)]
    for group in [*networks.GROUPS, "all"]:
        mine = [r for r in records if group in ("all", r["name"].partition("/")[0])]
        count = Counter(map(judge, mine))
        lines.append(f"| {group} | {len(mine)} | " + " | ".join(str(count[w]) for w in words) + " |")
    rows = ["| network | " + " | ".join(f"{way}: MACs left" for way in WAYS) + " | seconds |", "|---|" + "---:|" * 4]
    for r in records:
        shares = [
            f"{r[w]['left']:.2f}"
            if "left" in r.get(w, {})
            else next((k for k in ("crash", "refused") if k in r.get(w, {})), "–")
            for w in WAYS
        ]
        rows.append(f"| {r['name']} | " + " | ".join(shares) + f" | {r['seconds']:.0f} |")
    reasons = [
        f"- {len(where)} × {text.replace('|', '/')} ({', '.join(where[:3])})" for text, where in group_reasons(records)
    ]
    missing = len(networks.names()) - len(records)
    said = f"{len(records)} networks are measured. {missing} more of the list were not run, or took too long."
    head = ["# Coverage", "", INTRODUCTION, "", f"Versions: {format_versions()}. {said}", ""]
    return "\n".join([*head, *lines, "", "## Reasons", "", *reasons, "", "## Networks", "", *rows, ""])


def format_versions() -> str:
    from importlib.metadata import version

    packages = ("torch", "torchvision", "timm", "transformers", "diffusers")
    return ", ".join([f"python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)])


HEADS = (f"keep at most {ENOUGH:.0%} of the MACs", "keep more", "refused", "crashed", "wrong")
INTRODUCTION = f"""\
Small configurations of networks of torchvision, timm, transformers and diffusers and of our own, with random weights,
are pruned with `sosp.prune(model, inputs, macs={BUDGET})`: by default, with coupled and with independent channels. The
outputs of the smaller network are compared with those of `sosp.masked`, in double precision, on the example and on a
fresh input of another batch size and length, in eval and in train mode. One network in {REPAIRED_EVERY} is also
repaired.

Made with `benchmarks/surgery/coverage.py --table`. How: `benchmarks/README.md`."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", default=["*"], help="names or globs: 'timm/*' transformers/bert; default: all")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="default: all")
    p.add_argument("--limit", type=float, default=180, help="seconds per network")
    p.add_argument("--again", action="store_true", help="also those that are in the results already")
    p.add_argument("--results", type=Path, default=RESULTS, help="JSON lines; default: benchmarks/results")
    p.add_argument("--part", type=int, default=0, help="with --parts: measure only this part, to run several at once")
    p.add_argument("--parts", type=int, default=1)
    p.add_argument("--table", action="store_true", help=f"write docs/measurements/{PAGE.name}")
    p.add_argument("--list", action="store_true", help="only name the networks")
    return p.parse_args(argv)


def main() -> None:
    args = parse_arguments()
    chosen = [n for n in networks.names() if any(fnmatchcase(n, p) for p in args.names)]
    if args.list:
        print("\n".join(chosen))
        return
    torch.set_num_threads(1)  # before a child is forked
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    networks.import_packages()
    cover(chosen, args)
    records = list(load(args.results).values())
    for text, where in group_reasons(records):
        print(f"{len(where)} × {text}\n      {', '.join(where[:4])}")
    print(Counter(map(judge, records)))
    if args.table:
        PAGE.write_text(write_page(records))


if __name__ == "__main__":
    sys.exit(main())
