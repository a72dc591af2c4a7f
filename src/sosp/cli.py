"""The command line: parse, call, print; a refusal is one line, not a traceback."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import sosp

app = typer.Typer(
    name="sosp",
    help="Second-order structured pruning of neural networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback, where there is one, is Python's own
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    """Second-order structured pruning of neural networks."""


@app.command()
def demo() -> None:
    """Train a small network on scikit-learn's digits, prune it by several methods and compare them.

    Runs on the CPU in under a minute, downloads nothing and writes no file. Needs the extra sosp\\[demo].
    """
    from sosp.demo import run  # here, so that `sosp --help` does not pay for it

    run(Console())


def main() -> None:
    """Run the command line: exit code 2 where sosp refuses (as for wrong usage), 130 on Ctrl-C."""
    try:
        app()
    except sosp.errors.SospError as refusal:
        Console(stderr=True).print(Text(f"sosp: {refusal}", style="red"), soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
