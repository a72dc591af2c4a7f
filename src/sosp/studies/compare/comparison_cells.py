"""Define the plan and the cells of a comparison; each cell is saved as soon as it is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sosp.core import distributed
from sosp.errors import ArgumentError, check_choice, check_whole_number
from sosp.graph.structures import Exclude
from sosp.scoring.methods import METHODS


@dataclass(frozen=True)
class ComparisonPlan:
    """The methods, ratios, seeds and options of a comparison."""

    methods: tuple[str, ...]
    ratios: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7)
    seeds: int = 1  # each draws different examples for scoring
    seed: int = 0  # the first seed
    examples: int = 1000
    recalibrate: int = 2000  # images to re-estimate batch-norm statistics after pruning
    gate: str = "features"
    groups: str = "independent"  # methods that need coupled channels get them
    exclude: Exclude = ()
    repair: bool = False  # repair every network, with ``recalibrate`` images

    def __post_init__(self) -> None:
        if not self.methods or not self.ratios:
            raise ArgumentError("there is nothing to compare: give at least one method and one ratio.")
        for method in self.methods:
            check_choice("method", method, METHODS)
        for ratio in self.ratios:
            if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < 1:
                raise ArgumentError(f"ratio={ratio!r} must be a share between 0 and 1.")
        for name in ("methods", "ratios"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ArgumentError(f"{name} contains a value twice: {', '.join(map(str, getattr(self, name)))}.")
        check_whole_number("seeds", self.seeds)
        check_whole_number("seed", self.seed, least=0)

    @property
    def draws(self) -> range:
        """Return the seeds."""
        return range(self.seed, self.seed + self.seeds)

    def groups_for(self, method: str) -> str:
        """Return the groups of a method: those of the plan, or "coupled" if the method needs it."""
        return "coupled" if "coupled" in METHODS[method].needs else self.groups


@dataclass(frozen=True)
class ComparisonCell:
    """One method at one ratio with one seed. Accuracies are shares of the test data."""

    method: str
    ratio: float
    seed: int
    structures: int = 0
    removed: int = 0
    params: int = 0  # exact count
    macs: int = 0
    params_alternative: int = 0  # counted as in App. D
    macs_alternative: int = 0
    masked: float | None = None  # accuracy after pruning alone
    recalibrated: float | None = None  # batch-norm statistics re-estimated
    repaired: float | None = None  # every layer refitted, if the plan asks for it
    tuned: float | None = None  # after fine-tuning
    best: float | None = None  # best epoch of the fine-tuning
    seconds: float = 0.0  # of scoring, once for all ratios
    refusal: str = ""  # why there are no results

    @property
    def key(self) -> tuple[str, float, int]:
        return self.method, self.ratio, self.seed


OPTIONAL_FIELDS = frozenset({"repaired"})  # missing in older files


class ComparisonStore:
    """Finished cells; with a folder, in a file of JSON lines, of which an incomplete last line is ignored."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "cells.jsonl"
        self.known: dict[tuple[str, float, int], ComparisonCell] = {}
        if self.path is not None and self.path.is_file():
            for cell in _read(self.path):
                self.known[cell.key] = cell

    def keep(self, cell: ComparisonCell) -> None:
        self.known[cell.key] = cell
        if self.path is not None and distributed.is_main():
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cell)) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _read(path: Path) -> Iterator[ComparisonCell]:
    names = {f.name for f in fields(ComparisonCell)}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the last line of a process that was killed
        if isinstance(found, dict) and names - OPTIONAL_FIELDS <= found.keys() <= names:
            yield ComparisonCell(**found)
