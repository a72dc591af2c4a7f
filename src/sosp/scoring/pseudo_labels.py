"""Check whether labels are ignored, and replace missing labels by the model's own predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from sosp.core.batches import Chunk
from sosp.core.losses import IGNORE_INDEX, LossLike, find_class_axis, find_logits
from sosp.errors import DataError


class LabelCheck:
    """Record of whether any label of the data is not ignored."""

    def __init__(self, loss: LossLike) -> None:
        self.loss = loss
        self.seen = self.counts = False

    def record_targets(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the same chunks and record their targets."""
        for chunk in chunks:
            if isinstance(chunk.targets, Tensor):
                self.seen = True
                self.counts = self.counts or bool((chunk.targets != IGNORE_INDEX).any())
            yield chunk

    @property
    def are_ignored(self) -> bool:
        """Return whether there were labels and cross-entropy ignores all of them."""
        return self.loss == "cross_entropy" and self.seen and not self.counts


def add_pseudo_labels(model: nn.Module, chunk: Chunk, loss: LossLike) -> Chunk:
    """Return the same examples; if they have no targets, the predictions of ``model`` are their targets."""
    if chunk.targets is not None or chunk.keyed:
        return chunk
    if callable(loss):
        raise DataError(
            "the data has no targets, and they cannot be predicted for a loss function of your own. Give targets."
        )
    with torch.no_grad():
        logits = find_logits(chunk.run(model))
    return replace(chunk, targets=logits if loss == "mse" else logits.argmax(find_class_axis(logits)))
