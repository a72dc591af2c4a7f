"""What an experiment is: its cells, what the paper says about them, and variants of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sosp.errors import ArgumentError, check_whole_number
from sosp.studies.cells import Cell, PrunedCell, TrainedCell

TINY = "-tiny"
BASELINE = "baseline"  # what nothing was removed from


@dataclass(frozen=True)
class PublishedRow:
    """A row of the paper as it is printed, and the line of its source where it stands. Accuracies in percent."""

    line: int
    network: str
    data: str
    method: str  # ours by their names in sosp.METHODS, others as the paper calls them
    accuracy: float | None = None
    std: float | None = None
    before: float | None = None  # fine-tuning
    before_std: float | None = None
    ratio: float | None = None  # of structures removed
    params: float | None = None  # left
    macs: float | None = None
    params_cut: float | None = None  # percent removed
    macs_cut: float | None = None
    macs_alternative: float | None = None  # left, by the count of App. D
    seconds: float | None = None  # of the pruning step; without a deviation it took longer than that
    seconds_std: float | None = None
    final: float | None = None  # where ``accuracy`` is the best one
    final_std: float | None = None
    final_line: int | None = None  # of its own
    table: str = ""  # where it stands, if the paper has other numbers of the same

    @property
    def budget(self) -> tuple[str, float] | None:
        """What a cell is asked for to stand beside this row: the ratio, else the parameters that are left."""
        if self.ratio is not None:
            return "ratio", self.ratio
        if self.params_cut is not None:
            return "params", round(1 - self.params_cut / 100, 4)
        return None if self.params is None else ("params", self.params)


@dataclass(frozen=True)
class Claim:
    """What the paper concludes, in our words: one method is better than another, or as good, on the same network."""

    text: str
    line: int | None  # None: the paper does not say it, and we want to know
    method: str  # labels of cells
    other: str  # or BASELINE
    by: str = "final"  # the metric that decides
    relation: str = "better"  # or "equal"
    same_terms: bool = True  # budget and number of examples; else there is one cell for each method, on its own
    places: tuple[str, ...] = ()  # the networks and datasets it is about; () are all
    budget: tuple[str, float] | None = None  # of the method; None: any


@dataclass(frozen=True)
class Experiment:
    """Cells in the order in which they are wanted, and the paper's numbers for them."""

    name: str
    title: str
    where: str  # in the paper
    cells: tuple[Cell, ...]
    published: tuple[PublishedRow, ...] = ()
    claims: tuple[Claim, ...] = ()
    beside: str = "final"  # which of our accuracies stands beside the paper's: or "best"; "zeroed" without fine-tuning
    together: int = 8  # networks that are trained side by side on a GPU
    notes: tuple[str, ...] = ()  # on the setting, without numbers

    @property
    def command(self) -> str:
        """What comes after ``sosp reproduce``."""
        name = self.name.removesuffix(TINY)
        return f"{name} --tiny" if name != self.name else f"{name} --data-dir DIR"

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1][:3]


# --- variants -------------------------------------------------------------------------------------------


def make_tiny(experiment: Experiment) -> Experiment:
    """The same steps on digits, in seconds; what the paper says does not hold for it."""
    cells = tuple(dict.fromkeys(cell.tiny() for cell in experiment.cells))
    return replace(experiment, name=experiment.name + TINY, cells=cells, published=())


def set_epochs(experiment: Experiment, epochs: int) -> Experiment:
    """Every training and fine-tuning in so many epochs; its cells are others, and the paper has no numbers for them."""
    check_whole_number("epochs", epochs)
    cells = tuple(dict.fromkeys(cell.in_epochs(epochs) for cell in experiment.cells))
    return replace(experiment, cells=cells, published=())


def limit_seeds(experiment: Experiment, seeds: int) -> Experiment:
    """Only the first so many seeds of every row."""
    check_whole_number("seeds", seeds)
    return replace(experiment, cells=tuple(cell for cell in experiment.cells if cell.seed < seeds))


def select_cells(experiment: Experiment, pattern: str) -> Experiment:
    """Only the cells whose name a regular expression finds."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"--only {pattern!r} is no regular expression: {error}.") from error
    cells = tuple(cell for cell in experiment.cells if found.search(cell.name))
    if not cells:
        known = ", ".join(cell.name for cell in experiment.cells[:3])
        raise ArgumentError(f"--only {pattern!r} names no cell of {experiment.name}; there are {known}, ...")
    return replace(experiment, cells=cells)


# --- parts ----------------------------------------------------------------------------------------------


def list_starts(experiment: Experiment) -> tuple[TrainedCell, ...]:
    """The networks that its cells begin with, and those that are cells themselves."""
    return collect_starts(experiment.cells)


def collect_starts(cells: Iterable[Cell]) -> tuple[TrainedCell, ...]:
    found = (cell.start if isinstance(cell, PrunedCell) else cell for cell in cells)
    return tuple(dict.fromkeys(cell for cell in found if isinstance(cell, TrainedCell)))


def find_dataset(cell: Cell) -> str:
    return cell.start.data if isinstance(cell, PrunedCell) else cell.data


def list_pruned_cells(experiment: Experiment) -> tuple[PrunedCell, ...]:
    return tuple(cell for cell in experiment.cells if isinstance(cell, PrunedCell))
