"""The command line: parse, call, print; a refusal is one line, not a traceback."""

import json
import os
import sys
from typing import Annotated

import typer

import sosp
from sosp.app.cli import demo, expand, inspect, report, reproduce, runs

app = typer.Typer(
    name="sosp",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback, where there is one, is Python's own
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = {
    "demo": demo.demo,
    "train": runs.train,
    "prune": runs.prune,
    "finetune": runs.finetune,
    "run": runs.run,
    "compare": runs.compare,
    "expand": expand.expand,
    "bottlenecks": expand.bottlenecks,
    "report": report.report,
    "eval": inspect.evaluate,
    "count": inspect.count,
    "trace": inspect.trace,
    "data": inspect.data,
    "reproduce": reproduce.reproduce,
}
for name, command in COMMANDS.items():
    app.command(name)(command)

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, wherever this typer keeps it


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"sosp {sosp.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Second-order structured pruning of neural networks.

    Exit codes: 0 done, 1 a bug (with its traceback), 2 refused, 3 training failed, 130 stopped by Ctrl-C.
    """


def main() -> None:
    """Run the command line; see ``options`` for the exit codes."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # for package.module:function, as `python -m` does
    as_json = "--json" in sys.argv
    try:
        sys.exit(app(standalone_mode=not as_json) or 0)
    except UsageError as error:
        print(json.dumps({"error": error.format_message(), "code": 2}))  # type: ignore[attr-defined]
        sys.exit(2)
