"""Where a run comes from: the command that does it again, versions, and its whole config."""

from __future__ import annotations

import json
import shlex
from typing import Any

from sosp.app.report.run_facts import RunFacts
from sosp.app.report.section import ReportSection, ReportTable

# Key of config.json -> what it is called.
KEYS = {
    "commit": "commit",
    "sosp": "sosp",
    "torch": "torch",
    "python": "Python",
    "machine": "machine",
    "hardware": "hardware",
    "begun": "begun",
}


def build_section(facts: RunFacts) -> ReportSection:
    origin = facts.record.origin
    command = origin.get("command")
    code = (("Command that repeats this run", shlex.join(map(str, command))),) if isinstance(command, list) else ()
    return ReportSection("origin", "Origin", (), tables=(versions(facts), settings(facts)), code=code)


def versions(facts: RunFacts) -> ReportTable:
    origin = facts.record.origin
    rows = [("seed", str(facts.record.config.run.seed))]
    rows += [(name, str(origin[key])) for key, name in KEYS.items() if origin.get(key) is not None]
    rows += [(f"sha256 of {name}", digest) for name, digest in facts.record.digests.items()]
    return ReportTable("Versions, seed and files", ("what", "which"), tuple(rows))


def settings(facts: RunFacts) -> ReportTable:
    """Every key of the config that is set."""
    sections = facts.record.config.as_dict()
    rows = [(section, key, _format_value(value)) for section, keys in sections.items() for key, value in keys.items()]
    return ReportTable("The whole config", ("section", "key", "value"), tuple(rows), folded=True)


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
