"""Tiny networks and data to train on; and, run as a script, processes that train, to be killed or to train together.

``python tests/training_worker.py kills FOLDER`` and ``python tests/training_worker.py ranks FOLDER`` import torch once
and fork: a clean process may do so, one that has computed gradients on a machine with a GPU may not.
"""

import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sosp
from sosp import Schedule
from sosp.core import distributed
from sosp.errors import CheckpointError, DataError, SospError
from sosp.training import CheckpointWarning

N, CLASSES = 22, 4  # batches of 8: 8, 8, 6
SHORT = Schedule(epochs=3, batch=8, rate=0.1, decay=1e-3, milestones=(0.4, 0.7))


# --- networks and data ----------------------------------------------------------------------------------


def fixed(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.b(torch.relu(self.a(x.flatten(1))))))


class Counting(nn.Module):
    """Its outputs depend on a buffer that no state dict holds, and on a mask of minus infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, CLASSES)
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.fc(x.flatten(1)) * (1 + self.steps / 10) + self.mask.softmax(0)[1]


class Two(nn.Module):
    """Two arguments, by place or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, CLASSES), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.a(x.flatten(1)) + torch.tanh(self.b(z.flatten(1)))


class Pixels(nn.Module):
    """A class for every pixel, ``(N, D, H, W)``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Viewing(nn.Module):
    """A reshape that cannot tell the size of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).view(x.size(0), -1))


def plain() -> nn.Module:
    return fixed(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, CLASSES)))


def normed() -> nn.Module:
    return fixed(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 6, 2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(54, 8), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(), nn.Linear(8, CLASSES)),
        )
    )


def dropping() -> nn.Module:
    return fixed(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Dropout(0.4), nn.ReLU(), nn.Linear(9, CLASSES))
    )


def partly_frozen() -> nn.Module:
    model = normed()
    for p in model[0].parameters():
        p.requires_grad_(False)
    return model


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "normed": normed,
    "dropping": dropping,
    "frozen": partly_frozen,
    "tied": lambda: fixed(Tied),
    "counting": lambda: fixed(Counting),
}


def examples(count: int = N, seed: int = 1, kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Images (count, 3, 2, 2) and labels that can be learned."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (count,), generator=g)
    x = torch.randn(count, 3, 2, 2, generator=g, dtype=kind) + y.view(-1, 1, 1, 1)
    return x, y


# --- what a training gave -------------------------------------------------------------------------------


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All numbers, also the buffers that a state dict leaves out."""
    return {n: x.detach().clone() for n, x in [*model.named_parameters(), *model.named_buffers()]}


def story(trained: sosp.Trained) -> list[tuple[Any, ...]]:
    """The history without the clock."""
    return [astuple(e)[:5] for e in trained.history]


def outcome(trained: sosp.Trained) -> dict[str, Any]:
    average = weights(trained.average) if trained.average is not None else None
    return {"weights": weights(trained.model), "average": average, "story": story(trained)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- killed ---------------------------------------------------------------------------------------------

KILLS = 20
KILLED = Schedule(epochs=6, batch=4, rate=0.05, ema=0.9, shape="cosine")  # 96 steps of 64 examples


def train_for_kills(folder: Path) -> dict[str, Any]:
    """Every step leaves a checkpoint; the loader draws its own order, the networks dropout."""
    x, y = examples(64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True)
    models = {"normed": normed(), "dropping": dropping()}
    found = sosp.train(models, (loader, examples(10, 2)), KILLED, folder=folder, seed=3, save_every=0)
    return {n: outcome(t) for n, t in found.items()}


def child(act: Callable[[], Any], out: Path) -> int:
    """Fork; the child writes what ``act`` returns."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.save(act(), out)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def newest(folder: Path) -> str:
    return max((p.name for p in folder.glob("checkpoint-*")), default="")


def kills(folder: Path) -> None:
    """Train undisturbed; then again, killed 20 times at random moments."""
    start = time.monotonic()
    os.waitpid(child(lambda: train_for_kills(folder / "calm"), folder / "calm.pt"), 0)
    whole = time.monotonic() - start
    dice = random.Random(0)
    steps = [""]
    for kill in range(KILLS):
        pid = child(lambda: train_for_kills(folder / "killed"), folder / "killed.pt")
        end = time.monotonic() + 2
        while kill % 2 and newest(folder / "killed") == steps[-1] and time.monotonic() < end:
            time.sleep(1e-4)  # every other time once it has gone on a little, so that a busy machine gets on as well
        time.sleep(dice.uniform(0, 1.5 * whole / KILLS))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        steps.append(newest(folder / "killed"))
    _, status = os.waitpid(child(lambda: train_for_kills(folder / "killed"), folder / "killed.pt"), 0)
    torch.save({"steps": steps[1:], "status": status}, folder / "kills.pt")


# --- together -------------------------------------------------------------------------------------------


def double(model: nn.Module) -> nn.Module:
    return model.double()


def rank_source(count: int = 23) -> tuple[Tensor, Tensor]:
    """Batches of 7: 7, 7, 7 and 2, fewer than three processes."""
    return examples(count, kind=torch.float64)


TOGETHER = Schedule(epochs=3, batch=7, rate=0.05, smoothing=0.1, ema=0.9, warmup=0.5)


def own_loader() -> list[Any]:
    x, y = rank_source()
    return [(x[:9], y[:9]), (x[9:11], y[9:11]), (x[11:], y[11:])]


def job_train() -> Any:
    model = double(normed())
    if distributed.get_rank():  # everybody starts with the numbers of the first
        with torch.no_grad():
            model[0].weight.add_(1)
    return outcome(sosp.train(model, (rank_source(), examples(11, 2, torch.float64)), TOGETHER))


def job_loader() -> Any:
    return outcome(sosp.train(double(normed()), own_loader(), TOGETHER))


def job_shuffled() -> Any:
    """Whatever the ranks' own random numbers are, they draw the same order."""
    torch.manual_seed(100 + distributed.get_rank())
    dataset = torch.utils.data.TensorDataset(*rank_source())
    loader = torch.utils.data.DataLoader(dataset, batch_size=7, shuffle=True)
    small = sosp.recalibrate(double(normed()), loader)
    return {**outcome(sosp.train(double(normed()), loader, TOGETHER)), "small": weights(small)}


def job_viewing() -> Any:
    """A network that cannot take a batch of no rows."""
    model = double(fixed(Viewing))
    found = sosp.evaluate(model, rank_source(), batch=7)
    return {**outcome(sosp.train(model, rank_source(), TOGETHER)), "accuracy": astuple(found)}


def job_several() -> Any:
    models = {"a": double(normed()), "b": double(plain())}
    found = sosp.train(models, rank_source(), TOGETHER, seed={"a": 1, "b": 2})
    return {n: outcome(t) for n, t in found.items()}


def job_evaluate() -> Any:
    model = double(normed())
    source = sosp.evaluate(model, rank_source(), batch=7)
    loader = sosp.evaluate(model, own_loader())
    limited = sosp.evaluate(model, rank_source(), batch=7, limit=9)
    return [astuple(a) for a in (source, loader, limited)]


def job_recalibrate() -> Any:
    model = double(normed())
    return [
        weights(sosp.recalibrate(model, rank_source(), batch=7)),
        weights(sosp.recalibrate(model, rank_source(), batch=7, examples=15, seed=1)),
        weights(sosp.recalibrate(model, own_loader())),
        weights(sosp.recalibrate(model, rank_source(), examples=2)),
    ]


class Sometimes(nn.Module):
    """A layer for few examples: one rank may have some and another none. And one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.extra, self.never = nn.Linear(12, CLASSES), nn.Linear(12, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        out, few = self.fc(x), (x[:, 0] > 3).nonzero()[:, 0]
        return out.index_add(0, few, self.extra(x[few])) if len(few) else out


def job_unused() -> Any:
    return outcome(sosp.train(double(fixed(Sometimes)), rank_source(), TOGETHER))


def job_dropout() -> Any:
    """Ranks must not drop out the same units: what the first layer's noise was, seen through a hook."""
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 64), nn.Dropout(0.5), nn.Linear(64, CLASSES)).double()
    model[2].register_forward_hook(lambda m, x, y: seen.append((y == 0)[:1]))
    sosp.train(model, rank_source(), Schedule(epochs=1, batch=21))
    return seen[0]


def job_nan() -> Any:
    """Only one rank's rows are bad; all stop at the same step."""
    x, y = rank_source()
    x[5] = torch.nan
    try:
        sosp.train(double(plain()), (x, y), Schedule(epochs=2, batch=23))
    except SospError as error:
        return type(error).__name__, str(error)
    return "no error"


def job_refused(folder: Path) -> Any:
    """All refuse, instead of one that waits for the others."""
    said = []
    (folder / "file").write_text("")
    for act in (
        lambda: sosp.train(double(plain()), rank_source(), TOGETHER, folder=folder / "file"),
        lambda: sosp.train(double(plain()), (rank_source()[0], torch.full((23,), 9)), TOGETHER),
        lambda: sosp.train(double(plain()), distributed_loader(), TOGETHER),
    ):
        try:
            act()
        except (CheckpointError, DataError) as error:
            said.append(str(error))
    return said


def distributed_loader() -> Any:
    dataset = torch.utils.data.TensorDataset(*rank_source())
    sampler = torch.utils.data.DistributedSampler(
        dataset, num_replicas=distributed.count_ranks(), rank=distributed.get_rank()
    )
    return torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)


class HaltedError(Exception):
    """By a test."""


def job_resume(folder: Path) -> Any:
    """HaltedError inside the second epoch; the newest checkpoint is then damaged; on to the end."""
    where = folder / f"resume{distributed.count_ranks()}"
    seen = []

    def stop(done: int, total: int, moment: Any) -> None:
        seen.append(done)
        if done == 7:
            raise HaltedError

    sosp.training.loop.PROGRESS_INTERVAL = 0
    options: dict[str, Any] = {"folder": where, "save_every": 0, "seed": 5}
    with suppress(HaltedError):
        sosp.train(double(normed()), rank_source(), TOGETHER, on_step=stop, **options)
    distributed.wait_for_ranks()
    names = sorted(p.name for p in where.iterdir())
    if distributed.is_main():
        newest = where / names[-1]
        newest.write_bytes(newest.read_bytes()[:-3])
    distributed.wait_for_ranks()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = sosp.train(double(normed()), rank_source(), TOGETHER, **options)
    heard = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
    return {**outcome(trained), "names": names, "heard": heard, "seen": seen}


JOBS: dict[str, Callable[..., Any]] = {
    "train": job_train,
    "loader": job_loader,
    "shuffled": job_shuffled,
    "viewing": job_viewing,
    "several": job_several,
    "evaluate": job_evaluate,
    "recalibrate": job_recalibrate,
    "unused": job_unused,
    "dropout": job_dropout,
    "nan": job_nan,
    "refused": job_refused,
    "resume": job_resume,
}


def all_jobs(folder: Path) -> dict[str, Any]:
    """Each job's result, or how it failed."""
    found: dict[str, Any] = {}
    for name, job in JOBS.items():
        try:
            found[name] = job(folder) if name in ("refused", "resume") else job()
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other ranks may be elsewhere by now
    return found


def as_rank(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    with distributed.join_processes():
        assert (distributed.get_rank(), distributed.count_ranks()) == (rank, world)
        return all_jobs(folder)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def together(folder: Path) -> None:
    """The jobs in one, two and three processes."""
    for world in (1, 2, 3):
        port, at = free_port(), folder / str(world)
        at.mkdir()
        pids = [
            child(lambda r=r, n=world, p=port, at=at: as_rank(r, n, p, at), folder / f"{world}-{r}.pt")  # type: ignore[misc]
            for r in range(world)
        ]
        wait_for(pids, patience=60)


def wait_for(pids: list[int], patience: float) -> None:
    """When one has failed, the others may wait for it for ever."""
    left, end = set(pids), time.monotonic() + patience
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            left -= {done}
            end = min(end, time.monotonic() + 5) if done and status else end
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0).step()  # imports a lot, which every child would do again
    {"kills": kills, "ranks": together}[sys.argv[1]](Path(sys.argv[2]))
