"""What a network that was cut several times lacks, as one mask of the original."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sosp.errors import StructureError
from sosp.layers import layer_type
from sosp.mask import Mask
from sosp.records import Structures
from sosp.repair.pairs import channels_of, recipes_between


def absent(small: nn.Module, model: nn.Module, structures: Structures) -> Mask:
    """The mask of all structures of ``model`` no channel of which is left in ``small``."""
    present = torch.zeros(len(structures), dtype=torch.bool)
    for ids in _present(small, model, structures):
        present[ids[ids >= 0].cpu()] = True
    return Mask.from_structures(structures, (~present).nonzero().flatten())


def _present(small: nn.Module, model: nn.Module, structures: Structures) -> Iterator[Tensor]:
    """The structures of the channels that are left, layer by layer."""
    recipes = recipes_between(small, model)
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        module = small.get_submodule(layer.name)
        if layer_type(module) is None:  # nothing is left of it
            continue
        kept = channels_of(layer.name, module, recipes, layer.channels)
        if kept is None:
            raise StructureError(f"it cannot be told which channels of {layer.name!r} are left.")
        yield ids[kept.to(ids.device)]
