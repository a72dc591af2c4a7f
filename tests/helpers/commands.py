"""Run the command line inside the test, and read what it printed."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from sosp.app import cli

QUICK = ("--data", "digits", "--width", "0.25", "--epochs", "2")
TOML = """
[model]
name = "sosp:digits_resnet"
width = 0.25
[data]
name = "digits"
"""  # a file that says nothing to do yet
WIDE = {"COLUMNS": "200"}  # so that no word of a help text is cut


def call(*words: str) -> Result:
    """What ``sosp WORDS...`` does; an exception that is not an exit goes on."""
    found = CliRunner().invoke(cli.app, [str(word) for word in words], env=WIDE)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def lines(*words: str) -> list[dict[str, Any]]:
    """The objects that ``sosp WORDS... --json`` prints; nothing else may be on any line."""
    return [json.loads(line) for line in call(*words, "--json").stdout.splitlines()]


def refusal(*words: str, code: int = 2, begun: bool = False) -> str:
    """The one line that a refused command prints; nothing else, unless it had ``begun``."""
    found = call(*words)
    assert found.exit_code == code, found.output
    assert bool(found.stdout) == begun
    *warned, line = found.stderr.splitlines()
    assert all(words.endswith("its parameters are randomly initialised.") for words in warned)
    return line.removeprefix("sosp: ")
