"""Run the user's own forward once and follow every channel through it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_leaves

from sosp.flow.graph import OPAQUE, ZERO, Combine, Cut, Dense, Graph, Ids, Pin, Record, Slices
from sosp.flow.labels import MOVES, RESHAPES, SAME, Labels, moved, settle, vector
from sosp.flow.probe import Call, Sliced, copied, sliced
from sosp.layers import is_norm, layer_type
from sosp.scatter import Scatter

CONVOLUTIONS = {"conv1d": 1, "conv2d": 1, "conv3d": 1}
TRANSPOSED = {"conv_transpose1d": 1, "conv_transpose2d": 1, "conv_transpose3d": 1}
DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout".split()
)
COMPOSITE = frozenset({"multi_head_attention_forward"})  # made of ops that are followed one by one
NORMALISATIONS = frozenset("batch_norm instance_norm".split())
VALUES = frozenset("item tolist numpy __bool__ __int__ __float__ __index__ __contains__ equal allclose".split())
TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parent.parent)

_names: dict[Any, str] = {}


def name_of(func: Callable[..., Any]) -> str:
    """``relu`` for torch.relu_, Tensor.relu, F.relu; the property's name for a getter."""
    try:
        found = _names.get(func)
    except TypeError:
        return getattr(func, "__name__", str(func))
    if found is None:
        parts = (resolve_name(func) or getattr(func, "__name__", str(func))).split(".")
        found = parts[-2] if parts[-1] == "__get__" and len(parts) > 1 else parts[-1]
        if not found.startswith("__"):
            found = found.rstrip("_")
        _names[func] = found
    return found


def user_line() -> str:
    """``file.py:12``: the innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, OURS, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


class Tracer(TorchFunctionMode):
    """A mode that labels every tensor of the forward pass while it runs."""

    def __init__(self, model: nn.Module, graph: Graph, mode: str, values: dict[str, Tensor], examples: int) -> None:
        super().__init__()
        self.graph, self.mode, self.examples = graph, mode, examples
        self.records = graph.records.setdefault(mode, [])
        self.held: dict[int, tuple[Tensor, Labels | None]] = {}  # id -> the tensor, kept alive, and its labels
        self.families: dict[int, list[int]] = {}  # memory -> the tensors in it
        self.names: dict[int, str] = {}  # id of a parameter or buffer -> its first name
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            self.names.setdefault(id(x), name)
        self.values = values  # the numbers in integer buffers, by name
        self.modules = dict(model.named_modules())
        self.stack: list[str] = []
        self.inputs: dict[str, Any] = {}  # module -> the arguments of its last call
        self.resting = False

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def labels(self, x: Tensor) -> Labels | None:
        """The labels of a tensor; a parameter with one long axis gets its own when it is first used."""
        if id(x) in self.held:
            return self.held[id(x)][1]
        if id(x) in self.names:
            return self.parameter(x)
        return None

    def parameter(self, x: Tensor) -> Labels | None:
        name = self.names[id(x)]
        known = self.graph.slices.get(name)
        if known is None:
            long = [d for d, n in enumerate(x.shape) if n > 1] or ([0] if x.dim() == 1 else [])
            if len(long) != 1:
                long = self.weight_axis(name) if x.dim() > 1 else []
            if len(long) != 1 or not (x.is_floating_point() or x.dim() == 1):
                return None
            known = self.graph.slices[name] = Slices(name, long[0], self.graph.fresh(x.shape[long[0]], True))
        return self.put(x, vector(known.ids, known.axis, x.shape))

    def weight_axis(self, name: str) -> list[int]:
        """A layer's weight that the code computes with, before it is used (weight norm, standardisation)."""
        path, _, key = name.rpartition(".")
        while path.endswith("parametrizations") or ".parametrizations." in path:
            path = path.rpartition(".")[0]
        kind = layer_type(self.modules[path]) if path in self.modules else None
        if kind is None or key not in ("weight", "original0", "original1", "original", "weight_v", "weight_g", "weight_orig"):
            return []
        return [kind.weight_axis]

    def put(self, x: Tensor, labels: Labels | None) -> Labels | None:
        if id(x) not in self.held:
            self.families.setdefault(x.untyped_storage()._cdata, []).append(id(x))
        self.held[id(x)] = (x, labels)
        return labels

    def pin(self, ids: Ids, op: str, why: str) -> None:
        ids = np.unique(ids)
        ids = ids[ids > OPAQUE]
        if len(ids):
            self.graph.pins.append(Pin(ids, op, user_line(), why))

    def pin_tensor(self, x: Any, op: str, why: str) -> None:
        labels = self.labels(x) if isinstance(x, Tensor) else None
        if labels is not None:
            self.pin(labels.numbers(), op, why)

    # -- every op passes here --------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if self.resting:
            return func(*args, **kwargs)
        if name in COMPOSITE:
            with self, unchecked():
                return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        before = [(x, x._version, self.held.get(id(x), (None, None))[1]) for x in tensors]
        result = run(func, name, args, kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if not outputs:
            self.without_tensors(name, tensors, result)
        else:
            self.follow(Call(func, name, leaves, spec, tuple(tuple(y.shape) for y in outputs), self.known(leaves)), result, args, kwargs)
        for x, version, old in before:
            if x._version != version:
                self.written(x, old, name, leaves, bool(outputs))
        return result

    def without_tensors(self, name: str, tensors: list[Tensor], result: Any) -> None:
        if name in VALUES:
            for x in tensors:
                self.pin_tensor(x, name, "its values decide what the code does")
        elif name in ("shape", "size", "__len__", "numel", "nelement", "stride"):
            for x in tensors:
                labels = self.labels(x)
                if labels is not None:
                    self.graph.reads.append((self.mode, self.stack[-1] if self.stack else "", labels.numbers()))

    def known(self, leaves: list[Any]) -> dict[int, Tensor]:
        """The values of integer tensors, as far as they are known on the meta device."""
        found = {}
        for k, x in enumerate(leaves):
            if isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex():
                if not x.is_meta:
                    found[k] = x
                elif self.names.get(id(x)) in self.values:
                    found[k] = self.values[self.names[id(x)]]
        return found

    def follow(self, call: Call, result: Any, args: Any, kw: Any) -> None:
        """Label what came out."""
        leaves, spec = tree_flatten(result)
        outputs = [y for y in leaves if isinstance(y, Tensor)]
        found, moves = self.rule(call, args, kw)
        given = tuple(self.held.get(id(call.leaves[k]), (None, None))[1] for k in call.tensors)
        for y, labels in zip(outputs, found, strict=True):
            self.put(y, labels)
            if labels is not None and len(labels.varying) > 1:
                self.graph.boxes.append(labels)
        dtypes = tuple(y.dtype if isinstance(y, Tensor) else None for y in leaves)
        module = self.stack[-1] if self.stack else ""
        self.records.append(Record(call.name, given, tuple(found), call.shapes, spec, dtypes, moves, user_line(), module))

    def rule(self, call: Call, args: Any, kw: Any) -> tuple[list[Labels | None], bool]:
        """The labels of the outputs, and whether the op only moves elements."""
        name, nothing = call.name, [None] * len(call.shapes)
        if name in CONVOLUTIONS or name in TRANSPOSED or name in ("linear", "addmm"):
            found = self.dense(call, args, kw)
            if found is not None:
                return [found], False
        if name == "embedding":
            return [self.embedding(call, args, kw)], False
        given = {k: self.labels(call.leaves[k]) for k in call.tensors}
        if all(x is None for x in given.values()):
            return nothing, False
        if name in DROPOUTS or (name in SAME and len(call.shapes) == 1):
            return [given[call.tensors[0]]], False
        if name in RESHAPES or name in MOVES:
            out = self.moving(call, given)
            if out is not None:
                self.pieces(call, out)
                return list(out), True
        channelwise = self.elementwise(call, given)
        if channelwise is not None:
            return list(channelwise), False
        full = {k: x.full() for k, x in given.items() if x is not None}
        copies = copied(call, full, OPAQUE, ZERO)
        if copies is not None:
            return [settle(x) for x in copies], True
        for k in call.tensors:
            self.pin_tensor(call.leaves[k], name, f"{name} mixes the channels it is given")
        return nothing, False

    def moving(self, call: Call, given: dict[int, Labels | None]) -> list[Labels] | None:
        arrays: list[Labels] = []
        places: list[int] = []
        for k in call.tensors:
            x = call.leaves[k]
            if k in call.known and given[k] is None:
                continue
            if given[k] is None and not x.is_floating_point():
                return None  # an index whose values are not known
            places.append(k)
            arrays.append(given[k] or Labels(torch.full([1] * x.dim(), OPAQUE), tuple(x.shape)))

        def run(*full: Tensor) -> Any:
            leaves = list(call.leaves)
            for k, x in call.known.items():
                leaves[k] = x
            for k, x in zip(places, full, strict=True):
                leaves[k] = x
            return call.run(leaves)

        try:
            out = moved(call.name, run, arrays, list(call.shapes))
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
            return None
        return out if [x.shape for x in out] == list(call.shapes) else None

    def pieces(self, call: Call, out: list[Labels]) -> None:
        """``x.chunk(2, 1)`` cuts in half whatever is left of x: both halves must keep as much."""
        if call.name in ("chunk", "tensor_split", "split") and len(out) > 1 and len(set(call.shapes)) == 1:
            cut = [x.core.numpy().reshape(-1) for x in out if len(x.varying) == 1]
            if len(cut) == len(out):
                self.graph.even.append(cut)

    # -- layers ----------------------------------------------------------------------------------------------------

    def dense(self, call: Call, args: Any, kw: Any) -> Labels | None:
        """A convolution, a linear layer, Hugging Face's Conv1D; None where it is none of these after all."""
        bound = _bind(call.name, args, kw)
        x, w, bias = bound["input"], bound["weight"], bound.get("bias")
        if call.name == "addmm" and (id(w) not in self.names or self.layer_of(w) is None or bound.get("scaled")):
            return None
        name = self.names.get(id(w))
        groups = bound.get("groups", 1)
        axis = 1 if call.name in CONVOLUTIONS or call.name in TRANSPOSED else -1
        transposed = call.name in TRANSPOSED
        out_axis, in_axis = (1, 0) if transposed or call.name == "addmm" else (0, 1)
        shape = call.shapes[0]
        width = shape[axis % len(shape)]
        into = self.channels(x, axis)
        if axis == 1 and x.dim() != w.dim() or into is None or not isinstance(x, Tensor):
            self.pin_tensor(x, call.name, "its input has channels on several axes")
            into = np.full(x.shape[axis], OPAQUE)
            if axis == 1 and x.dim() != w.dim():
                return None
        if name is None or not x.is_floating_point():
            return self.computed(call, x, w, bias, axis, out_axis, groups, width)
        known = self.graph.dense.get(name)
        if known is None:
            known = self.graph.dense[name] = Dense(
                name, self.layer_of(w) or "", self.names.get(id(bias)) if bias is not None else None,
                out_axis, in_axis, groups, transposed, self.graph.fresh(width),
                kernel=w.numel() * groups // (width * x.shape[axis]),
            )  # fmt: skip
        elif (known.out_axis, known.groups) != (out_axis, groups) or len(known.out) != width:
            self.pin(known.out, call.name, "one weight is used in two ways")
            for other in known.into:
                self.pin(other, call.name, "one weight is used in two ways")
            self.pin(into, call.name, "one weight is used in two ways")
            return vector(np.full(width, OPAQUE), axis, shape)
        if name in self.graph.slices:  # as a raw parameter elsewhere: an embedding tied to the output layer
            raw = self.graph.slices[name]
            self.graph.tie(raw.ids, known.out if raw.axis == out_axis else into)
        for other in known.into:
            self.graph.tie(other, into)
        known.into.append(into)
        self.count(known, self.applications(x, shape, axis, transposed))
        out = known.out
        if bias is not None:
            self.tie_bias(bias, out, call.name)
        elif groups > 1 and groups == len(into):  # depthwise: nothing in, nothing out
            out = self.graph.fresh(width)
            self.graph.tie(out, known.out)
            self.graph.steps.append(Combine(out, (np.repeat(into, width // groups)[:, None],), (True,), False))
        return vector(out, axis, shape)

    def applications(self, x: Tensor, shape: tuple[int, ...], axis: int, transposed: bool) -> float:
        """How often a filter is applied to one example."""
        sizes = tuple(x.shape) if transposed else shape
        return float(np.prod(sizes) / sizes[axis % len(sizes)] / self.examples)

    def count(self, layer: Dense, positions: float) -> None:
        layer.positions[self.mode] = layer.positions.get(self.mode, 0.0) + positions

    def computed(self, call: Call, x: Any, w: Tensor, bias: Any, axis: int, out_axis: int, groups: int, width: int) -> Any:
        """A weight that the code computes: its rows may follow the channels of what it is computed from."""
        self.pin_tensor(x, call.name, "its weight is computed, so that its columns cannot be dropped")
        rows = self.channels(w, out_axis)
        follows = rows is not None and len(rows) == width and groups == 1
        out = rows if follows and rows is not None else np.full(width, OPAQUE)
        if not follows:
            self.pin_tensor(w, call.name, "its weight is computed")
        if bias is not None:
            self.tie_bias(bias, out, call.name)
        module = self.stack[-1] if self.stack else ""
        transposed = call.name in TRANSPOSED
        into = np.full(x.shape[axis], OPAQUE)
        key = f"{module}:{call.name}"
        layer = self.graph.dense.setdefault(
            key, Dense(key, module, None, out_axis, 1 - out_axis, groups, transposed, out, [into], narrow=False)
        )
        layer.kernel = w.numel() * groups // (width * x.shape[axis])
        self.count(layer, self.applications(x, call.shapes[0], axis, transposed))
        return vector(out, axis, call.shapes[0])

    def tie_bias(self, bias: Tensor, out: Ids, op: str) -> None:
        ids = self.channels(bias, 0)
        if ids is None or len(ids) != len(out):
            self.pin(out, op, "its bias is not one number per channel")
        else:
            self.graph.tie(ids, out)

    def channels(self, x: Tensor, axis: int) -> Ids | None:
        """(n,) the labels along an axis; OPAQUE for a tensor without; None where other axes are labelled too."""
        labels = self.labels(x)
        if labels is None:
            return np.full(x.shape[axis], OPAQUE)
        return labels.along(axis)

    def layer_of(self, w: Tensor) -> str | None:
        """The layer that a weight belongs to."""
        path = self.names[id(w)].rpartition(".")[0]
        return path if path in self.modules and layer_type(self.modules[path]) else None

    def embedding(self, call: Call, args: Any, kw: Any) -> Labels | None:
        w = args[1] if len(args) > 1 else kw["weight"]
        name = self.names.get(id(w))
        if name is None:
            return None
        known = self.graph.slices.get(name)
        if known is None:
            known = self.graph.slices[name] = Slices(name, 1, self.graph.fresh(w.shape[1]))
            if name in self.graph.dense:
                for into in self.graph.dense[name].into:
                    self.graph.tie(into, known.ids)
        return vector(known.ids, -1, call.shapes[0])

    # -- ops that treat channels one by one ------------------------------------------------------------------------

    def elementwise(self, call: Call, given: dict[int, Labels | None]) -> list[Labels] | None:
        labelled = {k: x for k, x in given.items() if x is not None and x.varying}
        if not labelled:
            return None
        labelled |= self.aligned_parameters(call, given, labelled)
        axes = {}
        for axes_k in _aligned(call, labelled):
            found = sliced(call, axes_k)
            if found is not None:
                axes[tuple(axes_k.items())] = found
        covered = {(k, d) for pairs in axes for k, d in pairs}
        if axes and all((k, d) in covered for k, x in labelled.items() for d in x.varying):
            return self.every_axis(call, labelled, axes)
        for pairs, found in [*axes.items(), *self.other_axes(call, labelled, axes)]:
            if {k for k, _ in pairs} == set(labelled):
                return self.one_axis(call, labelled, dict(pairs), found)
        return None

    def aligned_parameters(self, call: Call, given: dict[int, Labels | None], labelled: dict[int, Labels]) -> Any:
        """Parameters with several long axes follow the channels they meet (a scale of shape (heads, 1, d))."""
        if len(labelled) != 1 or len(call.shapes) != 1:
            return {}
        (x,) = labelled.values()
        found = {}
        for k in call.tensors:
            p = call.leaves[k]
            if given[k] is not None or id(p) not in self.names or len(x.varying) != 1 or len(p.shape) < 2:
                continue
            d = x.varying[0] - len(x.shape) + p.dim()
            name = self.names[id(p)]
            if d >= 0 and p.shape[d] == x.shape[x.varying[0]] and name not in self.graph.dense:
                known = self.graph.slices.setdefault(name, Slices(name, d, self.graph.fresh(p.shape[d], True)))
                if known.axis == d:
                    found[k] = self.put(p, vector(known.ids, d, p.shape))
        return found

    def other_axes(self, call: Call, labelled: dict[int, Labels], tried: Any) -> Iterator[tuple[Any, Sliced]]:
        """Axes that do not stand under each other (einsum)."""
        choices = [[(k, d) for d in x.varying] for k, x in labelled.items()]
        for pairs in list(product(*choices))[:27]:
            if pairs in tried or len({call.leaves[k].shape[d] for k, d in pairs}) > 1:
                continue
            found = sliced(call, dict(pairs))
            if found is not None:
                yield pairs, found

    def every_axis(self, call: Call, labelled: dict[int, Labels], axes: Any) -> list[Labels] | None:
        """Each labelled axis of each operand can be sliced: labels go element by element."""
        results: list[Labels] = []
        ids: Ids | None = None
        for i, shape in enumerate(call.shapes):
            arrays = []
            for k, x in labelled.items():
                target = {d: found.axes[i] for pairs, found in axes.items() for kk, d in pairs if kk == k}
                arrays.append(_placed(x, target, len(shape)))
            together = np.broadcast_arrays(*arrays)
            if ids is None or ids.size != together[0].size:
                first = next(iter(axes.values()))
                kills = {k: z for pairs, f in axes.items() for (k, _), z in zip(pairs, f.kills, strict=True)}
                ids = self.combined([a.reshape(-1, 1) for a in together], [kills[k] for k in labelled], first.all)
            out = torch.from_numpy(ids.reshape(together[0].shape).copy())
            results.append(Labels(out, shape))
        return results

    def one_axis(self, call: Call, labelled: dict[int, Labels], dims: dict[int, int], found: Sliced) -> list[Labels]:
        """Only whole slices along one axis are independent (a head of attention): all in a slice stay together."""
        rows = [np.moveaxis(_spread(x, dims[k]), dims[k], 0) for k, x in labelled.items()]
        matrices = [r.reshape(len(r), -1) for r in rows]
        for m in matrices:
            self.graph.tie(m[:, :1], m)
        order = list(dims)
        ids = self.combined(matrices, [found.kills[order.index(k)] for k in labelled], found.all)
        return [vector(ids, d, shape) for d, shape in zip(found.axes, call.shapes, strict=True)]

    def combined(self, operands: list[Ids], kills: list[bool], everything: bool) -> Ids:
        """The values behind an op: the operand's own where nothing but parameters joins it and zero stays zero."""
        values = [k for k, x in enumerate(operands) if not self.graph.is_parametric(x)]
        for x in operands[1:]:
            self.graph.tie(operands[0][:, 0], x[:, 0])
        if len(values) == 1 and kills[values[0]] and operands[values[0]].shape[1] == 1:
            return operands[values[0]][:, 0]
        out = self.graph.fresh(len(operands[0]), not values)
        self.graph.tie(out, operands[0][:, 0])
        self.graph.steps.append(Combine(out, tuple(operands), tuple(kills), everything))
        return out

    # -- writes in place -------------------------------------------------------------------------------------------

    def written(self, x: Tensor, old: Labels | None, op: str, leaves: list[Any], returned: bool) -> None:
        """A write is harmless for other views of the same memory if it changes neither labels nor zeros."""
        new = self.held.get(id(x), (None, None))[1]
        if returned and old is not None and new is not None and old.core is new.core:
            return
        family = self.families.get(x.untyped_storage()._cdata, [])
        others = [self.held[k] for k in family if k in self.held and self.held[k][0] is not x]
        if not returned:
            others.append((x, new))
        if not others:
            return
        for y in [x, *(y for y, _ in others), *(y for y in leaves if isinstance(y, Tensor))]:
            self.pin_tensor(y, op, "it writes into a view")
        for y, _ in others:
            self.put(y, None)

    # -- modules ---------------------------------------------------------------------------------------------------

    def enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.stack.append(name)
            self.resting = isinstance(module, Scatter)
            self.inputs[name] = args

        return hook

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            self.stack.pop()
            self.resting = True  # what is done to labels here is no op of the network
            self.left(name, module, args, output)
            self.resting = False

        return hook

    def left(self, name: str, module: Any, args: Any, output: Any) -> None:
        if isinstance(module, Scatter):
            parent, _, role = name.rpartition(".")
            if role == "gather":
                self.gathered(name, module, args[0], output)
            else:
                self.cut(parent, args[0], output, self.index_of(name, module))
        elif not isinstance(getattr(module, "scatter", None), Scatter) and isinstance(output, Tensor):
            if (layer_type(module) or is_norm(module)) and output.is_floating_point():
                self.cut(name, output, output, None)

    def index_of(self, name: str, scatter: Any) -> Ids:
        index = scatter.index if not scatter.index.is_meta else self.values[f"{name}.index"]
        return index.cpu().numpy()

    def gathered(self, name: str, module: Any, x: Tensor, output: Tensor) -> None:
        into = self.channels(x, module.axis)
        if into is None:
            self.pin_tensor(x, name, "its input has channels on several axes")
            into = np.full(x.shape[module.axis], OPAQUE)
        self.put(output, vector(into[self.index_of(name, module)], module.axis, output.shape))
        self.pin(into, name, "an earlier shrinking picks its channels by number")

    def cut(self, name: str, computed: Tensor, output: Tensor, index: Ids | None) -> None:
        """A place where channels can be set to zero, dropped and scattered."""
        module = self.modules[name]
        kind, norm = layer_type(module), is_norm(module)
        axis = kind.axis if kind else 1
        labels = self.labels(computed)
        given = labels.along(axis) if labels is not None and computed.dim() > axis else None
        if given is None:
            if norm and index is None:
                return
            given = np.full(computed.shape[axis], OPAQUE)
            if labels is not None:
                self.pin(labels.numbers(), name, "its output has channels on several axes")
        index = np.arange(len(given)) if index is None else index
        step = Cut(name, axis, given, self.graph.fresh(len(index)), index, self.before(name, len(given)) if norm else None)
        for other in self.graph.calls.setdefault(name, []):
            self.graph.tie(other.out, step.out)
            self.graph.tie(other.given, step.given)
        self.graph.calls[name].append(step)
        self.graph.steps.append(step)
        self.put(output, vector(step.out, axis, output.shape))

    def before(self, name: str, width: int) -> Ids | None:
        """(n,) the input of a norm."""
        x = next((a for a in self.inputs[name] if isinstance(a, Tensor)), None)
        labels = self.labels(x) if x is not None and x.dim() > 1 else None
        found = labels.along(1) if labels is not None else None
        return found if found is not None and len(found) == width else None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch every module while the model runs."""
        handles = []
        for name, module in self.modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            # Before all other hooks on the way in, behind all on the way out.
            handles.append(module.register_forward_pre_hook(self.enter(name), prepend=True))
            handles.append(module.register_forward_hook(self.leave(name)))
        try:
            yield
        finally:
            for h in handles:
                h.remove()


def run(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call an op. On the meta device torch takes a millisecond to find the shape of a norm: it is its input's."""
    x = args[0] if args else None
    if name not in NORMALISATIONS or not isinstance(x, Tensor) or not x.is_meta:
        return func(*args, **kwargs)
    widths = {y.numel() for y in tree_leaves((args[1:], kwargs)) if isinstance(y, Tensor)}
    if widths - {x.shape[1]}:
        raise ValueError(f"{name} over {x.shape[1]} channels with parameters for {widths}")
    return torch.empty_like(x)


@contextmanager
def unchecked() -> Iterator[None]:
    """Torch's python functions ask first whether somebody overrides them; this one was asked already."""
    before = F.has_torch_function
    F.has_torch_function = lambda *args: False  # type: ignore[assignment]
    try:
        yield
    finally:
        F.has_torch_function = before


def _bind(name: str, args: Any, kw: Any) -> dict[str, Any]:
    """The arguments of a dense op by name."""
    if name == "addmm":
        bound = dict(zip(("bias", "input", "weight"), args, strict=False)) | kw
        bound = {"bias": bound.get("bias"), "input": bound.get("input", kw.get("mat1")), "weight": bound.get("weight", kw.get("mat2"))}
        bound["scaled"] = bool(kw.get("beta", 1) != 1 or kw.get("alpha", 1) != 1)
        return bound
    if name in TRANSPOSED:
        names = ["input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"]
    else:
        names = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    return dict(zip(names, args, strict=False)) | kw


def _aligned(call: Call, labelled: dict[int, Labels]) -> list[dict[int, int]]:
    """Candidate axes, operands laid under each other from the right, as broadcasting does."""
    found: dict[int, dict[int, int]] = {}
    for k, x in labelled.items():
        for d in x.varying:
            found.setdefault(d - len(x.shape), {})[k] = d
    return list(found.values())


def _placed(x: Labels, target: dict[int, int], dim: int) -> np.ndarray:
    """The labels of an operand laid out along the output's axes: its axis d becomes ``target[d]``."""
    core = x.core.numpy()
    order = sorted(x.varying, key=lambda d: target[d])
    squeezed = core.transpose([*order, *(d for d in range(core.ndim) if d not in order)])
    sizes = [1] * dim
    for d in order:
        sizes[target[d]] = core.shape[d]
    return squeezed.reshape(sizes)


def _spread(x: Labels, axis: int) -> np.ndarray:
    """The labels with one axis at its full size, the others as short as they are."""
    sizes = list(x.core.shape)
    sizes[axis] = x.shape[axis]
    return x.core.expand(sizes).numpy()
