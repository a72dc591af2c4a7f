"""Bottlenecks widened, pruning before and after training, and shuffled masks (Fig. 3, App. A.9 to A.12)."""

from __future__ import annotations

from dataclasses import replace

from sosp.studies.cells import PAPER, PrunedCell, TrainedCell, WideningSpec
from sosp.studies.experiment import Claim, Experiment, PublishedRow
from sosp.training import Schedule

SEEDS = (0, 1, 2)
UNTRAINED = replace(PAPER, epochs=0)
CAPS = {"vgg19": 0.95}
HOW = (None, "expand", "widen")
# Parameters that are left, the same ones for the network as it is and for the wider ones.
SIZES = {"resnet56": (340_000, 170_000, 510_000), "vgg19": (2_000_000, 1_000_000, 4_000_000)}
TRIALS = "A trial is all of it: training, bottlenecks, wider networks, pruning and fine-tuning with one seed."
EQUAL = ("sosp-h", "sosp-h, init, twice")
ARCHITECTURE = "what matters is how many structures of a layer stay, not which ones"
FIGURE = "The paper shows curves of these and prints no numbers."


def expand() -> Experiment:
    """The least pruned block of ResNet-56, or five layers of VGG, twice as wide; beside it all layers by a constant."""
    return Experiment(
        "expand",
        "Widen what is too narrow, then prune",
        "Sec. 3.3, Fig. 3",
        _sized(PAPER),
        claims=_wider("sosp-h"),
        notes=(TRIALS, FIGURE),
    )


def expand_init() -> Experiment:
    """The same before any training: bottlenecks of the untrained network, pruned at once, trained once."""
    return Experiment(
        "expand-init",
        "Widen what is too narrow before any training",
        "App. A.11",
        _sized(UNTRAINED),
        claims=_wider("sosp-h", ", init"),
        notes=(TRIALS, FIGURE, "Untrained networks are scored with batch norm statistics of their own."),
    )


def _sized(schedule: Schedule) -> tuple[PrunedCell, ...]:
    """Every network at every size; the wider ones from bottlenecks of the plain one."""
    found = []
    for network, sizes in SIZES.items():
        for seed in SEEDS:
            plain = TrainedCell(network, "cifar10", schedule, seed)
            begun = [replace(plain, grown=WideningSpec(how, plain)) if how else plain for how in HOW]
            found += [
                PrunedCell(start, "sosp-h", ("params", size), seed=seed, cap=CAPS.get(network))
                for size in sizes
                for start in begun
            ]
    return tuple(found)


def _wider(method: str, end: str = "") -> tuple[Claim, ...]:
    text = "widening bottlenecks gives higher accuracy at equal size than"
    return (
        Claim(f"{text} the network as it is", 495, f"{method}, expand{end}", f"{method}{end}"),
        Claim(f"{text} widening all layers", 495, f"{method}, expand{end}", f"{method}, widen{end}"),
    )


def init_vs_trained() -> Experiment:
    """Pruned before two cycles of training, between them, and before a single one; by SOSP-H and at random."""
    cells = []
    for network in ("resnet56", "vgg19"):
        for seed in SEEDS:
            for ratio in (0.5, 0.3, 0.7):
                for method in ("sosp-h", "random"):
                    first = PrunedCell(
                        TrainedCell(network, "cifar10", PAPER, seed),
                        method,
                        ("ratio", ratio),
                        seed=seed,
                        cap=CAPS.get(network),
                    )
                    once = replace(first, start=replace(first.start, schedule=UNTRAINED))
                    cells += [first, replace(once, cycles=2), once]
    return Experiment(
        "init-vs-trained",
        "Pruning before and after training",
        "App. A.9, App. A.10",
        tuple(cells),
        claims=(
            Claim("at equal training, pruning before it is as good", 1180, *EQUAL, relation="equal"),
            Claim("with less training, pruning before it is worse", 1184, "sosp-h", "sosp-h, init"),
            Claim("and random pruning shows the same difference", 1184, "random", "random, init"),
        ),
        notes=(
            "A trial is all of it: training, pruning and fine-tuning with one seed.",
            FIGURE,
            "Untrained networks are scored with batch norm statistics of their own.",
        ),
    )


def shuffle() -> Experiment:
    """The same number of every layer, but other ones."""
    start, place = TrainedCell("resnet56", "cifar10"), ("resnet56", "cifar10")
    return Experiment(
        "shuffle",
        "Shuffled masks: is it the architecture or the weights?",
        "App. A.12",
        tuple(
            PrunedCell(start, "sosp-h", ("ratio", ratio), seed=seed, shuffled=shuffled)
            for seed in SEEDS
            for ratio in (0.5, 0.3)
            for shuffled in (False, True)
        ),
        (
            PublishedRow(1216, *place, "sosp-h", 93.62, 0.13, ratio=0.3),
            PublishedRow(1216, *place, "sosp-h, shuffled", 92.59, 0.12, ratio=0.3),
            PublishedRow(1218, *place, "sosp-h", 93.15, 0.15, ratio=0.5),
            PublishedRow(1218, *place, "sosp-h, shuffled", 92.94, 0.09, ratio=0.5),
        ),
        (Claim(ARCHITECTURE, 1210, "sosp-h", "sosp-h, shuffled", relation="equal"),),
        notes=("By the paper's own numbers the shuffled masks are worse where little is removed.",),
    )
