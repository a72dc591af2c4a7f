"""Describe the origin of a record: commit, versions, hardware."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from sosp.core.run_environment import describe_environment


def describe_origin(device: torch.device) -> dict[str, Any]:
    """Return what all records of a run share, without the command, which names folders of this machine."""
    found = {key: value for key, value in describe_environment((), device).items() if key != "command"}
    return {**found, "commit": find_commit(), "device": str(device)}


def find_commit() -> str:
    """Return the commit: ``SOSP_COMMIT``, or git's (``-dirty`` if files differ), or "unknown"."""
    if told := os.environ.get("SOSP_COMMIT"):
        return told
    ask = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        here = Path(__file__).resolve().parent
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=10, cwd=here).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
