"""Keep a shrunk network in one safetensors file: its tensors, and how to make it from the original, as data only."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.files import about, as_path, line, read, write
from sosp.errors import ArgumentError, CheckpointError
from sosp.graph.mask import Mask
from sosp.surgery.checkpoint.model import (
    aliases_of,
    apart,
    check_model,
    kind,
    plain,
    rebuild,
    refuse_hooks,
    state_of,
    stored,
    transient,
)
from sosp.surgery.checkpoint.reader import decode
from sosp.surgery.checkpoint.recipe_shapes import check_shapes, shapes
from sosp.surgery.checkpoint.record import Saved, encode


def save(path: str | Path, small: nn.Module, mask: Mask | None = None) -> None:
    """Write a pruned network, and its mask if given, to one safetensors file.

    The file appears, or replaces an older one, only when it is complete. Hooks, optimisers, buffers outside the state
    dict and the network's code are not stored.

    Args:
        path: The file.
        small: A network made by ``sosp.shrink``, or any other.
        mask: The mask it was made with.

    Raises:
        CheckpointError: If the network cannot be stored or the file cannot be written.
    """
    file, model = as_path(path), plain(small)
    if mask is not None and not isinstance(mask, Mask):
        raise ArgumentError(f"mask={mask!r:.80} is a {type(mask).__name__}; give a sosp.Mask or nothing.")
    with about(file):
        refuse_hooks(model)
        state = state_of(model)
        saved = describe(model, state, mask)
        document, indices = encode(saved)
        tensors = {**apart({name: state[name] for name in saved.tensors}), **indices}
        check_shapes(decode(document, tensors))  # what could not be read is not written
        write(file, document, tensors)


def load(path: str | Path, model: nn.Module) -> nn.Module:
    """Read a pruned network from a file. Nothing in the file is executed.

    Args:
        path: A file written by ``sosp.save``.
        model: The network before pruning, with any weights. It is not changed. Its class must have the name of the
            saved one or inherit from a class that has; the module it is defined in does not matter.

    Returns:
        A copy of ``model`` made into the saved network. Tensors have the saved type and memory layout and the devices
        of ``model``; train or eval mode, ``requires_grad``, hooks and buffers outside the state dict are those of
        ``model``.

    Raises:
        CheckpointError: If the file is damaged, or not of this network.
    """
    file, original = as_path(path), plain(model)
    with about(file):
        saved, tensors = _read(file)
        check_model(saved, original)
        twin: Any = copy.deepcopy(original)
        try:
            rebuild(saved, tensors, twin)
        except CheckpointError:
            raise
        except Exception as error:  # of a module that is not what a forged recipe takes it for
            raise CheckpointError(f"does not fit the model ({line(error)}).") from error
    if saved.recipes:
        twin.sosp_recipes, twin.sosp_shapes = saved.recipes, dict(saved.original)
    return twin


def inspect(path: str | Path) -> Saved:
    """Read what a file says about the network in it, and its mask, without the network.

    Args:
        path: A file written by ``sosp.save``.

    Raises:
        CheckpointError: If the file is damaged.
    """
    file = as_path(path)
    with about(file):
        return _read(file)[0]


def _read(file: Path) -> tuple[Saved, dict[str, Tensor]]:
    document, tensors = read(file)
    saved = decode(document, tensors)
    check_shapes(saved)
    return saved, tensors


def describe(model: nn.Module, state: dict[str, Tensor], mask: Mask | None) -> Saved:
    """All that a file says beside the numbers."""
    aliases = aliases_of(state)
    recipes = tuple(getattr(model, "sosp_recipes", ()))
    original = getattr(model, "sosp_shapes", None) if recipes else shapes(model)
    if original is None:
        raise CheckpointError("the model has recipes but not the shapes from before (sosp_shapes); use sosp.shrink.")
    return Saved(
        sosp=vars(sys.modules["sosp"])["__version__"],  # the package imports this module, not the other way round
        torch=torch.__version__,
        module=type(model).__module__,
        qualname=type(model).__qualname__,
        tensors={name: stored(x) for name, x in state.items() if name not in aliases},
        aliases=aliases,
        original=original,
        transient={name: kind(x) for name, x in transient(model).items() if x.is_floating_point()},
        recipes=recipes,
        mask=mask,
    )


__all__ = ["Saved", "inspect", "load", "save", "shapes"]
