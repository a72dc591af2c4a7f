"""Where a run comes from: versions, the command, the commit, and the files it starts from by what is in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sosp.app.config import Config
from sosp.app.run.job import choose_device, resolve_network_file
from sosp.app.run.run_folder import FILE_KEYS, RunRecord
from sosp.core.run_environment import describe_environment
from sosp.nets.by_name import hash_weights_file, parse_network_name


def describe_run(config: Config, command: Sequence[str]) -> RunRecord:
    """The record of a run that is about to begin, or goes on."""
    given = {f"{s}.{k}": getattr(getattr(config, s), k, None) for s, k in FILE_KEYS}
    found = {name: hash_weights_file(resolve_network_file(path)) for name, path in given.items() if path is not None}
    plans = {stage: asdict(getattr(config, stage).build_schedule()) for stage in _list_training_stages(config)}
    return RunRecord(
        config, found, {**describe_environment(command, choose_device(config.run.device)), "schedules": plans}
    )


def _list_training_stages(config: Config) -> list[str]:
    return [stage for stage in ("train", "finetune") if getattr(config, stage) is not None]


def name_run(config: Config, command: str) -> str:
    """``prune-resnet56-cifar10-sosp-h-ratio0.5-seed0``."""
    source, inside = parse_network_name(config.model.name)
    net = inside if source else inside.rpartition(":")[2]
    parts = [command, Path(net).name, (config.data.name or "").rpartition(":")[2]]
    if config.prune is not None and config.compare is None:
        budget = config.prune.budget if config.expand is None else {"x": config.expand.factor}
        parts += [*([config.prune.method] if config.prune.method else []), *(f"{k}{v:g}" for k, v in budget.items())]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(filter(None, [*parts, f"seed{config.run.seed}"])))
