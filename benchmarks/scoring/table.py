"""From measurements to a table: on the terminal, as markdown, as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lines import SEED, Sizes
from measure import Entry, say

import sosp


@dataclass(frozen=True)
class Section:
    """One network's lines."""

    title: str
    about: str
    sizes: Sizes
    structures: int
    entries: list[Entry]


COLUMNS = ("network", "pass", "median", "min to max", "x plain", "peak", "x plain's peak")


def cells(section: Section) -> list[tuple[str, ...]]:
    """The section as text, a tuple per line of the table."""
    lines: list[tuple[str, ...]] = []
    for i, e in enumerate(section.entries):
        head = section.title if i == 0 else ""
        if e.error:
            lines.append((head, e.label, e.error, "", "", "", ""))
            continue
        spread = f"{seconds(min(e.times))} to {seconds(max(e.times))}" if len(e.times) > 1 else "once"
        peak = "" if e.peak is None else f"{e.peak / 2**20:,.0f} MiB"
        label = e.label + ("*" if e.notes else "")
        times = (seconds(median(e.times)), spread, _number(e.ratio))
        lines.append((head, label, *times, peak, _number(e.peak_ratio)))
    return lines


def seconds(t: float) -> str:
    """Three digits, in the unit they read best in."""
    return f"{t * 1e3:.3g} ms" if t < 0.9995 else f"{t:.3g} s" if t < 999.5 else f"{t:,.0f} s"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}"


def footnotes(sections: list[Section]) -> list[str]:
    notes = [s.about for s in sections]
    return notes + [f"* {s.title}, {e.label}: {n}" for s in sections for e in s.entries for n in e.notes]


def as_markdown(sections: list[Section], facts: dict[str, str]) -> str:
    table = [COLUMNS, ("---", "---", *["---:"] * 5), *(line for s in sections for line in cells(s))]
    parts = [f"- {k}: {v}" for k, v in facts.items()], ["| " + " | ".join(r) + " |" for r in table]
    return "\n\n".join("\n".join(p) for p in (*parts, [f"- {n}" for n in footnotes(sections)])) + "\n"


def show(sections: list[Section], facts: dict[str, str]) -> None:
    """The table on the terminal; as markdown where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(as_markdown(sections, facts))
        return
    table = Table(*COLUMNS[:2])
    for name in COLUMNS[2:]:
        table.add_column(name, justify="right")
    for section in sections:
        for line in cells(section):
            table.add_row(*line)
        table.add_section()
    console = Console(width=max(150, Console().width), highlight=False, markup=False)
    for text in (f"{k}: {v}" for k, v in facts.items()):
        console.print(text, soft_wrap=True)
    console.print(table)
    for text in footnotes(sections):
        console.print(text, soft_wrap=True)


def facts_of(args: argparse.Namespace) -> dict[str, str]:
    """Hardware, versions and settings: what a number needs to mean anything."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {"command": shlex.join(sys.orig_argv)}
    if args.device == "cuda":
        facts["GPU"] = torch.cuda.get_device_name()
    facts["CPU"] = f"{_cpu_model()}, {cores} cores, {torch.get_num_threads()} threads"
    ours = f"sosp {sosp.__version__} ({_commit()})"
    torches = f"torch {torch.__version__}, torch-pruning {_version('torch-pruning')}"
    facts["versions"] = f"{ours}, {torches}, Python {platform.python_version()}"
    precision = "TF32 convolutions allowed" if torch.backends.cudnn.allow_tf32 else "no TF32 in convolutions"
    layout = "channels_last" if args.channels_last else "contiguous (NCHW)"
    facts["settings"] = f"float32, {precision if args.device == 'cuda' else 'CPU'}, {layout}, seed {SEED}"
    return facts


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _commit() -> str:
    try:
        command = ["git", "-C", str(Path(sosp.__file__).parent), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "commit unknown"
    return done.stdout.strip()


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:  # its folder alone may be on the path
        module = sys.modules.get(package.replace("-", "_"))
        if module is None:
            return "not installed"
        return f"{getattr(module, '__version__', '?')} (from its folder)"


def save(sections: list[Section], facts: dict[str, str], args: argparse.Namespace) -> None:
    """The same as markdown and JSON; runs with other settings get other names."""
    folder = Path(args.save)
    folder.mkdir(parents=True, exist_ok=True)
    tf32 = "" if args.tf32 is None else "-tf32" if args.tf32 else "-no-tf32"
    stem = folder / f"score-{args.device}{tf32}{'-channels-last' if args.channels_last else ''}"
    stem.with_suffix(".md").write_text(as_markdown(sections, facts))
    config = {k: str(v) for k, v in vars(args).items()}
    record = {"facts": facts, "config": config, "sections": [_plain_record(s) for s in sections]}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    say(f"saved {stem}.md and {stem}.json")


def _plain_record(section: Section) -> dict[str, Any]:
    record = asdict(section)
    for e in record["entries"]:
        del e["row"]
        e["median"] = median(e["times"]) if e["times"] else None
    return record
