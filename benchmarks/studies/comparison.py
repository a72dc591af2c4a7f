"""A page from a run of `sosp compare`: accuracy by method and ratio, without training, and what scoring takes.

sosp compare sosp:resnet56 --weights resnet56.safetensors --data cifar10 --data-dir datasets --seeds 3 --out RUN
python benchmarks/studies/comparison.py RUN [--out docs/measurements/comparison.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from sosp.app.run.run_folder import read_record
from sosp.studies.compare.comparison_cells import ComparisonCell, ComparisonStore
from sosp.studies.compare.summary import ComparisonSummary, summarise_cells

COMMAND = """<!-- not run: needs CIFAR-10 and weights -->
```sh
sosp compare sosp:{model} --weights {model}.safetensors --data {data} \\
  --data-dir datasets --seeds {seeds} --statistics {statistics}
```"""
READ = """Scoring data is training data, which the network knows: few examples have a gradient left, and methods that
look at gradients vary with the draw. Every method removes the same number of structures, not of parameters: see the
last table. `group-fisher` removes whole channels of a stream, all others choose in every layer. What the methods are:
[methods](../reference/methods.md)."""
ABOUT = {
    "recalibrated": "## With batch norm statistics taken anew",
    "repaired": "## Repaired",
    "tuned": "## Fine-tuned",
    "masked": "## Nothing but the cut",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = page(options.run)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, encoding="utf-8")


def page(run: Path) -> str:
    """The whole of it."""
    cells = tuple(ComparisonStore(run).known.values())
    if not cells:
        raise SystemExit(f"{run}: has no cells; is it a run of sosp compare?")
    found = summarise_cells(cells)
    parts = [_head(run, cells)]
    parts += [_section(title, what, found) for what, title in ABOUT.items() if any(what in s.means for s in found)]
    return "\n\n".join([*parts, _costs(found, cells)]) + "\n"


def _head(run: Path, cells: tuple[ComparisonCell, ...]) -> str:
    record = read_record(run)
    model, data = record.config.model.name.removeprefix("sosp:"), record.config.data.name
    seeds, how = len({c.seed for c in cells}), record.config.compare
    return (
        f"# {model} on {data}: every method, without training\n\n"
        f"Test accuracy in percent by share of the structures removed, mean ± standard deviation over {seeds} draws of "
        f"1,000 examples to score with, batch norm statistics from {how.statistics:,} training images. "
        f"Gates sit after the norm. Measured on {record.origin['hardware']} with torch {record.origin['torch']} by:\n\n"
        f"{COMMAND.format(model=model, data=data, seeds=seeds, statistics=how.statistics)}\n\n{READ}"
    )


def _section(title: str, what: str, found: list[ComparisonSummary]) -> str:
    ratios = list(dict.fromkeys(s.ratio for s in found))
    lines = [f"| | {' | '.join(f'{r:g}' for r in ratios)} |", "|---|" + "---:|" * len(ratios)]
    for method in dict.fromkeys(s.method for s in found):
        row = {s.ratio: s for s in found if s.method == method}
        lines.append(f"| `{method}` | {' | '.join(_share(row[r], what) for r in ratios)} |")
    return f"{title}\n\n" + "\n".join(lines)


def _share(s: ComparisonSummary, what: str) -> str:
    if what not in s.means:
        return "refused" if s.refusal else ""
    spread = f" ± {100 * s.stds[what]:.1f}" if s.seeds > 1 else ""
    return f"{100 * s.means[what]:.1f}{spread}"


def _costs(found: list[ComparisonSummary], cells: tuple[ComparisonCell, ...]) -> str:
    """At the middle ratio, and the seconds of a scoring pass."""
    ratios = sorted({s.ratio for s in found})
    ratio = ratios[len(ratios) // 2]
    lines = ["| | parameters, thousands | MACs, millions | seconds to score |", "|---|---:|---:|---:|"]
    for s in found:
        if s.ratio == ratio and "params" in s.means:
            seconds = median(c.seconds for c in cells if c.method == s.method)
            params, macs = s.means["params"] / 1e3, s.means["macs"] / 1e6
            lines.append(f"| `{s.method}` | {params:.0f} | {macs:.1f} | {seconds:.2f} |")
    return f"## What is left at {ratio:g}, and what scoring takes\n\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
