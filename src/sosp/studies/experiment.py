"""Define an experiment: its cells, the paper's numbers and claims about them, and variants of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sosp.errors import ArgumentError, check_whole_number
from sosp.studies.cells import Cell, PrunedCell, TrainedCell

TINY = "-tiny"
BASELINE = "baseline"  # the unpruned network


@dataclass(frozen=True)
class PublishedRow:
    """A row of the paper as printed, with its line in the paper's source. Accuracies in percent."""

    line: int
    network: str
    data: str
    method: str  # a name in sosp.METHODS, or the paper's name for other methods
    accuracy: float | None = None
    std: float | None = None
    before: float | None = None  # accuracy before fine-tuning
    before_std: float | None = None
    ratio: float | None = None  # share of structures removed
    params: float | None = None  # left
    macs: float | None = None
    params_cut: float | None = None  # percent removed
    macs_cut: float | None = None
    macs_alternative: float | None = None  # left, counted as in App. D
    seconds: float | None = None  # of the pruning step; a lower bound if there is no standard deviation
    seconds_std: float | None = None
    final: float | None = None  # final accuracy, where ``accuracy`` is the best one
    final_std: float | None = None
    final_line: int | None = None  # line of the final accuracy
    table: str = ""  # the paper's table, if another table has different numbers for the same

    @property
    def budget(self) -> tuple[str, float] | None:
        """Return the budget of the cells to compare with this row: the ratio, or the parameters that are left."""
        if self.ratio is not None:
            return "ratio", self.ratio
        if self.params_cut is not None:
            return "params", round(1 - self.params_cut / 100, 4)
        return None if self.params is None else ("params", self.params)


@dataclass(frozen=True)
class Claim:
    """A conclusion of the paper in our words: one method is better than another, or equal, on the same network."""

    text: str
    line: int | None  # None: a question of ours that the paper does not answer
    method: str  # label of cells
    other: str  # label of the cells to compare with, or BASELINE
    by: str = "final"  # the metric that decides
    relation: str = "better"  # or "equal"
    same_terms: bool = True  # same budget and examples; False: one cell per method, each with its own budget
    places: tuple[str, ...] = ()  # its networks and datasets; () means all
    budget: tuple[str, float] | None = None  # of the method's cells; None: any


@dataclass(frozen=True)
class Experiment:
    """Cells in the order of priority, and the paper's numbers for them."""

    name: str
    title: str
    where: str  # section of the paper
    cells: tuple[Cell, ...]
    published: tuple[PublishedRow, ...] = ()
    claims: tuple[Claim, ...] = ()
    compared_metric: str = "final"  # our accuracy to compare with the paper's: "final", "best" or "zeroed" (not tuned)
    group_size: int = 8  # networks that are trained side by side on a GPU
    notes: tuple[str, ...] = ()  # on the setup, without numbers

    @property
    def command(self) -> str:
        """Return the arguments of ``sosp reproduce``."""
        name = self.name.removesuffix(TINY)
        return f"{name} --tiny" if name != self.name else f"{name} --data-dir DIR"

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1][:3]


# --- variants -------------------------------------------------------------------------------------------


def make_tiny(experiment: Experiment) -> Experiment:
    """Return the same steps on digits, which take seconds; the paper's numbers do not apply to them."""
    cells = tuple(dict.fromkeys(cell.tiny() for cell in experiment.cells))
    return replace(experiment, name=experiment.name + TINY, cells=cells, published=())


def set_epochs(experiment: Experiment, epochs: int) -> Experiment:
    """Return the experiment with this number of epochs in every training; the paper has no numbers for its cells."""
    check_whole_number("epochs", epochs)
    cells = tuple(dict.fromkeys(cell.in_epochs(epochs) for cell in experiment.cells))
    return replace(experiment, cells=cells, published=())


def limit_seeds(experiment: Experiment, seeds: int) -> Experiment:
    """Return the experiment with only the first ``seeds`` seeds of every row."""
    check_whole_number("seeds", seeds)
    return replace(experiment, cells=tuple(cell for cell in experiment.cells if cell.seed < seeds))


def select_cells(experiment: Experiment, pattern: str) -> Experiment:
    """Return the experiment with only the cells whose name matches a regular expression."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"--only {pattern!r} is not a valid regular expression: {error}.") from error
    cells = tuple(cell for cell in experiment.cells if found.search(cell.name))
    if not cells:
        known = ", ".join(cell.name for cell in experiment.cells[:3])
        raise ArgumentError(f"--only {pattern!r} matches no cell of {experiment.name}; its cells are {known}, ...")
    return replace(experiment, cells=cells)


# --- parts ----------------------------------------------------------------------------------------------


def list_starts(experiment: Experiment) -> tuple[TrainedCell, ...]:
    """Return the networks that the cells begin with, including those that are cells themselves."""
    return collect_starts(experiment.cells)


def collect_starts(cells: Iterable[Cell]) -> tuple[TrainedCell, ...]:
    found = (cell.start if isinstance(cell, PrunedCell) else cell for cell in cells)
    return tuple(dict.fromkeys(cell for cell in found if isinstance(cell, TrainedCell)))


def find_dataset(cell: Cell) -> str:
    return cell.start.data if isinstance(cell, PrunedCell) else cell.data


def list_pruned_cells(experiment: Experiment) -> tuple[PrunedCell, ...]:
    return tuple(cell for cell in experiment.cells if isinstance(cell, PrunedCell))
