"""The quadratic programme of a layer: against trying all subsets, against slow projected gradients, and by symmetry."""

import pytest
import torch
from torch import Tensor

from oracles import baselines
from sosp.selection.quadratic_program import choose_subset, solve_relaxation


def random_programme(n: int, seed: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    J = torch.randn(rank or n + 2, n, dtype=torch.float64, generator=g)
    return torch.randn(n, dtype=torch.float64, generator=g), J.T @ J / n


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_relaxed_solution_is_the_least(k: int, seed: int) -> None:
    first, pairs = random_programme(7, seed)
    x = solve_relaxation(pairs, first, k)
    assert float(x.sum()) == pytest.approx(k, abs=1e-9)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    slow = baselines.relaxed_choice(first, pairs, k)
    # The value is within 1e-10 of the least; strong convexity (eigenvalues of 1e-2 and more) makes that 1e-4 in x.
    assert torch.allclose(x, slow, atol=1e-4)
    value = [float(0.5 * v @ pairs @ v - first @ v) for v in (x, slow)]
    assert value[0] == pytest.approx(value[1], abs=1e-8)


def test_no_choice_is_below_the_relaxed_value_and_the_rounded_one_is_near_the_best() -> None:
    worse, beaten = 0, 0
    for seed in range(12):
        first, pairs = random_programme(8, seed)
        for k in (2, 4, 6):
            x = solve_relaxation(pairs, first, k)
            bound = float(0.5 * x @ pairs @ x - first @ x)
            best = baselines.change(first, pairs, baselines.best_choice(first, pairs, k))
            found = baselines.change(first, pairs, tuple(choose_subset(pairs, first, k).tolist()))
            alone = torch.argsort(0.5 * pairs.diagonal() - first)[:k]
            assert bound - 1e-8 <= best <= found + 1e-12
            worse += found > best + 1e-9
            beaten += baselines.change(first, pairs, tuple(alone.tolist())) > found + 1e-9
    assert worse < 18  # of 36: rounding is not always the best
    assert beaten > 9  # but better than looking at each by itself, most times they differ


def test_channels_that_do_not_interact_are_sorted() -> None:
    first, _ = random_programme(9, 0)
    still = 1e-6 * torch.eye(9, dtype=torch.float64)
    for k in range(10):
        found = choose_subset(still, first, k)
        assert sorted(found.tolist()) == sorted(torch.argsort(first, descending=True)[:k].tolist())


def test_of_two_that_do_the_same_one_is_enough() -> None:
    """Removing both of a pair costs four times what removing one does: look-alikes are not removed together."""
    J = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.1, 1.1]], dtype=torch.float64)
    first = torch.tensor([0.01, 0.0, 0.0, 0.01], dtype=torch.float64)
    assert sorted(choose_subset(J.T @ J, first, 2).tolist()) == [0, 3]
    alone = torch.argsort(0.5 * (J.T @ J).diagonal() - first)[:2]
    assert sorted(alone.tolist()) == [0, 1]


def test_ties_go_to_the_lower_index_and_the_ends_are_plain() -> None:
    same, still = torch.ones(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    assert choose_subset(still, same, 2).tolist() == [0, 1]
    assert choose_subset(still, same, 0).tolist() == []
    assert choose_subset(still, same, 5).tolist() == [0, 1, 2, 3, 4]
    assert choose_subset(torch.zeros(3, 3), torch.zeros(3), 1).tolist() == [0]


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
def test_the_unit_of_the_loss_does_not_matter(size: float) -> None:
    first, pairs = random_programme(10, 3, rank=2)
    assert torch.equal(choose_subset(size * pairs, size * first, 4), choose_subset(pairs, first, 4))


def test_a_wide_layer_is_quick() -> None:
    """64 Newton steps of 256^3 / 3 operations: well under a second."""
    first, pairs = random_programme(256, 0, rank=32)
    x = solve_relaxation(pairs, first, 100)
    slope = pairs @ x - first
    inside = (x > 1e-4) & (x < 1 - 1e-4)
    level = slope[inside].mean()
    # Karush, Kuhn, Tucker: equal slopes inside, lower ones at 1, higher ones at 0.
    assert float((slope[inside] - level).abs().max()) < 1e-4
    assert bool((slope[x > 1 - 1e-4] < level + 1e-4).all())
    assert bool((slope[x < 1e-4] > level - 1e-4).all())
