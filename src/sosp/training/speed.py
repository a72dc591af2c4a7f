"""Choose what makes training fast: precision, memory layout, CUDA graphs, compilation and padded widths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sosp.core import distributed
from sosp.errors import ArgumentError, check_choice

PRECISIONS = ("auto", "float32", "bf16")


class SlowTrainingWarning(UserWarning):
    """Training continues without an optimisation that does not work for this network."""


@dataclass(frozen=True)
class Speed:
    """Options for the speed of training. None chooses by device: all that helps on a GPU, float32 on a CPU."""

    precision: str = "auto"  # "bf16": matrix products and convolutions in bfloat16, weights in float32
    channels_last: bool | None = None
    graph: bool | None = None  # run a step as one CUDA graph; the network must not branch on tensor values
    compile: bool = False
    pad_widths: bool | None = None  # train a pruned network with widths padded to multiples of 8 and without scatters

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)

    def on(self, device: torch.device) -> Speed:
        """Return these options for a device, with every None replaced by a choice."""
        cuda = device.type == "cuda"
        if self.graph and not cuda:
            raise ArgumentError(f"graph=True needs a CUDA device, not {device}.")
        if self.graph and distributed.count_ranks() > 1:
            raise ArgumentError("graph=True needs a single process: several processes communicate within a step.")
        precision = ("bf16" if cuda else "float32") if self.precision == "auto" else self.precision
        layout = cuda if self.channels_last is None else self.channels_last
        graph = cuda and distributed.count_ranks() == 1 if self.graph is None else self.graph
        pad = (
            cuda and distributed.count_ranks() == 1 and not self.compile if self.pad_widths is None else self.pad_widths
        )
        return Speed(precision, layout, graph, self.compile, pad)

    @contextmanager
    def mixed(self, device: torch.device) -> Iterator[None]:
        """Use bfloat16 if chosen. Cast weights are not cached: a CUDA graph would keep old values."""
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False):
            yield

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move a model to the device and into the memory layout, in place, and return it."""
        model = model.to(device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]


def upcast_half(x: Tensor) -> Tensor:
    """Return ``x`` in float32 if it is in half precision; unchanged otherwise."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@contextmanager
def enable_cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN benchmark its kernels: the shapes in a training do not change."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
