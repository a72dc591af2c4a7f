"""Accuracy after a cut: nothing done, batch norm statistics anew, repaired; and fine-tuned from each of these starts.

python benchmarks/refit/repair.py --data DIR --weights FILE [--device cuda] [--out repair.jsonl] [--finetune]
python benchmarks/refit/repair.py --show --out benchmarks/results/repair-cuda.jsonl

DIR is the folder of CIFAR-10. No label is used before fine-tuning: the network is scored on its own answers. Every line
of the file is one measurement; those that are there are not made again. --show only writes the tables of the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import sosp
from sosp.core.run_environment import describe_hardware

CUTS = ("sosp-i", "sosp-h", "slimming", "random", "sosp-obs", "sosp-i:4", "sosp-obs:4", "sosp-obs:8")  # method:rounds
STARTS = ("masked", "recalibrated", "repaired")


@dataclass(frozen=True, eq=False)
class Work:
    """A network and its data on a device."""

    name: str
    model: nn.Module
    data: sosp.data.Dataset
    device: torch.device
    inputs: int  # to repair with
    examples: int  # to score with
    sweeps: int  # of the repair
    cuts: dict[tuple[str, float], Cut] = field(default_factory=dict)  # that are made, by method and ratio

    @property
    def loader(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Training images, with the network's own answers as labels."""
        images = self.data.train.subset(self.inputs, seed=0).to(self.device).ordered(batch=500)
        with torch.no_grad():
            return [(x, self.model(x).argmax(1)) for x, _ in images]


@dataclass(frozen=True, eq=False)
class Cut:
    """A mask and the three networks it leads to."""

    mask: sosp.Mask
    networks: dict[str, nn.Module]
    facts: dict[str, Any]


def main() -> None:
    options = _options()
    lines = Lines(options.out, torch.device(options.device))
    if not options.show:
        measured(prepared(options), options, lines)
    print("\n\n".join(tables(lines.known)))


def measured(work: Work, options: argparse.Namespace, lines: Lines) -> None:
    for ratio in options.ratios:
        for name in options.cuts:
            key = {"kind": "cut", "net": work.name, "cut": name, "ratio": ratio, "inputs": work.inputs}
            lines.measure({**key, "sweeps": work.sweeps}, lambda n=name, r=ratio: accuracies(work, cut(work, n, r)))
    if options.finetune:
        finetuned(work, options, lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet56")
    parser.add_argument("--show", action="store_true", help="only the tables of what was measured")
    parser.add_argument("--data", help="the folder of CIFAR-10")
    parser.add_argument("--weights", help="a .safetensors file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("repair.jsonl"))
    parser.add_argument("--cuts", nargs="+", default=list(CUTS), help="methods, with the number of rounds if several")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--inputs", type=int, default=5000, help="images to repair with")
    parser.add_argument("--examples", type=int, default=1000, help="images to score with")
    parser.add_argument("--sweeps", type=int, default=1)
    parser.add_argument("--test", type=int, help="test images; all of them unless told otherwise")
    parser.add_argument("--finetune", action="store_true")
    parser.add_argument("--finetune-cut", default="sosp-obs:4")
    parser.add_argument("--finetune-ratios", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.01, 0.05])
    parser.add_argument("--images", type=int, help="training images to fine-tune with; all unless told otherwise")
    options = parser.parse_args()
    if not options.show and not (options.data and options.weights):
        parser.error("give --data and --weights, or --show")
    return options


class Lines:
    """Measurements in a file, each made once."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.device = path, device
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        self.known = [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def has(self, key: dict[str, Any]) -> bool:
        return any(key.items() <= line.items() for line in self.known)

    def measure(self, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> None:
        if not self.has(key):
            started = time.perf_counter()
            self.keep({**key, **make(), "total_seconds": time.perf_counter() - started})

    def keep(self, line: dict[str, Any]) -> None:
        line = {**line, "torch": torch.__version__, "hardware": describe_hardware(self.device)}
        self.known.append(line)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items() if k not in ("layers", "curve")}
        print(short, flush=True)


def prepared(options: argparse.Namespace) -> Work:
    device = torch.device(options.device)
    model = sosp.nets.make(options.net)
    model.load_state_dict(load_file(options.weights))
    data = sosp.data.cifar10(options.data)
    if options.test:
        data = replace(data, test=data.test.subset(options.test, seed=0))
    if options.images:
        data = replace(data, train=data.train.subset(options.images, seed=1))
    data = replace(data, train=data.train.to(device), test=data.test.to(device))
    return Work(options.net, model.to(device).eval(), data, device, options.inputs, options.examples, options.sweeps)


# --- cutting --------------------------------------------------------------------------------------------


def cut(work: Work, name: str, ratio: float) -> Cut:
    """By a method, in so many rounds: ``sosp-obs:4``; made once."""
    if (name, ratio) not in work.cuts:
        work.cuts[name, ratio] = _cut(work, name, ratio)
    return work.cuts[name, ratio]


def _cut(work: Work, name: str, ratio: float) -> Cut:
    method, _, rounds = name.partition(":")
    loader = work.loader
    example = loader[0][0][:8]
    started = _clock(work)
    facts: dict[str, Any] = {}
    if int(rounds or 1) > 1:
        found = sosp.prune(
            work.model,
            loader,
            ratio=ratio,
            method=method,
            scoring=sosp.Scoring(examples=work.examples),
            repair=sosp.Repair(rounds=int(rounds)),
        )
        mask = found.mask
    else:
        mask = sosp.select(sosp.score(work.model, loader, method=method, examples=work.examples), ratio=ratio)
    facts["choosing_seconds"] = _clock(work) - started
    small = sosp.shrink(work.model, mask, example, verify=False)
    started = _clock(work)
    fixed = sosp.repair(small, work.model, loader, examples=work.inputs, sweeps=work.sweeps)
    facts["repair_seconds"] = _clock(work) - started
    facts |= {"agreement_before": fixed.agreement_before, "agreement_after": fixed.agreement_after}
    facts["layers"] = [(x.layer, x.before, x.after, x.ridge) for x in fixed.layers]
    again = sosp.recalibrate(small, work.data.train, examples=min(work.inputs, len(work.data.train)))
    return Cut(mask, {"masked": small, "recalibrated": again, "repaired": fixed.model}, facts)


def accuracies(work: Work, found: Cut) -> dict[str, Any]:
    """On the test data; and what is left."""
    cost = sosp.count(found.networks["masked"], next(iter(work.data.test.ordered(batch=2)))[0])
    tested = {name: sosp.evaluate(net, work.data.test).top1 for name, net in found.networks.items()}
    return {**tested, **found.facts, "removed": found.mask.ratio, "params": cost.params, "macs": cost.macs}


def _clock(work: Work) -> float:
    if work.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# --- fine-tuning ----------------------------------------------------------------------------------------


def finetuned(work: Work, options: argparse.Namespace, lines: Lines) -> None:
    """All ratios and starts side by side, for every number of epochs and every rate."""
    for epochs in options.epochs:
        for rate in options.rates:
            keys = {
                f"{start}-{ratio:g}": _tuning_key(work, options, ratio, start, epochs, rate)
                for ratio in options.finetune_ratios
                for start in options.starts
            }
            if all(map(lines.has, keys.values())):
                continue
            schedule = sosp.Schedule(epochs=epochs, rate=rate, shape="cosine")
            trained = sosp.train(_starts(work, options), work.data, schedule, device=work.device, seed=0)
            _keep(lines, keys, trained)


def _tuning_key(
    work: Work, options: argparse.Namespace, ratio: float, start: str, epochs: int, rate: float
) -> dict[str, Any]:
    facts = {"kind": "finetune", "net": work.name, "cut": options.finetune_cut, "ratio": ratio, "start": start}
    return {**facts, "epochs": epochs, "rate": rate}


def _starts(work: Work, options: argparse.Namespace) -> dict[str, nn.Module]:
    found = {ratio: cut(work, options.finetune_cut, ratio).networks for ratio in options.finetune_ratios}
    return {f"{start}-{ratio:g}": found[ratio][start] for ratio in found for start in options.starts}


def _keep(lines: Lines, keys: dict[str, dict[str, Any]], trained: Any) -> None:
    for name, key in keys.items():
        if not lines.has(key):
            curve = [e.test.top1 for e in trained[name].history if e.test is not None]
            lines.keep({**key, "last": curve[-1], "best": max(curve), "curve": curve})


# --- tables ---------------------------------------------------------------------------------------------


def tables(lines: Sequence[dict[str, Any]]) -> list[str]:
    """After a cut; fine-tuned for so many epochs; after the epochs of the longest fine-tuning. In percent."""
    cuts = sorted((x for x in lines if x["kind"] == "cut"), key=lambda x: (x["ratio"], -x["repaired"]))
    tuned = sorted((x for x in lines if x["kind"] == "finetune"), key=lambda x: (x["rate"], x["ratio"], x["epochs"]))
    head = ["ratio", "cut", "only masked", "BN re-estimated", "repaired", "choosing", "last repair"]
    times = ("choosing_seconds", "repair_seconds")
    rows = [
        [x["ratio"], _words(x["cut"]), *(_percent(x[n]) for n in STARTS), *(f"{x[n]:.1f} s" for n in times)]
        for x in cuts
    ]
    return [_table(head, rows)] + (_curves(cuts, tuned) if tuned else [])


def _curves(cuts: Sequence[dict[str, Any]], tuned: Sequence[dict[str, Any]]) -> list[str]:
    runs: dict[tuple[float, float, str], dict[int, dict[str, Any]]] = {}
    for x in tuned:
        runs.setdefault((x["rate"], x["ratio"], x["start"]), {})[x["epochs"]] = x
    lengths = sorted({x["epochs"] for x in tuned})
    longest, shown = lengths[-1], _looks(lengths[-1])
    starts = {(x["cut"], x["ratio"]): x for x in cuts}
    ends, ways = [], []
    for run in runs.values():
        one = next(iter(run.values()))
        key = [one[name] for name in ("rate", "ratio", "start")]
        before = starts.get((one["cut"], one["ratio"]))  # a cut may be fine-tuned that is not asked for by itself
        zero = "" if before is None else _percent(before[one["start"]])
        ends.append([*key, zero, *(_percent(run[n]["last"]) if n in run else "" for n in lengths)])
        if longest in run:
            ways.append([*key, *(_percent(run[longest]["curve"][n - 1]) for n in shown)])
    return [
        _table(["rate", "ratio", "start", "0 epochs", *map(str, lengths)], ends),
        _table(["rate", "ratio", "start", *(f"epoch {n}" for n in shown)], ways),
    ]


def _looks(epochs: int) -> list[int]:
    """The epochs of a training that are shown."""
    return sorted({1, 2, 5, *range(10, epochs + 1, 5), epochs} & set(range(1, epochs + 1)))


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---" if name in ("cut", "start") else "---:" for name in head], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _words(cut: str) -> str:
    method, _, rounds = cut.partition(":")
    return f"`{method}`, {rounds} rounds" if rounds else f"`{method}`"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


if __name__ == "__main__":
    main()
