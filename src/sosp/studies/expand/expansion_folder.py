"""Claim the folder of an expansion, and read and atomically write its JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sosp.core import distributed
from sosp.errors import CheckpointError
from sosp.studies.expand.expansion_plan import ExpansionPlan, ExpansionSetup
from sosp.training.schedule import resolve_schedule

PLAN = "plan.json"


def claim_expansion(plan: ExpansionPlan, setup: ExpansionSetup) -> None:
    """Write plan, seed and schedules into the folder; raise CheckpointError if it holds others."""
    if setup.place is None:
        return
    schedule = resolve_schedule(setup.schedule)
    tuning = schedule if setup.tuning is None else resolve_schedule(setup.tuning)
    mine = {"seed": setup.seed, **asdict(plan), **_named("schedule", schedule), **_named("tuning", tuning)}
    path = setup.place / PLAN
    if not path.is_file():
        write_expansion_json(path, mine)
        return
    there = read_expansion_json(path)
    plain = json.loads(json.dumps(mine))
    for key in [*plain, *there]:
        if plain.get(key) != there.get(key):
            raise CheckpointError(
                f"{setup.place}: contains a different expansion: {key} was {there.get(key)!r} and is "
                f"{plain.get(key)!r}. Give another folder, or remove this one."
            )


def _named(what: str, schedule: Any) -> dict[str, Any]:
    return {f"{what}.{key}": value for key, value in asdict(schedule).items()}


def read_expansion_json(path: Path) -> Any:
    """Return the content of a JSON file; raise CheckpointError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: was not written by an expansion ({error}). Give another folder.") from error


def write_expansion_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, on the main process only."""
    if not distributed.is_main():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
