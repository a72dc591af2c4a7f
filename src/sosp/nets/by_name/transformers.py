"""Networks of Hugging Face transformers, from a folder on this machine; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.core.optional_packages import import_package
from sosp.errors import ArgumentError, suggest_name
from sosp.nets import Width
from sosp.nets.by_name.network_source import ROWS, NetworkSource

TOKENS = 16  # of an example for a language model
# The heads that fit labelled data, best first: (the table of classes by type, the class that makes one).
HEADS = (
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "AutoModelForSequenceClassification"),
)


def _make(name: str, classes: int | None, width: Width) -> nn.Module:
    hub = import_package("transformers")
    folder = Path(name).expanduser()
    local = (folder / "config.json").is_file()
    config = hub.AutoConfig.from_pretrained(str(folder), local_files_only=True) if local else _default(hub, name)
    maker = _maker(hub, config, name)
    if local and _has_weights(folder):
        _check_classes(name, classes, config.num_labels)
        return maker.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    config.num_labels = config.num_labels if classes is None else classes
    return maker._from_config(config) if hasattr(maker, "_from_config") else maker.from_config(config)


def _has_weights(folder: Path) -> bool:
    names = [p.name for p in folder.iterdir()]
    if any(n.startswith("model") and n.endswith(".safetensors") for n in names):
        return True
    if pickled := [n for n in names if n.startswith("pytorch_model") and n.endswith(".bin")]:
        raise ArgumentError(
            f"hf:{folder}: its weights are in {pickled[0]}, a pickle, which sosp does not read. Save them as "
            "safetensors: model.save_pretrained(folder)."
        )
    return False


def _check_classes(name: str, classes: int | None, found: int) -> None:
    if classes not in (None, found):
        raise ArgumentError(f"hf:{name}: the weights in the folder are for {found} classes, not {classes}.")


def _default(hub: Any, name: str) -> Any:
    """The configuration that a type of networks has by default."""
    types = import_package("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    if name in types:
        return hub.AutoConfig.for_model(name)
    found = "has no config.json" if Path(name).is_dir() else "is not a folder"
    raise ArgumentError(
        f"hf:{name}: {name} {found}, and it is not a model type of transformers.{suggest_name(name, types)} Nothing "
        "is downloaded: give a folder with a config.json (and model.safetensors for its weights)."
    )


def _maker(hub: Any, config: Any, name: str) -> Any:
    """The class that the configuration names; else the head for labelled data that its type has."""
    named = [getattr(hub, n, None) for n in config.architectures or ()]
    for found in named:
        if found is not None:
            return found
    for table, maker in HEADS:
        if type(config) in getattr(hub, table):
            return getattr(hub, maker)
    raise ArgumentError(
        f"hf:{name}: {type(config).__name__} has neither a class for images nor one for sequences. "
        'Name the class in its config.json: "architectures": ["..."].'
    )


def _example(name: str, model: nn.Module) -> Any:
    config: Any = model.config
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        return torch.zeros(ROWS, getattr(config, "num_channels", 3), height, width)
    length = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS))
    tokens = torch.ones(ROWS, length, dtype=torch.long)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


HF = NetworkSource(_make, _example)
