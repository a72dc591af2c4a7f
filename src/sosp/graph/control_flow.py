"""Code that decides by values which layers run: only the way that the example takes is seen.

Another input may take another way. What a layer that did not run might read is not known, so every width that such a
way could meet has to stay: all but those inside of modules in which nothing is decided and everything ran.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType

import numpy as np
import torch
from torch import nn

from sosp.core.layer_types import find_layer_type, is_norm
from sosp.graph.channels import Decision, Graph, Ids, Pin
from sosp.graph.ops import SOSP_FOLDER

SHOWN = 3  # names in a message


class PathWarning(UserWarning):
    """The code decides by values what runs, and only one way through it was seen."""


def find_unused_modules(model: nn.Module, graph: Graph) -> tuple[str, ...]:
    """Layers, norms and other modules with parameters that did not run, in no mode, and whose weights nobody used."""
    names = {id(x): name for name, x in model.named_parameters()}
    hidden = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule))
    found = []
    for name, module in model.named_modules():
        own = [names[id(p)] for p in module._parameters.values() if p is not None]
        counts = own or find_layer_type(module) is not None or is_norm(module)
        if counts and name not in graph.ran and not f"{name}.".startswith(hidden):
            found += [] if any(n in graph.used for n in own) else [name]
    return tuple(found)


def pin_other_paths(graph: Graph, unused: tuple[str, ...]) -> None:
    """Where values decide and layers did not run: pin what a way that was not seen could read."""
    if not graph.decisions or not unused:
        return
    why = f"its values decide what runs, and {format_names(unused)} did not: what another way reads is not known"
    graph.pins.append(build_path_pin(graph, find_exposed_values(graph, unused), why))


def build_path_pin(graph: Graph, ids: Ids, why: str) -> Pin:
    """Pinned by the line that decides first."""
    return Pin(ids, graph.decisions[0].op, graph.decisions[0].where, why)


def find_exposed_values(graph: Graph, unused: tuple[str, ...]) -> Ids:
    """Values whose class is met by more than one module that always does the same, or leaves it."""
    crooked = {""}
    for name in (*(d.module for d in graph.decisions), *unused):
        parts = name.split(".")
        crooked |= {".".join(parts[: k + 1]) for k in range(len(parts))}
    numbers: dict[str, int] = {}
    classes = graph.classes()
    owner = np.full(graph.count, -1)  # of a class: the module that alone has met it; -2 where there are several
    for module, ids in _list_op_values(graph):
        home = _find_undecided_module(module, crooked)
        number = numbers.setdefault(home, len(numbers)) if home is not None else -2
        met = np.unique(classes[ids])
        owner[met] = np.where((owner[met] == -1) | (owner[met] == number), number, -2)
    for module, labels in graph.leaving:
        if _find_undecided_module(module, crooked) == module:
            owner[np.unique(classes[labels.numbers()])] = -2
    return np.flatnonzero(owner[classes] == -2)


def _list_op_values(graph: Graph) -> Iterator[tuple[str, Ids]]:
    """Every op: the module it ran in, and the values it was given and gave."""
    for records in graph.records.values():
        for r in records:
            for labels in (*r.given, *r.out):
                if labels is not None:
                    yield r.module, labels.numbers()


def _find_undecided_module(module: str, crooked: set[str]) -> str | None:
    """The largest module around an op in which nothing is decided and everything ran."""
    parts = module.split(".")
    for k in range(len(parts)):
        if (name := ".".join(parts[: k + 1])) not in crooked:
            return name
    return None


def format_path_warning(decisions: Iterable[Decision], unused: tuple[str, ...]) -> str | None:
    """What to tell the user of a network that decides by values; None where there is nothing to tell."""
    found = [d for d in decisions if unused or not (d.shape or d.given)]
    if not found:
        return None
    lines = format_names(tuple(dict.fromkeys(f"{d.op} at {d.where}" for d in found)))
    if unused:
        return (
            f"the code decides by values what runs ({lines}), and {format_names(unused)} did not run on the example: "
            "not offered for pruning, and what it might read keeps its width. Give an example on which more of the "
            "layers run, or print(sosp.trace(model, example)) to see what is pinned."
        )
    return (
        f"the code decides by values ({lines}). It is cut along the way that the example takes; an input that takes "
        "another way may meet widths that do not fit. Compare the result with sosp.masked(model, mask) on such inputs."
    )


def format_names(names: tuple[str, ...]) -> str:
    """``a, b, c and 4 more``."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def count_library_frames() -> int:
    """How far up the stack the user's own call of sosp is, for a warning to point at."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(SOSP_FOLDER):
        frame, level = frame.f_back, level + 1
    return level
