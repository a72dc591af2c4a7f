"""What a network that is cut several times lacks, as one mask of the original."""

from __future__ import annotations

import numpy as np
import torch

from sosp.graph.mask import Mask
from sosp.graph.plan import Plan
from sosp.graph.recipe import find_kept_positions
from sosp.graph.records import Structures


class RemovalHistory:
    """Cut by cut, what is gone of every layer: removed by a mask, or needed by nothing any more."""

    def __init__(self, structures: Structures) -> None:
        self.structures = structures
        self.left = {layer.name: np.arange(layer.channels) for layer in structures.layers}  # in the original's numbers
        self.gone = {layer.name: np.zeros(layer.channels, dtype=bool) for layer in structures.layers}

    def record(self, plan: Plan) -> None:
        """Record that the network of this plan, as the cuts so far have left it, was cut by the plan."""
        for name, channels in plan.mask.removed.items():
            self.gone[name][self.left[name][channels.cpu().numpy()]] = True
        flow, layout = plan.flow, plan.layout
        unneeded = (d for d in flow.graph.dense.values() if not layout.needed[d.out].any())
        emptied = {d.module for d in unneeded if d.weight in layout.emptied}
        for name, numbers in self.left.items():
            if name in emptied:
                self.left[name] = numbers[:0]
            # What stands in for a layer emptied before has no channel of it; one that is not run on the example stays.
            elif len(numbers) and name in flow.graph.calls:
                self.left[name] = numbers[find_kept_positions(layout.counts, flow.graph.calls[name][0].given)]

    def mask(self) -> Mask:
        """Of all structures no channel of which is there: rows that only fill up a group are not."""
        present = torch.zeros(len(self.structures), dtype=torch.bool)
        for layer, ids in zip(self.structures.layers, self.structures.ids, strict=True):
            numbers = self.left[layer.name]
            there = ids.cpu()[torch.from_numpy(numbers[~self.gone[layer.name][numbers]])]
            present[there[there >= 0]] = True
        return Mask.from_structures(self.structures, (~present).nonzero().flatten())
