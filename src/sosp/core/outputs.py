"""What a network returns: its tensors by name, and whether each of them holds logits or numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sosp.core.batches import Chunk
from sosp.errors import OutputError

WHOLE = "output"  # name of a network's only tensor
HEADS = ("logits", "out")  # names of the head that counts where a loss takes a single tensor
# What Hugging Face's models return on request, or in addition, and what their outputs are computed from.
EXTRA = ("hidden_states", "attentions", "loss", "losses", "indices", "router_logits")
EXTRA_STARTS = ("past_", "cache_", "encoder_", "aux_", "auxiliary_", "logits_per_", "mems", "rnn_")
BEFORE_LOGITS = ("last_hidden_state", "pooler_output", "aux")


def find_output_tensors(outputs: Any, examples: int | None = None) -> dict[str, Tensor]:
    """Return the real tensors among the outputs that are results, by name; the place in a tuple is a name too.

    Left out are a loss, what is returned on request (hidden states, attentions, caches), and next to logits the hidden
    states that they are computed from. Containers within the container count only where it holds no tensor itself.

    Args:
        outputs: What the network returns: a tensor, or a container of tensors.
        examples: Number of examples. Tensors with another first dimension are left out, unless all have another.

    Raises:
        OutputError: There is no tensor of real numbers.
    """
    named = {name: x for name, x in _walk(outputs, "") if x.is_floating_point()}
    results = {name: x for name, x in named.items() if not _is_extra(name)} or named
    if any(is_logits_name(name) for name in results):
        results = {name: x for name, x in results.items() if name not in BEFORE_LOGITS}
    rows = {name: x for name, x in results.items() if x.dim() and len(x) == examples}
    if not results:
        raise OutputError(_describe_missing_tensor(outputs))
    return rows or results


def find_logits(outputs: Any) -> Tensor:
    """Return the tensor that a loss compares with targets: the output itself, or where containers keep it."""
    for key in HEADS if not isinstance(outputs, Tensor) else ():
        found = outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)
        if isinstance(found, Tensor) and found.is_floating_point():
            return found
    return next(iter(find_output_tensors(outputs).values()))


def is_logits_name(name: str) -> bool:
    """Return whether an output is called logits."""
    last = name.rpartition(".")[2]
    return last in HEADS or "logits" in last


def _walk(x: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a container by name; those of the containers in it where it holds none itself."""
    if isinstance(x, Tensor):
        yield name or WHOLE, x
        return
    parts = {f"{name}.{key}" if name else str(key): part for key, part in _list_parts(x)}
    tensors = {key: part for key, part in parts.items() if isinstance(part, Tensor)}
    if any(part.is_floating_point() for part in tensors.values()):
        yield from tensors.items()
        return
    for key, part in parts.items():
        if not _is_extra(key):
            yield from _walk(part, key)


def _list_parts(x: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(x, Mapping):
        return x.items()
    if isinstance(x, (tuple, list)):
        return zip(getattr(x, "_fields", range(len(x))), x, strict=True)
    return vars(x).items() if hasattr(x, "__dict__") and not isinstance(x, type) else ()


def _is_extra(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith(EXTRA) or last.startswith(EXTRA_STARTS)


def _describe_missing_tensor(outputs: Any) -> str:
    if isinstance(outputs, Tensor):
        return (
            f"the model's output is of type {outputs.dtype}; a loss cannot be differentiated through it. Return the "
            "logits instead of the predicted classes."
        )
    names = f" with {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) and outputs else ""
    return (
        f"the model returns a {type(outputs).__name__}{names}, and no tensor of real numbers was found in it: no "
        "logits, hidden states or samples. Wrap the model to return one: as a tensor, in a tuple, or under a name such "
        "as 'logits'. Without repair, 'sosp-h' and 'first-order' need none: give loss=a function of (outputs, targets) "
        "that returns one loss per example."
    )


def find_class_axis(logits: Tensor) -> int:
    """Where the classes stand when no label tells: second, as in images, or last, as in rows of tokens."""
    return 1 if logits.dim() in (2, 4, 5) else logits.dim() - 1


def are_numbers(loss: object, outputs: Tensor) -> bool:
    """Return whether outputs are numbers by themselves, and not the logits of classes."""
    alone = outputs.dim() < 2 or outputs.shape[find_class_axis(outputs)] == 1
    return loss == "mse" or (loss != "bce" and alone)


def infer_loss(name: str, outputs: Tensor, chunk: Chunk, targets: Any = None) -> str:
    """Return the loss that fits an output: of its targets where there are some, else by its name and shape.

    Whole numbers are classes. Real numbers of the outputs' shape are probabilities, yes or no (0 or 1), or numbers. An
    output without a telling name is logits, unless it has the shape of an input as an image or a signal has.
    """
    if isinstance(targets, Tensor) and targets.is_floating_point() and targets.shape == outputs.shape:
        return _infer_from_targets(outputs, targets)
    if are_numbers("cross_entropy", outputs):
        return "mse"
    if (isinstance(targets, Tensor) and not targets.is_floating_point()) or is_logits_name(name):
        return "cross_entropy"
    if not (name == WHOLE or name.rpartition(".")[2].isdigit()):
        return "mse"
    shapes = {x.shape for x in tree_leaves(chunk.inputs) if isinstance(x, Tensor) and x.is_floating_point()}
    return "mse" if outputs.dim() > 2 and outputs.shape in shapes else "cross_entropy"


def _infer_from_targets(outputs: Tensor, targets: Tensor) -> str:
    if not are_numbers("cross_entropy", outputs):
        total = targets.sum(find_class_axis(outputs))
        if bool((targets >= 0).all()) and torch.allclose(total, torch.ones_like(total), atol=1e-3):
            return "cross_entropy"
    return "bce" if bool(((targets == 0) | (targets == 1)).all()) else "mse"
