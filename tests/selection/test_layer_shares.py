"""Every layer by itself: uniform and given shares, budgets, caps, pairs; and masks with other filters."""

from dataclasses import replace
from functools import cache
from math import floor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_budgets import cost
from test_select import OBJECTIVES, saliency, structures
from torch import Tensor, nn

import sosp
from networks import Case, case, to_score
from oracles import baselines, subsets
from sosp.errors import ArgumentError
from sosp.selection.layer_shares import build_quotas

WIDTHS = (3, 5, 8)


def removed(mask: sosp.Mask) -> dict[str, list[int]]:
    return {name: gone.tolist() for name, gone in mask.removed.items()}


def numbers(mask: sosp.Mask) -> dict[str, int]:
    """How many go, layer by layer."""
    return {layer.name: len(mask.removed.get(layer.name, ())) for layer in mask.layers}


def scored(values: list[float], *widths: int, **more: Any) -> sosp.Saliency:
    """Scores by hand."""
    first = torch.tensor(values, dtype=torch.float64)
    return sosp.Saliency(structures(*widths), "fisher", None, values=first, **more)


def within(s: sosp.Saliency, quotas: list[int]) -> list[int]:
    """The textbook: of every layer the cheapest, ties to the lower index."""
    owner = s.structures.owner().tolist()
    chosen: list[int] = []
    for i, k in enumerate(quotas):
        mine = [x for x in range(len(owner)) if owner[x] == i]
        chosen += sorted(mine, key=lambda x: (float(s.scores[x]), x))[:k]
    return sorted(chosen)


def chosen_of(s: sosp.Saliency, mask: sosp.Mask) -> list[int]:
    ids = {layer.name: ids for layer, ids in zip(s.structures.layers, s.structures.ids, strict=True)}
    return sorted(int(i) for name, gone in mask.removed.items() for i in ids[name][gone])


# --- the same share of every layer


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_every_layer_loses_its_share_of_the_cheapest(seed: int, ratio: float) -> None:
    s = replace(saliency(16, seed % 50, widths=WIDTHS), pairs=None)
    mask = sosp.select(s, ratio=ratio, scope="layer")
    wanted = [min(floor(ratio * w + 0.5 + 1e-9), w - 1) for w in WIDTHS]
    assert list(numbers(mask).values()) == wanted
    assert chosen_of(s, mask) == within(s, wanted)


def test_by_hand_and_not_the_global_choice() -> None:
    s = scored([9, 8, 7, 6, 1, 2, 3, 4, 5, 6], 4, 6)
    assert removed(sosp.select(s, ratio=0.5, scope="layer")) == {"a": [2, 3], "b": [0, 1, 2]}
    assert removed(sosp.select(s, ratio=0.5)) == {"b": [0, 1, 2, 3, 4]}
    layerwise = replace(s, scope="layer")
    assert sosp.select(layerwise, ratio=0.5) == sosp.select(s, ratio=0.5, scope="layer")
    assert sosp.select(layerwise, ratio=0.5, scope="global") == sosp.select(s, ratio=0.5)
    assert sosp.select(layerwise) == sosp.select(layerwise, ratio=0.5)


def test_one_structure_of_every_layer_stays() -> None:
    s = scored([float(i) for i in range(9)], 1, 3, 5)
    assert removed(sosp.select(s, ratio=1.0, scope="layer")) == {"b": [0, 1], "c": [0, 1, 2, 3]}
    assert removed(sosp.select(s, ratio=0.0, scope="layer")) == {}
    c = case("mlp")  # which would be cut in two
    whole = sosp.score(c.model, None, method="fpgm", structures=sosp.find_structures(c.model, c.inputs))
    assert numbers(sosp.select(whole, ratio=1.0)) == {"fc1": 6, "fc2": 5}


def test_a_half_is_rounded_up_and_nothing_is_lost_to_rounding() -> None:
    s = scored([float(i) for i in range(25)], 5, 20)
    assert numbers(sosp.select(s, ratio=0.5, scope="layer")) == {"a": 3, "b": 10}
    assert numbers(sosp.select(s, ratio=0.7, scope="layer")) == {"a": 4, "b": 14}
    wide = scored([float(i) for i in range(50)], 50)
    assert numbers(sosp.select(wide, ratio=0.29, scope="layer")) == {"a": 15}  # 0.29 * 50 is 14.499999999999998


# --- shares of their own


@cache
def some_scores() -> sosp.Saliency:
    c = case("residual")
    return sosp.score(c.model, None, method="fpgm", structures=sosp.find_structures(c.model, c.inputs[:2]))


def test_ratios_by_name_by_pattern_and_the_rest() -> None:
    c = case("residual")
    found = sosp.find_structures(c.model, c.inputs[:2])
    s = sosp.score(c.model, None, method="magnitude-l1", structures=found)
    mask = sosp.select(s, ratios={"block1.*": 0.5, "block1.conv2": 0.34, "conv1": 1.0})
    assert numbers(mask) == {**dict.fromkeys(c.norms, 0), "conv1": 2, "block1.conv1": 1, "block1.conv2": 1}
    mask = sosp.select(s, ratios={"block1.*": 0.0}, ratio=0.5)
    assert numbers(mask)["block1.conv1"] == numbers(mask)["block1.conv2"] == 0
    assert numbers(mask)["block2.conv2"] == 2
    assert sosp.select(s, ratios={"*": 0.5}) == sosp.select(s, ratio=0.5)
    assert sosp.select(s, ratios={"block1.conv2": 0.34, "block1.*": 0.5}) == sosp.select(
        s, ratios={"block1.*": 0.5, "block1.conv2": 0.34}
    )
    assert sosp.select(s, ratios={}) == sosp.select(s, ratio=0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratios": {"block1.conv3": 0.5}}, ["'block1.conv3'", "matches no layer", "Did you mean 'block1.conv"]),
        ({"ratios": {"layer*": 0.5}}, ["'layer*'", "matches no layer"]),
        ({"ratios": {"conv1": 1.5}}, ["ratios['conv1']=1.5", "from 0 to 1"]),
        ({"ratios": {"conv1": -0.1}}, ["ratios['conv1']=-0.1", "from 0 to 1"]),
        ({"ratios": {"conv1": "half"}}, ["ratios['conv1']='half'", "from 0 to 1"]),
        ({"ratios": {"conv1": True}}, ["ratios['conv1']=True", "from 0 to 1"]),
        ({"ratios": {"conv1": float("nan")}}, ["ratios['conv1']=nan", "from 0 to 1"]),
        ({"ratios": [0.5]}, ["ratios=[0.5]", "{'layer1.*': 0.5}"]),
        ({"ratios": {"block1.*": 0.5, "*.conv1": 0.3}}, ["'block1.conv1'", "0.5", "'block1.*'", "0.3", "'*.conv1'"]),
        ({"ratios": {"conv1": 0.5}, "scope": "global"}, ["ratios", "scope='layer'"]),
        ({"ratios": {"conv1": 0.5}, "params": 0.5}, ["ratios", "params", "one of them"]),
        ({"ratios": {"conv1": 0.5}, "macs": 0.5}, ["ratios", "macs", "one of them"]),
        ({"ratios": {"conv1": 0.5}, "cap": 0.3}, ["0.5 of 'conv1'", "cap=0.3"]),
        ({"ratio": 0.5, "cap": 0.3}, ["ratio=0.5", "cap=0.3"]),
        ({"ratio": 1.5}, ["ratio=1.5", "from 0 to 1"]),
        ({"scope": "layers"}, ["scope='layers'", "Did you mean 'layer'?", "global"]),
        ({"cap": 2}, ["cap=2", "from 0 to 1"]),
        ({"scale": "mac"}, ["scale='mac'", "Did you mean 'macs'?"]),
        ({"round_to": 0}, ["round_to=0"]),
        ({"params": 1e-9}, ["params=1e-09 cannot be met"]),
    ],
)
def test_what_does_not_go(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        sosp.select(some_scores(), **options)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_blocks_have_no_share() -> None:
    c = case("residual")
    s = sosp.score(c.model, (c.inputs, c.targets), structures=sosp.find_structures(c.model, c.inputs, kind="blocks"))
    with pytest.raises(ArgumentError, match=r"a block is a whole layer.*scope='global'"):
        sosp.select(s, ratio=0.5, scope="layer")


def test_a_saliency_of_an_unknown_scope() -> None:
    with pytest.raises(ArgumentError, match=r"scope='layers'.*Did you mean 'layer'"):
        scored([1.0], 1, scope="layers")


# --- groups: the first layer has the say


def coupled(method: str = "magnitude-l2") -> tuple[Case, sosp.Saliency]:
    c = case("residual")
    found = sosp.find_structures(c.model, c.inputs[:2], groups="coupled")
    return c, sosp.score(c.model, (c.inputs, c.targets), method=method, structures=found)


def test_coupled_channels_go_together_by_the_share_of_their_first_layer() -> None:
    _, s = coupled()
    mask = sosp.select(s, ratio=0.5, scope="layer")
    gone = numbers(mask)
    assert gone["conv1"] == gone["block1.conv2"] == 2
    assert gone["block2.conv2"] == gone["block2.downsample.0"] == 2
    assert removed(mask)["conv1"] == removed(mask)["block1.conv2"]
    assert numbers(sosp.select(s, ratios={"conv1": 0.34}))["block1.conv2"] == 1


def test_a_layer_whose_channels_are_tied_to_another_has_no_share() -> None:
    _, s = coupled()
    with pytest.raises(ArgumentError, match=r"'block1.conv2'.*tied to the channels of 'conv1'"):
        sosp.select(s, ratios={"block1.conv2": 0.5})
    found = s.structures
    none = replace(found, ids=tuple(torch.full_like(i, -1) if n else i for n, i in enumerate(found.ids)))
    with pytest.raises(ArgumentError, match="none of them can be removed"):
        sosp.select(replace(s, structures=none, values=s.values[:3]), ratios={"block2.conv1": 0.5})


# --- budgets


@pytest.mark.parametrize("what", ["params", "macs"])
@pytest.mark.parametrize("name", ["mlp", "conv-bn", "residual", "concat", "depthwise", "grouped"])
def test_the_least_share_that_meets_a_budget(name: str, what: str) -> None:
    c = case(name)
    s = sosp.score(c.model, (c.inputs, c.targets), method="fisher")
    limit = 0.6 * cost(c.model, c.inputs)[what]
    mask = sosp.select(s, **{what: 0.6}, scope="layer")
    quotas = build_quotas(s.structures, None, None)
    steps = [0.0, *quotas.steps()]
    at = [i for i, step in enumerate(steps) if list(numbers(mask).values()) == quotas.at(step)]
    assert len(at) == 1
    assert chosen_of(s, mask) == within(s, quotas.at(steps[at[0]]))
    assert left(c, mask, what) <= limit
    fewer = sosp.select(s, ratio=steps[at[0] - 1], scope="layer")
    assert left(c, fewer, what) > limit


def left(c: Case, mask: sosp.Mask, what: str) -> int:
    return cost(sosp.shrink(c.model, mask, c.inputs, verify=False), c.inputs)[what]


def test_a_budget_that_is_met_already_takes_nothing() -> None:
    c = case("conv-bn")
    s = sosp.score(c.model, (c.inputs, c.targets), method="fisher")
    assert sosp.select(s, macs=1.0, scope="layer").chosen == 0


def test_every_step_removes_one_more_somewhere() -> None:
    quotas = build_quotas(structures(3, 5, 8), None, None)
    totals = [sum(quotas.at(step)) for step in quotas.steps()]
    assert totals == sorted(set(totals))
    assert totals[-1] == 2 + 4 + 7
    just_below = [sum(quotas.at(step - 1e-6)) for step in quotas.steps()]
    assert just_below == [0, *totals[:-1]]


def test_a_budget_with_a_cap_takes_more_where_it_may() -> None:
    c = case("conv-bn")
    s = sosp.score(c.model, (c.inputs, c.targets), method="fisher")
    mask = sosp.select(s, params=0.7, cap=0.45, scope="layer")
    assert numbers(mask)["conv1"] <= 1
    assert left(c, mask, "params") <= 0.7 * cost(c.model, c.inputs)["params"]
    with pytest.raises(ArgumentError, match=r"params=0\.1 cannot be met"):
        sosp.select(s, params=0.1, cap=0.45, scope="layer")


# --- with caps, scales and rounding


def test_a_cap_below_every_share_is_kept() -> None:
    s = scored([float(i) for i in range(25)], 5, 20)
    assert numbers(sosp.select(s, ratio=0.5, cap=0.5, scope="layer")) == {"a": 2, "b": 10}  # half of 5: at most 2


def test_widths_are_rounded_by_taking_back() -> None:
    s = scored([float(i) for i in range(15)], 5, 10)
    mask = sosp.select(s, ratio=0.5, round_to=4, scope="layer")
    assert numbers(mask) == {"a": 1, "b": 2}
    assert removed(mask) == {"a": [0], "b": [0, 1]}


def test_a_layer_narrower_than_the_multiple_stays_whole() -> None:
    s = scored([float(i) for i in range(5)], 5)
    for ratio in (0.2, 0.4, 0.6, 0.8):
        assert sosp.select(s, ratio=ratio, round_to=6, scope="layer").removed == {}


def test_a_scale_matters_within_a_layer_of_groups_only() -> None:
    _, s = coupled("fisher")
    plain = scored([3, 2, 1, 4], 2, 2)
    assert sosp.select(plain, ratio=0.5, scale="macs", scope="layer") == sosp.select(plain, ratio=0.5, scope="layer")
    weighed = sosp.select(s, ratio=0.5, scale="macs", scope="layer")
    assert sum(numbers(weighed).values()) == sum(numbers(sosp.select(s, ratio=0.5, scope="layer")).values())


def test_a_scale_lets_the_larger_structure_of_a_layer_go() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    found = sosp.find_structures(model, torch.zeros(2, 3), groups=[{"0": [0], "2": [0]}])
    s = sosp.Saliency(found, "first-order", torch.tensor([1.2, 1.0, 1.5, 1.5, 1.5, 9.0, 9.0, 9.0]))
    ratios = {"0": 0.2}
    assert removed(sosp.select(s, ratios=ratios)) == {"0": [1]}
    assert removed(sosp.select(s, ratios=ratios, scale="params")) == {"0": [0], "2": [0]}


# --- pairs


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_with_pairs_keeps_the_quotas(objective: str, seed: int) -> None:
    s = saliency(16, seed, objective, WIDTHS)
    mask = sosp.select(s, ratio=0.5, scope="layer")
    assert list(numbers(mask).values()) == [2, 3, 4]
    assert chosen_of(s, mask) == sorted(walk(s, objective, [2, 3, 4]))


def walk(s: sosp.Saliency, objective: str, quotas: list[int]) -> list[int]:
    """The textbook greedy, which passes over layers that are full."""
    assert s.first is not None
    assert s.pairs is not None
    f, H = s.first.tolist(), s.pairs.tolist()
    owner, room, chosen = s.structures.owner().tolist(), list(quotas), []
    for _ in range(sum(quotas)):
        open_ = [x for x in range(len(f)) if x not in chosen and room[owner[x]]]
        best = min(open_, key=lambda x: subsets.OBJECTIVES[objective](f, H, [*chosen, x]))
        room[owner[best]] -= 1
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("seed", range(8))
def test_the_signed_objective_is_greedy_globally(seed: int) -> None:
    s = saliency(12, seed, "signed")
    assert s.first is not None
    assert s.pairs is not None
    chosen: list[int] = []
    for _ in range(6):
        rest = [x for x in range(12) if x not in chosen]
        chosen.append(min(rest, key=lambda x: baselines.change(s.first, s.pairs, (*chosen, x))))
        assert chosen_of(s, sosp.select(s, ratio=len(chosen) / 12)) == sorted(chosen)
    alone = replace(s, pairs=None, second=None)
    assert chosen_of(s, sosp.select(alone, ratio=0.5)) == sorted(torch.argsort(-s.first)[:6].tolist())


def test_a_cap_closes_a_layer_for_the_signed_objective() -> None:
    s = saliency(16, 1, "signed", WIDTHS)
    mask = sosp.select(s, ratio=0.5, cap=0.6)
    assert all(n <= int(0.6 * w + 1e-9) for n, w in zip(numbers(mask).values(), WIDTHS, strict=True))
    assert mask.chosen == 8


def programme(seed: int) -> sosp.Saliency:
    """Pairs within layers, positive semidefinite, as CCP has them."""
    s = saliency(16, seed, "signed", WIDTHS)
    owner = s.structures.owner()
    g = torch.Generator().manual_seed(seed)
    J = torch.randn(40, 16, dtype=torch.float64, generator=g)
    return replace(s, pairs=J.T @ J / 16 * (owner[:, None] == owner), scope="layer")


def test_the_programme_of_every_layer_is_solved_by_itself() -> None:
    best = better = 0
    for seed in range(8):
        s = programme(seed)
        mask = sosp.select(s, ratio=0.5)
        assert list(numbers(mask).values()) == [2, 3, 4]
        assert s.first is not None
        assert s.pairs is not None
        for layer, ids, k in zip(s.structures.layers, s.structures.ids, [2, 3, 4], strict=True):
            first, pairs = s.first[ids], s.pairs[ids][:, ids]
            found = baselines.change(first, pairs, tuple(removed(mask)[layer.name]))
            alone = tuple(torch.argsort(0.5 * pairs.diagonal() - first)[:k].tolist())
            best += found <= baselines.change(first, pairs, baselines.best_choice(first, pairs, k)) + 1e-9
            better += found < baselines.change(first, pairs, alone) - 1e-9
            assert found <= baselines.change(first, pairs, alone) + 1.0
    assert best > 12  # of 24 layers
    assert better > 4


def test_the_programme_meets_budgets_and_rounds_and_refuses_scales() -> None:
    c = case("conv-bn")
    s = sosp.score(c.model, (c.inputs, c.targets), method="ccp")
    mask = sosp.select(s, params=0.6)
    assert left(c, mask, "params") <= 0.6 * cost(c.model, c.inputs)["params"]
    assert numbers(sosp.select(s, ratio=0.5, round_to=2)) == {"conv1": 2, "conv2": 3}
    assert numbers(sosp.select(s, ratios={"conv2": 0.8})) == {"conv1": 0, "conv2": 4}
    with pytest.raises(ArgumentError, match=r"scale='macs'.*objective='signed'.*scope='global'"):
        sosp.select(s, ratio=0.5, scale="macs")
    assert sosp.select(s, ratio=0.5, scale="macs", scope="global").chosen == 4
    greedy = sosp.select(s.with_objective("individual"), ratio=0.5, scale="macs")
    assert numbers(greedy) == {"conv1": 2, "conv2": 3}


def test_single_weights_layer_by_layer() -> None:
    c = case("mlp")
    found = sosp.find_structures(c.model, c.inputs[:2], kind="weights")
    mask = sosp.select(sosp.score(c.model, None, method="magnitude-l1", structures=found), ratio=0.4)
    for layer in found.layers:
        size = c.model.get_parameter(layer.name).detach().abs().flatten()
        k = floor(0.4 * len(size) + 0.5 + 1e-9)
        wanted = torch.argsort(size, stable=True)[:k].sort().values
        assert torch.equal(mask.removed.get(layer.name, torch.zeros(0, dtype=torch.long)), wanted)


# --- other filters


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x)


@pytest.mark.parametrize("name", to_score())
def test_a_shuffled_mask_has_as_many_but_other_filters(name: str) -> None:
    c = case(name)
    found = sosp.find_structures(c.model, c.inputs[:2])
    mask = sosp.select(sosp.score(c.model, None, method="magnitude-l1", structures=found), ratio=0.4)
    other = mask.shuffled(torch.Generator().manual_seed(1), found)
    assert numbers(other) == numbers(mask)
    assert (other.chosen, other.structures, other.kind) == (mask.chosen, mask.structures, mask.kind)
    assert other == mask.shuffled(torch.Generator().manual_seed(1), found)
    assert all(torch.equal(gone, gone.unique()) for gone in other.removed.values())
    assert other == sosp.Mask.from_removed(c.model, other.removed, c.inputs[:2])
    # What goes with the channels further on is found anew: the mask and the network built by it agree.
    small = sosp.shrink(c.model, other, c.inputs[:2])
    assert torch.allclose(run(small, c.inputs), run(sosp.masked(c.model, other), c.inputs), rtol=1e-10, atol=1e-10)


def test_shuffles_differ_and_visit_every_filter() -> None:
    s = scored([float(i) for i in range(8)], 8)
    mask = sosp.select(s, ratio=0.5)
    generator = torch.Generator().manual_seed(0)
    seen = [tuple(removed(mask.shuffled(generator))["a"]) for _ in range(60)]
    assert len(set(seen)) > 30
    assert {c for one in seen for c in one} == set(range(8))
    assert removed(mask) == {"a": [0, 1, 2, 3]}


def test_norms_further_on_are_found_anew() -> None:
    c = case("preact")
    found = sosp.find_structures(c.model, c.inputs[:2])
    mask = sosp.Mask.from_removed(c.model, {"conv": [0], "dense1.conv": [1]}, c.inputs[:2])
    other = mask.shuffled(torch.Generator().manual_seed(3), found)
    assert other != mask
    again = sosp.Mask.from_removed(c.model, other.removed, c.inputs[:2])
    assert {n: v.tolist() for n, v in other.norms.items()} == {n: v.tolist() for n, v in again.norms.items()}
    with pytest.raises(ArgumentError, match=r"'dense1\.bn'.*mask\.shuffled\(generator, structures\)"):
        mask.shuffled(torch.Generator())


def test_single_weights_are_shuffled_within_their_parameter() -> None:
    c = case("mlp")
    mask = sosp.Mask.from_removed(c.model, {"fc1.weight": [0, 1, 2], "fc2.bias": [0]}, c.inputs[:1], kind="weights")
    other = mask.shuffled(torch.Generator().manual_seed(0))
    assert {n: len(v) for n, v in other.removed.items()} == {"fc1.weight": 3, "fc2.bias": 1}
    assert other != mask
