"""How the layers of a network hang together, read off one forward pass and its autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sosp.core.batches import call_model, copy_inputs, find_batch_size, take_examples
from sosp.core.borrowed_model import borrow_model
from sosp.core.layers import is_norm
from sosp.core.outputs import find_logits
from sosp.errors import DataError, DifferentiationError, OutputError, SospError, StructureError
from sosp.graph.forward_code import refuse_failing_model
from sosp.graph.records import INPUT, OUTPUT

ROWS = 8  # of the example are run
JOINS = frozenset({"AddBackward0", "CatBackward0", "SubBackward0"})


@dataclass
class LayerCalls:
    """What was seen of one layer, over all its calls."""

    shapes: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # input and output, on the meta device
    norms: tuple[str, ...] = ()
    weights: int = 0
    biased: bool = False


@dataclass(frozen=True)
class LayerTrace:
    """A network's layers in the order they were called, and what lies between them."""

    order: tuple[str, ...]
    calls: Mapping[str, LayerCalls]
    wiring: Mapping[str, tuple[str, ...]]  # layer -> nearest layers upstream
    output_layers: frozenset[str]
    cut_off: frozenset[str]  # called, but without a differentiable way to the output
    branches: tuple[tuple[str, ...], ...]  # for every parallel branch, the layers it ends in
    examples: int  # in the forward pass
    footprint: int  # bytes of activations per example
    outputs: int = 0  # numbers per example in the network's output; 0 where no logits are found in it


class Recorder:
    """Hooks that mark every layer's output with a node of its own in the autograd graph."""

    def __init__(self) -> None:
        self.nodes: dict[Any, str] = {}  # marking node -> layer
        self.calls: dict[str, LayerCalls] = {}
        self.norms: dict[str, list[Any]] = {}  # norm -> the node of each input it was given
        self.unmarked: set[str] = set()
        self.inputs: set[Any] = set()  # nodes of embedded tokens: a network's input that has no gradient
        self.bytes = 0

    def layer(self, name: str, tag: Tensor) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            call = self.calls.setdefault(name, LayerCalls())
            # Read here, in eval mode: looking at a computed weight (spectral norm) may change the model otherwise.
            call.weights, call.biased = module.weight.numel(), getattr(module, "bias", None) is not None
            given = args[0] if args and isinstance(args[0], Tensor) else output
            call.shapes.append((given.detach().to("meta"), output.detach().to("meta")))
            marked = output * tag.to(output.dtype)
            if marked.grad_fn is None:
                self.unmarked.add(name)
            else:
                self.nodes[marked.grad_fn] = name
            return marked

        return hook

    def embedding(self, tag: Tensor) -> Callable[..., Any]:
        def mark(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            marked = x * tag.to(x.dtype)
            self.inputs.add(marked.grad_fn)
            return marked

        return lambda module, args, output: tree_map(mark, output)  # one of the user's may return several

    def norm(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor):
                self.norms.setdefault(name, []).append(args[0].grad_fn)

        return hook

    def size(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.bytes += sum(x.numel() * x.element_size() for x in tree_leaves(output) if isinstance(x, Tensor))


def trace_layers(model: nn.Module, example: Any, is_layer: Callable[[nn.Module], bool]) -> LayerTrace:
    """Run a few rows of ``example`` once and read the wiring off the graph behind the output."""
    _check_example_device(model, example)
    some = take_examples(example, ROWS)
    for rows in [some] if _examples(some) == _examples(example) else [some, example]:  # the code may count on its batch
        try:
            return _trace(model, rows, is_layer)
        except SospError:
            raise
        except Exception as error:
            failure = error
    refuse_failing_model(model, example)
    raise StructureError(
        f"the layers of the model cannot be traced with gradients: {type(failure).__name__}: {failure}. The model "
        "itself runs on the example without gradients. If it also runs with them, this is a bug in sosp: please report "
        "it, with the network."
    ) from failure


def _trace(model: nn.Module, example: Any, is_layer: Callable[[nn.Module], bool]) -> LayerTrace:
    recorder = Recorder()
    handles = []
    with borrow_model(model):
        example, sources = _track_inputs(example)
        tag = torch.ones((), device=_device(example), requires_grad=True)
        try:
            for name, module in model.named_modules():
                if is_layer(module):
                    handles.append(module.register_forward_hook(recorder.layer(name, tag)))
                elif isinstance(module, nn.Embedding):
                    handles.append(module.register_forward_hook(recorder.embedding(tag)))
                elif is_norm(module):
                    handles.append(module.register_forward_hook(recorder.norm(name)))
                if not any(module.children()) and not isinstance(module, torch.jit.ScriptModule):
                    handles.append(module.register_forward_hook(recorder.size))
            outputs = call_model(model, copy_inputs(example))
        finally:
            for h in handles:
                h.remove()
    found = _read(recorder, _output_nodes(outputs), _main_nodes(outputs), sources, _examples(example))
    return replace(found, outputs=_count_outputs(outputs, _examples(example)))


def _track_inputs(example: Any) -> tuple[Any, set[int]]:
    """The example with its float inputs as leaves of the graph to come, and their identities."""
    leaves = tree_map(
        lambda x: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x,
        example,
    )
    return leaves, {id(x) for x in tree_leaves(leaves) if isinstance(x, Tensor) and x.requires_grad}


def _device(example: Any) -> torch.device:
    return next(x.device for x in tree_leaves(example) if isinstance(x, Tensor))


def _check_example_device(model: nn.Module, example: Any) -> None:
    tensors = [x for x in tree_leaves(example) if isinstance(x, Tensor)]
    if not tensors:
        raise DataError(f"the example is a {type(example).__name__} without tensors; give what model(...) takes.")
    homes = {p.device for p in model.parameters()}
    if homes and tensors[0].device not in homes:
        home = next(iter(homes))
        raise DataError(
            f"the example is on {tensors[0].device} and the model on {home}. Move one: x.to({str(home)!r}) "
            f"or model.to({str(tensors[0].device)!r})."
        )


def _examples(example: Any) -> int:
    return find_batch_size(example) or 1


def _output_nodes(outputs: Any) -> list[Any]:
    leaves = tree_leaves(outputs)
    leaves += [x for leaf in leaves if hasattr(leaf, "__dict__") for x in tree_leaves(vars(leaf))]  # the user's class
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]
    if not nodes:
        kinds = sorted({str(x.dtype) for x in tensors}) or [type(outputs).__name__]
        raise DifferentiationError(
            f"the model's output ({', '.join(kinds)}) does not depend differentiably on any of its layers. Look for "
            "torch.no_grad, .detach() or an integer output (argmax) in forward, and return logits."
        )
    return nodes


def _main_nodes(outputs: Any) -> list[Any]:
    """The node of the logits, where a container of outputs names them; none elsewhere."""
    for key in ("logits", "out"):
        found = outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)
        if isinstance(found, Tensor) and found.grad_fn is not None:
            return [found.grad_fn]
    return []


def _count_outputs(outputs: Any, examples: int) -> int:
    """Return the numbers per example in the logits; 0 where none are found."""
    try:
        return find_logits(outputs).numel() // examples
    except OutputError:
        return 0


def _read(recorder: Recorder, ends: list[Any], main: list[Any], sources: set[int], examples: int) -> LayerTrace:
    graph = AutogradGraph(ends, recorder.nodes, recorder.inputs, sources)
    main = main or ends
    wiring: dict[str, set[str]] = {OUTPUT: set(graph.nearest(main))}
    # A hidden state that is returned beside the logits ends in a layer whose channels the logits need as well.
    inside = {recorder.nodes[n] for end in main for n in graph.upstream(end) if n in recorder.nodes}
    output_layers = wiring[OUTPUT] | (graph.nearest(ends) - inside)
    for node, name in recorder.nodes.items():
        if node in graph.edges:
            wiring.setdefault(name, set()).update(graph.nearest(graph.edges[node]))
    order = tuple(recorder.calls)
    for name in order:  # a network of tokens has no float input: what has nothing upstream starts it
        if name in wiring and not wiring[name]:
            wiring[name] = {INPUT}
    _own_norms(recorder, graph, ends)
    reached = {recorder.nodes[n] for n in graph.edges if n in recorder.nodes}
    return LayerTrace(
        order,
        recorder.calls,
        {name: tuple(sorted(up)) for name, up in wiring.items()},
        frozenset(output_layers - {INPUT}),
        frozenset(n for n in order if n not in reached or n in recorder.unmarked),
        graph.branches(),
        examples,
        recorder.bytes // examples,
    )


def _own_norms(recorder: Recorder, graph: AutogradGraph, ends: list[Any]) -> None:
    """A layer's own norms: on every call one norm takes its output and nothing else does, nor does it take others'."""
    found: dict[str, list[str | None]] = {}
    for node, name in recorder.nodes.items():
        alone = graph.uses.get(node, 0) == 1 and node not in ends
        taker = next((n for n, inputs in recorder.norms.items() if node in inputs), None)
        found.setdefault(name, []).append(taker if alone else None)
    shared = {n for n, inputs in recorder.norms.items() if len({recorder.nodes.get(i) for i in inputs}) > 1}
    for name, norms in found.items():
        if not shared & set(norms) and None not in norms:
            recorder.calls[name].norms = tuple(dict.fromkeys(n for n in norms if n is not None))


class AutogradGraph:
    """The autograd graph behind the outputs, with some nodes marked as layers."""

    def __init__(self, ends: list[Any], marks: Mapping[Any, str], inputs: set[Any], sources: set[int]) -> None:
        self.marks = marks
        self.edges: dict[Any, list[Any]] = {}  # node -> the nodes it was computed from
        self.uses: dict[Any, int] = {}
        self.inputs = set(inputs)
        stack = list(ends)
        while stack:
            node = stack.pop()
            if node in self.edges:
                continue
            self.edges[node] = [n for n, _ in node.next_functions if n is not None]
            for n in self.edges[node]:
                self.uses[n] = self.uses.get(n, 0) + 1
            stack += self.edges[node]
            if id(getattr(node, "variable", None)) in sources:
                self.inputs.add(node)

    def nearest(self, starts: Iterable[Any]) -> set[str]:
        """The layers reached from ``starts`` upstream without passing another layer; INPUT for the input."""
        found: set[str] = set()
        seen: set[Any] = set()
        stack = list(starts)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.marks:
                found.add(self.marks[node])
            elif node in self.inputs:
                found.add(INPUT)
            else:
                stack += self.edges[node]
        return found

    def upstream(self, start: Any) -> set[Any]:
        """``start`` and everything it was computed from."""
        seen: set[Any] = set()
        stack = [start]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += self.edges[node]
        return seen

    def branches(self) -> tuple[tuple[str, ...], ...]:
        """The parallel branches: what is added to or concatenated with something that does without it.

        An operand of a join is a branch if layers lie on its way that the other operands do not need; the skip of
        a residual block needs none of its own, so only the block's branch counts. The innermost joins come first
        and a layer ends one branch only.
        """
        found: list[tuple[int, tuple[str, ...]]] = []
        for join in (n for n in self.edges if n.name() in JOINS):
            behind = {a: self.upstream(a) for a in dict.fromkeys(self.edges[join])}
            behind = {a: up for a, up in behind.items() if self.inputs & up or any(n in self.marks for n in up)}
            if len(behind) < 2:
                continue
            for a, up in behind.items():
                others = set().union(*(u for b, u in behind.items() if b is not a))
                own = {self.marks[n] for n in up - others if n in self.marks}
                ends = self.nearest([a])
                if own and ends <= own:
                    found.append((len(own), tuple(sorted(ends))))
        claimed: set[str] = set()
        kept: list[tuple[str, ...]] = []
        for _, ends_ in sorted(found, key=lambda f: f[0]):
            if not claimed & set(ends_):
                claimed |= set(ends_)
                kept.append(ends_)
        return tuple(kept)
