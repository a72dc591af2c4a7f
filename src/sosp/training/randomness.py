"""Make random numbers reproducible: those of the networks, and those of a user's loader."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sosp.core.borrowed_model import preserve_random_state

# Datasets draw from NumPy's legacy functions, so their global state is the one to preserve.
_numpy_state, _set_numpy_state = np.random.get_state, np.random.set_state


@dataclass(frozen=True)
class LoaderRandomness:
    """The random states that a loader uses: those of torch, Python and NumPy, and its own generators."""

    generators: tuple[torch.Generator, ...]

    @classmethod
    def of(cls, loader: Any) -> LoaderRandomness:
        """Return the random states that ``loader`` uses."""
        batches = getattr(loader, "batch_sampler", None)
        parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        found = [getattr(part, "generator", None) for part in parts]
        own = {id(g): g for g in found if isinstance(g, torch.Generator) and g.device.type == "cpu"}
        return cls(tuple(own.values()))

    def read(self) -> list[Any]:
        """Return the current states."""
        return [torch.get_rng_state(), random.getstate(), _numpy_state(), *[g.get_state() for g in self.generators]]

    def write(self, states: list[Any]) -> None:
        """Set the current states."""
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        _set_numpy_state(states[2])
        for g, state in zip(self.generators, states[3:], strict=True):
            g.set_state(state)

    def make_states(self, start: torch.Generator) -> list[Any]:
        """Return the states at the start of an epoch, derived from ``start``."""
        seed = start.initial_seed() % 2**32
        numbers = [random.Random(seed).getstate(), np.random.RandomState(seed).get_state()]
        return [start.get_state(), *numbers, *[start.get_state() for _ in self.generators]]


def iterate_with_generator(items: Iterable[Any], start: torch.Generator) -> Iterator[Any]:
    """Iterate with random states that begin at ``start``; the random states of other code do not change."""
    randomness = LoaderRandomness.of(items)
    theirs, iterator = randomness.make_states(start), None
    while True:
        mine = randomness.read()
        randomness.write(theirs)
        try:
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            theirs = randomness.read()
            randomness.write(mine)
        yield item


@contextmanager
def use_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers for dropout, and restore the previous states on exit."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.init()  # before that, the state to restore cannot be read
    with preserve_random_state(), torch.cuda.device(device) if cuda else nullcontext():
        set_seed(seed, device)
        yield


def set_seed(seed: int, device: torch.device) -> None:
    """Seed torch's generators on the CPU and on the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
