"""A companion takes part in a training: a term of the loss, parameters of its own, a last word after each step."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from sosp.training import Companion

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 2
SCHEDULE = sosp.Schedule(epochs=3, batch=8, rate=0.1, shape="constant")


class Scaled(Companion):
    """Learns a factor for the first weight, shrinks the second after every step, and counts."""

    def begin(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        self.factor = nn.Parameter(torch.full((), 0.5))
        self.steps = torch.zeros(())
        return {"factor": self.factor}

    def loss(self, model: Any, inputs: Any, outputs: Any, labels: Tensor) -> Tensor:
        return (self.factor * model[0].weight).square().sum() + 0.1 * self.factor

    def after(self, model: Any, rate: float | Tensor) -> None:
        model[2].weight.mul_(1 - 0.01 * rate)
        self.steps += 1

    def tensors(self) -> dict[str, Tensor]:
        return {"steps": self.steps}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def by_hand(model: Any) -> tuple[Any, Tensor]:
    """The same, written out."""
    model, factor = copy.deepcopy(model), torch.full((), 0.5, requires_grad=True)
    optimiser = torch.optim.SGD([*model.parameters(), factor], lr=0.1, momentum=0.9, weight_decay=1e-4)
    source = sosp.training.user_data.PairSource(X, Y)
    for number in range(SCHEDULE.epochs):
        for x, y in source.epoch(number, batch=8, seed=0):
            optimiser.zero_grad()
            more = (factor * model[0].weight).square().sum() + 0.1 * factor
            (F.cross_entropy(model(x), y, reduction="sum") / len(y) + more).backward()
            optimiser.step()
            with torch.no_grad():
                model[2].weight.mul_(1 - 0.01 * 0.1)
    return model, factor


def test_as_by_hand() -> None:
    given = Scaled()
    trained = sosp.train(network(), (X, Y), SCHEDULE, companion=given)
    wanted, factor = by_hand(network())
    for a, b in zip(trained.model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(trained.companion.factor, factor)
    assert trained.companion.steps == 9
    assert not hasattr(given, "factor")  # every network gets a copy


def test_each_network_has_its_own() -> None:
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(2)
    both = sosp.train({"a": network(), "b": other}, (X, Y), SCHEDULE, companion=Scaled())
    alone = sosp.train(other, (X, Y), SCHEDULE, companion=Scaled())
    assert torch.equal(both["b"].companion.factor, alone.companion.factor)
    assert not torch.equal(both["a"].companion.factor, both["b"].companion.factor)


def test_a_checkpoint_has_it(tmp_path: Path) -> None:
    whole = sosp.train(network(), (X, Y), SCHEDULE, companion=Scaled())

    def stop(name: str, epoch: Any) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sosp.train(network(), (X, Y), SCHEDULE, companion=Scaled(), folder=tmp_path, on_epoch=stop)
    again = sosp.train(network(), (X, Y), SCHEDULE, companion=Scaled(), folder=tmp_path)
    assert again.resumed
    assert torch.equal(again.companion.factor, whole.companion.factor)
    assert again.companion.steps == whole.companion.steps
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
