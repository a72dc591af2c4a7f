"""Compare a smaller network with the masked one it stands for, on the example, before anybody relies on it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sosp.core.batches import call_model, copy_inputs, slice_examples
from sosp.errors import StructureError, SurgeryError
from sosp.graph.meta_copies import count_input_examples, isolate_forward, list_tensors, shorten_example
from sosp.graph.ops import DROPOUTS, find_op_name

# Rounding differs when sums have fewer terms; beyond this it is looked at again in double precision.
SUSPECT = {torch.float64: 1e-11, torch.float32: 1e-5}
WRONG = 1e-7  # of the largest output, in double precision
ROWS = 8  # of the example are looked at, at a time
BUG_REPORT_HINT = (
    "This is a defect of sosp: please report it, with the network. Until then exclude the layers involved "
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

    ``most``: rows of the example that are looked at, a few at a time.
    """
    for start in range(0, min(most, count_input_examples(example)), ROWS):
        _check_rows(small, masked, shorten_example(slice_examples(example, start, ROWS), ROWS), modes)


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
