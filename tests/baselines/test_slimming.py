"""Slimming: the L1 term on the scales of batch norms, step by step and on digits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from learned_digits import SCHEDULE, accuracy, by_chance, digits, fresh
from torch import nn

import sosp
from sosp.baselines import Slimming
from sosp.errors import ArgumentError, StructureError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 2


def network(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    """Scales above, below and at zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), norm(4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -0.7, 0.0, 1e-3]))
    return model


def test_a_step_by_hand() -> None:
    """``gamma <- gamma - rate (dL/dgamma + strength sign(gamma))``, the sign of zero being zero."""
    schedule = sosp.Schedule(epochs=1, batch=12, rate=0.1, momentum=0.0, decay=0.0, shape="constant")
    trained = sosp.train(network(), (X, Y), schedule, companion=Slimming(0.3))
    model: Any = network()
    order = next(iter(sosp.training.user_data.PairSource(X, Y).epoch(0, batch=12, seed=0)))
    F.cross_entropy(model(order[0]), order[1]).backward()
    push = torch.tensor([0.3, -0.3, 0.0, 0.3], dtype=torch.float64)
    wanted = model[1].weight - 0.1 * (model[1].weight.grad + push)
    # A dozen additions in double precision.
    torch.testing.assert_close(trained.model[1].weight, wanted, rtol=0, atol=1e-14)
    wanted = model[1].bias - 0.1 * model[1].bias.grad  # shifts and weights are not pushed
    torch.testing.assert_close(trained.model[1].bias, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        trained.model[0].weight, model[0].weight - 0.1 * model[0].weight.grad, rtol=0, atol=1e-14
    )


def test_all_batch_norms_count_and_nothing_else() -> None:
    model = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm2d(3), nn.LayerNorm(4), nn.BatchNorm2d(5, affine=False)])
    with torch.no_grad():
        model[0].weight.fill_(-2)  # type: ignore[operator]
    companion = Slimming(0.5)
    companion.begin(model)
    assert companion.loss(model, None, None, Y) == 0.5 * (2 * 2 + 3 * 1)


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    schedule = sosp.Schedule(epochs=3, batch=5, rate=0.1)

    def stop(name: str, epoch: Any) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    def run(**more: Any) -> Any:
        return sosp.train(network(), (X, Y), schedule, companion=Slimming(0.01), **more)

    with pytest.raises(KeyboardInterrupt):
        run(folder=tmp_path, on_epoch=stop)
    again, whole = run(folder=tmp_path), run()
    assert again.resumed
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_a_network_without_scales() -> None:
    frozen = network()
    frozen[1].weight.requires_grad_(False)  # type: ignore[operator]
    for model in (network(nn.LayerNorm), frozen):
        with pytest.raises(StructureError, match="trainable scales of batch norms, but this network has none"):
            sosp.train(model, (X, Y), SCHEDULE, companion=Slimming(0.1))


@pytest.mark.parametrize("strength", [-1.0, float("nan"), float("inf"), "much", True, None])
def test_no_strength(strength: Any) -> None:
    with pytest.raises(ArgumentError, match="strength"):
        Slimming(strength)


def test_on_digits_its_scales_tell_what_can_go() -> None:
    model = sosp.train(fresh(), digits(), replace(SCHEDULE, epochs=8), companion=Slimming(0.04)).model
    structures = sosp.find_structures(model, torch.randn(2, 1, 8, 8))
    saliency = sosp.score(model, None, method="slimming", structures=structures)
    found = accuracy(model, sosp.select(saliency, ratio=0.3))
    # Seen: 0.96 against 0.17.
    assert found > 0.8
    assert found > by_chance(model, structures, 0.3) + 0.3
