"""Shrink every network of ``networks.py`` and check that it computes what the masked network computes.

    PYTHONPATH=src python benchmarks/surgery/coverage.py                   # everything that is not in the results yet
    PYTHONPATH=src python benchmarks/surgery/coverage.py 'timm/*' --again  # these once more
    PYTHONPATH=src python benchmarks/surgery/coverage.py none --table      # only write the table

What is measured and how to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from page import page

from networks import names

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "coverage.jsonl"
TABLE = HERE.parents[1] / "docs" / "measurements" / "coverage.md"
BUILD = 600  # seconds a network may take to be built, which is not counted

Record = dict[str, Any]


def measure(name: str, tool: str, limit: float) -> Record:
    """One network and one tool in a process of their own; a step that takes too long is named."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [sys.executable, str(HERE / "one_network.py"), name, tool]
        child = subprocess.Popen(command, stdout=out, stderr=err, text=True)
        done = wait(child, out, limit)
        record = said(out)
        err.seek(0)
        last = (err.read().strip().splitlines() or [""])[-1]
    if not done:
        return record | {"error": f"out of time after {limit:g} s"}
    if child.returncode:
        return record | {"error": f"the process ended with {child.returncode}: {last[:300]}"}
    return record


def wait(child: subprocess.Popen[str], out: Any, limit: float) -> bool:
    """Wait until the child ends, or end it ``limit`` seconds after its network was built."""
    started, built = time.monotonic(), None
    while child.poll() is None:
        now = time.monotonic()
        built = built or (now if os.fstat(out.fileno()).st_size else None)
        if now - (built or started) > (limit if built else BUILD):
            child.kill()
            child.wait()
            return False
        time.sleep(0.05)
    return True


def said(out: Any) -> Record:
    """Everything the child said, line by line; libraries may have printed in between."""
    out.seek(0)
    record: Record = {}
    for line in out.read().splitlines():
        if line.startswith("{"):
            record |= json.loads(line)
    if record.get("at") == "end":
        del record["at"]
    return record


def load(path: Path) -> dict[str, Record]:
    """Network -> its record."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def save(path: Path, records: dict[str, Record]) -> None:
    """A line per network, in the order of ``networks.py``."""
    order = {name: k for k, name in enumerate(names())}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(records[n]) + "\n" for n in sorted(records, key=lambda n: order.get(n, len(order))))
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def cover(chosen: list[str], tools: list[str], args: argparse.Namespace) -> None:
    """Measure what is missing, and save after every network."""
    for k, name in enumerate(chosen):
        for tool in tools:
            records = load(args.results)
            record = records.setdefault(name, {"name": name})
            if tool in record and not args.again:
                continue
            record[tool] = measure(name, tool, args.limit)
            records[name] = record | {"versions": versions()}
            save(args.results, records)
            print(f"{k + 1}/{len(chosen)} {name} {tool}: {brief(record[tool])}", flush=True)


def brief(found: Record) -> str:
    """A line for the terminal."""
    keys = ("trace", "shrink", "seconds", "left", "whole", "eval", "train", "train_noise", "runs", "at", "error")
    return ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k in keys if (v := found.get(k)) is not None
    )


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchvision", "timm", "transformers", "torch-pruning"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    found["sosp"] = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "commit unknown"
    return found


def select(patterns: list[str]) -> list[str]:
    """The networks that match a name or a glob, with or without their library."""
    return [n for n in names() if any(fnmatchcase(n, p) or fnmatchcase(n.split("/")[1], p) for p in patterns)]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", default=["*"], help="names or globs: resnet18 'timm/*' 'vgg*_bn'; default: all")
    p.add_argument("--limit", type=float, default=120, help="seconds per network and tool, building it apart")
    p.add_argument("--again", action="store_true", help="also those that are in the results already")
    p.add_argument("--without-torch-pruning", action="store_true")
    p.add_argument("--results", type=Path, default=RESULTS, help="JSON lines; default: benchmarks/results")
    p.add_argument("--table", action="store_true", help=f"write the table to docs/measurements/{TABLE.name}")
    p.add_argument("--list", action="store_true", help="only name the networks")
    return p.parse_args(argv)


def main() -> None:
    args = arguments()
    chosen = select(args.names)
    if args.list:
        print("\n".join(chosen))
        return
    tools = ["sosp"] if args.without_torch_pruning else ["sosp", "torch-pruning"]
    cover(chosen, tools, args)
    if args.table:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(page(list(load(args.results).values())))


if __name__ == "__main__":
    main()
