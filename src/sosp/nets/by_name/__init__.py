"""Networks by name (``sosp:resnet56``, ``torchvision:…``, ``timm:…``, ``hf:…``, a function), and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sosp import nets
from sosp.errors import ArgumentError, suggest_name
from sosp.nets.by_name import package_networks, transformers, user_networks
from sosp.nets.by_name.network_source import ROWS, InputShape, NetworkSource
from sosp.nets.by_name.weights import hash_weights_file, load_weights, read_state

SOURCES: dict[str, NetworkSource] = {
    "sosp": package_networks.SOSP,
    "torchvision": package_networks.TORCHVISION,
    "timm": package_networks.TIMM,
    "hf": transformers.HF,
    "": user_networks.OWN,
}


def build_network(name: str, *, classes: int | None = None, width: nets.Width = 1.0, seed: int = 0) -> nn.Module:
    """The network of that name, in eval mode; fresh weights depend on ``seed`` alone.

    ``sosp:NAME`` (see ``sosp.nets.NETS``), ``torchvision:NAME``, ``timm:NAME``, ``hf:FOLDER`` with a config.json (and
    its weights, where they are there as safetensors) or ``hf:TYPE`` for the default configuration of a type;
    ``path/to/file.py:function`` or ``package.module:function``, called without arguments. ``classes``: outputs; by
    default as many as the network was made for. ``width`` is for ``sosp:`` networks. Nothing is downloaded.
    """
    source, inside = parse_network_name(name)
    if width != 1.0 and source != "sosp":
        raise ArgumentError(f"width is for sosp: networks; the widths of {name!r} are fixed.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = SOURCES[source].make(inside, classes, width)
    if not isinstance(found, nn.Module):
        raise ArgumentError(f"{name} returned a {type(found).__name__}; it must return a torch.nn.Module.")
    return found.eval()


def make_example(name: str, model: nn.Module, shape: InputShape | None = None) -> Any:
    """Inputs for tracing and counting: of ``shape``, or of the one that such a network takes."""
    if shape is not None:
        return torch.zeros(ROWS, *shape)
    source, inside = parse_network_name(name)
    return SOURCES[source].example(inside, model)


def parse_network_name(name: str) -> tuple[str, str]:
    """The source and what it calls the network; a name that none of them could know is refused."""
    source, colon, inside = name.partition(":")
    if source and source in SOURCES:
        return source, inside
    place = name.rpartition(":")[0]
    if place.endswith(".py") or (colon and not suggest_name(source, SOURCES) and "/" not in place):
        return "", name
    raise ArgumentError(
        f"there is no model {name!r}.{_hint(name)} Name one as sosp:NAME, torchvision:NAME, timm:NAME, hf:FOLDER, "
        f"path/to/file.py:function or package.module:function. sosp has {', '.join(nets.NETS)}."
    )


def _hint(name: str) -> str:
    source, colon, inside = name.partition(":")
    if colon:
        return suggest_name(source, SOURCES).replace("'?", f":{inside}'?")
    return suggest_name(name, nets.NETS).replace("mean '", "mean 'sosp:")


__all__ = [
    "SOURCES",
    "hash_weights_file",
    "make_example",
    "build_network",
    "parse_network_name",
    "read_state",
    "load_weights",
]
