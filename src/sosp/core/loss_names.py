"""The losses that are known: by name, and as torch writes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sosp.errors import ArgumentError, check_choice

LossLike = str | Callable[[Any, Any], Tensor]
LOSS_NAMES = ("cross_entropy", "bce", "mse")
LOSS_TITLES = {"cross_entropy": "cross-entropy", "bce": "binary cross-entropy", "mse": "squared error"}
AUTO = "auto"  # the loss that fits what the network returns and the targets
FUNCTIONS: dict[Any, str] = {
    F.cross_entropy: "cross_entropy",
    F.binary_cross_entropy_with_logits: "bce",
    F.mse_loss: "mse",
}
MODULES: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.BCEWithLogitsLoss: "bce",
    nn.MSELoss: "mse",
}


def name_loss(loss: object) -> str | None:
    """Return the name of a known loss; None for a function of the user's own, also where it calls a known loss."""
    if isinstance(loss, str):
        return loss if loss in LOSS_NAMES else None
    if isinstance(loss, nn.Module):
        return MODULES.get(type(loss))  # a subclass may compute something else
    return next((name for function, name in FUNCTIONS.items() if function is loss), None)


def resolve_loss(loss: LossLike) -> LossLike:
    """Return the name of a known loss if the name says all of it, and any other loss as it is.

    Raises:
        ArgumentError: The loss is neither a known name nor a function.
    """
    if inspect.isclass(loss):
        raise ArgumentError(f"loss={loss.__name__} is a class; give an instance of it, loss={loss.__name__}().")
    if not callable(loss):
        check_choice("loss", loss, LOSS_NAMES)
    name = name_loss(loss)
    return loss if name is None or _has_options(loss) else name


def _has_options(loss: object) -> bool:
    """Return whether one of torch's losses is not as torch makes it by default."""
    if type(loss) is nn.CrossEntropyLoss:
        default = (loss.ignore_index, loss.label_smoothing, loss.reduction) == (-100, 0.0, "mean")
        return loss.weight is not None or not default
    if type(loss) is nn.BCEWithLogitsLoss:
        return loss.weight is not None or loss.pos_weight is not None or loss.reduction != "mean"
    return False
