"""Stand-ins for trying a network out: copies without numbers, two examples, and no trace left behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sosp.core.batches import find_batch_size
from sosp.core.borrowed_model import disable_mha_fastpath, preserve_random_state
from sosp.errors import StructureError


@contextmanager
def isolate_forward() -> Iterator[None]:
    """Nothing differentiated, no fused transformer, the caller's random numbers."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(disable_mha_fastpath())
        stack.enter_context(preserve_random_state())
        yield


def list_tensors(outputs: Any) -> list[Tensor]:
    """All tensors a model returned, also in a class of the user's."""
    leaves = tree_leaves(outputs)
    leaves += [x for leaf in leaves if hasattr(leaf, "__dict__") for x in tree_leaves(vars(leaf))]
    return [x for x in leaves if isinstance(x, Tensor)]


def refuse_kept_tensors(model: nn.Module) -> None:
    """A tensor that forward kept, with the graph behind it, cannot be copied, and the module with it neither."""
    for path, module in model.named_modules():
        for key, kept in vars(module).items():
            leaves = [] if key in ("_parameters", "_buffers", "_modules") else tree_leaves(kept)
            if any(isinstance(x, Tensor) and x.grad_fn is not None for x in leaves):
                name = f"{path}.{key}" if path else key
                if hasattr(module, f"{key}_v") or hasattr(module, f"{key}_orig"):
                    raise StructureError(
                        f"{name!r} is computed in the old way of torch.nn.utils, which cannot be copied. Take the "
                        "weight_norm or spectral_norm of torch.nn.utils.parametrizations."
                    )
                raise StructureError(
                    f"{name!r} is a tensor that forward kept together with its graph, and torch cannot copy that. Keep "
                    f"it without, self.{key} = x.detach(), or let it go before: model.{name} = None."
                )


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy without numbers: the same modules, parameters and buffers that take no memory."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=False)
    for b in model.buffers():
        memo[id(b)] = b.detach().to("meta")
    return copy.deepcopy(model, memo)


def count_input_examples(inputs: Any) -> int:
    """How many examples these are."""
    return find_batch_size(inputs) or 1


def shorten_example(example: Any, most: int = 2) -> Any:
    """The first rows of the example, two at least (batch norms in train mode need more than one)."""
    count = count_input_examples(example)
    if any(isinstance(x, Tensor) and x.dim() and not len(x) for x in tree_leaves(example)):
        raise StructureError("the example is empty: give it one row at least.")
    return tree_map(
        lambda x: _cut(x, most) if isinstance(x, Tensor) and x.dim() and x.shape[0] == count else x, example
    )


def _cut(x: Tensor, most: int) -> Tensor:
    return x[:most] if x.shape[0] > 1 else torch.cat([x, x])


def clone_inputs(inputs: Any, real: bool) -> Any:
    """Copies of the inputs; without numbers, unless they are needed."""
    return tree_map(lambda x: (x.clone() if real else x.to("meta")) if isinstance(x, Tensor) else x, inputs)
