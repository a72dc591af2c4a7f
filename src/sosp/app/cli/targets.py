"""Resolve the network that a command names: by its name, or by a run that made it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sosp.app.cli.flags import Sections
from sosp.app.run.run_folder import FILES, RunRecord, find_last_network, is_run, read_record
from sosp.errors import ArgumentError, RunError, suggest_name
from sosp.graph.mask import Mask
from sosp.nets.by_name import parse_network_name
from sosp.surgery.checkpoint import inspect

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def resolve_target(word: str, given: Sections) -> tuple[Sections, RunRecord | None]:
    """The sections that name the network (and, for a run, the data it used), with what was given on top."""
    found = dict(given)
    named = _find_run_network(word)
    if named is None:
        _refuse_file(word)
        _refuse_unknown_name(word)
        found["model"] = {"name": word, **given.get("model", {})}
        return found, None
    record, file = named
    refuse_weights(word, given)
    before = record.config.as_dict()
    found["model"] = {**before["model"], **given.get("model", {}), "weights": str(file)}
    if "data" in given:
        found["data"] = merge_data_section(before, given)
    return found, record


def refuse_weights(word: str, given: Sections) -> None:
    if "weights" in given.get("model", {}):
        raise ArgumentError(
            f"{word} is a run, and its weights are used: leave out --weights, or name the network in place of the run."
        )


def merge_data_section(before: Mapping[str, Any], given: Sections) -> dict[str, Any]:
    """The data that is named, or that of the run before; a folder alone says where that lies now."""
    same = {} if "name" in given["data"] else before.get("data", {})
    return {**same, **given["data"]}


def _find_run_network(word: str) -> tuple[RunRecord, Path] | None:
    """The record and the network, where ``word`` is the folder of a run or a network in one."""
    path = Path(word)
    if is_run(path):
        return find_last_network(path)
    if path.name in FILES.values() and is_run(path.parent):
        return read_record(path.parent), path
    if path.is_dir():
        raise RunError(f"{word}: is a folder that contains no run (it has no config.json).")
    return None


def _refuse_unknown_name(word: str) -> None:
    """Refuse what is neither a run nor a network."""
    try:
        parse_network_name(word)
    except ArgumentError as error:
        path = Path(word)
        runs = [str(p) for p in path.parent.iterdir() if is_run(p)] if "/" in word and path.parent.is_dir() else []
        raise ArgumentError(
            f"there is no run {word!r} (no such folder).{suggest_name(word, runs)} It is not a network either: {error}"
        ) from None


def _refuse_file(word: str) -> None:
    if word.endswith(SUFFIXES):
        if not Path(word).exists():
            raise ArgumentError(f"{word}: there is no such file.")
        raise ArgumentError(
            f"{word}: is a file of weights and does not say which network they belong to. Name the network, and give "
            f"this file with --weights {word}"
        )


def find_unpruned_file(record: RunRecord, folder: Path) -> str | None:
    """The file of the network that a run pruned."""
    if record.config.prune is None:
        return None
    return str(folder / FILES["train"]) if record.config.train is not None else record.config.model.weights


def require_mask(word: str) -> Mask:
    """The mask of a run that pruned, or in a file of sosp.save."""
    path: Any = Path(word)
    file = path / FILES["prune"] if is_run(path) else path
    if not file.is_file():
        raise RunError(f"{word}: is neither a run that pruned a network nor a file written by sosp.save.")
    mask = inspect(file).mask
    if mask is None:
        raise RunError(f"{file}: contains no mask.")
    return mask
