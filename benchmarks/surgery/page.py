"""From the coverage results to a page: a summary and a row per network."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

Record = dict[str, Any]
TOLERANCE = {"float64": {"eval": 1e-10, "train": 1e-8}, "float32": {"eval": 1e-4, "train": 1e-4}}
REAL = 0.9  # a network that keeps more than this share of its parameters was not really made smaller
COLUMNS = (
    "network", "input", "parameters", "trace", "shrink", "eval", "train", "parameters left", "MACs left",
    "layers left whole", "Torch-Pruning", "s", "parameters left",
)  # fmt: skip


def tolerance(found: Record, mode: str) -> float:
    """What counts as equal; a hundred times what rounding the input does, where that is more."""
    return max(TOLERANCE[found["dtype"]][mode], 100 * found.get(f"{mode}_noise", 0.0))


def equal(found: Record) -> bool:
    """The small network computes what the masked one computes, in both modes."""
    return all(mode in found and found[mode] <= tolerance(found, mode) for mode in ("eval", "train"))


def real(found: Record) -> bool:
    """It lost a tenth of its parameters or more."""
    return found.get("left", 1.0) <= REAL


def verdict(found: Record) -> str:
    """Why a network does not count as equal."""
    if "error" in found:
        step = f" ({found['at']})" if "at" in found else ""
        return found["error"].splitlines()[0][:80] + step
    return "" if equal(found) else "differs"


def row(record: Record) -> tuple[str, ...]:
    """One network's cells."""
    found, other = record.get("sosp", {}), record.get("torch-pruning", {})
    size = f"{found['parameters'] / 1e6:.2f} M" if "parameters" in found else ""
    size += " (float32)" if found.get("dtype") == "float32" else ""
    whole = f"{found['whole']} of {found['layers']}" if "whole" in found else ""
    failed = verdict(found)
    return (
        record["name"], found.get("input", ""), size, seconds(found.get("trace")), seconds(found.get("shrink")),
        f"**{failed}**" if failed and "eval" not in found else gap(found, "eval"), gap(found, "train"),
        share(found.get("left")), share(found.get("macs_left")), whole,
        theirs(other), seconds(other.get("seconds")), share(other.get("left")),
    )  # fmt: skip


def gap(found: Record, mode: str) -> str:
    """The relative difference, bold where it is too large."""
    if mode not in found:
        return ""
    text = f"{found[mode]:.0e}" if found[mode] else "0"
    return text if found[mode] <= tolerance(found, mode) else f"**{text}**"


def seconds(t: float | None) -> str:
    return "" if t is None else f"{t:.2f}" if t < 10 else f"{t:.0f}"


def share(x: float | None) -> str:
    return "" if x is None else f"{x:.1%}"


def theirs(found: Record) -> str:
    """What became of the same network with Torch-Pruning."""
    if not found:
        return ""
    if "seconds" not in found:
        return "out of time" if "out of time" in found.get("error", "") else "fails"
    return "runs" if found.get("runs") else "does not run"


def summary(records: list[Record]) -> list[str]:
    """The counts."""
    found = [r["sosp"] for r in records if "sosp" in r]
    good = [f for f in found if equal(f)]
    lines = [
        f"- {len(found)} networks; {len(good)} of them compute after `sosp.shrink` what `sosp.masked` computes, in "
        f"eval and in train mode; {sum(map(real, good))} of these lost a tenth of their parameters or more.",
        f"- `sosp.trace`: {spread(found, 'trace')}. `sosp.shrink`: {spread(found, 'shrink')}.",
    ]
    other = [r["torch-pruning"] for r in records if "torch-pruning" in r]
    if other:
        count = {k: sum(theirs(f) == k for f in other) for k in ("runs", "does not run", "fails", "out of time")}
        real_ones = sum(theirs(f) == "runs" and real(f) for f in other)
        lines.append(
            f"- Torch-Pruning, {len(other)} networks: {count['runs']} run afterwards ({real_ones} of these lost a "
            f"tenth of their parameters or more), {count['does not run']} do not, {count['fails']} fail while "
            f"being cut, {count['out of time']} ran out of time; {spread(other, 'seconds')}."
        )
    return lines


def spread(found: list[Record], key: str) -> str:
    times = [f[key] for f in found if key in f]
    return f"median {median(times):.2f} s, at most {max(times):.0f} s" if times else "not measured"


def by_library(records: list[Record]) -> list[str]:
    """The same counts per library."""
    tests: list[tuple[str, Callable[[list[Record]], str]]] = [
        ("networks", lambda rs: str(len(rs))),
        ("equal", lambda rs: str(sum(equal(r["sosp"]) for r in rs))),
        ("equal and smaller", lambda rs: str(sum(equal(r["sosp"]) and real(r["sosp"]) for r in rs))),
        ("Torch-Pruning runs", lambda rs: str(sum(theirs(r.get("torch-pruning", {})) == "runs" for r in rs))),
    ]
    lines = ["| | " + " | ".join(name for name, _ in tests) + " |", "|---|" + "---:|" * len(tests)]
    for library in dict.fromkeys(r["name"].split("/")[0] for r in records):
        part = [r for r in records if r["name"].startswith(library + "/") and "sosp" in r]
        lines.append(f"| {library} | " + " | ".join(count(part) for _, count in tests) + " |")
    return lines


def versions(records: list[Record]) -> str:
    """Every version that a row was measured with."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for package, version in record.get("versions", {}).items():
            found.setdefault(package, {})[version] = None
    return ", ".join(f"{package} {' and '.join(seen)}" for package, seen in found.items())


def page(records: list[Record]) -> str:
    """The whole page."""
    head = ["# Coverage", "", INTRODUCTION, "", f"Versions: {versions(records)}.", ""]
    table = ["| " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * 8 + "---|---:|---:|"]
    table += ["| " + " | ".join(row(r)) + " |" for r in records]
    return "\n".join([*head, *summary(records), "", *by_library(records), "", *table, ""])


INTRODUCTION = """\
Every classification model of torchvision and a selection of timm and transformers, with random weights: 30 % of all
filters and neurons, chosen independently in every layer, are removed; `sosp.shrink` builds the smaller network, and
its outputs are compared with those of `sosp.masked`. **eval** and **train** are the largest difference of any output
relative to the largest output, in float64 unless the row says float32. **trace** and **shrink** are seconds on one CPU
core. **Layers left whole** are those the mask takes channels from and that are still as large as before.

Torch-Pruning cuts 30 % of the channels by magnitude across all layers but the last; **runs** says that a forward pass
of the result does, not what it computes.

Made with `benchmarks/surgery/coverage.py --table`; how: `benchmarks/README.md`."""
