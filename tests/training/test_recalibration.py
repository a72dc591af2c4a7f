"""Batch norm statistics from data alone: weighted averages over batches, written out; all else as it was."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosp
from helpers.training_worker import CLASSES, examples, fixed, normed, plain, same, weights
from sosp.data import Dataset, Resident
from sosp.errors import ArgumentError, DataError, TrainingError

EXACT = 1e-12  # float64: sums of some hundred terms in another order


def network() -> nn.Module:
    """Two batch norms with different factors, dropout between them, statistics of long ago."""
    model = fixed(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 6, 2, padding=1), nn.BatchNorm2d(6, eps=1e-3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()),
            *(nn.Linear(54, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, CLASSES)),
        )
    ).double()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            m.running_mean.fill_(7.0)
            m.running_var.fill_(100.0)
    return model


def statistics(model: Any, batches: list[Tensor]) -> dict[str, Tensor]:
    """``sum_b (n_b / n) mean_b`` and ``sum_b (n_b / n) var_b``, var_b unbiased; batch by batch, without batch norms."""
    total = sum(len(x) for x in batches)
    found = {n: torch.zeros(size, dtype=torch.float64) for n, size in (("m1", 6), ("v1", 6), ("m2", 8), ("v2", 8))}
    conv, norm1, fc = model[0], model[1], model[5]
    for x in batches:
        share = len(x) / total
        z = F.conv2d(x, conv.weight, conv.bias, padding=1)
        rows = z.movedim(1, 0).flatten(1)  # (6, everything else)
        mean = rows.sum(1) / rows.shape[1]
        squares = ((rows - mean[:, None]) ** 2).sum(1)
        found["m1"] += share * mean
        found["v1"] += share * squares / (rows.shape[1] - 1)
        biased = squares / rows.shape[1]
        z = (z - mean.view(1, -1, 1, 1)) / (biased + 1e-3).sqrt().view(1, -1, 1, 1)
        z = z * norm1.weight.view(1, -1, 1, 1) + norm1.bias.view(1, -1, 1, 1)
        z = torch.relu(z).flatten(1) @ fc.weight.T + fc.bias
        mean = z.sum(0) / len(z)
        found["m2"] += share * mean
        found["v2"] += share * ((z - mean) ** 2).sum(0) / (len(z) - 1)
    return {n: x.detach() for n, x in found.items()}


def assert_statistics(model: Any, batches: list[Tensor]) -> None:
    wanted = statistics(model, batches)
    for name, norm in (("1", model[1]), ("2", model[6])):
        torch.testing.assert_close(norm.running_mean, wanted[f"m{name}"], rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(norm.running_var, wanted[f"v{name}"], rtol=EXACT, atol=EXACT)


def inputs(count: int = 23) -> tuple[Tensor, Tensor]:
    return examples(count, kind=torch.float64)


# --- the statistics -------------------------------------------------------------------------------------


def test_averages_over_unequal_batches_by_hand() -> None:
    x, y = inputs()
    cuts = [x[:9], x[9:11], x[11:]]
    small = sosp.recalibrate(network(), [(x[:9], y[:9]), (x[9:11], y[9:11]), (x[11:], y[11:])])
    assert_statistics(small, cuts)


def test_a_pair_falls_into_batches_of_about_one_size() -> None:
    """23 in batches of 10: three of them, so 8 + 8 + 7, in order."""
    x, y = inputs()
    assert_statistics(sosp.recalibrate(network(), (x, y), batch=10), [x[:8], x[8:16], x[16:]])
    assert_statistics(sosp.recalibrate(network(), (x, y)), [x])


@pytest.mark.parametrize(
    ("total", "batch", "sizes"),
    [(15, 7, [5, 5, 5]), (5, 2, [3, 2]), (3, 2, [3]), (7, 3, [4, 3])],
)
def test_no_example_is_left_alone(total: int, batch: int, sizes: list[int]) -> None:
    """A single one has no variance."""
    x, y = inputs(total)
    assert_statistics(sosp.recalibrate(network(), (x, y), batch=batch), list(x.split(sizes)))


def test_so_many_examples_are_drawn() -> None:
    source = Resident.of(inputs()[0].float(), inputs()[1], pad=1, flip=True)
    for seed in (0, 3):
        drawn = torch.cat([x for x, _ in source.subset(12, seed).ordered(batch=12)])
        small = sosp.recalibrate(network().float(), source, examples=12, batch=6, seed=seed)
        wanted = statistics(network(), list(drawn.double().split(6)))
        torch.testing.assert_close(small[1].running_mean.double(), wanted["m1"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(small[6].running_var.double(), wanted["v2"], rtol=1e-4, atol=1e-5)
    assert not same(
        weights(sosp.recalibrate(network().float(), source, examples=12, seed=0)),
        weights(sosp.recalibrate(network().float(), source, examples=12, seed=3)),
    )


def test_all_examples_and_more_than_there_are() -> None:
    x, y = inputs()
    for wanted in (None, 23, 5000):
        assert_statistics(sosp.recalibrate(network(), (x, y), examples=wanted), [x])


def test_the_training_part_of_a_dataset() -> None:
    train, test = (Resident.of(*examples(n, n)) for n in (12, 9))
    data = Dataset("tiny", train, test, tuple("abcd"), (3, 2, 2))
    assert same(weights(sosp.recalibrate(normed(), data)), weights(sosp.recalibrate(normed(), train)))


def test_a_shuffling_loader_gives_the_same_each_time_and_leaves_random_numbers_alone() -> None:
    loader = DataLoader(TensorDataset(*inputs()), batch_size=6, shuffle=True)
    before = torch.get_rng_state()
    first = sosp.recalibrate(network(), loader)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    assert same(weights(sosp.recalibrate(network(), loader)), weights(first))


def test_old_statistics_have_no_say_even_if_they_are_no_numbers() -> None:
    model = network()
    model[1].running_mean.fill_(torch.nan)
    model[6].running_var.fill_(torch.inf)
    assert_statistics(sosp.recalibrate(model, inputs()), [inputs()[0]])


def test_what_it_is_for() -> None:
    """In eval mode on the same data the activations are normalised again: mean 0, variance 1 before the affine part."""
    x, y = inputs(40)
    small = sosp.recalibrate(network(), (x, y)).eval()
    z = small[1](small[0](x)).detach()
    assert z.mean((0, 2, 3)).abs().max() < 1e-12
    assert (z.var((0, 2, 3)) - 1).abs().max() < 0.02  # eps is 1e-3
    assert sosp.evaluate(small, (x, y)).loss < sosp.evaluate(network(), (x, y)).loss


# --- all else -------------------------------------------------------------------------------------------


LABELS = {
    "beyond the classes": torch.full((23,), 999),
    "real": torch.zeros(23),
    "vectors": torch.zeros(23, 4),
    "truths": torch.zeros(23, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_not_used(kind: str) -> None:
    x = inputs()[0]
    assert_statistics(sosp.recalibrate(network(), (x, LABELS[kind])), [x])
    assert_statistics(sosp.recalibrate(network(), [(x, LABELS[kind])]), [x])
    assert_statistics(sosp.recalibrate(network(), [(x, None)]), [x])


def test_only_statistics_change() -> None:
    model = network().train()
    model[3].eval()
    model[0].weight.requires_grad_(False)
    before, modes = copy.deepcopy(model), [m.training for m in model.modules()]
    small = sosp.recalibrate(model, inputs())
    assert same(weights(model), weights(before))
    assert [m.training for m in small.modules()] == modes
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in before.parameters()]
    assert (small[1].momentum, small[6].momentum) == (0.1, None)
    assert all(p.grad is None for p in small.parameters())
    for (name, mine), theirs in zip(small.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine is not theirs


def test_other_modules_run_in_eval_mode() -> None:
    seen: dict[str, bool] = {}
    model = network().train()
    for name, m in model.named_modules():
        m.register_forward_hook(lambda m, x, y, name=name: seen.update({name: m.training}))
    sosp.recalibrate(model, inputs())
    assert [name for name, training in seen.items() if training] == ["1", "6"]


def test_a_network_without_batch_norms_is_copied() -> None:
    model = plain().train()
    small = sosp.recalibrate(model, examples())
    assert small is not model
    assert same(weights(small), weights(model))
    assert small.training


def test_a_batch_norm_without_statistics_is_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12, track_running_stats=False), nn.BatchNorm1d(12))
    small = sosp.recalibrate(model, examples())
    assert small[1].running_mean is None
    assert small[2].running_mean.abs().max() < 1e-6  # normalised by the one before


# --- what is refused ------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    for options in ({"examples": 0}, {"examples": 1.5}, {"batch": 0}, {"seed": -1}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            sosp.recalibrate(normed(), examples(), **options)
    with pytest.raises(DataError, match="empty"):
        sosp.recalibrate(normed(), [])
    with pytest.raises(DataError, match="a batch is a Tensor"):
        sosp.recalibrate(normed(), list(examples()[0]))
    with pytest.raises(TrainingError, match="does not leave a single example"):
        sosp.recalibrate(normed(), (examples()[0][:1], examples()[1][:1]))
