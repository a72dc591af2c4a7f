"""A companion whose loss takes the place of the labels'; those that only add to it are as they were."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from sosp.baselines import Slimming
from sosp.baselines.gal_training import AdversarialMask
from sosp.baselines.variational_training import GaussianScales
from sosp.training import Companion, SlowTrainingWarning, Speed

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 2
SCHEDULE = sosp.Schedule(epochs=2, batch=8, rate=0.1, shape="constant")


class Towards(Companion):
    """Wants outputs of one."""

    replaces = True

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, labels: Tensor) -> Tensor:
        return F.mse_loss(outputs, torch.ones_like(outputs))


class Besides(Towards):
    replaces = False


class Silent(Companion):
    replaces = True


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def by_hand(with_labels: bool, with_ones: bool = True) -> list[Tensor]:
    model = copy.deepcopy(network())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for number in range(2):
        for x, y in sosp.training.user_data.PairSource(X, Y).epoch(number, batch=8, seed=0):
            optimiser.zero_grad()
            out = model(x)
            labels = F.cross_entropy(out, y, reduction="sum") / len(y)
            ones = F.mse_loss(out, torch.ones_like(out))
            (labels + ones if with_labels and with_ones else labels if with_labels else ones).backward()
            optimiser.step()
    return list(model.parameters())


def equal(model: nn.Module, wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))


def test_its_loss_takes_the_place_of_the_labels() -> None:
    trained = sosp.train(network(), (X, Y), SCHEDULE, companion=Towards())
    assert equal(trained.model, by_hand(with_labels=False))
    # What is told of an epoch is still the cross-entropy with the labels, and no label was learned from.
    other = sosp.train(network(), (X, 1 - Y), SCHEDULE, companion=Towards())
    assert equal(other.model, list(trained.model.parameters()))
    assert other.history[-1].accuracy == 1 - trained.history[-1].accuracy


def test_added_it_is_as_before() -> None:
    assert equal(sosp.train(network(), (X, Y), SCHEDULE, companion=Besides()).model, by_hand(with_labels=True))


def test_without_a_loss_there_is_nothing_to_take_the_place() -> None:
    trained = sosp.train(network(), (X, Y), SCHEDULE, companion=Silent())
    assert equal(trained.model, by_hand(with_labels=True, with_ones=False))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["slimming", "variational", "gal"])
def test_they_run_inside_a_cuda_graph(name: str) -> None:
    """And give what they give op by op, up to rounding; noise is drawn elsewhere, so that one only has to run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).cuda()
    found = sosp.find_structures(model, X[:2].cuda(), groups=[{"0": [0, 1]}])
    made = {
        "slimming": Slimming(0.01),
        "variational": GaussianScales(["1"], 0.01, warmup=3),
        "gal": AdversarialMask(found, 2, strength=0.1, every=2),
    }
    trained = []
    for graph in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("error", SlowTrainingWarning)
            speed = Speed("float32", graph=graph, channels_last=False)
            trained.append(sosp.train(model, (X, Y), SCHEDULE, companion=made[name], device="cuda", speed=speed))
    one, other = ([p.detach() for p in t.model.parameters()] for t in trained)
    assert all(bool(p.isfinite().all()) for p in one)
    if name != "variational":
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    if name == "gal":
        torch.testing.assert_close(*[t.companion.mask.detach() for t in trained], rtol=1e-3, atol=1e-4)
