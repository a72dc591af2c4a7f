"""Check that a call leaves the caller's model, and the state of chance, as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sosp.errors import SospError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a caller could notice, and the state of chance."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    modules = dict(model.named_modules())
    return {
        "numbers": {name: t.detach().clone() for name, t in tensors},
        "objects": {name: id(t) for name, t in tensors},
        "requires_grad": {name: t.requires_grad for name, t in tensors},
        "grads": {name: None if t.grad is None else t.grad.clone() for name, t in tensors},
        "modes": {name: m.training for name, m in modules.items()},
        "hooks": {name: [list(vars(m)[kind].items()) for kind in HOOKS] for name, m in modules.items()},
        "attributes": {name: {key: id(value) for key, value in vars(m).items()} for name, m in modules.items()},
        "contents": {
            name: [list(c) for c in vars(m).values() if isinstance(c, list | dict)] for name, m in modules.items()
        },
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "fused layers": torch.backends.mha.get_fastpath_enabled(),
        "fused attention": torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled(),
    }


def same(a: Any, b: Any) -> bool:
    """Bit by bit, also where a number is no number."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return a == b


@contextmanager
def check_unchanged(model: nn.Module) -> Iterator[None]:
    """The model, and the state of chance, are the same after the block as before."""
    before = snapshot(model)
    try:
        yield
    finally:
        after = snapshot(model)
        changed = [key for key in before if not same(before[key], after[key])]
        assert changed == []


@contextmanager
def check_refused(model: nn.Module, kind: type[SospError], *words: str) -> Iterator[None]:
    """Exactly this error, with these words in its message, and no trace on the model."""
    with check_unchanged(model), pytest.raises(SospError) as caught:
        yield
    assert type(caught.value) is kind
    missing = [word for word in words if word not in str(caught.value)]
    assert missing == [], str(caught.value)
