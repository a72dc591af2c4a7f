"""GAL: proximal steps, who learns from which loss, masks that become weights, and digits."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learned_digits import SCHEDULE, accuracy, by_chance, digits, known
from torch import Tensor, nn

import sosp
from sosp.baselines.fista import Fista, take_proximal_step
from sosp.baselines.fold_gates import fold_factors
from sosp.baselines.gal_training import WIDTHS, AdversarialMask
from sosp.core.layers import align_values, apply_gates
from sosp.errors import ArgumentError, StructureError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 2
# Some hundred operations in double precision.
EXACT = {"rtol": 0.0, "atol": 1e-12}


def network() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()


def structures(model: nn.Module, **options: Any) -> sosp.Structures:
    return sosp.find_structures(model, X, **options)


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# --- FISTA


def test_proximal_steps_by_hand() -> None:
    """rate 0.5, strength 0.2: every number loses 0.5 (slope + 0.2), and none gets below zero."""
    x, slope = doubles(1.0, 0.2, 1.0), doubles(0.0, 0.5, -1.0)
    first, momentum = take_proximal_step(x, x, doubles(0.0), slope, 0.5, 0.2)
    torch.testing.assert_close(first, doubles(0.9, 0.0, 1.4), **EXACT)
    assert momentum == 1
    second, momentum = take_proximal_step(first, x, momentum, slope, 0.5, 0.2)  # (1 - 1) / t: still without momentum
    torch.testing.assert_close(second, doubles(0.8, 0.0, 1.8), **EXACT)
    golden = (1 + 5**0.5) / 2
    torch.testing.assert_close(momentum, doubles(golden), **EXACT)
    third, momentum = take_proximal_step(second, first, momentum, slope, 0.5, 0.2)
    ahead = (1 + (1 + 4 * golden**2) ** 0.5) / 2
    push = (golden - 1) / ahead
    torch.testing.assert_close(third, doubles(0.8 - push * 0.1 - 0.1, 0.0, 1.8 + push * 0.4 + 0.4), **EXACT)
    torch.testing.assert_close(momentum, doubles(ahead), **EXACT)


def test_a_proximal_step_is_the_minimum_it_claims_to_be() -> None:
    y, rate, strength = 0.37, 0.25, 0.8
    grid = torch.linspace(0, 2, 200001, dtype=torch.float64)
    best = grid[((grid - y).square() / 2 + rate * strength * grid).argmin()]
    found, _ = take_proximal_step(doubles(y), doubles(y), doubles(0.0), doubles(0.0), rate, strength)
    assert abs(float(found - best)) < 1e-5  # the grid


def test_fista_finds_the_minimum() -> None:
    """Of ``sum a (x - b)^2 / 2 + strength |x|`` over ``x >= 0``: ``max(b - strength / a, 0)``."""
    a, b = doubles(1.0, 0.3, 2.0, 0.5), doubles(1.0, 2.0, 0.1, -1.0)
    fista = Fista(torch.ones(4, dtype=torch.float64), 0.4, every=1)
    for _ in range(400):
        fista.step(a * (fista.x - b), 0.4)
    # The slope is taken at x and not ahead of it, so that it swings in: 2e-4 after 400 steps.
    torch.testing.assert_close(fista.x, torch.relu(b - 0.4 / a), rtol=0, atol=1e-3)
    assert fista.x[2] == fista.x[3] == 0  # not nearly


def test_most_calls_only_count() -> None:
    seldom, always = Fista(torch.ones(3), 0.1, every=3), Fista(torch.ones(3), 0.1, every=1)
    slope = torch.tensor([0.1, 0.0, -0.1])
    for call in range(1, 10):
        before = seldom.x.clone()
        seldom.step(slope, 0.2)
        if call % 3:
            assert torch.equal(seldom.x, before)
        else:
            always.step(slope, 0.2)
            assert all(torch.equal(seldom.tensors()[n], always.tensors()[n]) for n in ("x", "before", "momentum"))


# --- who learns from what


def test_a_step_by_hand() -> None:
    """The network from closeness and deception, the discriminator from what it should tell, the mask by FISTA."""
    model, rate, strength, closeness = network(), 0.1, 0.3, 0.7
    found = structures(model)
    schedule = sosp.Schedule(epochs=1, batch=12, rate=rate, momentum=0.0, decay=0.0, shape="constant")
    judge = AdversarialMask(found, 2, strength=strength, closeness=closeness, every=1, seed=3)
    trained = sosp.train(model, (X, Y), schedule, companion=judge)

    started = AdversarialMask(found, 2, seed=3)
    started.begin(copy.deepcopy(model))
    told: Any = started.discriminator
    assert [layer.out_features for layer in told if isinstance(layer, nn.Linear)] == [*WIDTHS, 1]
    twin, mask = network().train(), torch.ones(4, dtype=torch.float64, requires_grad=True)
    x, _ = next(iter(sosp.training.user_data.PairSource(X, Y).epoch(0, batch=12, seed=0)))
    mine = twin[3](torch.relu(twin[1](twin[0](x)) * mask))
    theirs = network().eval()(x).detach()
    sure = torch.sigmoid(told(mine))
    loss = closeness * (mine - theirs).square().mean() - sure.log().mean()
    slopes = torch.autograd.grad(loss, [*twin.parameters(), mask])
    for (name, q), before, slope in zip(
        trained.model.named_parameters(), network().parameters(), slopes[:-1], strict=True
    ):
        torch.testing.assert_close(q.detach(), before.detach() - rate * slope, msg=name, **EXACT)
    wanted = torch.relu(1 - rate * (slopes[-1] + strength))
    torch.testing.assert_close(trained.companion.mask.detach(), wanted, **EXACT)

    sure, right = torch.sigmoid(told(mine.detach())), torch.sigmoid(told(theirs))
    apart = -right.log().mean() - (1 - sure).log().mean() - sure.log().mean()
    slopes = torch.autograd.grad(apart, list(told.parameters()))
    for after, before, slope in zip(
        trained.companion.discriminator.parameters(), told.parameters(), slopes, strict=True
    ):
        torch.testing.assert_close(after.detach(), before.detach() - rate * slope, **EXACT)


def test_labels_play_no_part() -> None:
    schedule = sosp.Schedule(epochs=2, batch=5, rate=0.05)
    one, other = (sosp.learned.gal(network(), (X, y), schedule, strength=0.5, every=1) for y in (Y, 1 - Y))
    assert torch.equal(one.saliency.scores, other.saliency.scores)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert not torch.equal(one.saliency.scores, torch.ones(4, dtype=torch.float64))


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    schedule = sosp.Schedule(epochs=3, batch=5, rate=0.05)

    def stop(name: str, epoch: Any) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    def run(**more: Any) -> Any:
        return sosp.learned.gal(network(), (X, Y), schedule, strength=0.5, every=2, **more)

    with pytest.raises(KeyboardInterrupt):
        run(folder=tmp_path, on_epoch=stop)
    again, whole = run(folder=tmp_path), run()
    assert torch.equal(again.saliency.scores, whole.saliency.scores)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_channels_that_share_a_gate_share_a_number() -> None:
    """And those that have none are left alone."""
    model = network()
    found = structures(model, groups=[{"0": [0, 2]}])
    found = replace(found, ids=(torch.tensor([0, 1, 0, -1]),))
    companion = AdversarialMask(found, 2)
    companion.begin(model)
    with torch.no_grad():
        companion.mask.copy_(doubles(0.5, 3.0))
    wanted = network()[1](network()[0](X)) * doubles(0.5, 3.0, 0.5, 1.0)
    model(X)
    torch.testing.assert_close(model[1](model[0](X)), wanted, **EXACT)


# --- masks that become weights


class Kinds(nn.Module):
    """A norm, no norm, transposed convolutions with and without groups, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.bare = nn.Conv2d(4, 6, 1, groups=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, groups=2)
        self.up2 = nn.ConvTranspose2d(4, 3, 2)
        self.linear, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bare(torch.relu(self.norm(self.conv(x)))))
        x = torch.relu(self.up2(torch.relu(self.up(x)))).mean((2, 3))
        return self.head(torch.relu(self.linear(x)))


@pytest.mark.parametrize("gate", ["features", "weights"])
@pytest.mark.parametrize("training", [False, True])
def test_a_folded_network_is_the_gated_one(gate: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Kinds().double()
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    found = sosp.find_structures(model, x, gate=gate)
    factors = torch.rand(len(found), dtype=torch.float64)
    own = found.expand_to_channels(factors)
    twin = copy.deepcopy(model).train(training)
    with apply_gates(twin, found.layers, gate, lambda i, y: y * align_values(own[i], y.dim(), found.layers[i].axis)):
        wanted = twin(x)
    small = copy.deepcopy(model).train(training)
    fold_factors(small, found, factors)
    torch.testing.assert_close(small(x), wanted, **EXACT)
    assert not torch.allclose(model.train(training)(x), wanted)


# --- refusals


def test_a_norm_that_cannot_take_the_mask() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Linear(4, 2)).double()
    schedule = sosp.Schedule(epochs=1)
    with pytest.raises(StructureError, match=r"'1' has no scale.*gate='weights'.*exclude=\['0'\]"):
        sosp.learned.gal(model, (X, Y), schedule)
    assert sosp.learned.gal(model, (X, Y), schedule, structures=structures(model, gate="weights")).mask.chosen == 0
    tied = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)).double()
    with pytest.raises(StructureError, match="the weight of '0' is computed"):
        sosp.learned.gal(tied, (X, Y), schedule)


def test_structures_it_does_not_take() -> None:
    model = network()
    with pytest.raises(ArgumentError, match="method='gal' does not take kind='weights'"):
        sosp.learned.gal(model, (X, Y), structures=structures(model, kind="weights"))
    other = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    narrow = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with pytest.raises(ArgumentError, match="4 channels in '0', this model 5"):
        sosp.learned.gal(other, (X, Y), structures=structures(narrow))


@pytest.mark.parametrize(
    "options", [{"strength": -1.0}, {"closeness": float("nan")}, {"every": 0}, {"every": 1.5}, {"strength": "much"}]
)
def test_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        sosp.learned.gal(network(), (X, Y), **options)
    with pytest.raises(ArgumentError, match="ema"):
        sosp.learned.gal(network(), (X, Y), sosp.Schedule(ema=0.9))


def test_on_digits_its_zeros_can_go() -> None:
    model = known()
    found = sosp.learned.gal(model, digits(), replace(SCHEDULE, epochs=12, rate=0.02), strength=0.1, every=2)
    # Seen: half of the filters at zero, 0.95 without them, and 0.13 without as many others.
    assert 0.25 < found.mask.ratio < 0.9
    whole = accuracy(found.model)
    assert whole > 0.7
    assert accuracy(found.model, found.mask) == whole  # they are zero: nothing changes
    assert whole > by_chance(found.model, found.saliency.structures, found.mask.ratio) + 0.3
    small = sosp.shrink(found.model, found.mask, torch.randn(2, 1, 8, 8))
    assert sosp.count(small, torch.randn(2, 1, 8, 8)).macs < 0.8 * sosp.count(model, torch.randn(2, 1, 8, 8)).macs
    assert accuracy(small) == pytest.approx(whole, abs=0.003)
