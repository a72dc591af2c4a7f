"""A cap holds for every layer: behind a depthwise one, where structures span layers, with and without pairs."""

from math import floor

import pytest
import torch
from torch import Tensor, nn

import sosp
from sosp.errors import ArgumentError, DisconnectedError

CHANNELS = 10


class Separable(nn.Module):
    """A layer, two depthwise ones on top of each other, and a narrow one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, CHANNELS, 1)
        self.deep = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.deeper = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.project = nn.Conv2d(CHANNELS, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deeper(self.deep(self.expand(x).relu()).relu()).relu()
        return self.head(self.project(x).relu().mean((2, 3)))


STREAM = ("expand", "deep", "deeper")


def saliency(seed: int, with_pairs: bool, **options: object) -> sosp.Saliency:
    found = sosp.find_structures(Separable(), torch.randn(2, 3, 5, 5), **options)
    g = torch.Generator().manual_seed(seed)
    S = len(found)
    J = torch.randn(S, S, dtype=torch.float64, generator=g)
    pairs = J.T @ J / S if with_pairs else None
    return sosp.Saliency(found, "sosp-i", torch.randn(S, dtype=torch.float64, generator=g), None, pairs)


def lost(mask: sosp.Mask, *names: str) -> set[int]:
    return {c for name in names for c in mask.removed.get(name, torch.zeros(0)).tolist()}


@pytest.mark.parametrize("with_pairs", [False, True])
@pytest.mark.parametrize("cap", [0.5, 0.75, 0.95])
def test_depthwise_layers_and_the_one_they_read_lose_no_more_together(cap: float, with_pairs: bool) -> None:
    for seed in range(8):
        s = saliency(seed, with_pairs)
        mask = sosp.select(s, ratio=cap * 0.9, cap=cap)
        assert mask.chosen == round(cap * 0.9 * 34)
        assert len(lost(mask, *STREAM)) <= floor(cap * CHANNELS)
        assert len(lost(mask, "project")) <= floor(cap * 4)


@pytest.mark.parametrize("with_pairs", [False, True])
def test_all_that_the_cap_allows_can_go(with_pairs: bool) -> None:
    """Nine of ten channels, the same ones in each layer, and three of four: 30."""
    s = saliency(0, with_pairs)
    mask = sosp.select(s, ratio=30 / 34, cap=0.95)
    assert [len(lost(mask, n)) for n in (*STREAM, "project")] == [9, 9, 9, 3]
    assert len(lost(mask, *STREAM)) == 9
    with pytest.raises(ArgumentError, match=r"asks for 31 of 34.*cap=0\.95 leaves only 30"):
        sosp.select(s, ratio=31 / 34, cap=0.95)


def test_without_pairs_the_order_is_that_of_the_scores_past_what_is_full() -> None:
    """By hand: walk through the sorted structures, take each one that leaves the places their share."""
    for seed in range(8):
        s = saliency(seed, False)
        owners = [(n, c) for n, w in (*((n, CHANNELS) for n in STREAM), ("project", 4)) for c in range(w)]
        places: tuple[set[int], set[int]] = (set(), set())
        walk = []
        for i in torch.argsort(s.scores, stable=True).tolist():
            name, c = owners[i]
            gone, most = (places[1], 2) if name == "project" else (places[0], 6)
            if c in gone or len(gone) < most:
                gone.add(c)
                walk.append(owners[i])
        mask = sosp.select(s, ratio=12 / 34, cap=0.6)
        assert {(n, c) for n, gone in mask.removed.items() for c in gone.tolist()} == set(walk[:12])


def test_a_budget_keeps_the_cap() -> None:
    for seed in range(8):
        mask = sosp.select(saliency(seed, False), macs=0.4, cap=0.8)
        assert len(lost(mask, *STREAM)) <= 8


@pytest.mark.parametrize("with_pairs", [False, True])
def test_a_structure_of_several_layers_counts_in_each(with_pairs: bool) -> None:
    """All of ``project`` hangs on channels of ``expand``: counted there alone, all four might go."""
    groups = [{"expand": [c], "project": [c]} for c in range(4)]
    for seed in range(8):
        s = saliency(seed, with_pairs, groups=groups)
        low = s.first.clone()
        low[:4] = 0  # these first
        pairs = None if s.pairs is None else s.pairs * 0
        mask = sosp.select(sosp.Saliency(s.structures, "sosp-i", low, None, pairs), ratio=0.4, cap=0.75)
        assert len(lost(mask, "project")) == 3


def test_what_takes_more_than_the_cap_by_itself_stays() -> None:
    s = saliency(0, False, groups=[{"expand": [0], "project": [0, 1, 2, 3]}])
    assert not lost(sosp.select(s, ratio=0.6, cap=0.95), "project")


def disjoint() -> sosp.Saliency:
    """Half of ``expand`` and the other half of ``deep`` are needed least."""
    s = saliency(0, False)
    first = torch.ones(34, dtype=torch.float64)
    first[:5] = first[15:20] = 0
    return sosp.Saliency(s.structures, "first-order", first)


def test_the_way_out_that_is_named_helps() -> None:
    with pytest.raises(DisconnectedError, match=r"'deep.*Lower the ratio, bound the share .*\(cap=0\.95\)"):
        sosp.select(disjoint(), ratio=10 / 34)
    assert len(lost(sosp.select(disjoint(), ratio=10 / 34, cap=0.95), "expand", "deep")) == 9


def test_no_cap_is_advised_where_it_would_not_help() -> None:
    """Every layer loses its share, and those of two have nothing in common."""
    with pytest.raises(DisconnectedError, match=r"'deep.*Lower the ratio, .*groups='coupled'") as caught:
        sosp.select(disjoint(), ratio=0.5, scope="layer")
    assert "cap" not in str(caught.value)
