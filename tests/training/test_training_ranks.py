"""Training in two and three processes: weights, statistics and history as in a single one, to float error."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import training_worker
from helpers.training_worker import JOBS, TOGETHER, Sometimes, fixed, normed, same, weights

WORLDS = (2, 3)
# float64: 12 steps that add up some hundred numbers in another order, each off by 1e-16 of sums near 10.
EXACT = 1e-11

pytestmark = pytest.mark.slow  # they start processes


def run_worker(folder: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, training_worker.__file__, "ranks", str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    (folder / "said.part").write_text(ran.stderr)
    (folder / "said.part").rename(folder / "said")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """World -> rank -> job -> result; made once, also where several processes run the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "training-ranks"
    try:
        folder.mkdir()
        run_worker(folder)
    except FileExistsError:
        end = time.monotonic() + 240
        while not (folder / "said").exists() and time.monotonic() < end:
            time.sleep(0.1)
    said = (folder / "said").read_text()
    results = {
        world: [torch.load(folder / f"{world}-{r}.pt", weights_only=False) for r in range(world)]
        for world in (1, 2, 3)
        if all((folder / f"{world}-{r}.pt").exists() for r in range(world))
    }
    assert list(results) == [1, 2, 3], said
    for world, ranks in results.items():
        for rank in ranks:
            failed = [f"{world} processes, {n}: {x}" for n, x in rank.items() if "Traceback" in str(x)]
            assert not failed, failed[0]
            assert list(rank) == list(JOBS)
    return results


def assert_same(mine: Any, theirs: Any, path: str = "") -> None:
    """Numbers to float error, all else equal."""
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs), path
        for name in theirs:
            assert_same(mine[name], theirs[name], f"{path}/{name}")
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs), path
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{path}/{k}")
    elif isinstance(theirs, Tensor):
        assert torch.allclose(mine, theirs, rtol=EXACT, atol=EXACT), (path, (mine - theirs).abs().max())
    elif isinstance(theirs, float):
        assert mine == pytest.approx(theirs, rel=EXACT, abs=EXACT), path
    else:
        assert mine == theirs, path


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "job", ["train", "loader", "shuffled", "viewing", "several", "evaluate", "recalibrate", "unused"]
)
def test_several_processes_do_what_one_does(job: str, world: int, found: Any) -> None:
    """Also where the last batch has fewer rows than there are processes."""
    for rank in found[world]:
        assert_same(rank[job], found[1][0][job])


def test_one_process_has_learned_something(found: Any) -> None:
    """Equal results are worth something only if they are results."""
    one = found[1][0]["train"]
    losses = [epoch[1] for epoch in one["story"]]
    assert losses[-1] < losses[0]
    start = weights(normed().double())
    assert all(not torch.equal(x, start[n]) for n, x in one["weights"].items())
    assert len(one["story"]) == TOGETHER.epochs


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_end_with_the_very_same_numbers(world: int, found: Any) -> None:
    first, *others = (rank["train"] for rank in found[world])
    for other in others:
        assert same(other["weights"], first["weights"])
        assert other["story"] == first["story"]


@pytest.mark.parametrize("world", WORLDS)
def test_an_unused_parameter_gets_neither_gradient_nor_decay(world: int, found: Any) -> None:
    start = weights(fixed(Sometimes).double())
    for rank in found[world]:
        assert torch.equal(rank["unused"]["weights"]["never.weight"], start["never.weight"])


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_drops_out_for_itself(world: int, found: Any) -> None:
    """64 units with probability 1/2: two ranks agree by chance once in 2 ** 64 times."""
    seen = [rank["dropout"] for rank in found[world]]
    assert all(not torch.equal(a, b) for k, a in enumerate(seen) for b in seen[:k])


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_stop_when_the_loss_of_one_is_no_number(world: int, found: Any) -> None:
    for rank in found[world]:
        kind, said = rank["nan"]
        assert kind == "TrainingError"
        assert "at step 1 (epoch 1)" in said


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_refuse(world: int, found: Any) -> None:
    for rank in found[world]:
        folder, labels, sampler = rank["refused"]
        assert "checkpoints cannot be written there" in folder
        assert "a label is 9, but the network has 4 outputs" in labels
        assert "DistributedSampler" in sampler


@pytest.mark.parametrize("world", WORLDS)
def test_training_goes_on_in_several_processes(world: int, found: Any) -> None:
    one = found[1][0]["resume"]
    for k, rank in enumerate(found[world]):
        mine = rank["resume"]
        assert_same(mine["story"], one["story"])
        assert_same(mine["weights"], one["weights"])
        assert_same(mine["average"], one["average"])
        assert mine["names"] == ["checkpoint-00000005.safetensors", "checkpoint-00000006.safetensors"]
        assert len(mine["heard"]) == (k == 0)  # only the first one reads
        assert mine["seen"] == [1, 2, 3, 4, 5, 6, 7]
    assert "truncated or damaged" in found[world][0]["resume"]["heard"][0]
