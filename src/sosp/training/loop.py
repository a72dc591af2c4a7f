"""Run the training loop of one or several networks: epochs, progress and checkpoints."""

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

PROGRESS_INTERVAL = 0.25  # seconds between two reads of the sums, which wait for the GPU
LARGE, SAVE_INTERVAL = 2**26, 30.0  # from this many bytes on, checkpoints are at least this many seconds apart

OnEpoch = Callable[[str, Epoch], None]
OnStep = Callable[[int, int, Moment], None]


@dataclass(frozen=True)
class TrainingCallbacks:
    """The user's functions to call after epochs and steps."""

    on_epoch: OnEpoch | None
    on_step: OnStep | None


@dataclass(frozen=True)
class CheckpointOptions:
    """The folder of checkpoints and the maximum number of seconds between them."""

    folder: Path | None
    every: float

    def __post_init__(self) -> None:
        number = isinstance(self.every, int | float) and not isinstance(self.every, bool)
        if not number or math.isnan(self.every) or self.every < 0:
            raise ArgumentError(f"save_every={self.every!r} must be a number of seconds, at least 0.")


class TrainingJob:
    """A training, from its newest checkpoint to its end."""

    def __init__(
        self,
        learners: dict[str, Learner],
        data: Any,
        schedule: Schedule,
        seeds: dict[str, int],
        saving: CheckpointOptions,
        callbacks: TrainingCallbacks,
    ) -> None:
        self.learners, self.schedule, self.seeds = learners, schedule, seeds
        self.saving, self.callbacks = saving, callbacks
        first = next(iter(learners.values()))
        self.device, self.speed = first.device, first.speed
        self.source, self.test = (
            x.to(self.device) if hasattr(x, "to") else x for x in split_train_test(data, first.model)
        )
        made = {
            s: TrainingBatches(self.source, schedule.batch, s, self.device, bool(self.speed.channels_last))
            for s in set(seeds.values())
        }
        self.batches = [made[seeds[n]] for n in learners]
        self.steps = self.batches[0].steps
        self.identity = checkpoints.TrainingIdentity.of(learners, schedule, seeds, self.batches[0].examples)
        self.graphed = CudaGraphSteps(list(learners.values())) if self.speed.graph else None
        self.history: dict[str, list[Epoch]] = {n: [] for n in learners}
        self.place = checkpoints.TrainingPosition()
        self.stop = StopRequest()
        self.checked_at = self.saved_at = self.reported_at = 0.0

    def run(self) -> dict[str, Trained]:
        """Run the training and return the trained networks by name."""
        self._resume()
        resumed = self.place.epoch
        self.saved_at = time.monotonic()
        with self.stop.catch_signals():
            for number in range(self.place.epoch, self.schedule.epochs):
                self._epoch(number)
        if self.stop.wanted:  # a signal after the last check
            self.stop.exit()
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
            # Each rank draws its own dropout.
            step = int(next(iter(self.learners.values())).count)
            start = make_generator(
                next(iter(self.seeds.values())), step * distributed.count_ranks() + distributed.get_rank()
            )
            set_seed(start.initial_seed(), self.device)

    # --- an epoch -------------------------------------------------------------------------------------------

    def _epoch(self, number: int) -> None:
        begun = self.checked_at = time.monotonic()
        begun -= self.place.seconds  # the seconds before the checkpoint count as well
        for k, batches in enumerate(self._batches(number), self.place.batch):
            self._step(batches, self.schedule.rate_at(number, k / self.steps))
            self.place = checkpoints.TrainingPosition(number, k + 1, time.monotonic() - begun)
            self._report_progress()
            self._stop_if_wanted()
            if time.monotonic() - self.saved_at >= self.saving.every and k + 1 < self.steps:
                self._save()
        self._stop_if_wanted()
        self._check_finite(weights=True)  # waits for the GPU
        self.place = replace(self.place, seconds=time.monotonic() - begun)
        self._finish_epoch(number)

    def _batches(self, number: int) -> Iterator[list[RankBatch]]:
        try:
            yield from zip_batches(self.batches, number, self.place.batch)
        except RuntimeError:
            if not self.stop.wanted:  # the workers of a loader also receive Ctrl-C, and end at once
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
        """Try a step of ``size`` examples, without regard to the state of the networks afterwards."""
        self.graphed = None
        for learner, batches in zip(self.learners.values(), self.batches, strict=True):
            learner.optimiser.zero_grad(set_to_none=True)
            batch = next(batches.epoch(0, 0))
            learner.step(
                batch._replace(inputs=take_examples(batch.inputs, size), labels=batch.labels[:size], rows=size)
            )

    def _stop_if_wanted(self) -> None:
        if distributed.is_any_true(self.stop.wanted, self.device):
            self._save()
            self.stop.exit()

    # --- progress -------------------------------------------------------------------------------------------

    def _report_progress(self) -> None:
        """Check that the loss is finite and call ``on_step``, at most every ``PROGRESS_INTERVAL`` seconds on a GPU."""
        now, cpu = time.monotonic(), self.device.type == "cpu"
        if not cpu and now - self.checked_at < PROGRESS_INTERVAL:
            return
        self.checked_at = now
        if cpu or distributed.count_ranks() == 1:  # on GPUs the ranks check at different times
            self._check_finite()
        if self.callbacks.on_step is None or now - self.reported_at < PROGRESS_INTERVAL:
            return
        self.reported_at = now
        loss, right, examples = next(iter(self.learners.values())).epoch_sums()
        done = self.place.epoch * self.steps + self.place.batch
        moment = Moment(self.place.epoch + 1, loss / examples, right / examples, examples / self.place.seconds)
        self.callbacks.on_step(done, self.schedule.epochs * self.steps, moment)

    def _check_finite(self, weights: bool = False) -> None:
        for name, learner in self.learners.items():
            if (bad := int(learner.bad)) >= 0:
                raise TrainingError(
                    self._describe_failure(f"the loss{_describe_network(name)} is not finite", name, bad)
                )
            if weights and not learner.is_finite():
                raise TrainingError(
                    self._describe_failure(
                        f"the weights{_describe_network(name)} are not finite", name, int(learner.count) - 1
                    )
                )

    def _describe_failure(self, what: str, name: str, step: int) -> str:
        known = checkpoints.list_checkpoints(self.saving.folder) if self.saving.folder is not None else []
        last = f"The last good checkpoint is {known[0]}." if known else "There is no checkpoint of this training yet."
        where = f"step {step + 1} (epoch {step // self.steps + 1})"
        return f"{what} at {where}, with learning rate {self._rate(step):g}. {last} {self._advise(name, step)}"

    def _advise(self, name: str, step: int) -> str:
        """Return advice; the batch is read again, because no learning rate helps if its inputs are not finite."""
        batches = dict(zip(self.learners, self.batches, strict=True))[name]
        batch = next(batches.epoch(*divmod(step, self.steps)), None)
        if batch is not None and not _are_finite(batch.inputs):
            return "The inputs of that step are not finite (NaN or infinite): check the data, not the learning rate."
        return "Lower the learning rate, or increase it slowly at the start (warmup)."

    # --- the end of an epoch --------------------------------------------------------------------------------

    def _finish_epoch(self, number: int) -> None:
        """Test the networks, record the epoch and save a checkpoint."""
        rate = self._rate(number * self.steps + self.steps - 1)
        for name, learner in self.learners.items():
            loss, right, examples = learner.epoch_sums()
            learner.reset_sums()
            if not examples:
                raise DataError(
                    f"the training data gave no batch in epoch {number + 1}; give a loader that can be read more than "
                    "once."
                )
            seconds, test = self.place.seconds, self._test(learner)
            if number + 1 == self.schedule.epochs and test is not None and not math.isfinite(test.loss):
                what = f"the loss{_describe_network(name)} on the test data is not finite"
                raise TrainingError(self._describe_failure(what, name, int(learner.count) - 1))
            epoch = Epoch(number + 1, loss / examples, right / examples, test, rate, seconds, examples / seconds)
            self.history[name].append(epoch)
            if self.callbacks.on_epoch is not None:
                self.callbacks.on_epoch(name, epoch)
        self.place = checkpoints.TrainingPosition(number + 1)
        self._stop_if_wanted()
        if number + 1 == self.schedule.epochs or self._is_time_to_save():
            self._save()

    def _is_time_to_save(self) -> bool:
        """Return whether to save after this epoch: a large network with short epochs would mostly write checkpoints."""
        size = sum(x.nbytes for learner in self.learners.values() for x in learner.tensors().values())
        return size < LARGE or time.monotonic() - self.saved_at >= min(SAVE_INTERVAL, self.saving.every)

    def _test(self, learner: Learner) -> Accuracy | None:
        if self.test is None:
            return None
        model = learner.average if learner.average is not None else learner.model
        with learner.speed.mixed(self.device):
            return evaluate(model, self.test)

    def _save(self) -> None:
        """Write a checkpoint, unless a loss or a weight is not finite."""
        self.saved_at = time.monotonic()
        if self.saving.folder is None or not distributed.is_main():
            return
        if all(int(a.bad) < 0 and a.is_finite() for a in self.learners.values()):
            history = {n: [asdict(e) for e in epochs] for n, epochs in self.history.items()}
            checkpoints.save_checkpoint(self.saving.folder, self.learners, self.identity, self.place, history)


def _describe_network(name: str) -> str:
    """Return `` of 'name'`` if there are several networks."""
    return f" of {name!r}" if name else ""


def _are_finite(inputs: Any) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tree_leaves(inputs) if isinstance(x, Tensor))
