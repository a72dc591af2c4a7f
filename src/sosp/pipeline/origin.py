"""Where a run comes from: versions, the command, the commit, and the files it starts from by what is in them."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sosp.config import Config
from sosp.nets.by_name import digest, parse
from sosp.pipeline.job import device_of, network_file
from sosp.runs import FILE_KEYS, Record

CPU = Path("/proc/cpuinfo")


def describe(config: Config, command: Sequence[str]) -> Record:
    """The record of a run that is about to begin, or goes on."""
    given = {f"{s}.{k}": getattr(getattr(config, s), k, None) for s, k in FILE_KEYS}
    found = {name: digest(network_file(path)) for name, path in given.items() if path is not None}
    plans = {stage: asdict(getattr(config, stage).plan()) for stage in _trained(config)}
    return Record(config, found, {**origin(command, device_of(config.run.device)), "schedules": plans})


def _trained(config: Config) -> list[str]:
    return [stage for stage in ("train", "finetune") if getattr(config, stage) is not None]


def origin(command: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Versions, the hardware that does the work, the command, the commit."""
    return {
        "sosp": vars(sys.modules["sosp"])["__version__"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "hardware": hardware(device),
        "command": list(command),
        "commit": _commit(),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    lines = CPU.read_text(encoding="utf-8", errors="replace").splitlines() if CPU.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of the repository that the current folder is in; with ``-dirty`` where files differ from it."""
    try:
        ask = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def name_of(config: Config, command: str) -> str:
    """``prune-resnet56-cifar10-sosp-h-ratio0.5-seed0``."""
    source, inside = parse(config.model.name)
    net = inside if source else inside.rpartition(":")[2]
    parts = [command, Path(net).name, (config.data.name or "").rpartition(":")[2]]
    if config.prune is not None and config.compare is None:
        budget = config.prune.budget if config.expand is None else {"x": config.expand.factor}
        parts += [config.prune.method, *(f"{k}{v:g}" for k, v in budget.items())]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(filter(None, [*parts, f"seed{config.run.seed}"])))
