"""Targets: whether any of them counts; where there are none, the network's own answers stand in their place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from sosp.core.batches import Chunk
from sosp.core.losses import IGNORE_INDEX, LossLike, find_class_axis, find_logits
from sosp.errors import DataError


class LabelCheck:
    """Whether there was one that counts."""

    def __init__(self, loss: LossLike) -> None:
        self.loss = loss
        self.seen = self.counts = False

    def noted(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same chunks."""
        for chunk in chunks:
            if isinstance(chunk.targets, Tensor):
                self.seen = True
                self.counts = self.counts or bool((chunk.targets != IGNORE_INDEX).any())
            yield chunk

    @property
    def are_ignored(self) -> bool:
        return self.loss == "cross_entropy" and self.seen and not self.counts


def add_pseudo_labels(model: nn.Module, chunk: Chunk, loss: LossLike) -> Chunk:
    """The same examples, with what ``model`` says of them where nothing else does."""
    if chunk.targets is not None or chunk.keyed:
        return chunk
    if callable(loss):
        raise DataError("the data has no targets, and only you know what a loss of your own takes: give some.")
    with torch.no_grad():
        logits = find_logits(chunk.run(model))
    return replace(chunk, targets=logits if loss == "mse" else logits.argmax(find_class_axis(logits)))
