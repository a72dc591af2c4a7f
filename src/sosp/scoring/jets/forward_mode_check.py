"""Trust torch's forward-mode rule for an operation only after it has been seen to differentiate backward.

Some of torch's forward-mode rules (layer norm, softmax) compute the right tangent but cannot be differentiated
backward, or, worse, give a wrong result when they are. So each operation is tried once, on the data at hand: the
derivative of its tangent, backward over forward, must equal the tangent of its derivative, forward over backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from sosp.scoring.jets.jet import Jet, UnsupportedError, get_primal

DIFFERENTIABLE: dict[Any, bool] = {}


def check_forward_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``Unsupported`` unless torch's forward-mode rule for this call can be differentiated backward."""
    settings = tree_map(lambda a: "tensor" if isinstance(a, Tensor) else repr(a), (args, kwargs))
    key = (func, str(settings))
    if key not in DIFFERENTIABLE:
        DIFFERENTIABLE[key] = _mixed_derivatives_agree(func, args, kwargs)
    if not DIFFERENTIABLE[key]:
        raise UnsupportedError(
            f"torch's forward-mode rule for {getattr(func, '__name__', func)} cannot be differentiated"
        )


def _mixed_derivatives_agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    moving = {id(a): a for a in tree_leaves((args, kwargs)) if isinstance(a, Jet) and a.tangent is not None}
    places = {key: i for i, key in enumerate(moving)}
    p = [j.primal.detach() for j in moving.values()]
    t = [j.tangent.detach() for j in moving.values() if j.tangent is not None]

    def run(values: list[Tensor]) -> list[Tensor]:
        swap = lambda a: values[places[id(a)]] if id(a) in places else get_primal(a)  # noqa: E731
        swapped = tree_map(swap, (args, kwargs))
        out = tree_leaves(func(*swapped[0], **swapped[1]))
        return [o for o in out if isinstance(o, Tensor) and o.is_floating_point()]

    try:
        if not run(p):
            return True  # a comparison, an index: nothing to differentiate
        backward = _backward_over_forward(run, p, t)
        forward = _forward_over_backward(run, p, t)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    ahead, back = (torch.cat([x.flatten() for x in xs]) for xs in (forward, backward))
    loose = {torch.float64: 1e-6, torch.float32: 1e-2}.get(back.dtype, 0.2)
    return bool((ahead - back).norm() <= loose * (ahead.norm() + back.norm()))


Run = Callable[[list[Tensor]], list[Tensor]]


def _weigh(outputs: list[Tensor]) -> Tensor:
    """One number from all outputs, with fixed weights that treat no two alike."""
    weights = [torch.arange(o.numel(), device=o.device).cos().to(o.dtype).view(o.shape) for o in outputs]
    return torch.stack([(o * w).sum() for o, w in zip(outputs, weights, strict=True)]).sum()


def _backward_over_forward(run: Run, p: list[Tensor], t: list[Tensor]) -> list[Tensor]:
    """The way jets take."""
    inputs = [x.clone().requires_grad_() for x in p]
    with forward_ad.dual_level():
        pairs = [
            forward_ad.unpack_dual(o)
            for o in run([forward_ad.make_dual(*pair) for pair in zip(inputs, t, strict=True)])
        ]
        moved = [pair.tangent for pair in pairs if pair.tangent is not None]
    total = _weigh(moved) if moved else None
    if total is None or not total.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return list(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))


def _forward_over_backward(run: Run, p: list[Tensor], t: list[Tensor]) -> list[Tensor]:
    def along(values: list[Tensor]) -> Tensor:
        return _weigh(run(values))

    return list(torch.func.jvp(torch.func.grad(along), (p,), (t,))[1])
