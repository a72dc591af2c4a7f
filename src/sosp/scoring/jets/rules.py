"""How operations act on jets: one entry of ``RULES`` each; everything else goes through torch's forward mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from sosp.scoring.jets.fused_ops import FrozenConv, plan_convolution
from sosp.scoring.jets.jet import (
    RULES,
    Gate,
    Jet,
    PendingOps,
    Rule,
    UnsupportedError,
    apply_batch_norm,
    apply_group_norm,
    apply_layer_norm,
    apply_pending,
    check_forward_rule,
    flush_pending,
    get_primal,
    load_forward_rules,
    mark_aliases,
)

T = torch.Tensor

# Rules: how an operation acts on jets. One entry each; everything else goes through ``_any`` ------------------------


def _forward_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's own forward-mode rule for this one operation, once it has proved itself."""
    jets = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Jet)]
    if all(j.tangent is None for j in jets):
        values = tree_map(get_primal, (args, kwargs))
        return _wrap(func(*values[0], **values[1]), jets)
    check_forward_rule(func, args, kwargs)
    load_forward_rules()
    with forward_ad.dual_level():
        duals = tree_map(lambda a: _dual(a) if isinstance(a, Jet) else a, (args, kwargs))
        pairs = _unpacked(func(*duals[0], **duals[1]))

    def wrap(pair: Any) -> Any:
        if not isinstance(pair, forward_ad.UnpackedDualTensor):
            return pair
        return pair.primal if pair.tangent is None and not pair.primal.requires_grad else Jet(*pair)

    return _alias(tree_map(wrap, pairs, is_leaf=_is_pair), jets)


def _is_pair(x: Any) -> bool:
    return isinstance(x, forward_ad.UnpackedDualTensor)


def _unpacked(out: Any) -> Any:
    return tree_map(lambda o: forward_ad.unpack_dual(o) if isinstance(o, Tensor) else o, out)


def _dual(jet: Jet) -> Tensor:
    return jet.primal if jet.tangent is None else forward_ad.make_dual(jet.primal, jet.tangent)


def _wrap(out: Any, jets: list[Jet]) -> Any:
    return _alias(tree_map(lambda o: Jet(o) if isinstance(o, Tensor) and o.requires_grad else o, out), jets)


def _alias(out: Any, jets: list[Jet]) -> Any:
    """Remember who shares memory with whom: writing into one of them would have to show in the other."""
    for o in tree_leaves(out):
        if isinstance(o, Jet):
            for j in jets:
                if o._p.untyped_storage()._cdata == j._p.untyped_storage()._cdata:
                    mark_aliases(o, j)
    return out


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in its jets: the same operation on the value and on the tangent."""
    jets = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Jet)]
    if len(jets) != 1 or not args or jets[0] is not args[0]:
        return _forward_mode(func, args, kwargs)
    (x,) = jets
    p = func(x.primal, *args[1:], **kwargs)
    if p is x.primal:
        return x
    return _alias(Jet(p, None if x.tangent is None else func(x.tangent, *args[1:], **kwargs)), jets)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view, or a copy where the faster memory layout does not allow one; either way the two count as sharing."""
    try:
        out = _linear(func, args, kwargs)
    except RuntimeError:
        if func is not T.view:
            raise
        out = _linear(T.reshape, args, kwargs)
    source = args[0] if args else kwargs.get("input")
    if isinstance(out, Jet) and isinstance(source, Jet) and out is not source:
        mark_aliases(out, source)
    return out


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedError(f"{getattr(func, '__name__', func)} bypasses autograd")


def _pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for operations with several outputs (chunk, split, unbind)."""
    x = args[0]
    p = func(x.primal, *args[1:], **kwargs)
    t = [None] * len(p) if x.tangent is None else func(x.tangent, *args[1:], **kwargs)
    return _alias(tuple(map(Jet, p, t)), [x])


def _iterate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return iter(_pieces(torch.unbind, args, {}))


def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cat and stack."""
    parts, *rest = args if args else (kwargs.pop("tensors"),)
    p = func([get_primal(x) for x in parts], *rest, **kwargs)
    if all(not isinstance(x, Jet) or x.tangent is None for x in parts):
        return Jet(p)
    tangents = [
        x.tangent if isinstance(x, Jet) and x.tangent is not None else torch.zeros_like(get_primal(x)) for x in parts
    ]
    return Jet(p, func(tangents, *rest, **kwargs))


def _weighted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convolutions and linear layers: the tangent passes through the same weights, without the bias."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias, rest = given.pop("input"), given.pop("weight"), given.pop("bias", None), args[3:]
    if not isinstance(x, Jet) or isinstance(weight, Jet) or isinstance(bias, Jet):
        return _forward_mode(func, args, kwargs)
    plan = plan_convolution(weight, rest, given) if func in CONVOLUTIONS and x.dim() == weight.dim() else None
    if plan is not None:
        return Jet(*FrozenConv.apply(x.primal, x.tangent, weight, bias, plan))
    p = func(x.primal, weight, bias, *rest, **given)
    return Jet(p, None if x.tangent is None else func(x.tangent, weight, None, *rest, **given))


def apply_gate(x: Tensor, by: Gate) -> Jet:
    """Multiply every channel by its gate (all ones, so nothing but the tangents and the gradients change)."""
    jet = x if isinstance(x, Jet) else Jet(_fast_layout(x))
    before = jet.pending or PendingOps()
    if before.gate is not None or before.residual is not None or (before.scale is not None and by.axis % x.dim() != 1):
        flush_pending(jet)
        before = PendingOps()
    return Jet(jet._p, jet._t, replace(before, gate=by, gate_first=before.scale is None))


def _fast_layout(x: Tensor) -> Tensor:
    """Channels last where convolutions prefer it (on CPUs, and on GPUs that may use their matrix units), else first."""
    if x.dim() != 4 or x.shape[1] == 1:
        return x
    matrix_units = torch.backends.cudnn.allow_tf32 or x.dtype in (torch.float16, torch.bfloat16)
    last = not x.is_cuda or matrix_units
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add two jets; one that is still pending takes the other along as its residual."""
    a, b, *rest = args
    both = isinstance(a, Jet) and isinstance(b, Jet) and a.shape == b.shape and a.dtype == b.dtype
    if not both or rest or kwargs:
        return _forward_mode(func, args, kwargs)
    if a.pending is None or a.pending.residual is not None:
        a, b = b, a
    if a.pending is None or a.pending.residual is not None or a is b:
        tangents = [x.tangent for x in (a, b) if x.tangent is not None]
        return Jet(a.primal + b.primal, sum(tangents[1:], tangents[0]) if tangents else None)
    # A jet of its own: an in-place operation may give b's name to something else before a is settled.
    return Jet(a._p, a._t, replace(a.pending, residual=Jet(b.primal, b.tangent)))


def _relu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    pending = x.pending or PendingOps()
    return Jet(*apply_pending(x._p, x._t, pending, True))


def _max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tangent of a maximum is the tangent of the winner."""
    x, *rest = args
    p, winners = F.max_pool2d_with_indices(x.primal, *rest, **kwargs)
    t = None if x.tangent is None else x.tangent.flatten(-2).gather(-1, winners.flatten(-2)).view_as(p)
    return Jet(p, t)


def _softmax_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Jet, int]:
    """The input and the dimension, which torch chooses by itself where none is named."""
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    x, dim = given["input"], given.get("dim")
    return x, dim if dim is not None else 0 if x.dim() in (0, 1, 3) else 1


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``s' = s (t - <s, t>)``; torch's own rule for the tangent cannot be differentiated backward."""
    x, dim = _softmax_dim(args, kwargs)
    p = func(x.primal, *args[1:], **kwargs)
    if x.tangent is None:
        return Jet(p)
    return Jet(p, p * (x.tangent - (p * x.tangent).sum(dim, keepdim=True)))


def _log_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``l' = t - <softmax, t>``."""
    x, dim = _softmax_dim(args, kwargs)
    p = func(x.primal, *args[1:], **kwargs)
    return Jet(p) if x.tangent is None else Jet(p, x.tangent - (p.exp() * x.tangent).sum(dim, keepdim=True))


def _logsumexp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``<softmax, t>``."""
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    x, dim = given["input"], given["dim"]
    p = func(x.primal, *args[1:], **kwargs)
    if x.tangent is None:
        return Jet(p)
    full = p if given.get("keepdim") else x.primal.logsumexp(dim, keepdim=True)
    share = (x.primal - full).exp()
    return Jet(p, (share * x.tangent).sum(dim, keepdim=bool(given.get("keepdim"))))


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in the log-softmax: labels pick from it, distributions weigh it."""
    given = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
    x, target = given.pop("input"), given.pop("target")
    smoothing = given.pop("label_smoothing", 0.0)
    reduction = given.pop("reduction", "mean")
    classes = 1 if x.dim() > 1 else 0
    # Torch's backward of the loss over several positions takes no channels_last.
    logs = _log_softmax(torch.log_softmax, (x.contiguous() if x.dim() > 2 else x, classes), {})
    given.pop("size_average", None), given.pop("reduce", None)
    if not smoothing and not target.is_floating_point():
        return _linear(F.nll_loss, (logs, target), given | {"reduction": reduction})
    ignored = not target.is_floating_point() and bool((target == given.get("ignore_index", -100)).any())
    if given.get("weight") is not None or ignored:
        raise UnsupportedError("cross_entropy with smoothed labels and class weights or ignored labels")
    if not target.is_floating_point():
        target = F.one_hot(target, x.shape[classes]).movedim(-1, classes).to(x.dtype)
    share = target * (1 - smoothing) + smoothing / x.shape[classes]
    values = -(logs * share).sum(classes)
    return values if reduction == "none" else values.sum() if reduction == "sum" else values.mean()


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``softmax(q k^T / sqrt(d) + mask) v``, step by step (the fused kernels have no second derivatives)."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if given.get("dropout_p"):
        raise UnsupportedError("attention with dropout")
    if given.get("enable_gqa"):
        repeat = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeat, -3), v.repeat_interleave(repeat, -3)
    scale = given.get("scale") or q.shape[-1] ** -0.5
    scores = torch.matmul(q * scale, k.transpose(-2, -1))
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return torch.matmul(torch.softmax(scores, -1), v)
    # A query that may look nowhere sees nothing: its row of weights is zero, not 0 / 0.
    allowed = mask if mask.dtype == torch.bool else ~mask.isneginf()
    blind = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | blind), float("-inf"))
    scores = scores if mask.dtype == torch.bool else scores + mask.masked_fill(~allowed, 0)
    return torch.matmul(torch.softmax(scores, -1).masked_fill(blind, 0), v)


def _hardsigmoid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (args[0] / 6 + 0.5).clamp(0, 1)


def _glu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    a, b = given["input"].chunk(2, given.get("dim", -1))
    return a * torch.sigmoid(b)


def _mse_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "target"), args, strict=False)) | kwargs
    gap = given["input"] - given["target"]
    how = given.get("reduction", "mean")
    return gap * gap if how == "none" else (gap * gap).sum() if how == "sum" else (gap * gap).mean()


def _run_python_body(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function written in Python: run it on the jets, as if it had never asked whether they are ordinary tensors."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    kept = {n: getattr(F, n) for n in names}
    try:
        for n in names:
            setattr(F, n, lambda *_: False)
        return func(*args, **kwargs)
    finally:
        for n, original in kept.items():
            setattr(F, n, original)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("training", True if len(args) < 3 else args[2]):
        raise UnsupportedError("dropout in train mode")
    return args[0]


def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    return (_linear if not given.get("value") else _forward_mode)(func, args, kwargs)


CONVOLUTIONS = frozenset({torch.conv1d, torch.conv2d, torch.conv3d})
TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
TABLE: dict[Any, Rule] = {
    None: _forward_mode,
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED, F.linear), _weighted),
    F.batch_norm: apply_batch_norm,
    **dict.fromkeys((F.relu, torch.relu, T.relu), _relu),
    **dict.fromkeys((torch.add, T.add, T.__add__, T.__radd__), _add),
    **dict.fromkeys((torch.cat, torch.concat, torch.stack), _join),
    **dict.fromkeys((torch.chunk, T.chunk, torch.split, T.split, torch.unbind, T.unbind), _pieces),
    T.__iter__: _iterate,
    **dict.fromkeys(
        (T.view, T.view_as, T.reshape, torch.reshape, T.reshape_as, T.flatten, torch.flatten, T.unflatten, T.contiguous,
         torch.unflatten, T.squeeze, torch.squeeze, T.unsqueeze, torch.unsqueeze, T.permute, torch.permute, T.transpose,
         torch.transpose, T.expand, T.expand_as, T.movedim, torch.movedim, T.__getitem__, T.narrow, torch.narrow),
        _view,
    ),
    getattr(T, "data").__get__: _refuse,  # noqa: B009
    torch.max_pool2d: _max_pool,
    **dict.fromkeys((F.softmax, torch.softmax, T.softmax), _softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, T.log_softmax), _log_softmax),
    **dict.fromkeys((torch.logsumexp, T.logsumexp), _logsumexp),
    F.layer_norm: apply_layer_norm,
    F.group_norm: apply_group_norm,
    F.cross_entropy: _cross_entropy,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _run_python_body,
    F.hardsigmoid: _hardsigmoid,
    F.glu: _glu,
    F.mse_loss: _mse_loss,
    **dict.fromkeys((torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), _dropout),
    F.pad: _pad,
    **dict.fromkeys(
        (T.mean, torch.mean, T.sum, torch.sum, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.roll,
         T.roll, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.pixel_shuffle, T.__neg__,
         T.float, T.double, T.to, T.clone, T.type_as),
        _linear,
    ),
}  # fmt: skip
RULES.update(TABLE)
