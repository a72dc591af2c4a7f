"""Keep a shrunk network in one safetensors file: its tensors, and how to make it from the original, as data only."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.safetensors_files import describe_error, parse_path, prefix_errors, read_safetensors, write_safetensors
from sosp.errors import ArgumentError, CheckpointError
from sosp.graph.mask import Mask
from sosp.graph.recipe import collect_shapes
from sosp.surgery.checkpoint.model_record import Saved, check_shapes, encode_record
from sosp.surgery.checkpoint.model_state import (
    check_model,
    describe_tensor,
    find_aliases,
    find_transient_tensors,
    format_dtype,
    read_state_dict,
    rebuild_model,
    refuse_hooks,
    separate_tensors,
    unwrap_model,
)
from sosp.surgery.checkpoint.reader import decode_record


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
    file, model = parse_path(path), unwrap_model(small)
    if mask is not None and not isinstance(mask, Mask):
        raise ArgumentError(f"mask={mask!r:.80} is a {type(mask).__name__}; give a sosp.Mask or nothing.")
    with prefix_errors(file):
        refuse_hooks(model)
        state = read_state_dict(model)
        saved = describe_model(model, state, mask)
        document, indices = encode_record(saved)
        tensors = {**separate_tensors({name: state[name] for name in saved.tensors}), **indices}
        check_shapes(decode_record(document, tensors))  # what could not be read is not written
        write_safetensors(file, document, tensors)


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
    file, original = parse_path(path), unwrap_model(model)
    with prefix_errors(file):
        saved, tensors = _read(file)
        check_model(saved, original)
        twin: Any = copy.deepcopy(original)
        try:
            rebuild_model(saved, tensors, twin)
        except CheckpointError:
            raise
        except Exception as error:  # of a module that is not what a forged recipe takes it for
            raise CheckpointError(f"does not fit the model ({describe_error(error)}).") from error
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
    file = parse_path(path)
    with prefix_errors(file):
        return _read(file)[0]


def _read(file: Path) -> tuple[Saved, dict[str, Tensor]]:
    document, tensors = read_safetensors(file)
    saved = decode_record(document, tensors)
    check_shapes(saved)
    return saved, tensors


def describe_model(model: nn.Module, state: dict[str, Tensor], mask: Mask | None) -> Saved:
    """All that a file says beside the numbers."""
    aliases = find_aliases(state)
    recipes = tuple(getattr(model, "sosp_recipes", ()))
    original = getattr(model, "sosp_shapes", None) if recipes else collect_shapes(model)
    if original is None:
        raise CheckpointError("the model has recipes but not the shapes from before (sosp_shapes); use sosp.shrink.")
    return Saved(
        sosp=vars(sys.modules["sosp"])["__version__"],  # the package imports this module, not the other way round
        torch=torch.__version__,
        module=type(model).__module__,
        qualname=type(model).__qualname__,
        tensors={name: describe_tensor(x) for name, x in state.items() if name not in aliases},
        aliases=aliases,
        original=original,
        transient={name: format_dtype(x) for name, x in find_transient_tensors(model).items() if x.is_floating_point()},
        recipes=recipes,
        mask=mask,
    )


__all__ = ["Saved", "inspect", "load", "save"]
