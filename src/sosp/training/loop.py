"""The training loop: epochs, progress, checkpoints; one network or several side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sosp.core import distributed
from sosp.core.batches import take_examples
from sosp.data.batch_source import make_generator
from sosp.errors import ArgumentError, DataError, TrainingError
from sosp.training import checkpoints
from sosp.training.cuda_graphs import CudaGraphSteps, step_learners
from sosp.training.epoch_batches import RankBatch, TrainingBatches, zip_batches
from sosp.training.evaluation import Accuracy, evaluate
from sosp.training.interrupt import StopRequest
from sosp.training.learner import Learner
from sosp.training.out_of_memory import explain_out_of_memory
from sosp.training.randomness import set_seed
from sosp.training.results import Epoch, Moment, Trained
from sosp.training.schedule import Schedule
from sosp.training.sync_norms import explain_small_batch
from sosp.training.user_data import split_train_test

PROGRESS_INTERVAL = 0.25  # seconds between two looks at the sums, which a GPU has to be waited for
LARGE, SAVE_INTERVAL = 2**26, 30.0  # bytes from which checkpoints after short epochs are so many seconds apart

OnEpoch = Callable[[str, Epoch], None]
OnStep = Callable[[int, int, Moment], None]


@dataclass(frozen=True)
class TrainingCallbacks:
    """Whom to tell."""

    on_epoch: OnEpoch | None
    on_step: OnStep | None


@dataclass(frozen=True)
class CheckpointOptions:
    """Where checkpoints go, and after how many seconds at the latest."""

    folder: Path | None
    every: float

    def __post_init__(self) -> None:
        number = isinstance(self.every, int | float) and not isinstance(self.every, bool)
        if not number or math.isnan(self.every) or self.every < 0:
            raise ArgumentError(f"save_every={self.every!r} must be a number of seconds, 0 at least.")


class TrainingJob:
    """A training, from where its checkpoints left it to its end."""

    def __init__(
        self,
        learners: dict[str, Learner],
        data: Any,
        schedule: Schedule,
        seeds: dict[str, int],
        saving: CheckpointOptions,
        told: TrainingCallbacks,
    ) -> None:
        self.learners, self.schedule, self.seeds, self.saving, self.told = learners, schedule, seeds, saving, told
        first = next(iter(learners.values()))
        self.device, self.speed = first.device, first.speed
        self.source, self.test = (x.to(self.device) if hasattr(x, "to") else x for x in split_train_test(data))
        made = {
            s: TrainingBatches(self.source, schedule.batch, s, self.device, bool(self.speed.channels_last))
            for s in set(seeds.values())
        }
        self.feeds = [made[seeds[n]] for n in learners]
        self.steps = self.feeds[0].steps
        self.identity = checkpoints.TrainingIdentity.of(learners, schedule, seeds, self.feeds[0].examples)
        self.graphed = CudaGraphSteps(list(learners.values())) if self.speed.graph else None
        self.history: dict[str, list[Epoch]] = {n: [] for n in learners}
        self.place = checkpoints.TrainingPosition()
        self.stop = StopRequest()
        self.looked = self.saved = self.spoke = 0.0  # when

    def run(self) -> dict[str, Trained]:
        self._resume()
        resumed = self.place.epoch
        self.saved = time.monotonic()
        with self.stop.watched():
            for number in range(self.place.epoch, self.schedule.epochs):
                self._epoch(number)
        if self.stop.wanted:  # in the last moment
            self.stop.go()
        return {
            n: Trained(a.finished(), tuple(self.history[n]), a.averaged(), resumed, a.companion)
            for n, a in self.learners.items()
        }

    def _resume(self) -> None:
        folder = self.saving.folder
        found = checkpoints.resume_learners(folder, self.learners, self.identity) if folder is not None else None
        if found is not None:
            self.place = found.place
            self.history = {n: [Epoch.read(e) for e in found.history[n]] for n in self.learners}
        if distributed.count_ranks() > 1:
            for learner in self.learners.values():
                distributed.broadcast_tensors(list(learner.tensors().values()))
            # Each rank drops out for itself.
            step = int(next(iter(self.learners.values())).count)
            start = make_generator(
                next(iter(self.seeds.values())), step * distributed.count_ranks() + distributed.get_rank()
            )
            set_seed(start.initial_seed(), self.device)

    # --- an epoch -------------------------------------------------------------------------------------------

    def _epoch(self, number: int) -> None:
        begun = self.looked = time.monotonic()
        begun -= self.place.seconds  # those before a checkpoint count as well
        for k, batches in enumerate(self._batches(number), self.place.batch):
            self._step(batches, self.schedule.rate_at(number, k / self.steps))
            self.place = checkpoints.TrainingPosition(number, k + 1, time.monotonic() - begun)
            self._look()
            self._stop_if_wanted()
            if time.monotonic() - self.saved >= self.saving.every and k + 1 < self.steps:
                self._save()
        self._stop_if_wanted()
        self._refuse_nonsense(weights=True)  # waits for a GPU
        self.place = replace(self.place, seconds=time.monotonic() - begun)
        self._close(number)

    def _batches(self, number: int) -> Iterator[list[RankBatch]]:
        try:
            yield from zip_batches(self.feeds, number, self.place.batch)
        except RuntimeError:
            if not self.stop.wanted:  # the workers of a loader hear Ctrl-C as well, and end at once
                raise

    def _rate(self, step: int) -> float:
        return self.schedule.rate_at(step // self.steps, step % self.steps / self.steps)

    def _step(self, batches: list[RankBatch], rate: float) -> None:
        for learner, batch in zip(self.learners.values(), batches, strict=True):
            learner.refuse(batch)
            learner.set_rate(rate)
        with explain_out_of_memory(batches[0].rows, self._attempt), explain_small_batch():
            if self.graphed is not None:
                self.graphed.step(batches)
            else:
                step_learners(list(self.learners.values()), batches)

    def _attempt(self, size: int) -> None:
        """Would a step of so many examples go through? It does not matter what it does to the networks."""
        self.graphed = None
        for learner, feed in zip(self.learners.values(), self.feeds, strict=True):
            learner.optimiser.zero_grad(set_to_none=True)
            batch = next(feed.epoch(0, 0))
            learner.step(
                batch._replace(inputs=take_examples(batch.inputs, size), labels=batch.labels[:size], rows=size)
            )

    def _stop_if_wanted(self) -> None:
        if distributed.is_any_true(self.stop.wanted, self.device):
            self._save()
            self.stop.go()

    # --- how it goes ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Tell how it goes, and see that the loss is still a number."""
        now, cpu = time.monotonic(), self.device.type == "cpu"
        if not cpu and now - self.looked < PROGRESS_INTERVAL:
            return
        self.looked = now
        if cpu or distributed.count_ranks() == 1:  # on GPUs the ranks look at different times
            self._refuse_nonsense()
        if self.told.on_step is None or now - self.spoke < PROGRESS_INTERVAL:
            return
        self.spoke = now
        loss, right, examples = next(iter(self.learners.values())).epoch_sums()
        done = self.place.epoch * self.steps + self.place.batch
        moment = Moment(self.place.epoch + 1, loss / examples, right / examples, examples / self.place.seconds)
        self.told.on_step(done, self.schedule.epochs * self.steps, moment)

    def _refuse_nonsense(self, weights: bool = False) -> None:
        for name, learner in self.learners.items():
            if (bad := int(learner.bad)) >= 0:
                raise TrainingError(
                    self._complaint(f"the loss{_describe_network(name)} is no finite number", name, bad)
                )
            if weights and not learner.is_finite():
                raise TrainingError(
                    self._complaint(
                        f"the weights{_describe_network(name)} are no finite numbers", name, int(learner.count) - 1
                    )
                )

    def _complaint(self, what: str, name: str, step: int) -> str:
        known = checkpoints.list_checkpoints(self.saving.folder) if self.saving.folder is not None else []
        last = f"The last good checkpoint is {known[0]}." if known else "There is no checkpoint of this training yet."
        where = f"step {step + 1} (epoch {step // self.steps + 1})"
        return f"{what} at {where}, with rate {self._rate(step):g}. {last} {self._advice(name, step)}"

    def _advice(self, name: str, step: int) -> str:
        """The data is read once more: no rate helps against inputs that are no numbers."""
        feed = dict(zip(self.learners, self.feeds, strict=True))[name]
        batch = next(feed.epoch(*divmod(step, self.steps)), None)
        if batch is not None and not _are_finite(batch.inputs):
            return "Inputs of that step are no finite numbers (NaN, or infinite): check the data, not the rate."
        return "Lower the rate, or let it rise slowly (warmup)."

    # --- the end of an epoch --------------------------------------------------------------------------------

    def _close(self, number: int) -> None:
        """Test, remember, save."""
        rate = self._rate(number * self.steps + self.steps - 1)
        for name, learner in self.learners.items():
            loss, right, examples = learner.epoch_sums()
            learner.forget_sums()
            if not examples:
                raise DataError(
                    f"the training data gave no batch in epoch {number + 1}; a loader must start anew each time it is "
                    "iterated."
                )
            seconds, test = self.place.seconds, self._test(learner)
            if number + 1 == self.schedule.epochs and test is not None and not math.isfinite(test.loss):
                what = f"the loss{_describe_network(name)} on the test data is no finite number"
                raise TrainingError(self._complaint(what, name, int(learner.count) - 1))
            epoch = Epoch(number + 1, loss / examples, right / examples, test, rate, seconds, examples / seconds)
            self.history[name].append(epoch)
            if self.told.on_epoch is not None:
                self.told.on_epoch(name, epoch)
        self.place = checkpoints.TrainingPosition(number + 1)
        self._stop_if_wanted()
        if number + 1 == self.schedule.epochs or self._is_time_to_save():
            self._save()

    def _is_time_to_save(self) -> bool:
        """A large network with epochs of seconds would otherwise write more than it learns."""
        size = sum(x.nbytes for learner in self.learners.values() for x in learner.tensors().values())
        return size < LARGE or time.monotonic() - self.saved >= min(SAVE_INTERVAL, self.saving.every)

    def _test(self, learner: Learner) -> Accuracy | None:
        if self.test is None:
            return None
        model = learner.average if learner.average is not None else learner.model
        with learner.speed.mixed(self.device):
            return evaluate(model, self.test)

    def _save(self) -> None:
        """Only what is worth going on from."""
        self.saved = time.monotonic()
        if self.saving.folder is None or not distributed.is_main():
            return
        if all(int(a.bad) < 0 and a.is_finite() for a in self.learners.values()):
            history = {n: [asdict(e) for e in epochs] for n, epochs in self.history.items()}
            checkpoints.save_checkpoint(self.saving.folder, self.learners, self.identity, self.place, history)


def _describe_network(name: str) -> str:
    """Which network, where there are several."""
    return f" of {name!r}" if name else ""


def _are_finite(inputs: Any) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tree_leaves(inputs) if isinstance(x, Tensor))
