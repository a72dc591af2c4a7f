"""Build the smaller network of a mask or plan, and check that it computes what the masked network computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sosp.core.batches import call_model, copy_inputs, slice_examples
from sosp.errors import ArgumentError, StructureError, SurgeryError
from sosp.graph.flow import Flow, follow_channels
from sosp.graph.forward_code import count_input_examples, format_names, isolate_forward, list_tensors, shorten_example
from sosp.graph.layout import LayoutStyle
from sosp.graph.mask import Mask, check_mask, masked
from sosp.graph.ops import DROPOUTS, find_op_name
from sosp.graph.plan import Plan, plan_removal
from sosp.graph.recipe import Recipe, apply_recipe, collect_shapes, set_rows_to_zero

MOST = 64  # rows that are compared where the code looks at values


def shrink(
    model: nn.Module, mask: Mask | Plan, example: Any, *, verify: bool = True, join: str = "scatter", round_to: int = 1
) -> nn.Module:
    """Return a smaller copy of ``model`` that computes what ``sosp.masked(model, mask)`` computes.

    Class, code and names stay the same. Filters, neurons and the inputs they fed are physically removed. A layer that
    lost all of them is replaced by zeros without parameters. The two networks agree in eval and in train mode.

    Args:
        model: The network; it is not changed.
        mask: The channels to remove, or a plan to remove them, which says how branches are joined and rounded.
        example: Inputs as ``model(...)`` takes them.
        verify: Compare the two networks on the example.
        join: Where a layer keeps fewer channels than the stream it feeds, ``"scatter"`` puts them in place.
            ``"zeros"`` lets the layer compute the missing ones with weights of zero: more to compute but one op less,
            for inference where the number of ops decides (training would bring those weights back).
        round_to: Round the widths of the streams up to a multiple, as fast kernels need. Round the widths of the
            layers in ``select``.

    Returns:
        The smaller network. It remembers how it was made, so that ``sosp.save`` can write it.

    Raises:
        StructureError: The mask is of another network, or the network cannot be followed.
        SurgeryError: The two networks differ.
    """
    plan = _as_plan(model, mask, example, join, round_to)
    small = apply_recipe_to_copy(model, plan.recipe)
    set_rows_to_zero(small, plan.zeroed)
    if verify:
        _check(small, masked(model, plan.mask), example, plan.flow, [*plan.mask.removed])
    return small


def _as_plan(model: nn.Module, mask: Mask | Plan, example: Any, join: str, round_to: int) -> Plan:
    """Return the plan itself, if it was made for such a network, or the plan to remove the channels of the mask."""
    if isinstance(mask, Plan):
        if (join, round_to) != ("scatter", 1):
            raise ArgumentError("the plan says how branches are joined and rounded: leave out join= and round_to=.")
        check_mask(model, mask.mask)
        if mask.flow.parameters != {name: tuple(p.shape) for name, p in model.named_parameters()}:
            raise StructureError("the plan was made for a network with other parameters. Make a plan for this network.")
        return mask
    check_mask(model, mask)
    if mask.kind == "weights":
        raise StructureError("single weights cannot be cut out of a layer: use sosp.masked, or kind='filters'.")
    style = LayoutStyle(join, round_to)
    return plan_removal(follow_channels(model, example), mask, style)


def _check(small: nn.Module, whole: nn.Module, example: Any, flow: Flow, layers: list[str]) -> None:
    """Compare the two networks, where the code looks at values on more of the example: rows may go different ways."""
    try:
        check_same_outputs(small, whole, example, flow.modes, MOST if flow.real else ROWS)
    except SurgeryError as error:
        if not str(error).endswith(BUG_REPORT_HINT):
            raise
        raise SurgeryError(str(error).removesuffix(BUG_REPORT_HINT) + _advice(flow, layers)) from error


def _advice(flow: Flow, layers: list[str]) -> str:
    """What in the user's code it may come from, and how to go on."""
    decides = format_names(tuple(dict.fromkeys(f"{d.op} at {d.where}" for d in flow.graph.decisions)))
    return (
        "Code that computes with the width of a layer (out_features, x.shape[1]) "
        + (f"or branches on the values of tensors ({decides}) " if decides else "")
        + "can cause this. Exclude the layers whose width it uses, exclude=[...] with some of "
        f"{format_names(tuple(layers))}, or use sosp.masked. If there is no such code, this is a bug in sosp: please "
        "report it, with the network."
    )


def apply_recipe_to_copy(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return a copy with the recipe applied. It remembers the recipe and the shapes from before, for saving."""
    small = copy.deepcopy(model)
    apply_recipe(small, recipe)
    small.sosp_recipes = (*getattr(model, "sosp_recipes", ()), recipe)  # type: ignore[assignment]
    small.sosp_shapes = getattr(model, "sosp_shapes", None) or collect_shapes(model)  # type: ignore[assignment]
    return small


# Comparing the two networks -------------------------------------------------------------------------------------------

# Rounding differs when sums have fewer terms; beyond this it is looked at again in double precision.
SUSPECT = {torch.float64: 1e-11, torch.float32: 1e-5}
WRONG = 1e-7  # of the largest output, in double precision
ROWS = 8  # of the example are looked at, at a time
BUG_REPORT_HINT = (
    "This is a bug in sosp: please report it, with the network. Until then exclude the layers involved "
    "(print(sosp.trace(model, example)) lists them), or use sosp.masked."
)


class NoDropout(TorchFunctionMode):
    """Dropout would draw other numbers for fewer channels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if find_op_name(func) in DROPOUTS:
            return args[0]
        kwargs = {**(kwargs or {}), **({"dropout_p": 0.0} if "dropout_p" in (kwargs or {}) else {})}
        return func(*args, **kwargs)


def check_same_outputs(
    small: nn.Module, masked: nn.Module, example: Any, modes: tuple[str, ...], most: int = ROWS
) -> None:
    """Refuse a small network that does not give what the masked one gives, in eval and in train mode.

    ``most``: rows of the example that are looked at, a few at a time; all of them at once if the model does not run on
    some.
    """
    try:
        for start in range(0, min(most, count_input_examples(example)), ROWS):
            _check_rows(small, masked, shorten_example(slice_examples(example, start, ROWS), ROWS), modes)
    except StructureError:
        _check_rows(small, masked, example, modes)


def _check_rows(small: nn.Module, masked: nn.Module, inputs: Any, modes: tuple[str, ...]) -> None:
    for mode in modes:
        try:
            theirs = run_copy(masked, inputs, mode, 0)
        except Exception as error:  # of another type or on another device, which the meta device does not mind
            raise StructureError(
                f"the model does not run on the example in {mode} mode: {type(error).__name__}: {error}"
            ) from error
        try:
            ours = run_copy(small, inputs, mode, 0)
        except Exception as error:
            raise SurgeryError(
                f"the smaller network does not run in {mode} mode: {error}. {BUG_REPORT_HINT}"
            ) from error
        if _largest(ours, theirs) > _suspect(masked):
            _check_in_double(small, masked, inputs, mode)


def _check_in_double(small: nn.Module, masked: nn.Module, inputs: Any, mode: str) -> None:
    """In double precision, and beside what a change of the last digits does to the masked network itself."""
    single = inputs
    inputs = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
    try:
        theirs = copy.deepcopy(masked).double()
        found = measure_difference(copy.deepcopy(small).double(), theirs, inputs, mode)
        noise = measure_difference(_perturb_parameters(theirs), theirs, inputs, mode)
        limit = max(WRONG, 1000 * noise)
    except RuntimeError:  # the code names a precision: what is far off is wrong all the same
        found, limit = measure_difference(small, masked, single, mode), 100 * _suspect(masked)
    if not found <= limit:
        raise SurgeryError(
            f"the smaller network differs from the masked one by {found:.1e} of the largest output in {mode} mode. "
            + BUG_REPORT_HINT
        )


@torch.no_grad()
def _perturb_parameters(model: nn.Module) -> nn.Module:
    """A copy whose parameters differ in their last digits."""
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        if p.is_floating_point():
            p.mul_(
                1 + 1e-15 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype).to(p.device)
            )
    return twin


def _suspect(model: nn.Module) -> float:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return SUSPECT.get(dtype, 1e-2)


def measure_difference(small: nn.Module, masked: nn.Module, inputs: Any, mode: str) -> float:
    """The largest difference of an output, relative to its largest magnitude; 0 where chance decides anyway."""
    ours, theirs = (run_copy(m, inputs, mode, 0) for m in (small, masked))
    if mode == "train" and _largest(theirs, run_copy(masked, inputs, mode, 1)) > 0:
        return 0.0  # stochastic depth and the like: two runs of one network differ as well
    return _largest(ours, theirs)


def run_copy(model: nn.Module, inputs: Any, mode: str, seed: int) -> list[Tensor]:
    """What a copy of the model gives: batch norms learn in train mode."""
    twin = copy.deepcopy(model).train(mode == "train")
    with isolate_forward(), NoDropout():
        torch.manual_seed(seed)
        return [x.double() for x in list_tensors(call_model(twin, copy_inputs(inputs))) if x.is_floating_point()]


def _largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return float("inf")
    found = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if b.numel() and not torch.equal(a, b):
            finite = torch.isfinite(b)
            if not torch.equal(torch.isfinite(a), finite):
                return float("inf")
            scale = b[finite].abs().max().item() if bool(finite.any()) else 0.0
            gap = (a - b)[finite].abs().max().item() if bool(finite.any()) else 0.0
            found = max(found, gap / scale if scale else float(gap > 0))
    return found
