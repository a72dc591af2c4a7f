"""Where a record comes from: versions, hardware, the command, the commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

CPU = Path("/proc/cpuinfo")


def describe_environment(command: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Versions, the hardware that does the work, the command, the commit."""
    return {
        "sosp": vars(sys.modules["sosp"])["__version__"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "hardware": describe_hardware(device),
        "command": list(command),
        "commit": _commit(),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_hardware(device: torch.device) -> str:
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
