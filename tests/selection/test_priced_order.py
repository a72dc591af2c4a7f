"""The price of a removal: what it saves is the exact count, the order is that of the formula, and layers stay."""

import numpy as np
import pytest
import torch
from torch import nn

import sosp
from networks import case, to_score
from networks.shrunk import original
from sosp.errors import ArgumentError
from sosp.selection.emptied_branches import EmptiedBranches
from sosp.selection.priced_order import list_layers, order_by_price
from sosp.selection.savings import Savings

INDEPENDENT = ["mlp", "conv-bn", "conv1d", "resnet"]
UNCOUPLED = ("layernorm", "softplus", "grouped")  # no channel of these can be removed as a whole
COUPLED = ["mlp", "conv-bn", "conv1d", "residual", "depthwise", "resnet", "densenet", "inverted-residual", "unet"]


def find(name: str, groups: str) -> tuple[nn.Module, object, sosp.Structures]:
    c = original(name)
    return c.model, c.example, sosp.find_structures(c.model, c.example, groups=groups)


def find_cut_layers(s: sosp.Structures) -> set[str]:
    found = zip(s.layers, list_layers(s, EmptiedBranches(s), None, 1), strict=True)
    return {layer.name for layer, state in found if state.cut}


def macs_left(model: nn.Module, example: object, structures: sosp.Structures, removed: list[int]) -> int:
    mask = sosp.Mask.from_structures(structures, torch.tensor(removed, dtype=torch.long))
    return sosp.count(model, example, mask).macs


@pytest.mark.parametrize(
    ("name", "groups"), [*((n, "independent") for n in INDEPENDENT), *((n, "coupled") for n in COUPLED)]
)
def test_what_a_removal_saves_is_the_difference_of_exact_counts(name: str, groups: str) -> None:
    model, example, s = find(name, groups)
    assert s.flow is not None
    savings, removed = Savings(s, {"macs": 1.0}), []
    for _ in range(2):  # of the whole network, then without one structure
        before = macs_left(model, example, s, removed)
        for k in range(0, len(s), 3):
            if k not in removed:
                saved = before - macs_left(model, example, s, [*removed, k])
                assert saved == pytest.approx(savings.saved[k], abs=0.5 + 1e-6 * before), k
        removed.append(1)
        savings.remove(np.array([1]))


class Looped(nn.Module):
    """Convolutions from the stream to the stream: a channel takes a row and a column of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5, 4)
        self.first, self.second = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.first(x)
        return self.head((x + self.second(x)).mean((2, 3)))


def test_a_row_and_a_column_of_one_weight_meet_in_one_element() -> None:
    model, x = Looped().eval(), torch.randn(2, 3, 6, 6)
    s = sosp.find_structures(model, x, groups="coupled")
    assert s.flow is not None
    # 36 places and 9 taps: 3 inputs in the stem, 5 + 5 - 1 elements of each loop; 4 outputs of the head.
    assert Savings(s, {"macs": 1.0}).saved.tolist() == [36 * 9 * (3 + 2 * 9) + 4] * 5
    assert macs_left(model, x, s, []) - macs_left(model, x, s, [2]) == 36 * 9 * 21 + 4


@pytest.mark.parametrize("name", ["mlp", "conv-bn", "conv-nobn", "transposed"])
def test_the_order_is_that_of_the_formula(name: str) -> None:
    """By brute force: every price from exact counts, every rise from the pairs."""
    c = case(name)
    s = sosp.find_structures(c.model, c.inputs)
    saliency = sosp.score(c.model, c.inputs, method="sosp-i", structures=s, targets="own")
    Q = saliency.pairs
    assert Q is not None
    owner, removed = s.owner().tolist(), []
    while len(removed) < len(s) - len(s.layers):
        whole, prices = macs_left(c.model, c.inputs, s, removed), {}
        for k in range(len(s)):
            mine = [j for j in range(len(s)) if owner[j] == owner[k]]
            left = [j for j in mine if j not in removed]
            if k in removed or len(left) == 1:
                continue
            rise = 0.5 * float(Q[k, k].abs()) + sum(float(Q[k, j].abs()) for j in removed)
            saved = whole - macs_left(c.model, c.inputs, s, [*removed, k])
            prices[k] = rise / saved**0.75 / (len(left) / len(mine)) ** 2
        removed.append(min(prices, key=prices.__getitem__))
    assert s.flow is not None
    assert np.concatenate(order_by_price(saliency, {"macs": 1.0})).tolist() == removed
    found = sosp.select(saliency, ratio=len(removed) / len(s), rule="priced")
    assert found == sosp.Mask.from_structures(s, torch.tensor(removed))
    some = sosp.select(saliency, ratio=4 / len(s), rule="priced")
    assert some == sosp.Mask.from_structures(s, torch.tensor(removed[:4]))


def test_layers_without_which_nothing_connects_input_and_output() -> None:
    _, _, chain = find("conv-bn", "coupled")
    assert find_cut_layers(chain) == {layer.name for layer in chain.layers}
    _, _, residual = find("resnet", "coupled")
    cut = find_cut_layers(residual)
    assert "conv1" in cut  # the stream
    assert "layer1.0.conv1" not in cut  # inside a block


@pytest.mark.parametrize("budget", [{"macs": 0.6}, {"params": 0.7}, {"ratio": 0.5}])
@pytest.mark.parametrize("name", [n for n in to_score() if n not in UNCOUPLED])
def test_layers_that_connect_input_and_output_keep_a_structure(name: str, budget: dict[str, float]) -> None:
    c = case(name)
    s = sosp.find_structures(c.model, c.inputs, groups="coupled")
    saliency = sosp.score(c.model, c.inputs, method="sosp-i", structures=s, targets="own")
    mask = sosp.select(saliency, rule="priced", **budget)
    empty = {layer.name for layer in s.layers if len(mask.removed.get(layer.name, ())) == layer.channels}
    assert not empty & find_cut_layers(s)
    assert not empty or s.branches
    assert sosp.shrink(c.model, mask, c.inputs)(c.inputs).shape[0] == len(c.inputs)


@pytest.mark.parametrize("limit", [0.8, 0.6, 0.4])
def test_no_structure_that_still_fits_is_removed(limit: float) -> None:
    model, example, s = find("resnet", "coupled")
    torch.manual_seed(0)
    saliency = sosp.Saliency(s, "random", None, values=torch.rand(len(s), dtype=torch.float64))
    mask = sosp.select(saliency, macs=limit, rule="priced")
    whole = sosp.count(model, example).macs
    assert sosp.count(model, example, mask).macs <= limit * whole
    owner = s.owner().tolist()
    for layer, ids in zip(s.layers, s.ids, strict=True):  # back with one of a layer that keeps some
        gone = mask.removed.get(layer.name, torch.zeros(0, dtype=torch.long))
        for k in set(ids[gone].tolist()) if len(gone) < layer.channels else ():
            fewer = {
                other.name: [c for c in mask.removed[other.name].tolist() if int(their[c]) != k]
                for other, their in zip(s.layers, s.ids, strict=True)
                if other.name in mask.removed
            }
            left = sosp.count(model, example, sosp.Mask.from_removed(model, fewer, example)).macs
            assert left > limit * whole, (s.layers[owner[k]].name, k)


def test_what_is_refused() -> None:
    c = case("mlp")
    saliency = sosp.score(c.model, (c.inputs, c.targets))
    with pytest.raises(ArgumentError, match="rule='price'"):
        sosp.select(saliency, macs=0.5, rule="price")
    with pytest.raises(ArgumentError, match="Leave scale out"):
        sosp.select(saliency, macs=0.5, rule="priced", scale="macs")
    weights = sosp.score(
        c.model, (c.inputs, c.targets), structures=sosp.find_structures(c.model, c.inputs, kind="weights")
    )
    with pytest.raises(ArgumentError, match="needs the channel flow"):
        sosp.select(weights, ratio=0.5, rule="priced")
