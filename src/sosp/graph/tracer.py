"""Run the user's own forward once and follow every channel through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

from sosp.core.layers import (
    Scatter,
    find_channel_axis,
    find_layer_type,
    find_source,
    gives_known_zeros,
    is_group_norm,
    is_norm,
)
from sosp.graph.channels import Combination, Graph, Ids, ModuleCall, OpRecord, TensorRegistry
from sosp.graph.dataflow import (
    CUT,
    IDLE_DROPOUT,
    EnterEvent,
    LeaveEvent,
    OpEvent,
    find_form,
    is_idle_dropout,
    list_arguments,
)
from sosp.graph.forward_code import count_input_examples, list_tensors
from sosp.graph.labels import (
    IDENTITY_OPS,
    JOINS,
    MOVES,
    OPAQUE,
    RESHAPES,
    SHAPED_LIKE,
    ZERO,
    Labels,
    compress_labels,
    label_axis,
    move_labels,
)
from sosp.graph.op_labels import (
    DENSE,
    label_channelwise_op,
    label_dense_op,
    label_embedding,
    label_group_norm,
    spread_groups,
)
from sosp.graph.ops import (
    COMPOSITE,
    COUNTING,
    DECOMPOSED,
    DROPOUTS,
    FACTORIES,
    SIZES,
    UNTRIED,
    VALUES,
    OpCall,
    checks_arguments,
    collect_numbers,
    find_forward_code,
    find_frame,
    find_op_name,
    find_user_line,
    is_called_by_torch,
    is_turned_weight,
    list_layer_parameters,
    probe_copies,
    run_op,
    skip_override_checks,
)

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # a scatter in them would be one of their modules
PRODUCTS = frozenset({"matmul", "__matmul__", "mm"})
OutputLabels = tuple[list[Labels | None], bool]  # the labels of the outputs, and whether the op only moves elements


class Tracer(TorchFunctionMode):
    """A mode that labels every tensor of the forward pass while it runs."""

    def __init__(
        self, model: nn.Module, graph: Graph, mode: str, values: dict[str, Tensor], inputs: Any, real: bool
    ) -> None:
        super().__init__()
        self.graph, self.real = graph, real
        self.code = find_forward_code(model)
        self.frame: FrameType | None = None  # of the network's forward: when it is over, it stands where it returned
        examples = count_input_examples(inputs)
        self.registry = TensorRegistry(model, graph, mode, values, examples)
        self.records = graph.records.setdefault(mode, [])
        self.events = graph.events.setdefault(mode, [])
        self.inputs: dict[str, Any] = {}  # module -> the arguments of its last call
        self.sources: list[Tensor] = []  # of modules that give zeros in their place
        self.paused = False
        self.layer_parameters = list_layer_parameters(model)
        for x in list_tensors(inputs):
            self.registry.begin(x)

    # -- every op passes here --------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = find_op_name(func)
        self.frame = self.frame or find_frame(self.code)
        if self.paused:
            return func(*args, **kwargs)
        if name in COMPOSITE or name in DECOMPOSED:
            with self, skip_override_checks():
                return DECOMPOSED.get(name, func)(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        before = [(x, x._version, self.registry.seen(x)) for x in tensors]
        result = run_op(func, name, args, kwargs)
        shapes = tuple(tuple(y.shape) for y in tree_leaves(result) if isinstance(y, Tensor))
        if is_turned_weight(name, args, self.layer_parameters):  # part of the product that follows
            self.registry.turned[id(result)] = args[0]
            self.registry.put(result, None)
            self.note_inputs(name, tensors, [result])
            return result
        if shapes:
            self.label_unknown_tensors(tensors)
            self.note_inputs(name, tensors, [y for y in tree_leaves(result) if isinstance(y, Tensor)])
            self.follow(OpCall(func, name, leaves, spec, shapes, self.find_known_values(leaves)), result, args, kwargs)
        else:
            self.note_reads(name, tensors)
        written = [x for x, version, _ in before if x._version != version]
        if shapes or written or name in VALUES:
            idle = name in DROPOUTS and is_idle_dropout(args, kwargs)
            outputs = [y for y in tree_leaves(result) if isinstance(y, Tensor)]
            moves = bool(shapes) and self.records[-1].moves
            self.note_event(IDLE_DROPOUT if idle else name, leaves, outputs, written, moves)
        for x, version, old in before:
            if x._version != version:
                self.registry.feed(tensors, [x])
                self.pin_shared_memory(x, old, name, tensors, bool(shapes))
        return result

    def label_unknown_tensors(self, tensors: list[Tensor]) -> None:
        """A tensor that no op gave came out of code that cannot be followed (TorchScript): then nothing is safe."""
        registry = self.registry
        for x in tensors:
            if id(x) in registry.held or id(x) in registry.names:
                continue
            family = registry.families.get(x.untyped_storage()._cdata, [])
            same = [registry.held[k] for k in family if registry.held[k][0].shape == x.shape]
            registry.put(x, same[-1][1] if same else None)
            registry.fed.add(id(x))
            if not same and x.is_floating_point() and x.dim() > 1 and x.shape[0] == registry.examples:
                everything = [y.numbers() for _, y in registry.held.values() if y is not None]
                registry.pin(
                    np.concatenate([np.zeros(0, dtype=int), *everything]), "?", "compiled code cannot be followed"
                )

    def note_inputs(self, name: str, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """Whose parameters the op takes, what depends on the input, and whether it counts what it finds there."""
        for x in tensors:
            if id(x) in self.registry.names:
                self.graph.used.setdefault(self.registry.names[id(x)], set()).add(self.registry.module)
        self.registry.feed(tensors, outputs)
        picks = name == "__getitem__" and any(x.dtype == torch.bool for x in tensors[1:])
        if name in COUNTING or picks or (name == "where" and len(tensors) == 1):
            self.registry.add_decision(name, tensors, shape=True)

    def note_event(
        self, name: str, leaves: list[Any], outputs: list[Tensor], written: list[Tensor], moves: bool
    ) -> None:
        """Which tensors the op took, gave and wrote into, and what shares memory with those."""
        given = [x for x in leaves if isinstance(x, Tensor)]
        memory = (self.registry.families.get(x.untyped_storage()._cdata, []) for x in written)
        self.events.append(
            OpEvent(
                name,
                tuple(id(x) for x in given),
                tuple(id(y) for y in outputs),
                tuple(find_form(x) for x in given),
                tuple(find_form(y) for y in outputs),
                tuple(self.registry.seen(y) for y in outputs),
                tuple(x for x in leaves if not isinstance(x, Tensor) and x is not None),
                frozenset(k for ids in memory for k in ids) | {id(x) for x in written},
                moves,
            )
        )

    def note_reads(self, name: str, tensors: list[Tensor]) -> None:
        """An op that returns no tensor."""
        if name in VALUES:
            self.registry.add_decision(name, tensors)
        for x in tensors:
            if name in VALUES:
                self.registry.pin_tensor(x, name, "its values decide what the code does")
            elif name in SIZES and id(x) in self.registry.names:
                self.graph.sized.append((self.registry.mode, self.registry.module, self.registry.names[id(x)]))
            elif name in SIZES and (labels := self.registry.labels(x)) is not None:
                self.graph.reads.append((self.registry.mode, self.registry.module, labels.numbers()))

    def find_known_values(self, leaves: list[Any]) -> dict[int, Tensor]:
        """The values of integer tensors, as far as they are known on the meta device."""
        found = {}
        for k, x in enumerate(leaves):
            if isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex():
                if not x.is_meta:
                    found[k] = x
                elif self.registry.names.get(id(x)) in self.registry.values:
                    found[k] = self.registry.values[self.registry.names[id(x)]]
        return found

    def follow(self, call: OpCall, result: Any, args: Any, kwargs: Any) -> None:
        """Label what came out, and keep a record of the op."""
        leaves, spec = tree_flatten(result)
        found, moves = self.label_outputs(*self.read_turned_weights(call, args), kwargs)
        given = tuple(self.registry.seen(call.leaves[k]) for k in call.tensors)
        where, mixed = find_user_line(), self.registry.find_mixing_op(call.leaves)
        if not mixed and any(x is not None for x in given):
            mixed = f"{call.name} at {where}"
        for y, labels in zip((y for y in leaves if isinstance(y, Tensor)), found, strict=True):
            self.registry.put(y, labels)
            if labels is None and mixed:
                self.registry.lost[id(y)] = mixed
            if labels is not None and len(labels.varying) > 1:
                self.graph.boxes.append(labels)
        dtypes = tuple(y.dtype if isinstance(y, Tensor) else None for y in leaves)
        self.records.append(
            OpRecord(
                call.name,
                given,
                tuple(found),
                call.shapes,
                spec,
                dtypes,
                moves,
                where,
                self.registry.module,
                collect_numbers(call.name, call.leaves),
            )
        )

    def read_turned_weights(self, call: OpCall, args: Any) -> tuple[OpCall, Any]:
        """``x @ layer.weight.T`` is the layer's own op; used in any other way, a turned weight has labels."""
        turned, registry = self.registry.turned, self.registry
        if call.name in PRODUCTS and len(args) == 2 and id(args[1]) in turned and args[0].dim() > 1:
            return replace(call, name="linear"), (args[0], turned[id(args[1])])
        for x in call.leaves:
            if id(x) in turned and (labels := registry.labels(turned.pop(id(x)))) is not None:
                registry.put(x, Labels(labels.core.T, tuple(x.shape)))
        return call, args

    def label_outputs(self, call: OpCall, args: Any, kwargs: Any) -> OutputLabels:
        """Layers by their weights; what moves elements or treats channels one by one; all else pins its input."""
        if call.name in DENSE:
            found = label_dense_op(self.registry, call, args, kwargs)
            if found is not None:
                return [found], False
        if call.name == "embedding":
            return [label_embedding(self.registry, call, args, kwargs)], False
        if call.name == "group_norm" and (found := label_group_norm(self.registry, call, args, kwargs)) is not None:
            return [found], False
        given = {k: self.registry.labels(call.leaves[k]) for k in call.tensors}
        if any(0 in shape for shape in call.shapes):
            for k in call.tensors:
                self.registry.pin_tensor(call.leaves[k], call.name, "on the example, nothing of it is taken here")
            return [None] * len(call.shapes), False
        if all(x is None for x in given.values()) or (call.name in FACTORIES and not is_called_by_torch()):
            return [None] * len(call.shapes), False
        if call.name in DROPOUTS or (call.name in IDENTITY_OPS and len(call.shapes) == 1):
            return [given[call.tensors[0]]], False
        if call.name in RESHAPES or call.name in MOVES:
            moved = self.move_elements(call, given)
            if moved is not None:
                return list(moved), True
        untried = call.name in UNTRIED or not checks_arguments(call.func)
        alike = None if untried else label_channelwise_op(self.registry, call, given)
        if alike is not None:
            return list(alike), False
        full = {k: x.full() for k, x in given.items() if x is not None}
        copies = None if untried else probe_copies(call, full, OPAQUE, ZERO)
        if copies is not None:
            return [compress_labels(x) for x in copies], True
        lost = self.registry.find_mixing_op(call.leaves)
        why = (
            f"it is combined with the output of {lost}, which mixes channels"
            if lost
            else f"{call.name} mixes the channels it is given"
        )
        for k in call.tensors:
            self.registry.pin_tensor(call.leaves[k], call.name, why)
        return [None] * len(call.shapes), False

    def move_elements(self, call: OpCall, given: dict[int, Labels | None]) -> list[Labels] | None:
        """An op that rearranges elements, run on their labels; None where it moves others, or nobody knows which."""
        moved = call.tensors if call.name in JOINS else call.tensors[:1]
        index = [] if call.name in SHAPED_LIKE else [k for k in call.tensors if k not in moved]
        if all(given[k] is None for k in moved) or any(given[k] is not None or k not in call.known for k in index):
            return None
        arrays: dict[int, Labels] = {}
        for k in moved:
            x = call.leaves[k]
            arrays[k] = given[k] or Labels(torch.full([1] * x.dim(), OPAQUE), tuple(x.shape))

        def on_labels(*full: Tensor) -> Any:
            put = {**call.known, **dict(zip(arrays, full, strict=True))}
            return call.run([put.get(k, x) for k, x in enumerate(call.leaves)])

        try:
            out = move_labels(call.name, on_labels, list(arrays.values()), list(call.shapes))
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
            return None
        if [x.shape for x in out] != list(call.shapes):
            return None
        self.note_even_pieces(call, out)
        return out

    def note_even_pieces(self, call: OpCall, out: list[Labels]) -> None:
        """``x.chunk(2, 1)`` cuts in half whatever is left of x: both halves must keep as much."""
        if call.name in ("chunk", "tensor_split", "split") and len(out) > 1 and len(set(call.shapes)) == 1:
            cut = [x.core.numpy().reshape(-1) for x in out if len(x.varying) == 1]
            if len(cut) == len(out):
                self.graph.even.append(np.stack(cut))

    def pin_shared_memory(self, x: Tensor, old: Labels | None, op: str, tensors: list[Tensor], returned: bool) -> None:
        """A write is harmless for other views of the same memory if it changes neither labels nor zeros."""
        new = self.registry.seen(x)
        if returned and old is not None and new is not None and old.core is new.core:
            return
        family = self.registry.families.get(x.untyped_storage()._cdata, [])
        others = [
            self.registry.held[k][0] for k in family if k in self.registry.held and self.registry.held[k][0] is not x
        ]
        if not returned:
            others.append(x)
        if others:
            for y in [x, *others, *tensors]:
                self.registry.pin_tensor(y, op, "it writes into a view")
            for y in others:
                self.registry.put(y, None)

    # -- every module passes here ----------------------------------------------------------------------------------

    @contextmanager
    def hook_modules(self) -> Iterator[None]:
        """Watch every module while the model runs."""
        handles = []
        for name, module in self.registry.modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                # Before all other hooks on the way in, behind all on the way out.
                handles.append(module.register_forward_pre_hook(self.enter(name), prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(self.leave(name)))
        try:
            yield
        finally:
            for h in handles:
                h.remove()

    def enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.paused = True  # the sizes that are read here are not read by the code
            tensors = list_arguments(args, kwargs)
            given = {k: (id(x), self.registry.seen(x), tuple(x.shape)) for k, x in tensors.items()}
            self.events.append(EnterEvent(name, given, len(tensors) == len(args) + len(kwargs) == 1))
            self.registry.stack.append(name)
            self.graph.ran.add(name)
            self.paused = isinstance(module, Scatter) or gives_known_zeros(module)
            self.inputs[name] = args
            if gives_known_zeros(module):
                self.sources.append(find_source(module, args, kwargs))

        return hook

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            self.registry.stack.pop()
            self.paused = True  # what is done to labels here is no op of the network
            if isinstance(module, Scatter):
                axis = module.axis % output.dim()
                self.add_call(name.rpartition(".")[0], axis, args[0], output, self.read_index(name, module))
            elif gives_known_zeros(module):
                self.label_zeros(self.sources.pop(), output)
            elif "scatter" not in module._modules and (
                find_layer_type(module) or is_norm(module) or is_group_norm(module)
            ):
                if isinstance(output, Tensor) and output.is_floating_point():
                    self.add_call(name, find_channel_axis(module, output), output, output, None)
            elif name and not isinstance(module, CONTAINERS) and (axis := self.find_padded_axis(output)) is not None:
                self.add_call(name, axis, output, output, None)  # zeros that nothing needs can be dropped behind it
            if self.real:
                leaving = [self.registry.seen(x) for x in list_tensors(output)]
                self.graph.leaving += [(name, labels) for labels in leaving if labels is not None]
            alone, outputs = isinstance(output, Tensor), list_tensors(output)
            ids, shapes = tuple(id(x) for x in outputs), tuple(tuple(x.shape) for x in outputs)
            self.events.append(LeaveEvent(name, ids, shapes, self.registry.seen(output) if alone else None, alone))
            self.paused = False

        return hook

    def label_zeros(self, given: Tensor, output: Tensor) -> None:
        """Zeros in the places of another tensor's channels."""
        labels = self.registry.labels(given)
        core = torch.ones([1] * output.dim()) if labels is None else labels.core
        ids = self.graph.add_values(core.numel())
        if labels is not None:
            self.graph.tie(ids, core.numpy().reshape(-1))
        self.graph.steps.append(Combination(ids, (np.full((len(ids), 1), ZERO),), (True,), True))
        self.registry.put(output, Labels(torch.from_numpy(ids).view(core.shape), tuple(output.shape)))
        self.registry.feed([given], [output])
        self.note_event(CUT, [given], [output], [], moves=False)

    def find_padded_axis(self, output: Any) -> int | None:
        """The axis of the channels of a tensor some of which are zeros that the code itself put there."""
        labels = self.registry.seen(output) if isinstance(output, Tensor) else None
        if labels is None or len(labels.varying) != 1 or ZERO not in labels.numbers():
            return None
        return labels.varying[0]

    def read_index(self, name: str, scatter: Any) -> Ids:
        index = self.registry.values[f"{name}.index"] if scatter.index.is_meta else scatter.index
        return index.cpu().numpy()

    def add_call(self, name: str, axis: int, computed: Tensor, output: Tensor, index: Ids | None) -> None:
        """A place where channels can be set to zero, dropped and scattered."""
        norm = is_norm(self.registry.modules[name]) or is_group_norm(self.registry.modules[name])
        labels = self.registry.labels(computed)
        given = labels.along(axis) if labels is not None and computed.dim() > axis else None
        if given is None and norm and index is None:
            return
        if given is None:
            given = np.full(computed.shape[axis], OPAQUE)
            self.registry.pin_tensor(computed, name, "its output has channels on several axes")
        index = np.arange(len(given)) if index is None else index
        through = self.find_norm_input(name, len(given)) if norm else None
        step = ModuleCall(name, self.registry.mode, axis, given, self.graph.add_values(len(index)), index, through)
        for other in self.graph.calls.setdefault(name, []):
            self.graph.tie(other.out, step.out)
            self.graph.tie(other.given, step.given)
        self.graph.calls[name].append(step)
        self.graph.steps.append(step)
        self.registry.put(output, label_axis(step.out, axis, output.shape))
        self.registry.feed([computed], [output])
        self.note_event(CUT, [computed], [output], [], moves=False)

    def find_norm_input(self, name: str, width: int) -> Ids | None:
        """(n, m) the input of a norm: for each channel those it is normalised with."""
        x = next((a for a in self.inputs[name] if isinstance(a, Tensor)), None)
        labels = self.registry.labels(x) if x is not None and x.dim() > 1 else None
        found = labels.along(1) if labels is not None else None
        if found is None or len(found) != width:
            return None
        groups = getattr(self.registry.modules[name], "num_groups", width)
        return spread_groups(found, groups) if width % groups == 0 else None
