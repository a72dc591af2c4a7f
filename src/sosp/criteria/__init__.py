"""From a model and data to a Saliency: the table of methods, and ``score``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sosp import ranks
from sosp.batches import read, share
from sosp.criteria import sosp
from sosp.criteria.options import Options
from sosp.errors import ArgumentError, DataError, one_of
from sosp.layers import width_of
from sosp.losses import LossLike
from sosp.losses import check as check_loss
from sosp.passes import Problem, Terms
from sosp.preserve import borrowed
from sosp.records import OBJECTIVES, Saliency, Structures
from sosp.structures import find_structures

Criterion = Callable[[Problem, Options], Terms | Tensor]

METHODS: dict[str, Criterion] = {
    "sosp-h": sosp.sosp_h,
    "sosp-i": sosp.sosp_i,
    "sosp-i-diagonal": sosp.sosp_i_diagonal,
    "first-order": sosp.first_order,
    "exact": sosp.exact,
    "random": sosp.random,
}


def score(
    model: nn.Module,
    data: Any,
    *,
    method: str = "sosp-h",
    loss: LossLike = "cross_entropy",
    structures: Structures | None = None,
    examples: int | None = 1000,
    generator: torch.Generator | None = None,
    objective: str = "individual",
    classes: int | None = None,
) -> Saliency:
    """What removing each structure does to the loss, from ``examples`` examples of ``data``.

    ``data``: a DataLoader or another iterable of (inputs, targets), a pair of tensors, or dict batches whose loss is
    the model's own. ``loss``: ``"cross_entropy"``, ``"mse"`` or a function of (outputs, targets) that returns one
    loss per example. ``structures``: from ``find_structures``; filters gated at their features by default.
    ``objective``: how the terms are combined, see ``Saliency.scores`` and ``select``. ``classes``: for SOSP-I with many
    outputs, sample this many labels per example (unbiased) instead of taking every output.

    The model is evaluated in eval mode, whatever mode it is in, and is left exactly as it was. Where torchrun started
    several processes, each takes its share of the examples and all get the same saliency; give all the same data.
    """
    one_of("method", method, METHODS)
    one_of("objective", objective, OBJECTIVES)
    check_loss(loss)
    if classes is not None and not method.startswith("sosp-i"):
        raise ArgumentError(
            f"classes= is for 'sosp-i' and 'sosp-i-diagonal'; method={method!r} does not sample outputs."
        )
    with borrowed(model):  # reading a shuffled loader draws random numbers; they are given back too
        chunks = iter(read(data, examples, generator))
        head = next(chunks, None)
        if head is None or head.size == 0:
            raise DataError("the data is empty: there is not one example to score with. Is the loader's dataset empty?")
        if structures is None:
            structures = find_structures(model, head.rows(0, min(2, head.size)).inputs)
        _check_model(model, structures)
        mine = share(itertools.chain([head], chunks), ranks.rank(), ranks.ranks())
        problem = Problem(model, structures, loss, mine, examples)
        found = METHODS[method](problem, Options(classes, generator))
    if isinstance(found, Tensor):
        return Saliency(structures, method, first=None, values=found, objective=objective)
    kind = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    first = found.first.to(kind)
    second = None if found.second is None else found.second.to(kind)
    pairs = None if found.pairs is None else found.pairs.to(kind)
    return Saliency(structures, method, first, second, pairs, objective=objective, examples=found.examples)


def _check_model(model: nn.Module, structures: Structures) -> None:
    """The structures must have been found in this model, or in one of the same shape."""
    names = dict(model.named_parameters() if structures.kind == "weights" else model.named_modules())
    again = "Find them again: structures=sosp.find_structures(model, example)."
    for layer in structures.layers:
        for name in (layer.name, *layer.norms):
            if name not in names:
                raise ArgumentError(f"the structures name {name!r}, which this model does not have. {again}")
        width = width_of(model, layer.name, structures.kind)
        if width != layer.channels:
            raise ArgumentError(
                f"the structures have {layer.channels} channels in {layer.name!r}, this model {width}. {again}"
            )


__all__ = ["METHODS", "score"]
