"""Read which stages led to a run: its own, and those of the runs that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sosp.app.run.run_folder import FILES, RunFolder, RunRecord, is_run, read_record
from sosp.errors import RunError
from sosp.nets.by_name import hash_weights_file

Figures = Mapping[str, Any]
Step = tuple[str, Figures]  # a stage that is done, and its figures


def read_steps(folder: Path, last: str | None = None) -> list[Step]:
    """Return the stages of the runs before this one and its own, oldest first, up to the stage ``last``."""
    record, results = read_record(folder), RunFolder(folder, writes=False).results
    stages = record.config.stages
    own = stages if last is None else stages[: stages.index(last) + 1]
    return [*read_earlier_steps(folder, record), *((stage, results[stage]) for stage in own if stage in results)]


def read_earlier_steps(folder: Path, record: RunRecord) -> list[Step]:
    """Return the stages of the runs before this one; none of a run that cannot be read any more."""
    found = find_parent(folder, record)
    with suppress(RunError):
        return [] if found is None else read_steps(*found)
    return []


def find_parent(folder: Path, record: RunRecord) -> tuple[Path, str] | None:
    """Return the run that made the network this one starts from, and its stage; None if that file has changed."""
    if record.config.model.weights is None:
        return None
    file = Path(record.config.model.weights)
    stage = next((stage for stage, name in FILES.items() if name == file.name), None)
    # Both runs may have been moved together.
    for path in (file.parent, folder.resolve().parent / file.parent.name):
        if stage is not None and is_run(path) and (path / file.name).is_file():
            if hash_weights_file(path / file.name) == record.digests.get("model.weights"):
                return path, stage
    return None
