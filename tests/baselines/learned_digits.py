"""A small network that knows the digits, trained once, and how good it is with some of it gone."""

from functools import cache

import torch
from torch import nn

import sosp

SCHEDULE = sosp.Schedule(epochs=8, batch=64, rate=0.05, decay=5e-4, shape="cosine")


@cache
def digits() -> sosp.data.Dataset:
    return sosp.data.load("digits")


def fresh() -> nn.Module:
    """A residual network of 168 filters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return sosp.nets.digits_resnet(width=0.5)


@cache
def known() -> nn.Module:
    """Do not change it."""
    return sosp.train(fresh(), digits(), SCHEDULE).model


def accuracy(model: nn.Module, mask: sosp.Mask | None = None) -> float:
    return sosp.evaluate(model if mask is None else sosp.masked(model, mask), digits().test).top1


def by_chance(model: nn.Module, structures: sosp.Structures, ratio: float) -> float:
    """The mean accuracy with as many structures gone, drawn at random five times."""
    masks = [sosp.Mask.from_structures(structures, draw) for draw in _draws(len(structures), ratio)]
    return sum(accuracy(model, mask) for mask in masks) / len(masks)


def _draws(count: int, ratio: float) -> list[torch.Tensor]:
    generators = [torch.Generator().manual_seed(seed) for seed in range(5)]
    return [torch.randperm(count, generator=g)[: round(ratio * count)] for g in generators]
