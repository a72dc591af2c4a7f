"""The training loop: epochs, progress, checkpoints; one network or several side by side."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.batches import first_rows
from sosp.errors import ArgumentError, TrainingError, whole_number
from sosp.preserve import refuse_uninitialised, same_random_numbers
from sosp.training import ranks, state
from sosp.training.evaluation import Accuracy, evaluate, home
from sosp.training.feed import Batch, Feed, both, shared
from sosp.training.graphs import Graphed, step_all
from sosp.training.learner import Learner
from sosp.training.memory import explained
from sosp.training.schedule import Schedule, schedule_of
from sosp.training.speed import Speed, fastest_kernels

GLANCE = 0.25  # seconds between two looks at the sums, which a GPU has to be waited for


@dataclass(frozen=True)
class Epoch:
    """What an epoch gave; accuracies are shares."""

    number: int  # from 1
    loss: float  # on the training data, while it learned
    accuracy: float
    test: Accuracy | None
    rate: float  # of its last step
    seconds: float
    images_per_second: float

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Epoch:
        """From ``asdict``."""
        test = found["test"]
        return cls(**{**found, "test": Accuracy(**test) if test is not None else None})


@dataclass(frozen=True)
class Moment:
    """How it goes, inside an epoch."""

    epoch: int  # from 1
    loss: float | None
    accuracy: float | None
    images_per_second: float


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network, in eval mode, and how it came about."""

    model: nn.Module
    history: tuple[Epoch, ...]
    average: nn.Module | None  # with the moving average of the weights
    resumed: int  # epochs that a checkpoint had already

    @property
    def best(self) -> Epoch | None:
        """The epoch with the highest test accuracy."""
        tested = [e for e in self.history if e.test is not None]
        return max(tested, key=lambda e: e.test.top1, default=None)  # type: ignore[union-attr]


OnEpoch = Callable[[str, Epoch], None]
OnStep = Callable[[int, int, Moment], None]


def train(
    model: nn.Module | Mapping[str, nn.Module],
    data: Any,
    schedule: Schedule | str = "cifar",
    *,
    folder: str | Path | None = None,
    seed: int | Mapping[str, int] = 0,
    device: torch.device | str | None = None,
    speed: Speed | None = None,
    teacher: nn.Module | None = None,
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    save_every: float = 600.0,
) -> Any:
    """A trained copy of ``model``, as ``Trained``; the model itself is left as it was.

    ``data``: a dataset of ``sosp.data``, a pair of tensors (inputs, labels), a loader, or (training data, test data) of
    any of these. ``schedule``: a ``Schedule`` or the name of one. Several networks, ``{"a": model, "b": other}``, are
    trained side by side, each as it would be alone, and give a dict of results; ``seed`` may then be a dict as well.

    ``folder``: checkpoints go there after every epoch and every ``save_every`` seconds, and training goes on from the
    newest one, on a CPU bit for bit as if it had never stopped. ``on_epoch(name, epoch)`` and
    ``on_step(done, all, moment)`` are told how it goes. ``teacher``: the network whose outputs ``schedule.distill``
    compares with. Ctrl-C saves first.
    """
    schedule = schedule_of(schedule)
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    _check(models, schedule, teacher)
    where = torch.device(device) if device is not None else home(next(iter(models.values())))
    fast = (speed or Speed()).on(where)
    seeds = {n: whole_number("seed", seed[n] if isinstance(seed, Mapping) else seed, least=0) for n in models}
    told = Told(on_epoch, on_step)
    with same_random_numbers(), fastest_kernels(), torch.enable_grad():
        torch.manual_seed(next(iter(seeds.values())))  # for dropout
        learners = {n: Learner(m, schedule, fast, where, teacher) for n, m in models.items()}
        job = Job(learners, data, schedule, seeds, Path(folder) if folder is not None else None, save_every, told)
        found = job.run()
    return found if isinstance(model, Mapping) else found[""]


def _check(models: Mapping[str, Any], schedule: Schedule, teacher: nn.Module | None) -> None:
    if not models or not all(isinstance(m, nn.Module) for m in models.values()):
        raise ArgumentError("train takes a module, or a dict of names and modules.")
    for m in models.values():
        refuse_uninitialised(m)
        if not any(p.requires_grad for p in m.parameters()):
            raise ArgumentError("the network has no parameter that could be trained (requires_grad is False for all).")
    if bool(schedule.distill) != (teacher is not None):
        raise ArgumentError("distillation needs both: a teacher, and distill > 0 in the schedule.")


@dataclass(frozen=True)
class Told:
    """Whom to tell."""

    on_epoch: OnEpoch | None
    on_step: OnStep | None


class Job:
    """A training, from where its checkpoints left it to its end."""

    def __init__(
        self,
        learners: dict[str, Learner],
        data: Any,
        schedule: Schedule,
        seeds: dict[str, int],
        folder: Path | None,
        save_every: float,
        told: Told,
    ) -> None:
        self.learners, self.schedule, self.folder, self.told = learners, schedule, folder, told
        self.save_every = save_every
        first = next(iter(learners.values()))
        self.device, self.speed = first.device, first.speed
        self.source, self.test = (x.to(self.device) if hasattr(x, "to") else x for x in both(data))
        made = {
            s: Feed(self.source, schedule.batch, s, self.device, bool(self.speed.channels_last))
            for s in set(seeds.values())
        }
        self.feeds = [made[seeds[n]] for n in learners]
        self.steps = self.feeds[0].steps
        self.identity = state.Identity.of(learners, schedule, seeds, self.feeds[0].examples)
        self.graphed = Graphed(list(learners.values())) if self.speed.graph else None
        self.history: dict[str, list[Epoch]] = {n: [] for n in learners}
        self.place = state.Place()
        self.stop = Stop()

    def run(self) -> dict[str, Trained]:
        if self.folder is not None:
            if ranks.is_main():
                state.prepare(self.folder)
            ranks.wait()
            self.place, history = state.resume(self.folder, self.learners, self.identity)
            self.history = {n: [Epoch.read(e) for e in history[n]] for n in self.learners}
        else:
            for learner in self.learners.values():
                ranks.same_everywhere(list(learner.model.state_dict().values()))
        resumed = self.place.epoch
        with self.stop.watched():
            for number in range(self.place.epoch, self.schedule.epochs):
                self._epoch(number, self.place.batch if number == self.place.epoch else 0)
        return {
            n: Trained(a.model.eval(), tuple(self.history[n]), a.averaged(), resumed) for n, a in self.learners.items()
        }

    def _epoch(self, number: int, start: int) -> None:
        begun = saved = looked = time.monotonic()
        rate = 0.0
        for k, batches in enumerate(shared(self.feeds, number, start), start):
            rate = self.schedule.rate_at(number, k / self.steps)
            self._step(batches, rate)
            self.place = state.Place(number, k + 1)
            now = time.monotonic()
            if self.device.type == "cpu" or now - looked > GLANCE:
                looked = now
                self._look(number, rate, (k + 1 - start) / max(now - begun, 1e-9))
            if ranks.any_of(self.stop.wanted, self.device):
                self._save()
                self.stop.go()
            if now - saved > self.save_every and k + 1 < self.steps:
                saved = now
                self._save()
        self._refuse_nonsense(rate)
        self._close(number, rate, begun)

    def _step(self, batches: list[Batch], rate: float) -> None:
        for learner in self.learners.values():
            learner.set_rate(rate)
        with explained(self.schedule.batch, self._attempt):
            if self.graphed is not None:
                self.graphed.step(batches)
            else:
                step_all(list(self.learners.values()), batches)

    def _attempt(self, size: int) -> None:
        """Would a step of so many examples go through? It does not matter what it does to the networks."""
        self.graphed = None
        for learner, feed in zip(self.learners.values(), self.feeds, strict=True):
            learner.optimiser.zero_grad(set_to_none=True)
            batch = next(feed.epoch(0, 0))
            learner.step(first_rows(batch.inputs, size), batch.labels[:size], size)

    def _look(self, number: int, rate: float, steps_per_second: float) -> None:
        """Tell how it goes, and see that the loss is still a number."""
        if self.device.type == "cpu" or ranks.ranks() == 1:  # on GPUs the ranks look at different times
            self._refuse_nonsense(rate)
        if self.told.on_step is None or not self.stop.calm(GLANCE):
            return
        loss, right, examples = next(iter(self.learners.values())).sums.tolist()
        images = steps_per_second * self.schedule.batch
        known = bool(examples)
        moment = Moment(number + 1, loss / examples if known else None, right / examples if known else None, images)
        self.told.on_step(number * self.steps + self.place.batch, self.schedule.epochs * self.steps, moment)

    def _refuse_nonsense(self, rate: float) -> None:
        for name, learner in self.learners.items():
            bad = int(learner.bad)
            if ranks.any_of(bad >= 0, self.device):
                raise TrainingError(self._complaint(name, bad, rate))

    def _complaint(self, name: str, step: int, rate: float) -> str:
        known = state.files(self.folder) if self.folder is not None else []
        who = f" of {name!r}" if name else ""
        last = f"The last good checkpoint is {known[0]}." if known else "There is no checkpoint of this training yet."
        where = f"step {step + 1} (epoch {step // self.steps + 1})"
        return (
            f"the loss{who} is no finite number at {where}, with rate {rate:g}. {last} "
            "Lower the rate, or let it rise slowly (warmup)."
        )

    def _close(self, number: int, rate: float, begun: float) -> None:
        """Test, remember, save."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.monotonic() - begun
        for name, learner in self.learners.items():
            loss, right, examples = learner.epoch_sums()
            learner.forget_sums()
            test = self._test(learner)
            epoch = Epoch(number + 1, loss / examples, right / examples, test, rate, seconds, examples / seconds)
            self.history[name].append(epoch)
            if self.told.on_epoch is not None:
                self.told.on_epoch(name, epoch)
        self.place = state.Place(number + 1, 0)
        self._save()

    def _test(self, learner: Learner) -> Accuracy | None:
        if self.test is None:
            return None
        model = learner.average if learner.average is not None else learner.model
        with learner.speed.mixed(self.device):
            return evaluate(model, self.test)

    def _save(self) -> None:
        if self.folder is not None:
            history = {n: [asdict(e) for e in epochs] for n, epochs in self.history.items()}
            state.save(self.folder, self.learners, self.identity, self.place, history)


class Stop:
    """Ctrl-C and the end of a job's time, heard between two steps: a step is done whole or not at all."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.told = 0.0

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._hear) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def _hear(self, number: int, frame: Any) -> None:
        if self.signal is not None:  # a second time: at once
            raise KeyboardInterrupt
        self.signal = number

    def go(self) -> None:
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    def calm(self, seconds: float) -> bool:
        """Not told anything for so long."""
        now = time.monotonic()
        if now - self.told < seconds:
            return False
        self.told = now
        return True
