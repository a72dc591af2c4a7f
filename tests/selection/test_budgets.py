"""Budgets: as few structures as it takes until the network that is built has so many parameters or MACs left."""

from collections.abc import Sequence
from dataclasses import replace
from math import floor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sosp
from networks import Case, case
from oracles import subsets
from sosp.errors import ArgumentError, DisconnectedError

CASES = ["mlp", "conv-bn", "residual", "concat", "depthwise", "grouped"]
LIMITS = pytest.mark.parametrize("what", ["params", "macs"])


def saliency(c: Case, seed: int = 0, with_pairs: bool = False, **options: Any) -> sosp.Saliency:
    """Random numbers for the structures of a case."""
    found = sosp.find_structures(c.model, c.inputs, **options)
    S = len(found)
    g = torch.Generator().manual_seed(seed)
    first = torch.randn(S, dtype=torch.float64, generator=g)
    J = torch.randn(2 * S, S, dtype=torch.float64, generator=g)
    return sosp.Saliency(found, "sosp-i", first, None, J.T @ J / (2 * S) if with_pairs else None)


def cost(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Of a network that is there: its tensors, and torch's own count of operations."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    params = sum(p.numel() for p in model.parameters())
    return {"params": params, "macs": counter.get_total_flops() // (2 * len(x))}


def left(c: Case, s: sosp.Saliency, chosen: Sequence[int], what: str, **style: Any) -> int:
    """What is left in the network without these structures, built for the purpose."""
    mask = sosp.Mask.from_structures(s.structures, torch.tensor(chosen, dtype=torch.long))
    return cost(sosp.shrink(c.model, mask, c.inputs, verify=False, **style), c.inputs)[what]


def order_of(s: sosp.Saliency) -> list[int]:
    """All structures, as the textbook removes them."""
    assert s.first is not None
    if s.pairs is not None:
        return subsets.greedy(len(s.first), "individual", s.first, s.pairs)
    return torch.argsort(s.first.abs(), stable=True).tolist()


def capped(s: sosp.Saliency, order: list[int], cap: float) -> list[int]:
    """The order without those whose layer is full."""
    owner = s.structures.owner().tolist()
    room = [floor(cap * layer.channels + 1e-9) for layer in s.structures.layers]
    walk = []
    for i in order:
        if room[owner[i]] > 0:
            room[owner[i]] -= 1
            walk.append(i)
    return walk


def numbers_of(s: sosp.Saliency, mask: sosp.Mask) -> set[int]:
    """The structures that a mask removes, one per channel."""
    ids = {layer.name: ids for layer, ids in zip(s.structures.layers, s.structures.ids, strict=True)}
    return {int(i) for name, channels in mask.removed.items() for i in ids[name][channels]}


def check_shortest(c: Case, s: sosp.Saliency, mask: sosp.Mask, order: list[int], what: str, limit: float) -> None:
    """The mask is a beginning of the order that meets the limit, and without its last structure it would not."""
    k = mask.chosen
    assert numbers_of(s, mask) == set(order[:k])
    assert left(c, s, order[:k], what) <= limit
    assert k == 0 or left(c, s, order[: k - 1], what) > limit


# --- met, and by as few as possible


@LIMITS
@pytest.mark.parametrize("name", CASES)
def test_the_shortest_beginning_that_meets_a_share(name: str, what: str) -> None:
    c = case(name)
    s = saliency(c)
    share = 0.6
    mask = sosp.select(s, **{what: share})
    assert 0 < mask.chosen < len(s.structures)
    check_shortest(c, s, mask, order_of(s), what, share * cost(c.model, c.inputs)[what])


@LIMITS
@pytest.mark.parametrize("name", ["residual", "grouped"])
def test_a_number_is_the_same_as_its_share(name: str, what: str) -> None:
    c = case(name)
    s = saliency(c, seed=1)
    whole = cost(c.model, c.inputs)[what]
    limit = whole * 2 // 3
    mask = sosp.select(s, **{what: limit})
    assert mask == sosp.select(s, **{what: float(limit)})
    assert mask == sosp.select(s, **{what: (limit + 0.5) / whole})
    check_shortest(c, s, mask, order_of(s), what, limit)


@LIMITS
@pytest.mark.parametrize("name", ["residual", "concat", "mlp"])
def test_with_pairs_the_order_is_greedy(name: str, what: str) -> None:
    c = case(name)
    s = saliency(c, seed=2, with_pairs=True)
    mask = sosp.select(s, **{what: 0.5})
    check_shortest(c, s, mask, order_of(s), what, 0.5 * cost(c.model, c.inputs)[what])


def test_a_limit_that_is_met_exactly_is_met() -> None:
    """The number that is left without k structures asks for k structures."""
    c = case("concat")
    s = saliency(c)
    order = order_of(s)
    lefts = [left(c, s, order[:k], "params") for k in range(8)]
    for k in range(1, 8):
        first = lefts.index(lefts[k])
        assert sosp.select(s, params=lefts[k]).chosen == first
        assert sosp.select(s, params=lefts[k] / lefts[0]).chosen == first


def test_a_share_of_a_whole_number_is_not_lost_to_rounding() -> None:
    """57 of 101 MACs, 3 x 5 + 6 x 3 + 4 x 6, are left without four neurons; 57 / 101 * 101 is 56.999..."""
    s = saliency(case("mlp"))
    s = replace(s, first=torch.arange(1.0, 14.0, dtype=torch.float64))
    assert sosp.select(s, macs=57).chosen == 4
    assert sosp.select(s, macs=57 / 101).chosen == 4


@LIMITS
def test_channels_go_behind_a_norm_that_is_called_twice(what: str) -> None:
    """In front of it they would not be gone: it sees other channels the second time."""
    c = case("conv-in-bn-shared")
    limit = 0.4 * cost(c.model, c.inputs)[what]
    for seed in (2, 4):
        s = saliency(c, seed)
        order = torch.argsort(s.scores, stable=True).tolist()
        count = sosp.select(s, **{what: 0.4}).chosen
        assert left(c, s, order[:count], what) <= limit < left(c, s, order[: count - 1], what)


@LIMITS
def test_what_asks_for_nothing_removes_nothing(what: str) -> None:
    c = case("residual")
    s = saliency(c)
    whole = cost(c.model, c.inputs)[what]
    for limit in (1, 1.0, whole, whole + 1, 10**9):
        mask = sosp.select(s, **{what: limit})
        assert mask.chosen == 0, limit
        assert mask.removed == {}
        assert sosp.select(s, **{what: limit}, scope="layer").removed == {}
        assert sosp.select(s, **{what: limit}, cap=0.0).removed == {}
    assert sosp.select(s, **{what: whole - 1}).chosen > 0


def test_budgets_of_macs_and_parameters_differ() -> None:
    """The second layer of a picture with a stride has many parameters and few MACs."""
    c = case("conv-nobn")
    s = saliency(c)
    s = replace(s, first=torch.tensor([5.0, 6, 7, 8, 1, 2, 3, 4, 9], dtype=torch.float64))
    by_params, by_macs = sosp.select(s, params=0.6), sosp.select(s, macs=0.6)
    assert by_params.chosen < by_macs.chosen
    for mask, what in ((by_params, "params"), (by_macs, "macs")):
        check_shortest(c, s, mask, order_of(s), what, 0.6 * cost(c.model, c.inputs)[what])


@LIMITS
def test_scored_by_sosp_i(what: str) -> None:
    c = case("residual")
    found = sosp.find_structures(c.model, c.inputs)
    s = sosp.score(c.model, (c.inputs, c.targets), method="sosp-i", structures=found)
    mask = sosp.select(s, **{what: 0.7}, cap=0.7)
    small = sosp.shrink(c.model, mask, c.inputs)
    assert cost(small, c.inputs)[what] <= 0.7 * cost(c.model, c.inputs)[what]


# --- together with cap, scale, groups, blocks


@pytest.mark.parametrize("with_pairs", [False, True])
def test_with_a_cap(with_pairs: bool) -> None:
    c = case("residual")
    s = saliency(c, seed=3, with_pairs=with_pairs)
    mask = sosp.select(s, params=0.6, cap=0.7)
    for layer in mask.layers:
        assert len(mask.removed.get(layer.name, ())) <= floor(0.7 * layer.channels + 1e-9)
    assert cost(sosp.shrink(c.model, mask, c.inputs), c.inputs)["params"] <= 0.6 * cost(c.model, c.inputs)["params"]
    if not with_pairs:
        walk = capped(s, order_of(s), 0.7)
        check_shortest(c, s, mask, walk, "params", 0.6 * cost(c.model, c.inputs)["params"])


@pytest.mark.parametrize("scale", ["kernel", "macs", "params"])
def test_with_a_scale(scale: str) -> None:
    """conv-bn by hand: 3 x 3 kernels both, 16 pixels both, of 2 and 4 input channels, the second with a bias."""
    c = case("conv-bn")
    s = saliency(c, seed=4)
    assert s.first is not None
    weigh = {"kernel": (3, 3), "macs": (18 * 16, 36 * 16), "params": (18, 37)}[scale]
    by = s.first.abs() / torch.tensor([weigh[0]] * 4 + [weigh[1]] * 5, dtype=torch.float64)
    mask = sosp.select(s, macs=0.5, scale=scale)
    order = torch.argsort(by, stable=True).tolist()
    check_shortest(c, s, mask, order, "macs", 0.5 * cost(c.model, c.inputs)["macs"])


def test_coupled_structures() -> None:
    c = case("residual")
    s = saliency(c, seed=5, groups="coupled")
    mask = sosp.select(s, params=0.6)
    order = order_of(s)
    limit = 0.6 * cost(c.model, c.inputs)["params"]
    assert left(c, s, order[: mask.chosen], "params") <= limit
    assert left(c, s, order[: mask.chosen - 1], "params") > limit
    assert mask == sosp.Mask.from_structures(s.structures, torch.tensor(order[: mask.chosen]))


def test_blocks() -> None:
    c = case("residual")
    s = saliency(c, kind="blocks")  # the first branch, the second and its skip
    s = replace(s, first=torch.tensor([1.0, 2, 3], dtype=torch.float64))
    whole = cost(c.model, c.inputs)["params"]
    one, two = sosp.select(s, params=0.8), sosp.select(s, params=0.5)
    assert list(one.removed) == ["block1.conv2"]
    assert list(two.removed) == ["block1.conv2", "block2.conv2"]
    for mask, share in ((one, 0.8), (two, 0.5)):
        assert cost(sosp.shrink(c.model, mask, c.inputs), c.inputs)["params"] <= share * whole


def test_layers_that_are_left_out_stay() -> None:
    c = case("residual")
    s = saliency(c, exclude=["block2"])
    mask = sosp.select(s, params=0.9)
    assert not any(name.startswith("block2") for name in mask.removed)
    assert cost(sosp.shrink(c.model, mask, c.inputs), c.inputs)["params"] <= 0.9 * cost(c.model, c.inputs)["params"]


# --- round_to


@pytest.mark.parametrize("multiple", [2, 3, 4])
def test_round_to_keeps_multiples_and_never_removes_more_than_asked(multiple: int) -> None:
    for name in ("residual", "concat"):
        c = case(name)
        s = saliency(c, seed=7)
        asked, rounded = sosp.select(s, ratio=0.5), sosp.select(s, ratio=0.5, round_to=multiple)
        assert numbers_of(s, rounded) <= numbers_of(s, asked)
        for layer in s.structures.layers:
            gone, was = (len(m.removed.get(layer.name, ())) for m in (rounded, asked))
            kept = layer.channels - gone
            assert kept % multiple == 0 or gone == 0, layer.name
            assert kept - (layer.channels - was) < multiple, layer.name  # taken back only up to the next multiple


def test_round_to_takes_back_what_went_last() -> None:
    c = case("mlp")  # 7 and 6 neurons
    s = saliency(c)
    s = replace(s, first=torch.tensor([1.0, 2, 3, 4, 90, 91, 92, 1.5, 2.5, 93, 94, 95, 96], dtype=torch.float64))
    assert {n: t.tolist() for n, t in sosp.select(s, ratio=6 / 13).removed.items()} == {
        "fc1": [0, 1, 2, 3],
        "fc2": [0, 1],
    }
    by_four = sosp.select(s, ratio=6 / 13, round_to=4).removed  # 3 of 7 left become 4, 4 of 6 are 4
    assert {n: t.tolist() for n, t in by_four.items()} == {"fc1": [0, 1, 2], "fc2": [0, 1]}
    by_seven = sosp.select(s, ratio=6 / 13, round_to=7).removed
    assert by_seven == {}


def rounded(s: sosp.Saliency, chosen: list[int], multiple: int) -> list[int]:
    """The longest beginning of each layer's share that leaves a multiple."""
    owner, taken = s.structures.owner().tolist(), []
    for number, layer in enumerate(s.structures.layers):
        mine = [i for i in chosen if owner[i] == number]
        fits = [k for k in range(len(mine) + 1) if k == 0 or (layer.channels - k) % multiple == 0]
        taken += mine[: fits[-1]]
    return taken


def test_round_to_within_a_budget() -> None:
    c = case("concat")
    s = saliency(c, seed=8)
    order, limit = order_of(s), 0.7 * cost(c.model, c.inputs)["macs"]
    mask = sosp.select(s, macs=0.7, round_to=2)
    beginnings = (rounded(s, order[:k], 2) for k in range(len(order) + 1))
    wanted = next(chosen for chosen in beginnings if left(c, s, chosen, "macs") <= limit)
    assert 0 < len(wanted) < len(order)
    assert numbers_of(s, mask) == set(wanted)


@LIMITS
@pytest.mark.parametrize("round_to", [1, 2])
@pytest.mark.parametrize("name", ["residual", "concat", "grouped"])
def test_a_budget_is_met_by_the_network_with_zeros(name: str, round_to: int, what: str) -> None:
    c = case(name)
    s = saliency(c, seed=9)
    style = {"join": "zeros", "round_to": round_to}
    order, limit = order_of(s), 0.7 * cost(c.model, c.inputs)[what]
    mask = sosp.select(s, **{what: 0.7}, **style)
    beginnings = [rounded(s, order[:k], round_to) for k in range(len(order) + 1)]
    wanted = next(chosen for chosen in beginnings if left(c, s, chosen, what, **style) <= limit)
    assert numbers_of(s, mask) == set(wanted)


class Heads(nn.Module):
    """Attention whose code fixes how many heads there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.head = (nn.Linear(*n) for n in ((8, 16), (16, 48), (16, 16), (16, 5)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.head((x + self.out((weights @ v).transpose(1, 2).flatten(2)))[:, 0])


@pytest.mark.parametrize("seed", range(6))
def test_a_budget_is_met_where_no_head_may_go_as_a_whole(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Heads(), torch.randn(24, 6, 8)
    s = sosp.score(model, (x, torch.randint(5, (24,))), method="taylor")
    for macs in (0.3, 0.5, 0.7):
        small = sosp.shrink(model, sosp.select(s, macs=macs), x[:4])
        assert sosp.count(small, x[:4]).macs <= macs * sosp.count(model, x[:4]).macs


def test_zeros_in_place_of_scatters_take_more_to_meet_a_budget() -> None:
    those = [saliency(case("residual"), seed=seed) for seed in range(5)]
    zeros, scatters = (
        [sosp.select(s, macs=0.8, cap=0.6, join=join).chosen for s in those] for join in ("zeros", "scatter")
    )
    assert all(a >= b for a, b in zip(zeros, scatters, strict=True))
    assert zeros != scatters


def test_join_of_another_kind() -> None:
    with pytest.raises(ArgumentError, match=r"join='zeroes'.*Did you mean 'zeros'"):
        sosp.select(saliency(case("mlp")), ratio=0.5, join="zeroes")


@pytest.mark.parametrize("bad", [0, -1, 2.0, "2", True, None])
def test_round_to_of_another_kind(bad: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"round_to={bad!r}"):
        sosp.select(saliency(case("mlp")), ratio=0.5, round_to=bad)


# --- what is refused


@pytest.mark.parametrize("rule", ["saliency", "priced"])
@pytest.mark.parametrize(
    "given",
    [
        {"ratio": 0.6, "params": 0.9},
        {"ratio": 0.1, "macs": 0.5},
        {"params": 0.4, "macs": 0.9},
        {"ratio": 0.2, "params": 0.7, "macs": 0.5},
    ],
)
def test_of_several_budgets_all_are_met(given: dict[str, float], rule: str) -> None:
    c = case("conv-bn")
    found = saliency(c)
    mask = sosp.select(found, rule=rule, **given)
    whole, left = sosp.count(c.model, c.inputs), sosp.count(c.model, c.inputs, mask)
    assert all(getattr(left, what) <= given.get(what, 1) * getattr(whole, what) for what in ("params", "macs"))
    assert mask.chosen >= round(given.get("ratio", 0) * len(found.structures))
    alone = [sosp.select(found, rule=rule, **{what: limit}).chosen for what, limit in given.items()]
    assert mask.chosen <= max(alone) + (rule == "priced") * len(found.structures)


@LIMITS
@pytest.mark.parametrize("bad", [0, 0.0, -0.5, -100, 1.5, 99.9, True, False, "half", float("nan"), float("inf"), [0.5]])
def test_a_budget_that_is_none(what: str, bad: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        sosp.select(saliency(case("mlp")), **{what: bad})
    assert f"{what}={bad!r} must be the share" in str(caught.value)


def test_a_budget_that_cannot_be_met_says_what_is_left() -> None:
    """mlp: 118 parameters. Each layer may lose half, 3 of 7 and 3 of 6: 4 x 5 + 4, 3 x 4 + 3 and 4 x 3 + 4 stay."""
    s = saliency(case("mlp"))
    with pytest.raises(ArgumentError, match=r"params=0\.2 cannot be met.*55 of 118 params.*cap"):
        sosp.select(s, params=0.2, cap=0.5)
    with pytest.raises(ArgumentError, match=r"macs=43 cannot be met.*44 of 101 macs"):
        sosp.select(s, macs=43, cap=0.5)
    with pytest.raises(ArgumentError, match=r"Most of them are in 'fc1' \(45\.5%\), 'fc2' .*'head' \(27\.3%, without"):
        sosp.select(s, macs=43, cap=0.5)  # 4 x 5, 3 x 4 and 4 x 3 of 44
    assert sosp.select(s, macs=44, cap=0.5).chosen == 6


class Recurrent(nn.Module):
    """Nearly all of its work is done by a layer that has no structures."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.hidden, self.head = nn.LSTM(6, 10, batch_first=True), nn.Linear(10, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.lstm(x)[0][:, -1]).relu())


@pytest.mark.parametrize("options", [{}, {"cap": 0.5}, {"round_to": 2}, {"cap": 0.5, "round_to": 2}])
def test_a_budget_that_cannot_be_met_names_the_layer_and_the_options_that_prevent_it(options: dict[str, Any]) -> None:
    """Of 9 steps of 4 x 10 x (6 + 10) MACs nothing goes; the two linear layers have 40 and 8, one or two rows stay."""
    model, x = Recurrent(), torch.randn(3, 9, 6)
    s = sosp.Saliency(sosp.find_structures(model, x), "first-order", torch.arange(4.0))
    rows = 2 if options else 1  # without a cap one zero, rounded up, is left for the output layer to read
    left = 9 * 640 + (rows * 10 if "cap" in options else 0) + rows * 2
    with pytest.raises(ArgumentError) as caught:
        sosp.select(s, macs=0.5, **options)
    found = str(caught.value)
    assert f"macs=0.5 cannot be met: after everything that can be removed is removed, {left:,} of 5,808 macs" in found
    assert f"Most of them are in 'lstm' ({5760 / left:.1%}, without structures), '" in found
    assert ("cap" in found) == ("cap" in options)
    assert ("round_to" in found) == ("round_to" in options)
    assert "Raise macs" in found


def test_a_budget_that_takes_a_whole_layer_is_refused_by_its_name() -> None:
    s = saliency(case("mlp"))
    with pytest.raises(DisconnectedError, match="fc"):
        sosp.select(s, params=0.2)


def test_single_weights_have_no_budget() -> None:
    c = case("mlp")
    s = saliency(c, kind="weights")
    with pytest.raises(ArgumentError, match=r"params=.* needs the channel flow"):
        sosp.select(s, params=0.5)


def test_structures_without_a_flow_have_no_budget() -> None:
    s = saliency(case("mlp"))
    blind = replace(s, structures=replace(s.structures, flow=None))
    with pytest.raises(ArgumentError, match=r"macs=.* needs the channel flow"):
        sosp.select(blind, macs=0.5)
    assert sosp.select(blind, ratio=0.3).chosen == 4
