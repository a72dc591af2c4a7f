"""Fit a removal to the user's code: run the smaller network on the meta device and pin what an op cannot lose.

Every op of the smaller network must do what it did in the whole one. Where it does not, the code requires the channels
that it works on; they are pinned, and the next layout is tried out.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from sosp.core.batches import call_model
from sosp.core.layers import Scatter, ZeroLayer, gives_known_zeros
from sosp.graph.channels import FixedAxis, OpRecord, Pin
from sosp.graph.dataflow import find_gone_events, list_running_records
from sosp.graph.forward_code import build_path_pin, clone_inputs, copy_to_meta, find_exposed_values, isolate_forward
from sosp.graph.labels import (
    OPAQUE,
    RESHAPES,
    Labels,
    compress_labels,
    find_kept_indices,
    reshape_labels,
    resize_labels,
)
from sosp.graph.layout import Layout, LayoutStyle
from sosp.graph.ops import (
    COMPOSITE,
    DECOMPOSED,
    NUMBERS,
    collect_numbers,
    find_op_name,
    find_raising_line,
    is_turned_weight,
    list_layer_parameters,
    run_op,
    skip_override_checks,
)
from sosp.graph.recipe import Recipe, RemovedChannels, apply_recipe, write_recipe
from sosp.graph.width_arithmetic import Trial, find_width_pins

if TYPE_CHECKING:
    from sosp.graph.flow import Flow


FIXED_AXIS = "the code requires a fixed size of an axis"
ASKED = "the code uses an attribute that what replaces an empty layer does not have"
FIXED_NUMBER = "the code requires a fixed number of channels here"

# fitting --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LayoutFit:
    """What stays and how to get there, as it runs in the user's code; and the flow with what that has shown."""

    flow: Flow
    layout: Layout
    recipe: Recipe


def fit_layout(flow: Flow, removed: RemovedChannels, style: LayoutStyle | None = None) -> LayoutFit:
    """Return the smallest layout without the ``removed`` channels with which the user's code runs."""
    while True:
        layout = flow.layout(removed, style)
        recipe = write_recipe(flow.network, flow.graph, layout, removed)
        pins, fixed = _find_trouble(flow, layout, recipe)
        if not pins:
            return LayoutFit(flow, layout, recipe)
        flow = flow.with_pins(pins, fixed)


def _find_trouble(flow: Flow, layout: Layout, recipe: Recipe) -> tuple[list[Pin], list[FixedAxis]]:
    """Run the smaller network; return the pins and the axes of fixed size with which the user's code would run."""
    pins: list[Pin] = []
    fixed: list[FixedAxis] = []
    tried = list(try_recipe(flow, layout, recipe))
    for mode, run in tried:
        pins += _find_reasons(flow, layout, mode, run, fixed)
    if pins or not any(run.computed for _, run in tried) or any(d.op in NUMBERS for d in flow.graph.decisions):
        return pins, fixed  # numbers that were computed from values may well differ
    trial = Trial(flow, layout, recipe, lambda a, b: try_recipe(flow, a, b))
    for mode, run in tried:
        pins += list(islice(find_width_pins(trial, mode, run), 1))  # one at a time: a pin may restore other numbers
    return pins, fixed


def try_recipe(flow: Flow, layout: Layout, recipe: Recipe) -> Iterator[tuple[str, DryRunMode]]:
    """Run the changed network next to the record of the whole one, in each mode in which the code differs."""
    twin = copy.deepcopy(flow.network) if flow.real else copy_to_meta(flow.network)
    apply_recipe(twin, recipe)
    gone = {*recipe.emptied, *recipe.passed}
    bypassed = {name: bypass.steps for name, bypass in recipe.bypassed.items()}
    decides = bool(flow.graph.decisions)
    for mode in flow.modes_that_differ(layout.counts):
        events = flow.graph.events[mode]
        running = list_running_records(flow.graph.records[mode], events, find_gone_events(events, bypassed))
        records = [r for r in running if r.module not in gone]
        twin.train(mode == "train")
        with isolate_forward():
            given = clone_inputs(flow.example, flow.real)
            yield mode, compare_ops(twin, given, records, layout.counts, gone, decides)


def _find_reasons(flow: Flow, layout: Layout, mode: str, run: DryRunMode, fixed: list[FixedAxis]) -> list[Pin]:
    """Pin the channels at each op that failed; if they all stayed, those whose sizes were read around it; or all.

    Where fixing the size of an axis helps, the axis is appended to ``fixed``.
    """
    pins = [_pin_one_channel(flow, name, run.asked_at) for name in run.asked]
    if run.took_other_path:
        ids = find_exposed_values(flow.graph, flow.unused_modules)
        if (layout.counts[ids] == 0).any():
            pins.append(
                build_path_pin(flow.graph, ids, "without the removed channels, the code takes a different path")
            )
    for record in run.failed[:-1] if run.took_other_path else run.failed:
        axis = _find_axis((*flow.fixed, *fixed), record, layout.counts)
        if axis is not None:
            fixed.append(axis)
            pins.append(Pin(np.zeros(0, dtype=int), record.name, record.where, FIXED_AXIS))
            continue
        at_op = [x.numbers() for x in (*record.given, *record.out) if x is not None]
        around = [ids for m, module, ids in flow.graph.reads if m == mode and module == record.module]
        everything = [np.arange(flow.graph.count)]
        for labels in (at_op, around, everything):
            ids = np.concatenate([np.zeros(0, dtype=int), *labels])
            if (layout.counts[ids] == 0).any():
                pins.append(Pin(np.unique(ids), record.name, record.where, FIXED_NUMBER))
                break
    return pins


def _pin_one_channel(flow: Flow, name: str, where: str) -> Pin:
    """Pin the first channel of a layer or a norm, so that it is not replaced."""
    layer = next((d for d in flow.graph.dense.values() if d.module == name), None)
    ids = layer.out if layer is not None else flow.graph.calls[name][0].given
    return Pin(ids[:1], name, where, ASKED)


def _find_axis(fixed: Iterable[FixedAxis], record: OpRecord, counts: np.ndarray) -> FixedAxis | None:
    """Where channels were folded into several axes, the code may fix the size of one: the shortest that changed."""
    known = {(id(labels), axis) for labels, axis in fixed}
    for labels in (*record.out, *record.given):
        picks = find_kept_indices(labels, counts) if labels is not None and len(labels.varying) > 1 else None
        if labels is None or picks is None:
            continue
        changed = [d for d in labels.varying if len(picks[d]) < labels.shape[d] and (id(labels), d) not in known]
        free = [d for d in labels.varying if (id(labels), d) not in known]
        if changed and len(free) > 1:  # one axis at least is free; otherwise all of it is pinned
            return labels, min(changed, key=lambda d: labels.shape[d])
    return None


# one run --------------------------------------------------------------------------------------------------------------


class OtherPathError(RuntimeError):
    """The code took another way than for the whole network."""


class DryRunMode(TorchFunctionMode):
    """Runs beside the record of the whole network, op by op; notes where shapes or the order of channels differ."""

    def __init__(
        self, twin: nn.Module, records: list[OpRecord], counts: np.ndarray, device: torch.device, decides: bool
    ) -> None:
        super().__init__()
        self.layer_parameters = list_layer_parameters(twin)
        self.records, self.counts, self.device = records, counts, device
        self.decides = decides  # the code decides by values: it may take another way, or count other rows
        self.took_other_path = False  # it did, and what comes then cannot be compared
        self.at = 0
        self.failed: list[OpRecord] = []
        self.asked: list[str] = []  # replaced modules of which the code asked for what they do not have
        self.asked_at = ""  # by which line
        self.agreed: set[int] = set()  # ids of records: the op computed with the numbers it had
        self.computed: list[OpRecord] = []  # it computed with others
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = find_op_name(func)
        if name in COMPOSITE or name in DECOMPOSED:
            with self, skip_override_checks():
                return DECOMPOSED.get(name, func)(*args, **kwargs)
        try:
            result = run_op(func, name, args, kwargs)
        except Exception as error:
            return self.record_failure(self.next(name, error))
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if not outputs or is_turned_weight(name, args, self.layer_parameters):
            return result
        record = self.next(name, None)
        self.compare(record, collect_numbers(name, tree_leaves((args, kwargs))))
        wanted = self.expected(record)
        # A reshape is given as many rows as before: if it gives others, channels were read as rows.
        counts_rows = self.decides and name not in RESHAPES
        if counts_rows and wanted is not None and self.other_rows(outputs, record, wanted):
            raise OtherPathError(f"{name}: the outputs have other rows than for the unpruned network")
        if wanted is None or [tuple(x.shape) for x in outputs] != [w.shape for w in wanted]:
            return self.record_failure(record)
        if record.moves and not self.same_order(func, name, args, kwargs, record, wanted):
            return self.record_failure(record)
        return result

    def next(self, name: str, error: Exception | None) -> OpRecord:
        if self.at >= len(self.records) or self.records[self.at].name != name:
            raise OtherPathError(f"{name}: the code took a different path than for the unpruned network") from error
        self.at += 1
        return self.records[self.at - 1]

    def compare(self, record: OpRecord, found: tuple[float, ...]) -> None:
        """A number that is another one than before was made of a width."""
        if found == record.numbers or any(x != x for x in record.numbers):
            self.agreed.add(id(record))
        else:
            self.computed.append(record)

    def other_rows(self, outputs: list[Tensor], record: OpRecord, wanted: list[Labels]) -> bool:
        """Shapes that differ along axes without channels."""
        for x, labels, kept in zip(outputs, record.out, wanted, strict=False):
            if x.dim() == len(kept.shape):
                varying = labels.varying if labels is not None else ()
                if any(n != m and d not in varying for d, (n, m) in enumerate(zip(x.shape, kept.shape, strict=True))):
                    return True
        return False

    def expected(self, record: OpRecord) -> list[Labels] | None:
        """The labels that should come out; None where they fill no box."""
        found = []
        for labels, shape in zip(record.out, record.shapes, strict=True):
            kept = (
                resize_labels(labels, self.counts)
                if labels is not None
                else Labels(torch.zeros([1] * len(shape)), shape)
            )
            if kept is None:
                return None
            found.append(kept)
        return found

    def record_failure(self, record: OpRecord) -> Any:
        """Note the failure and go on with what should have come out."""
        self.failed.append(record)
        wanted = self.expected(record)
        shapes = iter([w.shape for w in wanted] if wanted is not None else record.shapes)
        fakes = [torch.zeros(next(shapes), dtype=t, device=self.device) if t else None for t in record.dtypes]
        return tree_unflatten(fakes, record.spec)

    def same_order(self, func: Any, name: str, args: Any, kwargs: Any, record: OpRecord, wanted: list[Labels]) -> bool:
        leaves, spec = tree_flatten((args, kwargs))
        places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
        if any(not leaves[k].is_floating_point() for k in places):
            return True  # picked by numbers that are not known here: the check on real numbers decides
        given = []
        for k, labels in zip(places, record.given, strict=True):
            kept = resize_labels(labels, self.counts) if labels is not None else _opaque(leaves[k])
            if kept is None or kept.shape != tuple(leaves[k].shape):
                return False
            given.append(kept)
        if name in RESHAPES:
            return _same(reshape_labels(given[0], wanted[0].shape), wanted[0])
        for k, x in zip(places, given, strict=True):
            leaves[k] = x.full()
        try:
            again, keywords = tree_unflatten(leaves, spec)
            moved = [compress_labels(x) for x in tree_leaves(func(*again, **keywords)) if isinstance(x, Tensor)]
        except (RuntimeError, TypeError, NotImplementedError):
            return True  # an op that takes no integers (im2col): its shape agrees, real numbers decide
        return all(_same(a, b) for a, b in zip(moved, wanted, strict=True))


def _opaque(x: Tensor) -> Labels:
    return Labels(torch.full([1] * x.dim(), OPAQUE), tuple(x.shape))


def _same(a: Labels, b: Labels) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a.core, b.core) if a.core.shape == b.core.shape else torch.equal(a.full(), b.full())


def compare_ops(
    twin: nn.Module,
    inputs: Any,
    records: list[OpRecord],
    counts: np.ndarray,
    replaced: Collection[str],
    decides: bool = False,
) -> DryRunMode:
    """Run ``twin`` beside the record, in the mode it is in; ``failed`` holds the ops that went wrong.

    ``replaced``: layers and norms that are gone only now; what was left of others before is code that is in the record.
    ``decides``: the code decides by values. Where another way was taken, ``strayed``, the last of ``failed`` is there.
    """
    device = next((x.device for x in tree_leaves(inputs) if isinstance(x, Tensor)), torch.device("cpu"))
    mode = DryRunMode(twin, records, counts, device, decides)

    def rest(module: nn.Module, args: Any) -> None:
        mode.paused = True

    def work(module: nn.Module, args: Any, output: Any) -> None:
        mode.paused = False

    handles = []
    for name, module in twin.named_modules():
        rests = isinstance(module, Scatter) or gives_known_zeros(module)
        if rests or (isinstance(module, ZeroLayer) and name in replaced):
            handles.append(module.register_forward_pre_hook(rest))
            handles.append(module.register_forward_hook(work))
    try:
        with mode:
            call_model(twin, inputs)
        if decides and mode.at < len(records):
            raise OtherPathError("the code finished earlier than for the unpruned network")
    except Exception as error:  # between two ops: because of a module that was replaced, or a check of a size
        mode.asked, mode.asked_at = find_asked_modules(twin, error, replaced), find_raising_line(error)
        mode.took_other_path = decides and isinstance(error, OtherPathError)
        if not mode.asked:
            mode.failed.append(records[min(mode.at, len(records) - 1)])
    finally:
        for h in handles:
            h.remove()
    return mode


def find_asked_modules(twin: nn.Module, error: Exception, replaced: Collection[str]) -> list[str]:
    """Return the replaced module that lacks an attribute; all of them where a property of the user's hides which."""
    if not isinstance(error, AttributeError):
        return []
    asked = [name for name in replaced if twin.get_submodule(name) is error.obj]
    return asked or sorted(replaced)
