"""What makes training fast, as choices: precision, memory layout, CUDA graphs, the compiler."""

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
    """Training goes on without a shortcut that did not work here."""


@dataclass(frozen=True)
class Speed:
    """None decides by the device: everything that helps on a GPU, plain float32 on a CPU."""

    precision: str = "auto"  # "bf16": matrix products and convolutions in bfloat16, weights stay float32
    channels_last: bool | None = None
    graph: bool | None = None  # a step as one CUDA graph; needs a network without decisions by numbers
    compile: bool = False
    room: bool | None = None  # widths in multiples of 8 and no scatters while a pruned network is trained

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)

    def on(self, device: torch.device) -> Speed:
        """The same with everything decided."""
        cuda = device.type == "cuda"
        if self.graph and not cuda:
            raise ArgumentError(f"graph=True needs a CUDA device, not {device}.")
        if self.graph and distributed.count_ranks() > 1:
            raise ArgumentError("graph=True is for a single process: several talk to each other within a step.")
        precision = ("bf16" if cuda else "float32") if self.precision == "auto" else self.precision
        layout = cuda if self.channels_last is None else self.channels_last
        graph = cuda and distributed.count_ranks() == 1 if self.graph is None else self.graph
        room = cuda and distributed.count_ranks() == 1 and not self.compile if self.room is None else self.room
        return Speed(precision, layout, graph, self.compile, room)

    @contextmanager
    def mixed(self, device: torch.device) -> Iterator[None]:
        """bfloat16 where it was asked for. No cache of cast weights: a CUDA graph would keep old ones."""
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False):
            yield

    def placed(self, model: nn.Module, device: torch.device) -> nn.Module:
        """On the device, in the layout; changes the model it is given."""
        model = model.to(device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]


def upcast_half(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@contextmanager
def enable_cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN try its kernels out: the shapes of a training are always the same."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
