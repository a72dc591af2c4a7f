"""Values that carry their tangent: one forward pass computes f and df, ordinary backward differentiates both.

A ``Jet`` is a pair (p, t) that looks like the tensor p. Give every gate g a tangent d and let the loss of the network
be the jet (L, L'), with L' = sum_s d_s dL/dg_s. Then

    d L' / d g = H d        and        d L' / d d = dL/dg,

so a single backward pass from L' yields the first- and the second-order term together. Linear operations run on p and
on t as ordinary kernels; what costs memory traffic (normalisation, gate, residual add, ReLU) is put off and done in one
step, ``settle``; anything else goes through torch's own forward-mode rule for that one operation. A jet without
tangents (t = None) takes the same short cuts for plain gate gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map


class Unsupported(Exception):
    """This computation does not fit jets; another exact way must be taken."""


@dataclass(frozen=True)
class Gate:
    """One factor per channel, all ones: ``values`` (C,) or, per example, (N, C), and its ``tangent`` (C,) or None."""

    values: Tensor
    tangent: Tensor | None
    axis: int


@dataclass(frozen=True)
class Pending:
    """What is still to be done to a jet, channel by channel: gate, affine map (or the other way round), add."""

    scale: Tensor | None = None  # (C,)
    shift: Tensor | None = None  # (C,)
    gate: Gate | None = None
    gate_first: bool = True  # the gate acts before scale and shift
    residual: Jet | None = None


class Jet(torch.Tensor):
    """A value and its tangent; see the module's docstring."""

    _p: Tensor
    _t: Tensor | None
    pending: Pending | None
    aliased: bool

    @staticmethod
    def __new__(cls, p: Tensor, t: Tensor | None = None, pending: Pending | None = None) -> Jet:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device
        )
        self._p, self._t, self.pending, self.aliased = p, t, pending, False
        return self  # type: ignore[no-any-return]

    @property
    def p(self) -> Tensor:
        """The value, with everything pending done."""
        settle(self)
        return self._p

    @property
    def t(self) -> Tensor | None:
        """The tangent, with everything pending done; None stands for zero."""
        settle(self)
        return self._t

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Jet({tuple(self._p.shape)}, tangent={self._t is not None}, pending={self.pending is not None})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Inside torch.no_grad or a custom autograd.Function the link to the gates would be lost without a word.
        if not torch.is_grad_enabled():
            raise Unsupported("torch.no_grad or a custom autograd.Function in forward")
        target, func, kwargs = _out_of_place(func, args, kwargs)
        result = RULES.get(func, _any)(func, args, kwargs)
        if target is None:
            return result
        return _rebind(target, result)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unsupported(f"{func} reached a jet below torch functions")


T = torch.Tensor
METADATA: frozenset[Any] = frozenset(
    getattr(T, n).__get__
    for n in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_mps", "is_quantized",
              "requires_grad", "is_meta", "is_nested", "names", "is_mkldnn", "is_cpu", "is_xpu", "itemsize")
    if hasattr(T, n)
) | {T.size, T.dim, T.ndimension, T.numel, T.nelement, T.stride, T.is_contiguous, T.is_floating_point, T.is_complex,
     T.__len__, T.element_size, T.get_device, T.is_signed, T.__hash__, T.storage_offset, torch.is_floating_point,
     torch.is_complex, torch.numel}  # fmt: skip


# In-place operations: jets are values, so compute the result and let the name stand for it --------------------------


def _out_of_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """(the tensor written to, or None; the function that only computes; its keyword arguments)."""
    if kwargs.get("inplace"):
        return args[0], func, {**kwargs, "inplace": False}
    name = getattr(func, "__name__", "")
    if func in (T.__setitem__, T.copy_, T.set_, T.resize_) or kwargs.get("out") is not None:
        raise Unsupported(f"{name} writes into part of a tensor")
    if name.startswith("__i") and hasattr(T, "__" + name[3:]):  # __iadd__ -> __add__; __invert__ has no twin
        return args[0], getattr(T, "__" + name[3:]), kwargs
    if name.endswith("_") and not name.endswith("__"):
        plain = getattr(T, name[:-1], None) or getattr(torch, name[:-1], None) or getattr(F, name[:-1], None)
        if plain is None:
            raise Unsupported(f"in-place {name}")
        return args[0], plain, kwargs
    return None, func, kwargs


def _rebind(target: Any, result: Any) -> Jet:
    if not isinstance(target, Jet) or not isinstance(result, Jet) or target.shape != result.shape:
        raise Unsupported("an in-place operation that changes what is no jet, or its shape")
    if target.aliased:
        raise Unsupported("an in-place operation on a view")
    target._p, target._t, target.pending = result._p, result._t, result.pending
    return target


# Rules: how an operation acts on jets. One entry each; everything else goes through ``_any`` ------------------------

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _any(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's own forward-mode rule for this one operation, once it has proved itself."""
    jets = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Jet)]
    if all(j.t is None for j in jets):
        values = tree_map(_value, (args, kwargs))
        return _wrap(func(*values[0], **values[1]), jets)
    require_trust(func, args, kwargs)
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
    return jet.p if jet.t is None else forward_ad.make_dual(jet.p, jet.t)


def _value(a: Any) -> Any:
    return a.p if isinstance(a, Jet) else a


def _wrap(out: Any, jets: list[Jet]) -> Any:
    return _alias(tree_map(lambda o: Jet(o) if isinstance(o, Tensor) and o.requires_grad else o, out), jets)


def _alias(out: Any, jets: list[Jet]) -> Any:
    """Remember who shares memory with whom: writing into one of them would have to show in the other."""
    for o in tree_leaves(out):
        if isinstance(o, Jet):
            for j in jets:
                if o._p.untyped_storage()._cdata == j._p.untyped_storage()._cdata:
                    o.aliased = j.aliased = True
    return out


# Some of torch's forward-mode rules (layer norm, softmax) compute the right tangent but cannot be differentiated
# backward, or, worse, give a wrong result when they are. So each operation is tried once, on the data at hand: the
# derivative of its tangent, backward over forward, must equal the tangent of its derivative, forward over backward.
TRUST: dict[Any, bool] = {}


def require_trust(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``Unsupported`` unless torch's forward-mode rule for this call can be differentiated backward."""
    settings = tree_map(lambda a: "tensor" if isinstance(a, Tensor) else repr(a), (args, kwargs))
    key = (func, str(settings))
    if key not in TRUST:
        TRUST[key] = _mixed_derivatives_agree(func, args, kwargs)
    if not TRUST[key]:
        raise Unsupported(f"torch's forward-mode rule for {getattr(func, '__name__', func)} cannot be differentiated")


def _mixed_derivatives_agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    moving = {id(a): a for a in tree_leaves((args, kwargs)) if isinstance(a, Jet) and a.t is not None}
    places = {key: i for i, key in enumerate(moving)}
    p = [j.p.detach() for j in moving.values()]
    t = [j.t.detach() for j in moving.values() if j.t is not None]

    def run(values: list[Tensor]) -> list[Tensor]:
        swap = lambda a: values[places[id(a)]] if id(a) in places else _value(a)  # noqa: E731
        swapped = tree_map(swap, (args, kwargs))
        return [
            o for o in tree_leaves(func(*swapped[0], **swapped[1])) if isinstance(o, Tensor) and o.is_floating_point()
        ]

    def weigh(outputs: list[Tensor]) -> Tensor:
        """Any fixed weights that treat no two outputs alike."""
        weights = [torch.arange(o.numel(), device=o.device).cos().to(o.dtype).view(o.shape) for o in outputs]
        return torch.stack([(o * w).sum() for o, w in zip(outputs, weights, strict=True)]).sum()

    try:
        if not run(p):
            return True  # a comparison, an index: nothing to differentiate
        backward = torch.func.grad(lambda v: weigh(torch.func.jvp(run, (v,), (t,))[1]))(p)
        _, forward = torch.func.jvp(torch.func.grad(lambda v: weigh(run(v))), (p,), (t,))
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    ahead, back = (torch.cat([x.flatten() for x in xs]) for xs in (forward, backward))
    loose = {torch.float64: 1e-6, torch.float32: 1e-2}.get(back.dtype, 0.2)
    return bool((ahead - back).norm() <= loose * (ahead.norm() + back.norm()))


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in its jets: the same operation on the value and on the tangent."""
    jets = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Jet)]
    if len(jets) != 1 or not args or jets[0] is not args[0]:
        return _any(func, args, kwargs)
    (x,) = jets
    p = func(x.p, *args[1:], **kwargs)
    if p is x.p:
        return x
    return _alias(Jet(p, None if x.t is None else func(x.t, *args[1:], **kwargs)), jets)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view that the faster memory layout does not allow is a copy here; jets are values, so nobody can tell."""
    try:
        return _linear(func, args, kwargs)
    except RuntimeError:
        return _linear(T.reshape, args, kwargs)


def _pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for operations with several outputs (chunk, split, unbind)."""
    x = args[0]
    p = func(x.p, *args[1:], **kwargs)
    t = [None] * len(p) if x.t is None else func(x.t, *args[1:], **kwargs)
    return _alias(tuple(map(Jet, p, t)), [x])


def _iterate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return iter(_pieces(torch.unbind, args, {}))


def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cat and stack."""
    parts, *rest = args if args else (kwargs.pop("tensors"),)
    p = func([_value(x) for x in parts], *rest, **kwargs)
    if all(not isinstance(x, Jet) or x.t is None for x in parts):
        return Jet(p)
    tangents = [x.t if isinstance(x, Jet) and x.t is not None else torch.zeros_like(_value(x)) for x in parts]
    return Jet(p, func(tangents, *rest, **kwargs))


def _weighted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convolutions and linear layers: the tangent passes through the same weights, without the bias."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias, rest = given.pop("input"), given.pop("weight"), given.pop("bias", None), args[3:]
    if not isinstance(x, Jet) or isinstance(weight, Jet) or isinstance(bias, Jet):
        return _any(func, args, kwargs)
    apply = _frozen(func, weight, rest, given) if func in CONVOLUTIONS and not weight.requires_grad else None
    apply = apply or (lambda v, b: func(v, weight, b, *rest, **given))
    return Jet(apply(x.p, bias), None if x.t is None else apply(x.t, None))


def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In eval mode a batch norm is an affine map of each channel: put it off."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, mean, var = given["input"], given["running_mean"], given["running_var"]
    if given.get("training") or not isinstance(x, Jet) or mean is None:
        raise Unsupported("a batch norm in train mode")
    scale = (var + given.get("eps", 1e-5)).rsqrt()
    scale = scale if given.get("weight") is None else scale * given["weight"]
    shift = -mean * scale
    shift = shift if given.get("bias") is None else shift + given["bias"]
    if scale.requires_grad:
        raise Unsupported("a batch norm with trainable parameters")
    before = x.pending or Pending()
    if before.scale is not None or before.residual is not None or (before.gate and before.gate.axis % x.dim() != 1):
        settle(x)
        before = Pending()
    return Jet(x._p, x._t, replace(before, scale=scale.to(x.dtype), shift=shift.to(x.dtype)))


def gate(x: Tensor, by: Gate) -> Jet:
    """Multiply every channel by its gate (all ones, so nothing but the tangents and the gradients change)."""
    jet = x if isinstance(x, Jet) else Jet(_fast_layout(x))
    before = jet.pending or Pending()
    if before.gate is not None or before.residual is not None or (before.scale is not None and by.axis % x.dim() != 1):
        settle(jet)
        before = Pending()
    return Jet(jet._p, jet._t, replace(before, gate=by, gate_first=before.scale is None))


def _fast_layout(x: Tensor) -> Tensor:
    """Channels last, where convolutions prefer it: on CPUs, and on GPUs that may use their matrix units."""
    matrix_units = torch.backends.cudnn.allow_tf32 or x.dtype in (torch.float16, torch.bfloat16)
    if x.dim() != 4 or x.shape[1] == 1 or (x.is_cuda and not matrix_units):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add two jets; one that is still pending takes the other along as its residual."""
    a, b, *rest = args
    both = isinstance(a, Jet) and isinstance(b, Jet) and a.shape == b.shape and a.dtype == b.dtype
    if not both or rest or kwargs:
        return _any(func, args, kwargs)
    if a.pending is None or a.pending.residual is not None:
        a, b = b, a
    if a.pending is None or a.pending.residual is not None or a is b:
        tangents = [x.t for x in (a, b) if x.t is not None]
        return Jet(a.p + b.p, sum(tangents[1:], tangents[0]) if tangents else None)
    # A jet of its own: an in-place operation may give b's name to something else before a is settled.
    return Jet(a._p, a._t, replace(a.pending, residual=Jet(b.p, b.t)))


def _relu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    pending = x.pending or Pending()
    return Jet(*_finish(x._p, x._t, pending, True))


def _max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tangent of a maximum is the tangent of the winner."""
    x, *rest = args
    p, winners = F.max_pool2d_with_indices(x.p, *rest, **kwargs)
    t = None if x.t is None else x.t.flatten(-2).gather(-1, winners.flatten(-2)).view_as(p)
    return Jet(p, t)


def _layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    dims = tuple(range(-len(given["normalized_shape"]), 0))
    out = _standardised(given["input"], dims, given.get("eps", 1e-5))
    out = out if given.get("weight") is None else out * given["weight"]
    return out if given.get("bias") is None else out + given["bias"]


def _group_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x = given["input"]
    grouped = _standardised(x.reshape(x.shape[0], given["num_groups"], -1), (-1,), given.get("eps", 1e-5))
    out = grouped.reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    out = out if given.get("weight") is None else out * given["weight"].view(shape)
    return out if given.get("bias") is None else out + given["bias"].view(shape)


def _standardised(x: Any, dims: tuple[int, ...], eps: float) -> Any:
    centred = x - x.mean(dims, keepdim=True)
    return centred * ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt()


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``s' = s (t - <s, t>)``; torch's own rule for the tangent cannot be differentiated backward."""
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    x, dim = given["input"], given.get("dim", -1)
    p = func(*(x.p, *args[1:]), **kwargs)
    if x.t is None:
        return Jet(p)
    return Jet(p, p * (x.t - (p * x.t).sum(dim, keepdim=True)))


def _log_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``l' = t - <softmax, t>``."""
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    x, dim = given["input"], given.get("dim", -1)
    p = func(*(x.p, *args[1:]), **kwargs)
    return Jet(p) if x.t is None else Jet(p, x.t - (p.exp() * x.t).sum(dim, keepdim=True))


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in the log-softmax: labels pick from it, distributions weigh it."""
    given = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
    x, target = given.pop("input"), given.pop("target")
    smoothing = given.pop("label_smoothing", 0.0)
    reduction = given.pop("reduction", "mean")
    classes = 1 if x.dim() > 1 else 0
    logs = _log_softmax(torch.log_softmax, (x, classes), {})
    given.pop("size_average", None), given.pop("reduce", None)
    if not smoothing and not target.is_floating_point():
        return _linear(F.nll_loss, (logs, target), given | {"reduction": reduction})
    if given.get("weight") is not None or (smoothing and not target.is_floating_point() and bool((target < 0).any())):
        raise Unsupported("cross_entropy with class weights and smoothed labels")
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
        raise Unsupported("attention with dropout")
    if given.get("enable_gqa"):
        repeat = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeat, -3), v.repeat_interleave(repeat, -3)
    scale = given.get("scale") or q.shape[-1] ** -0.5
    scores = torch.matmul(q * scale, k.transpose(-2, -1))
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(torch.softmax(scores, -1), v)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("training", True if len(args) < 3 else args[2]):
        raise Unsupported("dropout in train mode")
    return args[0]


def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    return (_linear if not given.get("value") else _any)(func, args, kwargs)


CONVOLUTIONS = frozenset({torch.conv1d, torch.conv2d, torch.conv3d})
TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
RULES: dict[Any, Rule] = {
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED, F.linear), _weighted),
    F.batch_norm: _batch_norm,
    **dict.fromkeys((F.relu, torch.relu, T.relu), _relu),
    **dict.fromkeys((torch.add, T.add, T.__add__, T.__radd__), _add),
    **dict.fromkeys((torch.cat, torch.concat, torch.stack), _join),
    **dict.fromkeys((torch.chunk, T.chunk, torch.split, T.split, torch.unbind, T.unbind), _pieces),
    T.__iter__: _iterate,
    T.view: _view,
    torch.max_pool2d: _max_pool,
    **dict.fromkeys((F.softmax, torch.softmax, T.softmax), _softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, T.log_softmax), _log_softmax),
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.cross_entropy: _cross_entropy,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), _dropout),
    F.pad: _pad,
    **dict.fromkeys(
        (torch.flatten, T.flatten, T.reshape, torch.reshape, T.permute, torch.permute, T.transpose, T.contiguous,
         torch.transpose, T.unsqueeze, torch.unsqueeze, T.squeeze, torch.squeeze, T.__getitem__, T.mean, torch.mean, T.sum,
         torch.sum, T.expand, T.movedim, torch.movedim, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.roll, T.roll,
         F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.pixel_shuffle, torch.neg, T.__neg__,
         T.float, T.double, T.to, T.clone, T.type_as),
        _linear,
    ),
}  # fmt: skip


# The pending work in one step, forward and backward ------------------------------------------------------------------


def settle(jet: Jet) -> None:
    """Do what is pending; the jet is then plain (p, t)."""
    if jet.pending is not None:
        jet._p, jet._t = _finish(jet._p, jet._t, jet.pending, False)
        jet.pending = None


def _finish(p: Tensor, t: Tensor | None, todo: Pending, relu: bool) -> tuple[Tensor, Tensor | None]:
    rp, rt = (todo.residual._p, todo.residual._t) if todo.residual is not None else (None, None)
    g, d, axis = (todo.gate.values, todo.gate.tangent, todo.gate.axis) if todo.gate else (None, None, 1)
    plan = Plan(axis % max(p.dim(), 1), todo.gate_first, relu)
    a, da = Epilogue.apply(p, t, rp, rt, g, d, todo.scale, todo.shift, plan)
    return a, da


@dataclass(frozen=True)
class Plan:
    """How ``Epilogue`` reads its arguments."""

    axis: int
    gate_first: bool
    relu: bool


class Epilogue(torch.autograd.Function):
    """``y = gate . (scale c + shift) + r`` (or the gate inside), ``a = relu(y)``, and the tangents of both.

    Channel by channel, with c' = dc and gate = 1 carrying the tangent d:
        v = scale c + shift                v' = scale c'
        y = v + r                          y' = v' + d z + r'       z = v, or scale c for a gate that comes first
        a = max(y, 0)                      a' = [y > 0] y'
    Backward receives the cotangents of a (call it A) and of a' (call it B), masks both by [y > 0], and returns
        c: scale (A + d B)   c': scale B   r: A   r': B   gate: sum z A + v' B   d: sum z B
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        c: Tensor,
        dc: Tensor | None,
        r: Tensor | None,
        dr: Tensor | None,
        g: Tensor | None,
        d: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        at = _shaper(c, plan.axis)
        v = c if scale is None else torch.addcmul(at(shift), at(scale), c)
        y, dy = v, dc if dc is None or scale is None else dc * at(scale)
        if d is not None:
            z = c * at(scale) if plan.gate_first and scale is not None else v
            dy = _plus_times(dy, z, at(d))
        if r is not None:
            y = y + r if y is c else y.add_(r)
            dy = dr if dy is None else dy if dr is None else dy + dr if dy is dc else dy.add_(dr)
        if plan.relu:
            y = y.relu() if y is c else y.relu_()
            dy = None if dy is None else torch.ops.aten.threshold_backward(dy, y, 0)
        # Where a ReLU lets nothing else in, its output tells all that backward needs: y = v and y' there.
        compact = plan.relu and r is None and g is not None
        base, dbase = (y, dy) if compact else (c, dc) if g is not None else (None, None)
        ctx.save_for_backward(base, dbase, y if plan.relu else None, g, d, scale, shift)
        ctx.plan, ctx.compact, ctx.residual = plan, compact, (r is not None, dr is not None)
        ctx.has_dc = dc is not None
        if y is c:
            y = c.view_as(c)
        if dy is not None and (dy is dc or dy is dr):
            dy = dy.view_as(dy)
        return y, dy

    @staticmethod
    def backward(ctx: Any, A: Tensor | None, B: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        base, dbase, a, g, d, scale, shift = ctx.saved_tensors
        plan = ctx.plan
        like = A if A is not None else B
        assert like is not None
        if a is not None:
            A = None if A is None else torch.ops.aten.threshold_backward(A, a, 0)
            B = None if B is None else torch.ops.aten.threshold_backward(B, a, 0)
        at = _shaper(like, plan.axis)
        dg, dd = (None, None) if g is None else _gate_sums(ctx, A, B, base, dbase, g, d, scale, shift)
        c = A if d is None or B is None else _plus_times(A, B, at(d))
        c = c if c is None or scale is None else c * at(scale)
        dc = None if not ctx.has_dc or B is None else B if scale is None else B * at(scale)
        r, dr = (A if ctx.residual[0] else None), (B if ctx.residual[1] else None)
        return c, dc, r, dr, dg, dd, None, None, None


def _gate_sums(
    ctx: Any, A: Tensor | None, B: Tensor | None, base: Tensor, dbase: Tensor | None, g: Tensor, d: Tensor | None,
    scale: Tensor | None, shift: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(sum z A + v' B, sum z B) over every channel, from ``base`` = c, or = a where ``ctx.compact``."""
    plan, each = ctx.plan, g.dim() == 2

    def sums(x: Tensor | None, y: Tensor | None) -> Tensor | float:
        return 0.0 if x is None or y is None else channel_sums(x * y, plan.axis, each)

    def total(x: Tensor | None) -> Tensor | float:
        return 0.0 if x is None else channel_sums(x, plan.axis, each)

    zA, zB, tB = sums(base, A), sums(base, B), sums(dbase, B)
    affine = scale is not None
    if ctx.compact:
        # base = v: z is v, or v - shift for a gate that comes first; dbase = v' + d z.
        if affine and plan.gate_first:
            zA, zB = zA - shift * total(A), zB - shift * total(B)
        tB = tB if d is None else tB - d * zB
    elif affine:
        # base = c: z is scale c, plus shift for a gate that comes last; dbase = c'.
        zA, zB, tB = scale * zA, scale * zB, scale * tB
        if not plan.gate_first:
            zA, zB = zA + shift * total(A), zB + shift * total(B)
    dg = zA + tB
    return _as_tensor(dg, g), None if d is None else _as_tensor(zB, d)


def _as_tensor(x: Tensor | float, like: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else torch.zeros_like(like)


def _plus_times(x: Tensor | None, y: Tensor, factor: Tensor) -> Tensor:
    """``x + y * factor``; x may be missing."""
    return y * factor if x is None else torch.addcmul(x, y, factor)


def _shaper(x: Tensor, axis: int) -> Callable[[Tensor | None], Any]:
    """Per-channel values, shaped to broadcast along ``axis`` of x."""
    shape = [1] * x.dim()

    def at(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        shape[axis] = values.numel()
        return values.view(shape)

    return at


def channel_sums(x: Tensor, axis: int, each: bool) -> Tensor:
    """Sum over everything but the channels: (C,), or per example (N, C).

    As a product with a vector of ones: on the layouts that occur it reads memory once, at full speed.
    """
    channels = x.shape[axis]
    last = axis == x.dim() - 1
    if not last and x.dim() > 2 and x.stride(axis) == 1 and not x.is_contiguous():  # channels_last
        x, last = x.movedim(axis, -1), True
    if last:
        if not each:
            rows = x.reshape(-1, channels)
            return rows.new_ones(rows.shape[0]) @ rows
        rows = x.reshape(x.shape[0], -1, channels)
        return rows[:, 0] if rows.shape[1] == 1 else rows.sum(1)
    if axis != 1:
        x = x.movedim(axis, 1)
    rows = x.reshape(x.shape[0] * channels, -1)
    each_channel = (rows @ rows.new_ones(rows.shape[1])).view(-1, channels)
    return each_channel if each else each_channel.sum(0)


# Convolutions with frozen weights -------------------------------------------------------------------------------------


def _frozen(func: Any, weight: Tensor, rest: tuple[Any, ...], given: dict[str, Any]) -> Callable[..., Tensor] | None:
    """The convolution as a function that keeps no input for backward, or None where its arguments are unusual."""
    options = dict(zip(("stride", "padding", "dilation", "groups"), rest, strict=False)) | given
    if isinstance(options.get("padding"), str):
        return None
    dims = weight.dim() - 2
    plan = ConvPlan(
        *(_tuple(options.get(k, v), dims) for k, v in (("stride", 1), ("padding", 0), ("dilation", 1))),
        options.get("groups", 1),
    )
    return lambda v, b: FrozenConv.apply(v, weight, b, plan)


def _tuple(v: Any, n: int) -> tuple[int, ...]:
    return (v,) * n if isinstance(v, int) else tuple(v) * (n if len(v) == 1 else 1)


@dataclass(frozen=True)
class ConvPlan:
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class FrozenConv(torch.autograd.Function):
    """A convolution whose weights need no gradient: backward needs no input, so none is kept (half the memory)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)
        ctx.plan, ctx.shape = plan, x.shape
        ctx.format = torch.channels_last if x.dim() == 4 and _channels_last(x) else torch.contiguous_format
        zeros = (0,) * len(plan.stride)
        return torch.convolution(x, weight, bias, plan.stride, plan.padding, plan.dilation, False, zeros, plan.groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        plan = ctx.plan
        # Only the shape and the layout of the input matter here; its memory is never read.
        x = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format)
        zeros = (0,) * len(plan.stride)
        wanted = (True, False, False)
        grad_x, _, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, plan.stride, plan.padding, plan.dilation, False, zeros, plan.groups, wanted
        )
        return grad_x, None, None, None


def _channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
