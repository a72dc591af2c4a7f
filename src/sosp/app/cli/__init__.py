"""Parse the command line, call the command, print the result. An error is one line, not a traceback."""

import json
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import sosp

# Command -> its module and function below ``sosp.app.cli``, and the first sentence of its help. A module is imported
# when its command is called, so that the list of commands needs neither torch nor matplotlib.
COMMANDS = {
    "demo": (
        "demo_command.demo",
        "Train a small residual network on digits, prune it to 30 % of its MACs, and compare other rankings.",
    ),
    "train": ("run_commands.train", "Train a network."),
    "prune": (
        "run_commands.prune",
        "Rank the structures of a trained network, remove the least important ones, and save the smaller network.",
    ),
    "finetune": ("run_commands.finetune", "Train a pruned network further."),
    "run": ("run_commands.run", "Run the stages of a config file (train, prune, fine-tune), or resume a run."),
    "compare": (
        "run_commands.compare",
        "Prune one network with several methods and ratios, and compare the results. --epochs adds fine-tuning.",
    ),
    "tradeoff": (
        "tradeoff_command.tradeoff",
        "Prune one network to several budgets, and compare quality, MACs and latency: a table and a page.",
    ),
    "expand": (
        "width_commands.expand",
        "Widen the narrowest blocks, retrain and prune. Compare with the original and a uniformly wider network.",
    ),
    "bottlenecks": (
        "width_commands.bottlenecks",
        "Show which layers and blocks are too narrow or too wide, and suggest widths that balance them.",
    ),
    "report": ("report_command.report", "Write the report of a run again, or one report that compares several runs."),
    "eval": ("inspection_commands.evaluate", "Measure the accuracy of a network on the test data."),
    "count": ("inspection_commands.count", "Count parameters and multiply-accumulates, layer by layer."),
    "trace": (
        "inspection_commands.trace",
        "Show how channels flow through a network: which are tied together, which cannot be removed, and why.",
    ),
    "data": (
        "inspection_commands.data",
        "Show which datasets a folder contains, whether they are complete, and where to download what is missing.",
    ),
    "reproduce": (
        "reproduce_command.reproduce",
        "Reproduce an experiment of the paper. Finished parts are kept, interrupted parts are resumed.",
    ),
}
PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}  # a traceback is Python's own


class CommandGroup(TyperGroup):
    """A group that lists the commands with their summaries and imports only the one that is called."""

    def __init__(self, **settings: Any) -> None:
        named = {name: TyperCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()}
        super().__init__(**{**settings, "commands": named})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest


def load_command(name: str) -> Any:
    """Import a command with its options and its full help text."""
    module, _, function = COMMANDS[name][0].partition(".")
    alone = typer.Typer(**PLAIN)
    alone.command(name)(getattr(import_module(f"{__name__}.{module}"), function))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="sosp",
    cls=CommandGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **PLAIN,
)

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

    Exit codes: 0 success, 1 bug in sosp (with a traceback), 2 error (with a message), 3 training failed, 130 Ctrl-C.
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
