"""Several processes that train or score as one: who am I, sums over all of them. Alone, everything is a no-op."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


def get_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """The one that prints and writes."""
    return get_rank() == 0


@contextmanager
def join_processes() -> Iterator[None]:
    """Join the processes that torchrun started; without it nothing happens."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or count_ranks() > 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def sum_tensors(*tensors: Tensor) -> None:
    """Add up over all ranks, in place; one message."""
    if count_ranks() == 1 or not tensors:
        return
    flat = torch.cat([x.reshape(-1) for x in tensors])
    dist.all_reduce(flat)
    with torch.no_grad():
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view(x.shape))


def is_any_true(flag: bool, device: torch.device) -> bool:
    """Whether it is true for one of them: all take the same decision."""
    if count_ranks() == 1:
        return flag
    found = torch.tensor(float(flag), device=device)
    dist.all_reduce(found)
    return bool(found)


def broadcast_tensors(tensors: list[Tensor]) -> None:
    """Everybody takes the numbers of the first."""
    if count_ranks() > 1:
        for x in tensors:
            dist.broadcast(x.data, 0)


def gather_counts(mine: int, device: torch.device) -> list[int]:
    """This number of every rank."""
    if count_ranks() == 1:
        return [mine]
    found = torch.zeros(count_ranks(), dtype=torch.int64, device=device)
    found[get_rank()] = mine
    dist.all_reduce(found)
    return found.tolist()


def wait_for_ranks() -> None:
    if count_ranks() > 1:
        dist.barrier()
