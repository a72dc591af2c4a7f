"""Count the structures that every layer loses at each overall ratio, from saliencies or masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sosp.errors import ArgumentError, is_number
from sosp.graph.mask import Mask
from sosp.graph.records import Saliency, Structures
from sosp.selection.greedy_order import rank_structures
from sosp.selection.saved_saliency import SavedSaliency, find_removed_structures

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RemovalSource = Saliency | SavedSaliency | Mask | Sequence[Mask]


@dataclass(frozen=True, eq=False)
class RemovalCounts:
    """Numbers of structures that L layers, with S structures in total, lose at R overall ratios."""

    layers: tuple[str, ...]
    sizes: tuple[int, ...]  # (L,) structures
    gone: tuple[tuple[int, ...], ...]  # (R, L)
    method: str = ""

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(sum(row) / self.total for row in self.gone)


def count_removals(
    given: RemovalSource, ratios: Sequence[float] | None, structures: Structures | None
) -> RemovalCounts:
    """Count removed structures; omit layers whose channels are structures of other layers."""
    if isinstance(given, Saliency):
        _refuse_by_layer(given.method, given.scope)
        found = given.structures
        return _ranked(
            [x.name for x in found.layers], found.owner(), rank_structures(given).cpu(), ratios, given.method
        )
    if isinstance(given, SavedSaliency):
        _refuse_by_layer(given.method, given.scope)
        return _ranked(list(given.layers), given.index, given.rank, ratios, given.method)
    if ratios is not None:
        raise ArgumentError("masks have their own ratios: omit ratios=, or give a saliency.")
    masks = [given] if isinstance(given, Mask) else list(given)
    if not masks or not all(isinstance(m, Mask) for m in masks):
        raise ArgumentError("give a saliency (sosp.score), a mask, or a list of masks.")
    return _masked(sorted(masks, key=lambda m: m.ratio), structures)


def _refuse_by_layer(method: str, scope: str) -> None:
    if scope == "layer":
        raise ArgumentError(
            f"{method!r} ranks every layer by itself, so all lose the same share: it cannot tell which is too "
            "narrow. Score with a method that ranks all structures together, such as 'sosp-h'."
        )


def _ranked(
    names: list[str], owner: Tensor, rank: Tensor, ratios: Sequence[float] | None, method: str
) -> RemovalCounts:
    """Return the counts if the first ``round(r S)`` structures by rank are removed at ratio r."""
    limits = [round(r * len(rank)) for r in check_ratios(RATIOS if ratios is None else ratios)]
    return _counted(names, owner, [rank < n for n in limits], method)


def _masked(masks: list[Mask], structures: Structures | None) -> RemovalCounts:
    """Return the counts of structures if they are known, otherwise of channels."""
    names = [layer.name for layer in masks[0].layers]
    for mask in masks:
        if [layer.name for layer in mask.layers] != names:
            raise ArgumentError("the masks are of different layers; compare masks of one network.")
    if structures is not None:
        if [layer.name for layer in structures.layers] != names:
            raise ArgumentError("the structures are not those that the masks were chosen from.")
        return _counted(names, structures.owner(), [find_removed_structures(structures, m) for m in masks])
    sizes = tuple(layer.channels for layer in masks[0].layers)
    return RemovalCounts(tuple(names), sizes, tuple(tuple(len(m.removed.get(n, ())) for n in names) for m in masks))


def _counted(names: list[str], owner: Tensor, gone: list[Tensor], method: str = "") -> RemovalCounts:
    sizes = torch.bincount(owner, minlength=len(names)).tolist()
    rows = [torch.bincount(owner[g], minlength=len(names)).tolist() for g in gone]
    own = [i for i, size in enumerate(sizes) if size]
    return RemovalCounts(
        tuple(names[i] for i in own),
        tuple(sizes[i] for i in own),
        tuple(tuple(row[i] for i in own) for row in rows),
        method,
    )


def check_ratios(ratios: Sequence[float]) -> tuple[float, ...]:
    """Return the ratios in ascending order; raise ArgumentError unless they are different shares between 0 and 1."""
    found = tuple(ratios)
    for ratio in found:
        if not is_number(ratio) or not 0 < ratio < 1:
            raise ArgumentError(f"ratio={ratio!r} must be a share between 0 and 1.")
    if not found or len(set(found)) < len(found):
        raise ArgumentError(f"ratios={list(found)} must be different shares between 0 and 1, at least one.")
    return tuple(sorted(found))
