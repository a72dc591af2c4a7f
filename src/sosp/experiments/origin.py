"""Where a record comes from: commit, versions, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from sosp.pipeline.origin import origin

CPU = Path("/proc/cpuinfo")


def described(device: torch.device) -> dict[str, Any]:
    """What every record of a run has in common; not its command, which names folders of this machine."""
    found = {key: value for key, value in origin(()).items() if key != "command"}
    return {**found, "commit": commit(), "device": str(device), "hardware": hardware(device)}


def commit() -> str:
    """Of the source: as ``SOSP_COMMIT`` says, else as git does, ``-dirty`` where files differ, else "unknown"."""
    if told := os.environ.get("SOSP_COMMIT"):
        return told
    ask = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        here = Path(__file__).resolve().parent
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=10, cwd=here).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    lines = CPU.read_text(encoding="utf-8", errors="replace").splitlines() if CPU.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
