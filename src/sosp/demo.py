"""The demo: train a small residual network on embedded data, prune it by several methods, compare them."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import sosp

Pair = tuple[Tensor, Tensor]  # inputs (N, 1, 8, 8) and labels (N,)


@dataclass(frozen=True)
class Schedule:
    """SGD with momentum, the rate on one cosine from ``rate`` to zero."""

    epochs: int
    rate: float
    batch: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Settings:
    """Everything the demo chooses; the defaults take well under a minute on two CPU cores."""

    methods: tuple[str, ...] = ("sosp-h", "sosp-i", "first-order", "random")
    ratios: tuple[float, ...] = (0.3, 0.5)
    examples: int = 1000
    training: Schedule = Schedule(epochs=10, rate=0.05)
    tuning: Schedule = Schedule(epochs=2, rate=0.02)
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One pruned network; accuracies are shares of the test set."""

    method: str
    ratio: float
    removed: int
    parameters: int  # of the smaller network
    seconds: float  # to score; selection and surgery not counted
    shrunk: float
    tuned: float


# --- the network and its data ---------------------------------------------------------------------------


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm beside a skip (a 1x1 convolution where the shape changes)."""

    def __init__(self, width_in: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            conv = nn.Conv2d(width_in, width, 1, stride=stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(branch + self.skip(x))


class DigitNet(nn.Module):
    """A ResNet in small: a stem, three blocks of widths 16, 32, 32, average pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16), Block(16, 32, stride=2), Block(32, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(x.mean((2, 3)))


def digits(seed: int) -> tuple[Pair, Pair]:
    """scikit-learn's 1797 digits, standardised, as a fixed training and test set of 1347 and 450 images."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise sosp.errors.SospError(
            "the demo reads its images from scikit-learn, which is not installed: pip install 'sosp[demo]'"
        ) from missing
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1347], order[1347:]
    x = images.float().view(-1, 1, 8, 8)
    x = (x - x[train].mean()) / x[train].std()
    return (x[train], labels[train]), (x[test], labels[test])


def new_network(seed: int) -> DigitNet:
    """A freshly initialised network; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DigitNet()


@contextmanager
def one_thread() -> Iterator[None]:
    """Images this small gain little from a second thread and lose much where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- training -------------------------------------------------------------------------------------------


def train(model: nn.Module, data: Pair, schedule: Schedule) -> None:
    """Minimise the cross-entropy; ``model`` is changed and left in eval mode."""
    inputs, labels = data
    generator = torch.Generator().manual_seed(schedule.seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=schedule.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = schedule.epochs * -(-len(labels) // schedule.batch)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    model.train()
    for _ in range(schedule.epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(schedule.batch):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
            cosine.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Pair) -> float:
    inputs, labels = data
    model.eval()
    return (model(inputs).argmax(1) == labels).double().mean().item()


# --- the job --------------------------------------------------------------------------------------------


def before_and_after(model: nn.Module, splits: tuple[Pair, Pair], settings: Settings) -> tuple[float, float]:
    """Test accuracy of ``model`` as it is and after fine-tuning, which changes it."""
    train_set, test_set = splits
    before = accuracy(model, test_set)
    train(model, train_set, settings.tuning)
    return before, accuracy(model, test_set)


def size(model: nn.Module) -> int:
    """Its parameters."""
    return sum(p.numel() for p in model.parameters())


def compare(
    model: nn.Module, structures: sosp.Structures, method: str, splits: tuple[Pair, Pair], settings: Settings
) -> Iterator[Row]:
    """Score once, on the same examples for every method; prune and fine-tune a copy per ratio."""
    generator = torch.Generator().manual_seed(settings.seed)
    start = time.perf_counter()
    saliency = sosp.score(
        model,
        splits[0],
        method=method,
        structures=structures,
        examples=settings.examples,
        generator=generator,
    )
    seconds = time.perf_counter() - start
    for ratio in settings.ratios:
        mask = sosp.select(saliency, ratio=ratio)
        pruned = sosp.shrink(model, mask, splits[0][0][:8])
        removed = sum(len(channels) for channels in mask.removed.values())
        yield Row(method, ratio, removed, size(pruned), seconds, *before_and_after(pruned, splits, settings))


def table(rows: list[Row]) -> Table:
    """The rows by ratio, so that methods stand beside each other; the unpruned network comes first."""
    result = Table(title="Accuracy on the 450 test images (one image is 0.2 %)", title_justify="left")
    result.add_column("method")
    for heading in ("ratio", "removed", "parameters", "scoring (s)", "shrunk", "fine-tuned"):
        result.add_column(heading, justify="right")
    rows = sorted(rows, key=lambda row: row.ratio)
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        cells = (
            f"{row.ratio}",
            f"{row.removed}",
            f"{row.parameters:,}",
            f"{row.seconds:.2f}",
            f"{row.shrunk:.1%}",
            f"{row.tuned:.1%}",
        )
        result.add_row(row.method, *cells, end_section=row.ratio != following.ratio)
    return result


@one_thread()
def run(console: Console, settings: Settings | None = None) -> list[Row]:
    """Load, train, then score, select, shrink and fine-tune by each method; print each step and the table."""
    settings = settings or Settings()
    start = time.perf_counter()
    console.print("Loading scikit-learn's digits: 1347 images to train on, 450 to test on.")
    splits = train_set, test_set = digits(settings.seed)

    console.print(f"Training a residual network for {settings.training.epochs} epochs ...", end=" ")
    model = new_network(settings.seed)
    train(model, train_set, settings.training)
    console.print(f"test accuracy {accuracy(model, test_set):.1%}.")

    structures = sosp.find_structures(model, train_set[0][:1], exclude=sosp.downsampling(model))
    console.print(f"It has {len(structures)} filters that could go (its downsampling path stays whole).")
    unpruned = before_and_after(copy.deepcopy(model), splits, settings)
    rows = [Row("unpruned", 0.0, 0, size(model), 0.0, *unpruned)]
    shares = " and ".join(f"{ratio:.0%}" for ratio in settings.ratios)
    for method in settings.methods:
        console.print(f"{method}: scoring, removing {shares}, fine-tuning ...", end=" ")
        rows += compare(model, structures, method, splits, settings)
        console.print(f"scored in {rows[-1].seconds:.2f} s.")
    console.print(table(rows))
    console.print(
        "Shrunk: the removed filters are gone and nothing else has changed, so this column shows the "
        f"choice itself. Fine-tuned: {settings.tuning.epochs} more epochs; on data this easy they make up for any "
        f"choice, a random one included. Done in {time.perf_counter() - start:.0f} s."
    )
    return rows
