"""Put the weights of a file into a network: safetensors or torch.save, refused where they are another network's."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sosp.core.safetensors_files import KEY, describe_error, parse_path
from sosp.errors import CheckpointError
from sosp.surgery.checkpoint import load

WRAPPERS = ("state_dict", "model", "model_state_dict")  # keys under which training scripts keep the state dict
PREFIXES = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before every name
NAMED = 3  # tensors that a message lists


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """A copy of ``model`` with the weights in the file: a state dict, or what ``sosp.save`` wrote.

    The file is read without executing anything in it (``weights_only=True``). A network that ``sosp.shrink`` made is
    rebuilt from ``model``, the original one. ``{"state_dict": ...}`` around the state dict and ``module.`` before all
    names are understood.
    """
    file = parse_path(path)
    if _is_ours(file):
        return load(file, model)
    state = read_state(file)
    _check(model, state, file)
    twin = copy.deepcopy(model)
    twin.load_state_dict(state, strict=False)  # _check is stricter, but lets old files lack num_batches_tracked
    return twin


def hash_weights_file(path: str | Path) -> str:
    """sha256 of a file."""
    file = parse_path(path)
    _exists(file)
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# --- reading --------------------------------------------------------------------------------------------


def read_state(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a file, without wrappers and prefixes."""
    file = parse_path(path)
    found = _safetensors(file) if _is_safetensors(file) else _torch_file(file)
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(x, Tensor) for x in found.values()):
        raise CheckpointError(f"{file}: holds {_shape_of(found)}, not a state dict (names and tensors).")
    return _strip_prefixes({str(name): x for name, x in found.items()})


def _exists(file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: {'is not a file' if file.exists() else 'there is no such file'}.")


def _is_safetensors(file: Path) -> bool:
    """By its first bytes: the length of the header, then a JSON object."""
    _exists(file)
    with open(file, "rb") as opened:
        return opened.read(9)[8:] == b"{"


def _is_ours(file: Path) -> bool:
    """Whether sosp.save wrote it."""
    if not _is_safetensors(file):
        return False
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return KEY in (opened.metadata() or {})
    except Exception as error:  # of its own kind in every version
        raise CheckpointError(f"{file}: is truncated or damaged ({describe_error(error)}).") from error


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(f"{file}: is truncated or damaged ({describe_error(error)}).") from error


def _torch_file(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise CheckpointError(
            f"{file}: cannot be read as weights ({describe_error(error)}). Expected a state dict: save it with "
            "safetensors.torch.save_file(model.state_dict(), ...) or torch.save(model.state_dict(), ...)."
        ) from error


def _strip_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in (*PREFIXES, *PREFIXES):  # one may be around the other
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): x for name, x in state.items()}
    return state


def _shape_of(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a dict with {', '.join(map(repr, list(found)[:NAMED])) or 'nothing in it'}"
    return f"a {type(found).__name__}"


# --- comparing ------------------------------------------------------------------------------------------


def _check(model: nn.Module, state: Mapping[str, Tensor], file: Path) -> None:
    """Refuse weights of another network, and say how they differ."""
    mine = {name: tuple(x.shape) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    missing = [name for name in mine if name not in state and not name.endswith("num_batches_tracked")]
    strange = [name for name in state if name not in mine]
    other = {n: (tuple(x.shape), mine[n]) for n, x in state.items() if n in mine and tuple(x.shape) != mine[n]}
    gaps = [
        _gap("missing", missing),
        _gap("unknown", strange),
        _gap("with another shape", [f"{n} is {theirs}, expected {own}" for n, (theirs, own) in other.items()]),
    ]
    if any(gaps):
        hint = _classes(other) if not missing and not strange else ""
        raise CheckpointError(
            f"{file}: these weights are not for this {type(model).__name__}. Tensors: "
            f"{', '.join(filter(None, gaps))}.{hint}"
        )


def _gap(how: str, names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} {how} ({', '.join(names[:NAMED])}{more})" if names else ""


def _classes(other: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Where all that differs is one number of rows, the last layer has other classes."""
    rows = {(theirs[:1], own[:1]) for theirs, own in other.values()}
    if len(rows) != 1 or any(theirs[1:] != own[1:] for theirs, own in other.values()):
        return ""
    ((theirs, own),) = rows
    return f" Was it trained for {theirs[0]} classes? This one has {own[0]}: give classes={theirs[0]}."
