"""Variational pruning: the divergence, a step by hand, the way back to plain batch norms, and digits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from learned_digits import SCHEDULE, accuracy, by_chance, digits, known
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import sosp
from sosp.baselines.variational_training import SMALLEST, GaussianScales, compute_divergence
from sosp.errors import ArgumentError, StructureError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 2
ONE_STEP = sosp.Schedule(epochs=1, batch=12, rate=0.1, momentum=0.0, decay=0.0, shape="constant")
# Some hundred operations in double precision.
EXACT = {"rtol": 0.0, "atol": 1e-12}


def network() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -0.7, 1.1, 0.9]))
        model[1].bias.copy_(torch.tensor([0.1, 0.2, -0.3, 0.4]))
    return model


# --- the divergence


def test_the_divergence_is_that_of_two_gaussians() -> None:
    mean, deviation = torch.tensor([0.0, 0.3, -2.0]), torch.tensor([0.1, 0.5, 1.5])
    wanted = kl_divergence(Normal(mean, deviation), Normal(0.0, 0.7))
    torch.testing.assert_close(compute_divergence(mean, deviation, 0.7), wanted)
    own = kl_divergence(Normal(mean, deviation), Normal(torch.zeros(3), deviation))
    torch.testing.assert_close(compute_divergence(mean, deviation), own)


@pytest.mark.parametrize("prior", [None, 0.5])
def test_its_slopes_by_hand(prior: float | None) -> None:
    mean = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    deviation = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    slopes = torch.autograd.grad(compute_divergence(mean, deviation, prior).sum(), (mean, deviation))
    m, s = mean.detach(), deviation.detach()
    wanted = (m / s**2, -(m**2) / s**3) if prior is None else (m / 0.25, s / 0.25 - 1 / s)
    for found, slope in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(found, slope, **EXACT)


# --- a step


def forward(p: dict[str, Tensor], x: Tensor, gamma: Tensor) -> Tensor:
    """``gamma (normalised + beta)``."""
    hidden = F.linear(x, p["0.weight"], p["0.bias"])
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    return F.linear(torch.relu(gamma * (normal + p["beta"])), p["3.weight"], p["3.bias"])


@pytest.mark.parametrize("prior", [None, 0.2])
def test_a_step_by_hand(prior: float | None) -> None:
    model, strength, warmup = network(), 2.0, 4
    found = sosp.learned.variational(model, (X, Y), ONE_STEP, strength=strength, prior=prior, warmup=warmup)

    p = {n: q.detach().clone() for n, q in model.named_parameters() if not n.startswith("1.")}
    mean, log = model[1].weight.detach().clone(), torch.zeros(4, dtype=torch.float64)
    p |= {"beta": model[1].bias.detach() / mean, "mean": mean, "log": log}
    leaves = {n: q.requires_grad_() for n, q in p.items()}
    x, y = next(iter(sosp.training.user_data.PairSource(X, Y).epoch(0, batch=12, seed=0)))
    noise = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    deviation = 0.1 * mean.detach().abs() * leaves["log"].exp()
    loss = F.cross_entropy(forward(leaves, x, leaves["mean"] + deviation * noise), y)
    if prior is None:
        far = (leaves["mean"].square() / deviation.square() / 2).sum()
    else:
        far = ((prior / deviation).log() + (deviation**2 + leaves["mean"] ** 2) / (2 * prior**2) - 0.5).sum()
    slopes = torch.autograd.grad(loss + strength / 12 * (1 / warmup) * far, list(leaves.values()))
    after = {n: q.detach() - 0.1 * g for (n, q), g in zip(leaves.items(), slopes, strict=True)}

    for name, q in found.model.named_parameters():
        if not name.startswith("1."):
            torch.testing.assert_close(q.detach(), after[name], **EXACT)
    small: Any = found.model
    torch.testing.assert_close(small[1].weight.detach(), after["mean"], **EXACT)
    torch.testing.assert_close(small[1].bias.detach(), after["mean"] * after["beta"], **EXACT)
    sigma = 0.1 * mean.detach().abs() * after["log"].exp()
    torch.testing.assert_close(found.saliency.scores, (after["mean"] ** 2 + sigma**2).sqrt(), **EXACT)


def test_the_weight_of_the_divergence_rises() -> None:
    companion = GaussianScales(["1"], 0.5, warmup=4)
    model = network()
    companion.begin(model)
    far = float(compute_divergence(companion.mean, companion.deviation).sum().detach())
    seen = []
    for _ in range(6):
        seen.append(float(companion.loss(model, None, None, Y).detach()) / (0.5 * far))
        companion.after(model, 0.1)
    assert seen == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1], abs=1e-12)


# --- there and back


def test_the_network_is_the_same_at_the_start_and_plain_at_the_end() -> None:
    model, twin = network().eval(), network().eval()
    companion = GaussianScales(["1"], 0.0)
    companion.begin(twin)
    torch.testing.assert_close(twin(X), model(X), **EXACT)
    assert not torch.equal(twin.train()(X), twin(X))  # drawn anew each time
    with torch.no_grad():
        companion.mean.mul_(torch.tensor([0.5, 2.0, -1.0, 1.0]))
    learned = twin.eval()(X)
    companion.settle()
    torch.testing.assert_close(twin(X), learned, **EXACT)
    assert not twin[1]._forward_hooks
    assert not twin._forward_pre_hooks
    assert twin[1].weight.requires_grad
    assert torch.equal(twin[1].weight, companion.mean)


def test_scales_that_were_frozen_are_frozen_at_the_end() -> None:
    model = nn.Sequential(network(), nn.BatchNorm1d(2)).double()
    model[0][1].weight.requires_grad_(False)
    companion = GaussianScales(["0.1", "1"], 0.0)
    companion.begin(model)
    companion.settle()
    assert [model[0][1].weight.requires_grad, model[1].weight.requires_grad] == [False, True]


def test_a_scale_of_nothing_begins_a_little_above() -> None:
    model = network()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.0, -1e-5, 0.5, -0.5]))
    companion = GaussianScales(["1"], 0.0)
    companion.begin(model)
    assert companion.mean.tolist() == [SMALLEST, -SMALLEST, 0.5, -0.5]
    assert bool(model[1].bias.isfinite().all())


def test_what_it_is_given_stays_as_it_is() -> None:
    model = network()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    found = sosp.learned.variational(model, (X, Y), ONE_STEP)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert all(p.requires_grad for p in found.model.parameters())
    assert not found.model.training
    assert len(found.history) == 1


def test_the_size_of_a_structure_is_that_of_its_largest_scale() -> None:
    model = network()
    structures = sosp.find_structures(model, X, groups=[{"0": [0, 2]}])
    companion = GaussianScales(["1"], 0.0)
    companion.begin(model)
    with torch.no_grad():
        companion.mean.copy_(torch.tensor([0.01, 0.0, 3.0, 0.015], dtype=torch.float64))
        companion.start.copy_(torch.tensor([0.005, 0.009, 4.0, 0.02], dtype=torch.float64))
    sizes = companion.sizes(structures).tolist()
    assert sizes == pytest.approx([5.0, 0.009, 0.025], abs=1e-12)
    # The first is not sure of both its channels, the last of its one.
    assert companion.vanished(structures).tolist() == [False, True, False]


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    schedule = sosp.Schedule(epochs=3, batch=5, rate=0.05)

    def stop(name: str, epoch: Any) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    def run(**more: Any) -> Any:
        return sosp.learned.variational(network(), (X, Y), schedule, warmup=5, **more)

    with pytest.raises(KeyboardInterrupt):
        run(folder=tmp_path, on_epoch=stop)
    again, whole = run(folder=tmp_path), run()
    assert torch.equal(again.saliency.scores, whole.saliency.scores)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


# --- refusals


def test_layers_without_a_norm_are_named() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with pytest.raises(StructureError, match=r"method='variational' needs a batch norm.*not met by '0'.*These work"):
        sosp.learned.variational(plain, (X, Y), ONE_STEP)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strength": -1.0}, "strength"),
        ({"prior": 0.0}, "prior"),
        ({"spread": 0.0}, "spread"),
        ({"warmup": 1.5}, "warmup"),
    ],
)
def test_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        sosp.learned.variational(network(), (X, Y), ONE_STEP, **options)
    with pytest.raises(ArgumentError, match="ema"):
        sosp.learned.variational(network(), (X, Y), sosp.Schedule(epochs=1, ema=0.9))


def test_on_digits_it_tells_what_can_go() -> None:
    found = sosp.learned.variational(known(), digits(), SCHEDULE, strength=2.0)
    learned = accuracy(found.model, sosp.select(found.saliency, ratio=0.3))
    # Seen: 0.93 against 0.17.
    assert learned > 0.75
    assert learned > by_chance(found.model, found.saliency.structures, 0.3) + 0.3
