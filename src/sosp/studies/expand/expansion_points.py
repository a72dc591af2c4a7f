"""The points of a figure: a pruned network each, its size and its accuracy, kept as soon as they are known."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from sosp.core import distributed


@dataclass(frozen=True)
class ExpansionPoint:
    """One network of one course. Accuracies are shares of the test data."""

    course: str
    budget: str  # "ratio" or "params"
    size: float
    seed: int
    whole_params: int = 0  # before the cut
    whole_macs: int = 0
    whole: float | None = None  # accuracy then, where it was trained
    structures: int = 0
    removed: int = 0
    params: int = 0
    macs: int = 0
    blocks: Mapping[str, float] = field(default_factory=dict)  # block -> the share that is removed
    layers: Mapping[str, float] = field(default_factory=dict)
    cut: float | None = None  # accuracy after the cut, nothing trained
    tuned: float | None = None  # at the end
    best: float | None = None  # of the last cycle's epochs
    refusal: str = ""  # why there are no figures

    @property
    def name(self) -> str:
        """``expand-ratio0.5``."""
        return f"{self.course}-{self.budget}{self.size:g}"


class ExpansionStore:
    """The points that are known; where a folder is given, in a file of JSON lines, without one that was cut short."""

    FILE = "points.jsonl"

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / self.FILE
        self.known: dict[str, ExpansionPoint] = {}
        if self.path is not None and self.path.is_file():
            self.known = {point.name: point for point in _read(self.path)}

    def keep(self, point: ExpansionPoint) -> None:
        self.known[point.name] = point
        if self.path is not None and distributed.is_main():
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(point)) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _read(path: Path) -> Iterator[ExpansionPoint]:
    names = {f.name for f in fields(ExpansionPoint)}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the last one, of a process that was killed
        if isinstance(found, dict) and found.keys() == names:
            yield ExpansionPoint(**found)
