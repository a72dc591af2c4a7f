"""Define the points of an expansion, one pruned network each; a point is saved as soon as it is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from sosp.core import distributed


@dataclass(frozen=True)
class ExpansionPoint:
    """One pruned network of one protocol. Accuracies are shares of the test data."""

    course: str  # name of the protocol
    budget: str  # "ratio" or "params"
    size: float
    seed: int
    whole_params: int = 0  # before pruning
    whole_macs: int = 0
    whole: float | None = None  # accuracy before pruning, if trained
    structures: int = 0
    removed: int = 0
    params: int = 0
    macs: int = 0
    blocks: Mapping[str, float] = field(default_factory=dict)  # block -> share that is removed
    layers: Mapping[str, float] = field(default_factory=dict)
    cut: float | None = None  # accuracy after pruning, before further training
    tuned: float | None = None  # accuracy after all training
    best: float | None = None  # best epoch of the last cycle
    refusal: str = ""  # why there are no results

    @property
    def name(self) -> str:
        """Return the name: ``expand-ratio0.5``."""
        return f"{self.course}-{self.budget}{self.size:g}"


class ExpansionStore:
    """Measured points; with a folder, in a file of JSON lines, of which an incomplete last line is ignored."""

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
            continue  # the last line of a process that was killed
        if isinstance(found, dict) and found.keys() == names:
            yield ExpansionPoint(**found)
