"""Time every way to score against a plain gradient pass over the same examples, in one run and one table.

    PYTHONPATH=src python benchmarks/score.py --device cuda --save

What is timed, what is not, and how to read the ratios: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from nets import NETWORKS, images, network
from torch import Tensor, nn

import sosp

HERE = Path(__file__).parent
SAMPLED = 10  # labels per example for SOSP-I where the network has too many outputs for all of them
SEED = 0

# What is measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much data a network is timed on."""

    examples: int
    batch: int  # of the plain gradient pass
    each: int  # examples for methods that go one by one; their time is scaled up to `examples`

    def overridden(self, examples: int | None, batch: int | None) -> Sizes:
        """The command line's numbers where it gives any; nothing larger than the data."""
        N = examples or self.examples
        return Sizes(N, min(batch or self.batch, N), min(self.each, N))


SIZES: dict[tuple[str, str], Sizes] = {
    ("resnet56", "cuda"): Sizes(1000, 1000, 50),
    ("vgg16", "cuda"): Sizes(1000, 1000, 50),
    ("resnet50", "cuda"): Sizes(250, 125, 50),
    ("resnet56", "cpu"): Sizes(200, 100, 10),
    ("vgg16", "cpu"): Sizes(200, 100, 10),
    ("resnet50", "cpu"): Sizes(8, 8, 2),
}
BIG = Sizes(1000, 125, 50)


@dataclass(frozen=True)
class Setup:
    """A network with the data to score it on."""

    name: str
    model: nn.Module
    x: Tensor  # (N, 3, pixels, pixels)
    y: Tensor  # (N,)
    sizes: Sizes
    features: sosp.Structures  # gated after the batch norm
    weights: sosp.Structures  # the same filters, gated before it
    classes: int | None  # sampled labels for SOSP-I; None takes every output

    def head(self, count: int) -> Setup:
        """The same on the first ``count`` examples only."""
        sizes = self.sizes.overridden(count, min(self.sizes.batch, count))
        return replace(self, x=self.x[:count], y=self.y[:count], sizes=sizes)


@dataclass(frozen=True)
class Row:
    """One line of the table: ``prepare`` is not timed; ``run`` counts ``scale`` times, ``finish`` once."""

    label: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    finish: Callable[[Any], Any] = lambda result: None
    scale: float = 1.0
    at_once: int = 0  # examples in one forward pass, for comparing memory at equal batch


class NotMeasuredError(Exception):
    """A line of the table that says why it has no numbers."""


def make_setup(name: str, sizes: Sizes, args: argparse.Namespace, *, all_classes: bool = False) -> Setup:
    """The network and its data on the device, in the asked memory format."""
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = network(name, SEED).to(args.device, memory_format=layout)
    x, y = images(name, sizes.examples, torch.Generator().manual_seed(SEED + 2))
    x, y = x.to(args.device).contiguous(memory_format=layout), y.to(args.device)
    find = partial(sosp.find_structures, model, x[:1], exclude=sosp.downsampling(model))
    features, weights = find(gate="features"), find(gate="weights")
    assert len(features) == NETWORKS[name].structures
    sampled = None if all_classes or NETWORKS[name].classes <= 100 else SAMPLED
    return Setup(name, model, x, y, sizes, features, weights, sampled)


# The lines of the table -------------------------------------------------------------------------------------


def gradient_pass(setup: Setup, *, train: bool) -> None:
    """The gradient of the mean cross-entropy in all parameters, batch by batch."""
    setup.model.train(train)
    for x, y in zip(setup.x.split(setup.sizes.batch), setup.y.split(setup.sizes.batch), strict=True):
        loss = F.cross_entropy(setup.model(x), y, reduction="sum") / len(setup.x)
        loss.backward()


def plain(setup: Setup, *, train: bool) -> Row:
    label = f"plain gradient, {'train' if train else 'eval'} mode"
    return Row(label, lambda _: gradient_pass(setup, train=train), at_once=setup.sizes.batch)


def scored(setup: Setup, method: str, *, gate: str = "features", label: str | None = None) -> Row:
    structures = setup.features if gate == "features" else setup.weights
    run = partial(_score, setup, method, structures)
    return Row(label or method, lambda _: run(), at_once=setup.sizes.batch)


def _score(setup: Setup, method: str, found: sosp.Structures, classes: int | None = None) -> sosp.Saliency:
    data, N = (setup.x, setup.y), len(setup.x)
    return sosp.score(setup.model, data, method=method, structures=found, examples=N, classes=classes)


def gauss_newton(setup: Setup, *, diagonal: bool) -> Row:
    _refuse_slow(setup)
    method = "sosp-i-diagonal" if diagonal else "sosp-i"
    label = method if diagonal else f"{method}, all of Q"
    run = partial(_score, setup, method, setup.features, setup.classes)
    return Row(label + _sampling(setup), lambda _: run(), at_once=setup.sizes.batch)


def selection(setup: Setup) -> Row:
    """Half of the structures by the pairs of SOSP-I; the scoring itself is not timed here."""
    _refuse_slow(setup)
    device = setup.x.device

    @cache
    def saliency() -> sosp.Saliency:  # waits in host memory, so that Q is not in the other lines' peaks
        return _score(setup, "sosp-i", setup.features, setup.classes).to("cpu")

    return Row(
        "greedy selection of half, after sosp-i",
        run=lambda s: sosp.select(s, ratio=0.5),
        prepare=lambda: saliency().to(device),
        at_once=setup.sizes.batch,
    )


def _refuse_slow(setup: Setup) -> None:
    if setup.name == "resnet50" and setup.x.device.type == "cpu":
        raise NotMeasuredError("skipped: too slow on a CPU")


def _sampling(setup: Setup) -> str:
    D = NETWORKS[setup.name].classes
    return "" if setup.classes is None else f" ({setup.classes} sampled classes of {D})"


def _torch_pruning() -> Any:
    try:
        import torch_pruning
    except ImportError as error:
        missing = error.name or "torch_pruning"
        why = "not installed" if missing == "torch_pruning" else f"needs {missing}, which is not installed"
        raise NotMeasuredError(why) from error
    return torch_pruning


def _groups(setup: Setup) -> list[Any]:
    """Torch-Pruning's counterpart of our structures, found beforehand like ours."""
    graph = _torch_pruning().DependencyGraph().build_dependency(setup.model, setup.x[:1])
    return list(graph.get_all_groups(ignored_layers=[setup.model.fc]))


def group_taylor(setup: Setup) -> Row:
    """One gradient pass in eval mode, then the score of every group."""
    importance = _torch_pruning().importance.GroupTaylorImportance()
    groups = _groups(setup)

    def run(_: None) -> list[Tensor]:
        gradient_pass(setup, train=False)
        return [importance(g) for g in groups]

    return Row("Torch-Pruning GroupTaylorImportance", run, at_once=setup.sizes.batch)


def group_hessian(setup: Setup) -> Row:
    """As its docstring shows it: one forward pass, then a backward pass per example through its graph."""
    importance = _torch_pruning().importance.GroupHessianImportance()
    groups, n, N = _groups(setup), setup.sizes.each, len(setup.x)

    def run(_: None) -> None:
        importance.zero_grad()
        losses = F.cross_entropy(setup.model(setup.x[:n]), setup.y[:n], reduction="none")
        for loss in losses:
            setup.model.zero_grad()
            loss.backward(retain_graph=True)
            importance.accumulate_grad(setup.model)

    label = "Torch-Pruning GroupHessianImportance"
    label += f" (x{N / n:g} from {n} examples)" if n < N else ""
    return Row(label, run, finish=lambda _: [importance(g) for g in groups], scale=N / n, at_once=n)


METHODS: dict[str, Callable[[Setup], Row]] = {
    "plain": partial(plain, train=True),
    "plain-eval": partial(plain, train=False),
    "first-order": partial(scored, method="first-order"),
    "sosp-h": partial(scored, method="sosp-h", label="sosp-h, gate features"),
    "sosp-h-weights": partial(scored, method="sosp-h", gate="weights", label="sosp-h, gate weights"),
    "sosp-i-diagonal": partial(gauss_newton, diagonal=True),
    "sosp-i": partial(gauss_newton, diagonal=False),
    "select": selection,
    "tp-taylor": group_taylor,
    "tp-hessian": group_hessian,
}

# Measuring --------------------------------------------------------------------------------------------------


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Give the model back in eval mode, without gradients, its running statistics as they were."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    try:
        yield
    finally:
        model.eval().zero_grad(set_to_none=True)
        for name, b in model.named_buffers():
            b.copy_(before[name])


def timed(row: Row, setup: Setup) -> tuple[float, int | None]:
    """Seconds and, on CUDA, the peak of allocated memory in bytes."""
    cuda = setup.x.is_cuda
    sync = torch.cuda.synchronize if cuda else lambda: None
    with undone(setup.model):
        state = row.prepare()
        gc.collect()
        sync()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = row.run(state)
        sync()
        middle = time.perf_counter()
        row.finish(result)
        sync()
        end = time.perf_counter()
    return row.scale * (middle - start) + (end - middle), torch.cuda.max_memory_allocated() if cuda else None


@dataclass
class Entry:
    """A line of the table while it is being measured; its first error ends it."""

    method: str
    label: str
    row: Row | None = None
    times: list[float] = field(default_factory=list)
    peak: int | None = None  # bytes, in the timed passes
    ratio: float | None = None  # time, to the plain pass in train mode
    peak_ratio: float | None = None  # memory, to a plain pass in train mode over as many examples at once
    error: str | None = None
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error is this line's alone; that a slower way was taken is noted."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except NotMeasuredError as error:
                self.error = str(error)
            except Exception as error:  # whatever it is, the other lines go on
                self.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        slow = [str(w.message) for w in caught if issubclass(w.category, sosp.SlowPathWarning)]
        self.notes = list(dict.fromkeys(self.notes + slow))
        if self.error and torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def build(self, setup: Setup) -> None:
        with self.guarded():
            self.row = METHODS[self.method](setup)
            self.label = self.row.label

    def run(self, setup: Setup, *, keep: bool) -> None:
        if self.error or self.row is None:
            return
        with self.guarded():
            seconds, peak = timed(self.row, setup)
            say(f"{setup.name:9} {self.label:60} {'' if keep else 'warm-up '}{seconds:.4g} s")
            if keep:
                self.times.append(seconds)
                self.peak = peak if self.peak is None else max(self.peak, peak or 0)


def measure(setup: Setup, methods: list[str], repeats: int, *, once: bool = False) -> list[Entry]:
    """Warm every line up, then time them in turn, so that a noisy moment hits all alike.

    ``once``: time every line but the plain pass a single time, without a warm-up or a run at equal batch.
    """
    entries = [Entry(m, m) for m in methods]
    for e in entries:
        e.build(setup)
        if not once or e.method == "plain":
            e.run(setup, keep=False)
    for i in range(repeats):
        for e in entries:
            if not once or e.method == "plain" or i == 0:
                e.run(setup, keep=True)
    _compare(entries)
    if setup.x.is_cuda and not once:
        _compare_memory(entries, setup)
    for e in entries:
        e.row = None  # it holds the model, the data and Q
    return entries


def _compare(entries: list[Entry]) -> None:
    base = next((e.times for e in entries if e.method == "plain" and not e.error), None)
    for e in entries:
        if base and e.times and not e.error:
            e.ratio = median(e.times) / median(base)


def _compare_memory(entries: list[Entry], setup: Setup) -> None:
    """Peak over as many examples as the line takes at once, to the plain pass over the same in one batch."""

    @cache
    def plain_peak(n: int) -> int:
        few = setup.head(n)
        return timed(plain(few, train=True), few)[1] or 0

    for e in entries:
        if e.row is None or e.error:
            continue
        few = setup.head(e.row.at_once)
        with e.guarded():
            e.peak_ratio = (timed(METHODS[e.method](few), few)[1] or 0) / plain_peak(e.row.at_once)


# Reporting --------------------------------------------------------------------------------------------------


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


def say(text: str) -> None:
    """Progress, on stderr: a run that is killed has at least said what it knew."""
    print(text, file=sys.stderr, flush=True)


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


# The command line -------------------------------------------------------------------------------------------


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
    p.add_argument("--save", nargs="?", const=str(HERE / "results"), metavar="DIR", help=where)
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
