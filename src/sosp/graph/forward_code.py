"""Run the user's forward on copies without values, and find where its code decides by values which layers run."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sosp.core.batches import call_model, copy_inputs, find_batch_size
from sosp.core.borrowed_model import disable_mha_fastpath, preserve_random_state, preserve_state
from sosp.core.layers import find_layer_type, is_norm
from sosp.errors import StructureError
from sosp.graph.channels import Decision, Graph, Ids, Pin
from sosp.graph.ops import SOSP_FOLDER


@contextmanager
def isolate_forward() -> Iterator[None]:
    """Nothing differentiated, no fused transformer, the caller's random numbers."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(disable_mha_fastpath())
        stack.enter_context(preserve_random_state())
        yield


def list_tensors(outputs: Any) -> list[Tensor]:
    """All tensors a model returned, also in a class of the user's."""
    leaves = tree_leaves(outputs)
    leaves += [x for leaf in leaves if hasattr(leaf, "__dict__") for x in tree_leaves(vars(leaf))]
    return [x for x in leaves if isinstance(x, Tensor)]


def refuse_kept_tensors(model: nn.Module) -> None:
    """A tensor that forward kept, with the graph behind it, cannot be copied, and the module with it neither."""
    for path, module in model.named_modules():
        for key, kept in vars(module).items():
            leaves = [] if key in ("_parameters", "_buffers", "_modules") else tree_leaves(kept)
            if any(isinstance(x, Tensor) and x.grad_fn is not None for x in leaves):
                name = f"{path}.{key}" if path else key
                if hasattr(module, f"{key}_v") or hasattr(module, f"{key}_orig"):
                    raise StructureError(
                        f"{name!r} is computed by the old weight_norm or spectral_norm of torch.nn.utils, which "
                        "cannot be copied. Use those of torch.nn.utils.parametrizations."
                    )
                raise StructureError(
                    f"{name!r} is a tensor that forward stored with its autograd graph, which torch cannot copy. "
                    f"Store it detached, self.{key} = x.detach(), or delete it first: model.{name} = None."
                )


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy without numbers: the same modules, parameters and buffers that take no memory."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=False)
    for b in model.buffers():
        memo[id(b)] = b.detach().to("meta")
    return copy.deepcopy(model, memo)


def count_input_examples(inputs: Any) -> int:
    """How many examples these are."""
    return find_batch_size(inputs) or 1


def shorten_example(example: Any, most: int = 2) -> Any:
    """The first rows of the example, two at least (batch norms in train mode need more than one)."""
    count = count_input_examples(example)
    if any(isinstance(x, Tensor) and x.dim() and not len(x) for x in tree_leaves(example)):
        raise StructureError("the example is empty: give it at least one row.")
    return tree_map(
        lambda x: _cut(x, most) if isinstance(x, Tensor) and x.dim() and x.shape[0] == count else x, example
    )


def _cut(x: Tensor, most: int) -> Tensor:
    return x[:most] if x.shape[0] > 1 else torch.cat([x, x])


def find_running_rows(model: nn.Module, example: Any, most: int) -> Any:
    """The first rows of the example, or the whole of it if the model does not run on some rows.

    Code may count on its batch, and a tensor without a row per example (patches of images, a graph) stays whole.
    """
    some = shorten_example(example, most)
    if find_model_error(model, some) is None:
        return some
    refuse_failing_model(model, example)
    return example


def refuse_failing_model(model: nn.Module, example: Any) -> None:
    """Raise StructureError if the model itself fails on the whole example, whatever is done to follow it."""
    error = find_model_error(model, example)
    if error is not None:
        shapes = tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, example)
        raise StructureError(
            f"the model does not run on the example (shapes {shapes}): {type(error).__name__}: {error}. Give the "
            "example as model(...) takes it: a tensor, a tuple of arguments or a dict of keyword arguments."
        ) from error


def find_model_error(model: nn.Module, inputs: Any) -> Exception | None:
    """What the model itself raises on these inputs, in eval mode and without our hooks; None if it runs."""
    with isolate_forward(), preserve_state(model):
        for m in model.modules():
            m.training = False
        try:
            call_model(model, copy_inputs(inputs))
        except Exception as error:
            return error
    return None


def clone_inputs(inputs: Any, real: bool) -> Any:
    """Copies of the inputs; without numbers, unless they are needed."""
    return tree_map(lambda x: (x.clone() if real else x.to("meta")) if isinstance(x, Tensor) else x, inputs)


# Where values decide --------------------------------------------------------------------------------------------------

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
    why = (
        f"its values decide which layers run, and {format_names(unused)} did not run: what another path reads is not "
        "known"
    )
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
            f"the code branches on the values of tensors ({lines}), and {format_names(unused)} did not run on the "
            "example. These layers cannot be pruned, and the channels that they might read are kept. Give an example "
            "on which more of the layers run, or print(sosp.trace(model, example)) to see what is pinned."
        )
    return (
        f"the code branches on the values of tensors ({lines}). The network is pruned for the path that the example "
        "takes. An input that takes another path may meet widths that do not match. Compare the result with "
        "sosp.masked(model, mask) on such inputs."
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
