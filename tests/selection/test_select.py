"""From saliency to mask: greedy against the textbook, ties, caps, scales, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sosp
from networks import case
from oracles import subsets
from sosp.errors import ArgumentError, DisconnectedError
from sosp.graph.records import INPUT, OUTPUT, Layer, Structures
from sosp.selection.greedy_order import LayerLimits, order_removals

OBJECTIVES = ("individual", "structure", "order", "joint")


def layer(name: str, channels: int, **more: object) -> Layer:
    return replace(Layer(name, channels, 1, (), 1.0, 1.0, 1.0), **more)


def structures(*widths: int, **more: object) -> Structures:
    """Layers a, b, c ... side by side, so that no mask disconnects anything."""
    layers = tuple(layer(chr(97 + i), w) for i, w in enumerate(widths))
    ids = torch.arange(sum(widths)).split(list(widths))
    wiring = {OUTPUT: (INPUT, *(x.name for x in layers)), **{x.name: (INPUT,) for x in layers}}
    return replace(Structures("filters", "features", layers, tuple(ids), wiring), **more)


def saliency(S: int, seed: int, objective: str = "individual", widths: tuple[int, ...] = ()) -> sosp.Saliency:
    g = torch.Generator().manual_seed(seed)
    J = torch.randn(S + 2, S, dtype=torch.float64, generator=g)
    pairs = J.T @ J / S - 0.3 * torch.eye(S, dtype=torch.float64)  # not definite: the exact Hessian is not either
    first = torch.randn(S, dtype=torch.float64, generator=g)
    return sosp.Saliency(structures(*(widths or (S,))), "exact", first, pairs.sum(1), pairs, objective=objective)


def order_of(s: sosp.Saliency, count: int, weights: Tensor | None = None, cap: float | None = None) -> list[int]:
    return order_removals(s, count, weights, LayerLimits(s.structures, cap, torch.device("cpu"))).tolist()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(5))
def test_the_running_sum_gives_the_textbook_greedy_order(objective: str, seed: int) -> None:
    s = saliency(9, seed, objective)
    assert s.first is not None
    assert s.pairs is not None
    assert order_of(s, 9) == subsets.greedy(9, objective, s.first, s.pairs)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_first_choice_is_the_best_single_structure(objective: str) -> None:
    for seed in range(10):
        s = saliency(7, seed, objective)
        assert s.first is not None
        assert s.pairs is not None
        assert tuple(order_of(s, 1)) == subsets.best_subset(1, objective, s.first, s.pairs)
        scores = s.scores
        alone = torch.tensor([subsets.value(objective, s.first, s.pairs, (i,)) for i in range(7)], dtype=torch.float64)
        assert torch.allclose(scores, alone)


def test_greedy_finds_the_best_subset_where_structures_do_not_interact() -> None:
    s = saliency(8, 0)
    assert s.first is not None
    assert s.pairs is not None
    apart = replace(s, pairs=torch.diag(s.pairs.diagonal()))
    for k in range(1, 8):
        best = subsets.best_subset(k, "individual", s.first, apart.pairs)
        assert tuple(sorted(order_of(apart, k))) == tuple(sorted(best))


def test_without_pairs_it_is_a_sort_by_the_paper_s_formula() -> None:
    s = saliency(12, 1)
    h = replace(s, pairs=None)
    assert h.first is not None
    assert h.second is not None
    wanted = torch.argsort(h.first.abs() + 0.5 * h.second.abs(), stable=True)
    assert order_of(h, 12) == wanted.tolist()
    only_first = replace(h, second=None)
    assert order_of(only_first, 12) == torch.argsort(h.first.abs(), stable=True).tolist()


def test_joint_and_order_without_pairs_keep_a_running_total() -> None:
    s = replace(saliency(8, 2, "joint"), pairs=None)
    assert s.first is not None
    assert s.second is not None
    step = s.first - 0.5 * s.second
    total, left, wanted = 0.0, list(range(8)), []
    for _ in range(8):
        best = min(left, key=lambda i: (abs(total + float(step[i])), i))
        left.remove(best)
        total += float(step[best])
        wanted.append(best)
    assert order_of(s, 8) == wanted


def test_ties_go_to_the_lower_index_and_masks_repeat() -> None:
    s = saliency(6, 0)
    flat = replace(s, first=torch.ones(6, dtype=torch.float64), pairs=torch.zeros(6, 6, dtype=torch.float64))
    assert order_of(flat, 4) == [0, 1, 2, 3]
    assert order_of(replace(flat, pairs=None, second=None), 4) == [0, 1, 2, 3]
    assert sosp.select(s, ratio=0.5) == sosp.select(s, ratio=0.5)
    assert sosp.select(s, ratio=0.5) != sosp.select(s, ratio=0.0)


@given(st.integers(0, 10_000), st.floats(0, 1), st.booleans())
def test_a_cap_bounds_every_layer_and_nothing_else_changes(seed: int, cap: float, with_pairs: bool) -> None:
    s = saliency(14, seed % 50, widths=(3, 5, 6))
    s = s if with_pairs else replace(s, pairs=None)
    room = LayerLimits(s.structures, cap, torch.device("cpu"))
    limits = [int(cap * w + 1e-9) for w in (3, 5, 6)]
    assert room.total == sum(limits)
    count = seed % (room.total + 1)
    chosen = order_removals(s, count, None, room)
    owner = s.structures.owner()[chosen]
    assert len(set(chosen.tolist())) == count
    assert all(int((owner == i).sum()) <= limits[i] for i in range(3))
    # The textbook: walk the costs, skip a structure whose layer is full.
    if not with_pairs:
        walk, full = [], [0, 0, 0]
        for i in torch.argsort(s.scores, stable=True).tolist():
            where = int(s.structures.owner()[i])
            if full[where] < limits[where]:
                full[where] += 1
                walk.append(i)
        assert chosen.tolist() == walk[:count]


def test_a_cap_of_a_whole_number_of_structures_is_not_lost_to_rounding() -> None:
    s = saliency(20, 0)
    assert len(sosp.select(s, ratio=0.95, cap=0.95).removed["a"]) == 19
    with pytest.raises(ArgumentError, match=r"cap=0\.9 leaves only 18"):
        sosp.select(s, ratio=0.95, cap=0.9)


def test_scale_divides_the_cost() -> None:
    heavy = structures(2, 2)
    layers = (layer("a", 2, kernel=3.0, macs=9.0, params=100.0), layer("b", 2, kernel=1.0, macs=90.0, params=10.0))
    heavy = replace(heavy, layers=layers)
    cost = torch.tensor([2.0, 8.0, 1.0, 5.0], dtype=torch.float64)
    s = sosp.Saliency(heavy, "first-order", cost)
    assert sosp.select(s, ratio=0.5).removed["a"].tolist() == [0]
    by_kernel = sosp.select(s, ratio=0.5, scale="kernel").removed  # 0.67 2.67 1 5
    assert {k: v.tolist() for k, v in by_kernel.items()} == {"a": [0], "b": [0]}
    by_params = sosp.select(s, ratio=0.5, scale="params").removed  # .02 .08 .1 .5
    assert {k: v.tolist() for k, v in by_params.items()} == {"a": [0, 1]}
    by_macs = sosp.select(s, ratio=0.5, scale="macs").removed  # .22 .89 .011 .056
    assert {k: v.tolist() for k, v in by_macs.items()} == {"b": [0, 1]}
    paired = replace(s, pairs=torch.zeros(4, 4, dtype=torch.float64))
    assert sosp.select(paired, ratio=0.5, scale="macs") == sosp.select(s, ratio=0.5, scale="macs")


def test_what_has_no_size_is_as_small_as_the_smallest_that_has() -> None:
    """A kernel is never smaller than 1."""
    layers = (layer("a", 2, kernel=0.0, macs=0.0), layer("b", 2, kernel=3.0, macs=9.0))
    s = sosp.Saliency(replace(structures(2, 2), layers=layers), "first-order", torch.tensor([2.0, 8.0, 1.0, 5.0]))
    by_macs = sosp.select(s, ratio=0.5, scale="macs").removed  # .22 .89 .11 .56
    assert {k: v.tolist() for k, v in by_macs.items()} == {"a": [0], "b": [0]}
    by_kernel = sosp.select(s, ratio=0.5, scale="kernel").removed  # 2 8 .33 1.67
    assert {k: v.tolist() for k, v in by_kernel.items()} == {"b": [0, 1]}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(5))
def test_a_scale_divides_what_a_structure_adds_to_those_gone(objective: str, seed: int) -> None:
    s = saliency(9, seed, objective)
    assert s.first is not None
    assert s.pairs is not None
    sizes = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 50 + 1
    gone: list[int] = []
    for _ in range(9):
        now = subsets.value(objective, s.first, s.pairs, gone)
        rises = {i: subsets.value(objective, s.first, s.pairs, [*gone, i]) - now for i in range(9) if i not in gone}
        worth = {i: rise / sizes[i] if rise > 0 else rise * sizes[i] for i, rise in rises.items()}
        gone.append(min(worth, key=lambda i: float(worth[i])))
    assert order_of(s, 9, sizes) == gone


def test_an_objective_that_is_asked_for_takes_the_place_of_the_methods_own() -> None:
    c = case("mlp")
    data = (c.inputs, c.targets)
    assert sosp.score(c.model, data, method="ccp").objective == "signed"
    assert sosp.score(c.model, data, method="ccp", objective="individual").objective == "individual"
    assert sosp.score(c.model, data).objective == "individual"


def test_of_two_gains_the_larger_structure_goes_first() -> None:
    s = sosp.Saliency(structures(1, 1), "ccp", torch.tensor([0.9, 1.0], dtype=torch.float64), objective="signed")
    assert order_of(s, 2, torch.tensor([64.0, 6400.0])) == [1, 0]


def test_ratio_counts_structures_and_groups_bring_all_their_channels() -> None:
    c = case("residual")
    tied = sosp.find_structures(c.model, c.inputs[:2], groups=[["conv1", "block1.conv2"]])
    found = sosp.find_structures(c.model, c.inputs[:2])
    assert len(tied) == len(found) - next(x.channels for x in found.layers if x.name == "conv1")
    first = torch.full((len(tied),), 5.0)
    first[1] = 0.0  # channel 1 of both
    mask = sosp.select(sosp.Saliency(tied, "first-order", first), ratio=1 / len(tied))
    assert {k: v.tolist() for k, v in mask.removed.items()} == {"conv1": [1], "block1.conv2": [1]}
    assert mask.chosen == 1
    assert mask.ratio == pytest.approx(1 / len(tied))


def remove_all_of(model: nn.Module, x: Tensor, *names: str, **options: object) -> sosp.Mask:
    """Select so that exactly these layers go."""
    found = sosp.find_structures(model, x, **options)
    first = torch.ones(len(found))
    for one, ids in zip(found.layers, found.ids, strict=True):
        if one.name in names:
            first[ids] = 0
    count = int((first == 0).sum())
    return sosp.select(sosp.Saliency(found, "first-order", first), ratio=count / len(found))


def test_a_mask_that_cuts_the_network_is_refused_and_the_layer_named() -> None:
    c = case("mlp")
    name = next(iter(c.norms))
    with pytest.raises(DisconnectedError, match=rf"{name}.*cap=0.95"):
        remove_all_of(c.model, c.inputs[:2], name)


def test_a_layer_whose_bias_alone_is_left_is_dead() -> None:
    c = case("mlp")
    found = sosp.find_structures(c.model, c.inputs[:2], kind="weights")
    first = torch.ones(len(found))
    first[found.ids[[layer.name for layer in found.layers].index("fc1.weight")]] = 0
    with pytest.raises(DisconnectedError, match="'fc1'"):
        sosp.select(sosp.Saliency(found, "first-order", first), ratio=35 / len(found))


def test_a_removable_branch_may_go_and_both_of_two_may_not() -> None:
    c = case("residual")
    mask = remove_all_of(c.model, c.inputs[:2], "block1.conv1", "block1.conv2")
    assert set(mask.removed) == {"block1.conv1", "block1.conv2"}
    with pytest.raises(DisconnectedError, match=r"block2.conv2.*block2.downsample.0"):
        remove_all_of(c.model, c.inputs[:2], "block2.conv2", "block2.downsample.0")
    with pytest.raises(DisconnectedError, match="'conv1'"):
        remove_all_of(c.model, c.inputs[:2], "conv1")


def test_a_depthwise_layer_that_keeps_only_what_its_input_lost_is_dead() -> None:
    c = case("depthwise")
    found = sosp.find_structures(c.model, c.inputs[:2])
    deep = next(x for x in found.layers if x.depthwise)
    (above,) = found.wiring[deep.name]
    half = deep.channels // 2
    first = torch.ones(len(found))
    for one, ids in zip(found.layers, found.ids, strict=True):
        if one.name == deep.name:
            first[ids[:half]] = 0
        if one.name == above:
            first[ids[half:]] = 0
    ratio = float((first == 0).sum()) / len(found)
    with pytest.raises(DisconnectedError, match=deep.name):
        sosp.select(sosp.Saliency(found, "first-order", first), ratio=ratio)


def test_selection_of_many_structures_is_quick() -> None:
    """O(S) a step: 2000 structures take well under a second even here; S^3 would take minutes."""
    S = 2000
    g = torch.Generator().manual_seed(0)
    J = torch.randn(64, S, generator=g)
    s = sosp.Saliency(structures(S), "sosp-i", torch.randn(S, generator=g), None, J.T @ J)
    mask = sosp.select(s, ratio=0.5)
    assert len(mask.removed["a"]) == 1000


def test_numbers_of_numpy_are_numbers() -> None:
    s = saliency(8, 0)
    assert sosp.select(s, ratio=np.float32(0.5), cap=np.float64(0.9), round_to=np.int64(2)).chosen == 4
    with pytest.raises(ArgumentError, match=r"ratio=.*must be a number from 0 to 1"):
        sosp.select(s, ratio=np.bool_(True))
    c = case("mlp")
    found = sosp.score(c.model, (c.inputs, c.targets), examples=np.int64(4))
    assert found.examples == 4
    whole = sosp.count(c.model, c.inputs[:2]).macs
    assert sosp.select(found, macs=np.int64(whole)).chosen == 0
