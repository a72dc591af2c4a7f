"""Turn the options of config sections into the flags of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from sosp.app.cli.output import Screen
from sosp.app.config import SECTIONS
from sosp.core import distributed
from sosp.core.options import FLAG, Option, collect_options

PANELS = {
    "model": "Model",
    "data": "Data",
    "train": "Training",
    "prune": "Pruning",
    "finetune": "Training",
    "compare": "Comparison",
    "expand": "Expansion",
    "run": "Run",
}

Sections = dict[str, dict[str, Any]]  # section -> key -> what was given
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line instead of text.", show_default=False)
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print what would be done and what it would cost, without writing anything.",
        show_default=False,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume this run. Fail if it does not exist.", show_default=False)
]


def add_flags(*wanted: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a flag for every option of these sections (``"prune"``, or ``"run.device"`` for one option).

    The function is called with ``given``, what the user gave of them, and a ``screen``, on which every refusal ends.
    """
    chosen = [(s, k, o) for word in wanted for s, k, o in _options(word)]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [
            p for n, p in inspect.signature(function, eval_str=True).parameters.items() if n not in ("given", "screen")
        ]

        def command(**values: Any) -> None:
            given: Sections = {word.partition(".")[0]: {} for word in wanted}
            for section, key, _ in chosen:
                value = values.pop(f"{section}_{key}")
                if value is not None and value != []:
                    given[section][key] = value
            as_json = values.pop("json")
            with distributed.join_processes(), Screen(as_json=as_json).handle_errors() as screen:
                function(**values, given=given, screen=screen)

        parameters = [*own, *(_parameter(*option) for option in chosen), JSON]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


JSON = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)


def _options(word: str) -> list[tuple[str, str, Option]]:
    section, _, only = word.partition(".")
    found = collect_options(SECTIONS[section])
    return [(section, key, o) for key, o in found.items() if o.flag != "" and only in ("", key)]


def _parameter(section: str, key: str, option: Option) -> inspect.Parameter:
    name = (option.flag or key).replace("_", "-")
    declared = f"--{name}/--no-{name}" if option.kind is FLAG else f"--{name}"
    default = next(f.default for f in fields(SECTIONS[section]) if f.name == key)
    usual = option.shown or ("" if default is None else str(default).lower() if option.kind is FLAG else str(default))
    info = typer.Option(
        declared,
        help=" ".join([option.help, *_more("One of", ", ".join(option.choices)), *_more("Default", usual)]),
        show_default=False,  # None stands for it, so that what was given can be told from what was not
        rich_help_panel=PANELS[section],
        metavar=METAVARS.get(f"{section}.{key}"),
    )
    plain = option.kind.plain if option.kind.plain in (list[str], list[float]) else option.kind.plain | None
    annotation = Annotated[plain, info]  # type: ignore[valid-type]
    nothing: Any = [] if plain in (list[str], list[float]) else None
    return inspect.Parameter(f"{section}_{key}", inspect.Parameter.KEYWORD_ONLY, default=nothing, annotation=annotation)


def _more(what: str, words: str) -> list[str]:
    return [f"{what}: {words}."] if words else []


METAVARS = {
    "model.weights": "FILE",
    "model.input": "SHAPE",
    "data.name": "NAME",
    "data.folder": "DIR",
    "train.teacher": "RUN|FILE",
    "finetune.teacher": "RUN|FILE",
    "prune.exclude": "PATTERN",
    "run.name": "NAME",
    "run.out": "DIR",
}
