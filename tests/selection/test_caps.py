"""A cap holds for every layer: behind a depthwise one, where structures span layers, with and without pairs."""

from dataclasses import replace
from math import floor

import pytest
import torch
from torch import Tensor, nn

import sosp
from oracles import subsets
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


@pytest.mark.parametrize("with_pairs", [False, True])
def test_what_takes_more_than_the_cap_by_itself_stays(with_pairs: bool) -> None:
    s = saliency(0, with_pairs, groups=[{"expand": [0], "project": [0, 1, 2, 3]}])
    first = s.first.clone()
    first[0] = 0  # the first to go, if it could
    mask = sosp.select(replace(s, first=first), ratio=0.6, cap=0.95)
    assert mask.chosen == round(0.6 * 30)
    assert not lost(mask, "project")


GROUPS = [
    {"expand": [0, 1, 2]},
    {"expand": [3], "project": [0, 1]},
    {"deep": [4], "project": [2]},
    {"deeper": [0, 1, 2, 3, 4, 5, 6]},  # more than the cap by itself
]


def places(s: sosp.Saliency) -> list[tuple[set[int], set[int]]]:
    """Of every structure: its channels in the stream, and in ``project``."""
    found: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(len(s.structures))]
    for layer, ids in zip(s.structures.layers, s.structures.ids, strict=True):
        for channel, i in enumerate(ids.tolist()):
            found[i][layer.name == "project"].add(channel)
    return found


@pytest.mark.parametrize("scale", [None, "params"])
@pytest.mark.parametrize("with_pairs", [False, True])
def test_it_is_the_textbook_greedy_among_what_fits(with_pairs: bool, scale: str | None) -> None:
    """By hand: each time the one that raises the objective least, of those that leave both places their share."""
    for seed in range(6):
        s = saliency(seed, with_pairs, groups=GROUPS)
        S, where = len(s.structures), places(s)
        pairs = torch.zeros(S, S, dtype=torch.float64) if s.pairs is None else s.pairs
        sizes = torch.ones(S) if scale is None else s.structures.sizes(scale)
        walk: list[int] = []
        gone: tuple[set[int], set[int]] = (set(), set())
        for _ in range(10):
            now = subsets.value("individual", s.first, pairs, walk)
            worth = {
                i: (subsets.value("individual", s.first, pairs, [*walk, i]) - now) / float(sizes[i])
                for i in set(range(S)) - set(walk)
                if len(gone[0] | where[i][0]) <= 6 and len(gone[1] | where[i][1]) <= 2
            }
            walk.append(min(worth, key=worth.__getitem__))
            gone = gone[0] | where[walk[-1]][0], gone[1] | where[walk[-1]][1]
        mask = sosp.select(s, ratio=10 / S, cap=0.6, scale=scale)
        assert mask == sosp.Mask.from_structures(s.structures, torch.tensor(walk))


@pytest.mark.parametrize("with_pairs", [False, True])
def test_a_layer_that_has_no_structures_takes_no_room(with_pairs: bool) -> None:
    """The last structure is a channel that may go."""
    s = saliency(0, with_pairs)
    found = replace(s.structures, ids=(*s.structures.ids[:3], torch.full((4,), -1)))
    first = torch.ones(30, dtype=torch.float64)
    first[[9, 19, 29]] = 0
    pairs = torch.zeros(30, 30, dtype=torch.float64) if with_pairs else None
    mask = sosp.select(sosp.Saliency(found, "sosp-i", first, None, pairs), ratio=0.1, cap=0.5)
    assert {n: gone.tolist() for n, gone in mask.removed.items()} == {n: [9] for n in STREAM}


class Plain(nn.Module):
    """Two layers, of which none is depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(3, CHANNELS), nn.Linear(CHANNELS, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.narrow(self.wide(x).relu()).relu())


def test_a_structure_of_several_layers_counts_in_each_without_a_depthwise_one() -> None:
    groups = [{"wide": [c], "narrow": [c]} for c in range(4)]
    found = sosp.find_structures(Plain(), torch.randn(2, 3), groups=groups)
    mask = sosp.select(sosp.Saliency(found, "first-order", torch.arange(10.0)), ratio=0.4, cap=0.75)
    assert {n: sorted(lost(mask, n)) for n in ("wide", "narrow")} == {"wide": [0, 1, 2, 4], "narrow": [0, 1, 2]}


def test_a_wide_structure_stays_when_only_narrow_ones_fit() -> None:
    """Three narrow ones go first, which leaves room for two channels."""
    s = saliency(0, False, groups=[{"expand": [0, 1, 2]}])
    for with_pairs in (False, True):
        pairs = torch.zeros(len(s.structures), len(s.structures), dtype=torch.float64) if with_pairs else None
        first = torch.full((len(s.structures),), 9.0, dtype=torch.float64)
        wide, *narrow = dict.fromkeys(s.structures.ids[0].tolist())
        first[wide], first[narrow[:3]] = 1, 0
        mask = sosp.select(sosp.Saliency(s.structures, "sosp-i", first, None, pairs), ratio=8 / 32, cap=0.5)
        assert lost(mask, "expand").isdisjoint({0, 1, 2})
        assert len(lost(mask, *STREAM)) <= 5


class Doubled(nn.Module):
    """A depthwise layer that reads every channel of another one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.deep = nn.Conv2d(3, 5, 1), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.head = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.expand(x).relu()
        return self.head(self.deep(torch.cat([x, x], 1)).relu().mean((2, 3)))


class Added(nn.Module):
    """A depthwise layer that reads the sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, CHANNELS, 1), nn.Conv2d(3, CHANNELS, 1)
        self.deep, self.head = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS), nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(self.left(x) + self.right(x)).relu().mean((2, 3)))


def test_a_depthwise_layer_of_another_width_has_a_cap_of_its_own() -> None:
    found = sosp.find_structures(Doubled(), torch.randn(2, 3, 5, 5))
    s = sosp.Saliency(found, "first-order", torch.arange(15.0))
    mask = sosp.select(s, ratio=7 / 15, cap=0.5)
    assert [len(lost(mask, n)) for n in ("expand", "deep")] == [2, 5]
    with pytest.raises(ArgumentError, match=r"cap=0\.5 leaves only 7"):
        sosp.select(s, ratio=8 / 15, cap=0.5)


def test_a_depthwise_layer_that_reads_a_sum_has_a_cap_of_its_own() -> None:
    """What one of the two loses is not lost: the other one gives it."""
    found = sosp.find_structures(Added(), torch.randn(2, 3, 5, 5))
    first = torch.ones(30)
    first[:5] = first[25:] = 0
    mask = sosp.select(sosp.Saliency(found, "first-order", first), ratio=10 / 30, cap=0.5)
    assert {n: sorted(lost(mask, n)) for n in ("left", "deep")} == {"left": [0, 1, 2, 3, 4], "deep": [5, 6, 7, 8, 9]}


def disjoint() -> sosp.Saliency:
    """Half of ``expand`` and the other half of ``deep`` are needed least."""
    s = saliency(0, False)
    first = torch.ones(34, dtype=torch.float64)
    first[:5] = first[15:20] = 0
    return sosp.Saliency(s.structures, "first-order", first)


def test_the_way_out_that_is_named_helps() -> None:
    with pytest.raises(DisconnectedError, match=r"'deep.*Lower the ratio, bound the share .*\(cap=0\.95\)"):
        sosp.select(disjoint(), ratio=10 / 34)
    with pytest.raises(DisconnectedError, match=r"\(cap=0\.95\)"):
        sosp.select(disjoint(), ratio=10 / 34, cap=1.0)
    assert len(lost(sosp.select(disjoint(), ratio=10 / 34, cap=0.95), "expand", "deep")) == 9


def test_no_cap_is_advised_where_it_would_not_help() -> None:
    """Every layer loses its share, and those of two have nothing in common."""
    with pytest.raises(DisconnectedError, match=r"'deep.*Lower the ratio, .*groups='coupled'") as caught:
        sosp.select(disjoint(), ratio=0.5, scope="layer")
    assert "cap" not in str(caught.value)
