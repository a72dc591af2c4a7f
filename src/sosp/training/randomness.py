"""Chance, so that it can be had again: the numbers a network draws, and those a user's loader draws."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sosp.core.borrowed_model import preserve_random_state

# NumPy's old functions are what datasets draw from, so theirs is the state that counts.
_numpy_state, _set_numpy_state = np.random.get_state, np.random.set_state


@dataclass(frozen=True)
class LoaderRandomness:
    """torch's, Python's and NumPy's random numbers, and the generators that a loader was given."""

    own: tuple[torch.Generator, ...]

    @classmethod
    def of(cls, loader: Any) -> LoaderRandomness:
        batches = getattr(loader, "batch_sampler", None)
        parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        found = [getattr(part, "generator", None) for part in parts]
        own = {id(g): g for g in found if isinstance(g, torch.Generator) and g.device.type == "cpu"}
        return cls(tuple(own.values()))

    def read(self) -> list[Any]:
        return [torch.get_rng_state(), random.getstate(), _numpy_state(), *[g.get_state() for g in self.own]]

    def write(self, states: list[Any]) -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        _set_numpy_state(states[2])
        for g, state in zip(self.own, states[3:], strict=True):
            g.set_state(state)

    def seeded(self, start: torch.Generator) -> list[Any]:
        """The states in which an epoch begins."""
        seed = start.initial_seed() % 2**32
        numbers = [random.Random(seed).getstate(), np.random.RandomState(seed).get_state()]
        return [start.get_state(), *numbers, *[start.get_state() for _ in self.own]]


def iterate_with_generator(items: Iterable[Any], start: torch.Generator) -> Iterator[Any]:
    """Iterate with random numbers that begin at ``start``; everybody else's stay as they are."""
    dice = LoaderRandomness.of(items)
    theirs, iterator = dice.seeded(start), None
    while True:
        mine = dice.read()
        dice.write(theirs)
        try:
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            theirs = dice.read()
            dice.write(mine)
        yield item


@contextmanager
def use_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers for dropout; everybody else's are given back."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.init()  # before that nobody can tell what to give back
    with preserve_random_state(), torch.cuda.device(device) if cuda else nullcontext():
        set_seed(seed, device)
        yield


def set_seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
