"""Run the demo: train a small residual network on embedded data, prune half by SOSP-H and at random, fine-tune both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sosp
from sosp.core.text_files import write_json
from sosp.errors import RunError

RECORD, NETWORK = "demo.json", "small.safetensors"
RUNS = 50  # of each network, to time it


@dataclass(frozen=True)
class DemoSettings:
    """Everything the demo chooses; the defaults take well under a minute on two CPU cores."""

    methods: tuple[str, ...] = ("sosp-h", "random")  # the network of the first one is saved
    ratio: float = 0.5
    examples: int = 1000
    training: sosp.Schedule = sosp.SCHEDULES["digits"]
    tuning: sosp.Schedule = sosp.SCHEDULES["finetune-digits"]
    seed: int = 0


@dataclass(frozen=True)
class DemoRow:
    """One network and what it is worth."""

    network: str
    accuracy: float  # on the test images
    params: int
    macs: int
    latency: float  # seconds for the test images


@dataclass(frozen=True, eq=False)
class DemoNetwork:
    """A network that goes into the table."""

    name: str
    model: nn.Module
    mask: sosp.Mask | None = None


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
    """Train, prune, fine-tune; the smaller network is saved in the folder, the rows of the table come back."""
    settings = settings or DemoSettings()
    claim_folder(folder)
    data = sosp.data.digits()
    say(f"Training a residual network on {len(data.train)} images of digits for {settings.training.epochs} epochs ...")
    trained = sosp.train(new_network(settings.seed), data, settings.training, seed=settings.seed).model
    kept = [DemoNetwork("trained", trained)]
    for method in settings.methods:
        say(
            f"{method}: removing {settings.ratio:.0%} of the structures, fine-tuning for {settings.tuning.epochs} "
            "epochs ..."
        )
        kept += prune_and_finetune(trained, data, method, settings)
    rows = measure_networks(kept, data)
    sosp.save(folder / NETWORK, kept[2].model, kept[2].mask)
    write_json(folder / RECORD, {"settings": asdict(settings), "rows": [asdict(row) for row in rows]})
    return rows


def claim_folder(folder: Path) -> None:
    """Make the folder; one that holds anything else than an earlier demo is left alone."""
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder}: contains files that are not from an earlier demo. Choose another folder with --out.")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, {})  # ours from now on, even if it is interrupted


def prune_and_finetune(
    model: nn.Module, data: sosp.data.Dataset, method: str, settings: DemoSettings
) -> list[DemoNetwork]:
    """The network without what a method finds least needed, and the same after fine-tuning."""
    example = first_images(data, 8)
    structures = sosp.find_structures(model, example, groups="coupled", exclude=sosp.downsampling(model))
    saliency = sosp.score(
        model,
        data.train.subset(settings.examples, settings.seed).ordered(batch=250),
        method=method,
        structures=structures,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    mask = sosp.select(saliency, ratio=settings.ratio)
    small = sosp.recalibrate(sosp.shrink(model, mask, example), data.train, seed=settings.seed)
    tuned = sosp.train(small, data, settings.tuning, seed=settings.seed).model
    return [DemoNetwork(f"{method}: pruned", small, mask), DemoNetwork(f"{method}: fine-tuned", tuned, mask)]


def measure_networks(kept: list[DemoNetwork], data: sosp.data.Dataset) -> list[DemoRow]:
    """What each network costs and can do; their times are taken in turns."""
    images = first_images(data, len(data.test), test=True)
    times = sosp.latency({k.name: k.model for k in kept}, images, runs=RUNS)
    return [
        DemoRow(k.name, sosp.evaluate(k.model, data.test).top1, cost.params, cost.macs, times[k.name].median)
        for k in kept
        for cost in [sosp.count(k.model, images[:2])]
    ]


def first_images(data: sosp.data.Dataset, count: int, *, test: bool = False) -> Tensor:
    source: Any = data.test if test else data.train
    images, _ = next(iter(source.ordered(batch=count, limit=count)))
    return images
