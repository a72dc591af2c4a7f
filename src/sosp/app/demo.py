"""Run the demo: train a small network on embedded data, prune it in one call, and compare with other rankings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sosp
from sosp.core.text_files import write_json
from sosp.errors import RunError

RECORD, NETWORK = "demo.json", "small.safetensors"
RUNS = 200  # of each network and batch size, to time it
BATCHES = (1, 32)


@dataclass(frozen=True)
class DemoSettings:
    """Everything the demo chooses; the defaults take well under a minute on two CPU cores."""

    methods: tuple[str | None, ...] = (None, "magnitude-l2", "random")  # None is the default of sosp.prune; it is saved
    macs: float = 0.3
    images: int | None = None  # to prune and repair with; None for all training images
    training: sosp.Schedule = sosp.SCHEDULES["digits"]
    tuning: sosp.Schedule = sosp.SCHEDULES["finetune-digits"]
    seed: int = 0


@dataclass(frozen=True)
class DemoRow:
    """One network: what was done to it, and what it costs."""

    network: str
    accuracies: dict[str, float]  # step -> share of the test images, in the order of the steps
    params: int
    macs: int
    milliseconds: dict[int, float]  # batch size -> one call, the 10th percentile: others may use the cores
    widths: dict[str, tuple[int, int]]  # layer -> channels before and after

    @property
    def accuracy(self) -> float:
        """Return the accuracy after the last step."""
        return list(self.accuracies.values())[-1]


@dataclass(frozen=True, eq=False)
class DemoNetwork:
    """A network that goes into the table."""

    name: str
    model: nn.Module
    accuracies: dict[str, float]
    mask: sosp.Mask | None = None
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Images this small gain little from a second thread and lose much where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def new_network(seed: int) -> nn.Module:
    """A freshly initialised network; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return sosp.nets.digits_resnet()


@use_one_thread()
def run_demo(folder: Path, say: Callable[[str], None], settings: DemoSettings | None = None) -> list[DemoRow]:
    """Train, prune and fine-tune; save the smaller network in the folder and return the rows of the table."""
    settings = settings or DemoSettings()
    claim_folder(folder)
    data = sosp.data.digits()
    say(f"Training a residual network on {len(data.train)} images of digits for {settings.training.epochs} epochs ...")
    trained = sosp.train(new_network(settings.seed), data, settings.training, seed=settings.seed).model
    kept = [DemoNetwork("trained", trained, {"trained": measure_accuracy(trained, data)})]
    for method in settings.methods:
        ranking = "with the defaults of sosp.prune" if method is None else f"ranked by {method}"
        say(
            f"Pruning to {settings.macs:.0%} of the MACs {ranking}, repairing without labels, fine-tuning for "
            f"{settings.tuning.epochs} epochs ..."
        )
        kept.append(prune_and_finetune(trained, data, method, settings))
    rows = measure_networks(kept, data)
    sosp.save(folder / NETWORK, kept[1].model, kept[1].mask)
    write_json(folder / RECORD, {"settings": asdict(settings), "rows": [asdict(row) for row in rows]})
    return rows


def claim_folder(folder: Path) -> None:
    """Make the folder; one that holds anything else than an earlier demo is left alone."""
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder}: contains files that are not from an earlier demo. Choose another folder with --out.")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, {})  # ours from now on, even if it is interrupted


def prune_and_finetune(
    model: nn.Module, data: sosp.data.Dataset, method: str | None, settings: DemoSettings
) -> DemoNetwork:
    """Return the fine-tuned network, and the accuracy after each step."""
    images = first_images(data, settings.images or len(data.train))
    together = None if method is None else sosp.Selection(scope="global")  # all layers ranked together, as by default
    pruned = sosp.prune(model, images, macs=settings.macs, method=method, selection=together)
    tuned = sosp.train(pruned.model, data, settings.tuning, seed=settings.seed).model
    steps = {"pruned": sosp.shrink(model, pruned.mask, images[:8]), "repaired": pruned.model, "fine-tuned": tuned}
    accuracies = {step: measure_accuracy(network, data) for step, network in steps.items()}
    removed = pruned.mask.removed
    widths = {x.name: (x.channels, x.channels - len(removed.get(x.name, ()))) for x in pruned.mask.layers}
    return DemoNetwork(f"pruned by {pruned.saliency.method}", tuned, accuracies, pruned.mask, widths)


def measure_networks(kept: list[DemoNetwork], data: sosp.data.Dataset) -> list[DemoRow]:
    """Return what each network costs; their times are taken in turns."""
    images = first_images(data, max(BATCHES))
    networks = {k.name: k.model for k in kept}
    times = {batch: sosp.latency(networks, images[:batch], runs=RUNS) for batch in BATCHES}
    return [
        DemoRow(
            k.name,
            k.accuracies,
            cost.params,
            cost.macs,
            {batch: 1e3 * found[k.name].low for batch, found in times.items()},
            k.widths,
        )
        for k in kept
        for cost in [sosp.count(k.model, images[:2])]
    ]


def measure_accuracy(model: nn.Module, data: sosp.data.Dataset) -> float:
    return sosp.evaluate(model, data.test).top1


def compare_rankings(rows: list[DemoRow]) -> str:
    """Return how much the rankings differ in accuracy, after each step of the pruned networks."""
    steps = {step: [row.accuracies[step] for row in rows[1:]] for step in rows[-1].accuracies}
    gaps = [f"{100 * (max(found) - min(found)):.1f} points once {step}" for step, found in steps.items()]
    return f"The networks differ by {', '.join(gaps[:-1])} and {gaps[-1]}: they differ only in the ranking of channels."


def first_images(data: sosp.data.Dataset, count: int) -> Tensor:
    source: Any = data.train
    images, _ = next(iter(source.ordered(batch=count, limit=count)))
    return images
