"""Scoring in several processes: each takes its share of the examples, and all get what a single one gets."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import sosp
from networks import case
from sosp.core import distributed
from sosp.core.batches import distribute_examples, iterate_chunks
from sosp.errors import DataError

METHODS = ("sosp-h", "sosp-i", "sosp-i-diagonal", "first-order", "exact")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def joined(rank: int, world: int, port: int, job: Any, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    with distributed.join_processes():
        torch.save(job(), f"{folder}/{rank}.pt")


def together(world: int, job: Any, folder: Path) -> list[Any]:
    """What ``job`` returns in each of ``world`` processes."""
    mp.start_processes(joined, (world, free_port(), job, str(folder)), nprocs=world, start_method="fork")
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(world)]


def batches() -> list[Any]:
    """Unequal, one of them smaller than the number of processes."""
    x, y = case("residual").inputs, case("residual").targets
    return [(x[:4], y[:4]), (x[4:5], y[4:5]), (x[5:], y[5:])]


def terms() -> dict[str, list[Any]]:
    c = case("residual")
    found = {}
    for method in METHODS:
        s = sosp.score(c.model, batches(), method=method)
        found[method] = [s.first, s.second, s.pairs, s.examples]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_score_as_one(world: int, tmp_path: Path) -> None:
    wanted = terms()
    for found in together(world, terms, tmp_path):
        for method in METHODS:
            for a, b in zip(found[method], wanted[method], strict=True):
                if isinstance(b, torch.Tensor):
                    assert torch.allclose(a, b, rtol=1e-12, atol=1e-14), method  # float64, sums in another order
                else:
                    assert a == b


def dealt(sizes: list[int], world: int) -> list[list[int]]:
    """The numbers of the examples that each of ``world`` processes gets, of batches of these sizes."""
    data = [(x, x) for x in torch.arange(sum(sizes)).split(sizes)]
    shares = (distribute_examples(iterate_chunks(data, None, None), rank, world) for rank in range(world))
    return [[int(i) for chunk in share for i in chunk.inputs] for share in shares]


def test_examples_are_dealt_in_turn_across_batches() -> None:
    assert dealt([1, 1, 1, 1], 2) == [[0, 2], [1, 3]]
    assert dealt([1, 3, 1, 2], 3) == [[0, 3, 6], [1, 4], [2, 5]]


def too_few() -> str:
    x, y = case("residual").inputs, case("residual").targets
    try:
        sosp.score(case("residual").model, (x[:2], y[:2]))
    except DataError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_fewer_examples_than_processes(tmp_path: Path) -> None:
    """All refuse, instead of one that waits for the others."""
    for said in together(3, too_few, tmp_path):
        assert "2 examples are too few for 3 processes" in said


def test_alone_nothing_happens() -> None:
    x = torch.arange(3.0)
    distributed.sum_tensors(x)
    assert x.tolist() == [0, 1, 2]
    assert (distributed.get_rank(), distributed.count_ranks(), distributed.is_main()) == (0, 1, True)
    assert distributed.is_any_true(True, torch.device("cpu"))
    assert not distributed.is_any_true(False, torch.device("cpu"))


class Own(nn.Module):
    """Its loss is its own: a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.fc2(torch.relu(self.fc1(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def own() -> Any:
    g = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randn(n, 4, dtype=torch.float64, generator=g), "labels": torch.arange(n) % 3} for n in (3, 1, 4, 2)
    ]
    model = Own()
    found = sosp.find_structures(model, data[0])
    s = sosp.score(model, data, structures=found)
    return s.first, s.second


@pytest.mark.slow
def test_dict_batches_stay_whole(tmp_path: Path) -> None:
    wanted = own()
    for found in together(2, own, tmp_path):
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
