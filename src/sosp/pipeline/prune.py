"""From a trained network, data and a budget to a smaller network, in one call. Read this first."""

from __future__ import annotations

from typing import Any

from torch import nn

from sosp.core.loss_names import AUTO, LossLike
from sosp.graph.structures import Exclude
from sosp.pipeline.cut import PruningCall
from sosp.pipeline.held_out import Metric
from sosp.pipeline.largest_cut import prune_to_budget
from sosp.pipeline.pruned import Pruned
from sosp.refit.repair_options import Repair
from sosp.scoring.scoring_options import Scoring
from sosp.selection.selection_options import Selection


def prune(
    model: nn.Module,
    data: Any,
    *,
    ratio: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    max_drop: float | None = None,
    metric: Metric | None = None,
    method: str | None = None,
    loss: LossLike = AUTO,
    exclude: Exclude = (),
    scoring: Scoring | None = None,
    selection: Selection | None = None,
    repair: bool | Repair | None = None,
    preset: str = "default",
) -> Pruned:
    """Return a smaller network that computes nearly what the original computes.

    Score all structures, remove the least important ones, and refit the remaining weights to the outputs of the
    original. No labels are needed. The model is not changed.

    Args:
        model: The trained network.
        data: Inputs, or (inputs, labels), as ``sosp.score`` takes them: a tensor, a pair of tensors, a loader, batches.
        ratio: Share of the structures to remove; half if no budget is given. Of several budgets all are met.
        params: Largest number of parameters to keep: a share up to 1, or a whole number.
        macs: Largest number of multiply-accumulates to keep, likewise.
        max_drop: In place of a budget: the smallest network is returned whose quality on inputs that were used for
            nothing else falls by at most this much. 0.01 is one point of agreement with the original, or of accuracy
            where the data has labels.
        metric: The quality for ``max_drop``, a function of a network; higher is better.
        method: A name in ``sosp.METHODS``. By default SOSP-I on the network's own outputs, or SOSP-H where the network
            has too many structures for their pairs or the loss is a function of your own.
        loss: What the outputs are; by default the outputs and targets tell. ``"cross_entropy"`` or
            ``nn.CrossEntropyLoss()`` for logits of classes, ``"bce"`` for independent logits, ``"mse"`` for numbers; or
            a function of (outputs, targets), see ``sosp.score``.
        exclude: Layers to keep: names, patterns or modules.
        scoring: How structures are scored: examples, targets, gates.
        selection: What may be removed and what goes first: groups, caps, widths.
        repair: Whether, or how, the remaining weights are refitted to the outputs of the original, see
            ``sosp.repair``. By default they are, unless the data cannot be divided in two.
        preset: ``"paper"`` for the settings of the paper: SOSP-H with labels, gates at the weights, independent
            groups, the order of the saliencies, no repair.

    Returns:
        The pruned network, with the mask, the saliency, the cost before and after, and what was measured.

    Raises:
        ArgumentError: An argument has an invalid value.
        BudgetError: The budget cannot be met, or no cut keeps the quality that ``max_drop`` asks for.
        StructureError: The network has nothing that can be removed.
        DataError: The data is empty or cannot be read as examples.
    """
    call = PruningCall.open(model, data, method, loss, exclude, scoring, selection, repair, preset)
    return prune_to_budget(call, ratio=ratio, params=params, macs=macs, max_drop=max_drop, metric=metric)
