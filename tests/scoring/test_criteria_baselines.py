"""Every criterion of another paper against its formula written out; unequal batches, all kinds of networks."""

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from networks import Case, case, real_targets, to_score
from oracles import baselines, counts, dense, gauss_newton
from oracles.theta import thetas
from sosp.core import distributed
from sosp.scoring import example_gradients
from sosp.scoring.criteria import fisher, taylor

# Sums of a few hundred numbers of size one, in another order.
EXACT = 1e-10
CE = "cross_entropy"
NORMED = [n for n in to_score() if all(case(n).layers.values())]
PICTURES = ["conv-bn", "residual", "concat", "depthwise", "grouped", "conv-in-bn-shared", "transposed"]
GATES = ("features", "weights")


def unequal(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Batches of 4, 1 and 5: averaging batch means would be off by far more than the tolerance."""
    return [(x[a:b], y[a:b]) for a, b in ((0, 4), (4, 5), (5, 10))]


def off(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-300))


@cache
def structures_of(name: str) -> sosp.Structures:
    c = case(name)
    return sosp.find_structures(c.model, c.inputs[:2])


def scores(c: Case, method: str, gate: str = "features", data: Any = None) -> Tensor:
    found = structures_of(c.name) if c.name in to_score() else sosp.find_structures(c.model, c.inputs[:2])
    data = unequal(c.inputs, c.targets) if data is None else data
    return sosp.score(c.model, data, method=method, structures=replace(found, gate=gate)).scores


class Untouchable:
    """Data that nobody may look at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the data was read: {name}")

    def __iter__(self) -> Iterable[Any]:
        raise AssertionError("the data was read")


# --- from weights alone


@pytest.mark.parametrize("name", to_score())
def test_magnitudes_are_norms_of_filters(name: str) -> None:
    c = case(name)
    for p in (1, 2):
        found = scores(c, f"magnitude-l{p}", data=Untouchable())
        assert off(found, baselines.magnitudes(c.model, c.norms, p)) < EXACT


def test_magnitudes_of_groups_blocks_and_single_weights() -> None:
    c = case("residual")
    alone = baselines.magnitudes(c.model, c.norms, 2)
    tied = sosp.find_structures(c.model, c.inputs[:2], groups=[["conv1", "block1.conv2"]])
    found = sosp.score(c.model, None, method="magnitude-l2", structures=tied).scores
    assert off(found, torch.cat([alone[:3] + alone[5:8], alone[3:5], alone[8:]])) < EXACT
    blocks = sosp.find_structures(c.model, c.inputs[:2], kind="blocks")
    whole = dict(zip(c.norms, alone.split([3, 2, 3, 3, 4, 4]), strict=True))
    wanted = torch.stack([whole[layer.name].sum() for layer in blocks.layers])
    assert off(sosp.score(c.model, None, method="magnitude-l2", structures=blocks).scores, wanted) < EXACT
    weights = sosp.find_structures(c.model, c.inputs[:2], kind="weights")
    flat = torch.cat([c.model.get_parameter(layer.name).detach().abs().flatten() for layer in weights.layers])
    for method in ("magnitude-l1", "magnitude-l2"):
        assert torch.equal(sosp.score(c.model, None, method=method, structures=weights).scores, flat)


def test_grouped_transposed_convolutions_have_their_own_layout() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3)).double()
    x = torch.randn(2, 4, 2, 2, dtype=torch.float64)
    found = sosp.find_structures(model, x)
    for method, wanted in (
        ("magnitude-l1", baselines.magnitudes(model, {"0": None}, 1)),
        ("fpgm", baselines.distances(model, {"0": None})),
    ):
        assert off(sosp.score(model, None, method=method, structures=found).scores, wanted) < EXACT


@pytest.mark.parametrize("name", NORMED)
def test_slimming_is_the_scale(name: str) -> None:
    c = case(name)
    with torch.no_grad():
        for norm in c.norms.values():
            c.model.get_submodule(norm).weight[1:] *= -1
    assert off(scores(c, "slimming", data=Untouchable()), baselines.scales(c.model, c.norms)) < EXACT


@pytest.mark.parametrize("name", to_score())
def test_fpgm_is_the_distance_to_all_others(name: str) -> None:
    c = case(name)
    assert off(scores(c, "fpgm", data=Untouchable()), baselines.distances(c.model, c.norms)) < EXACT


def test_fpgm_sees_a_hair_between_two_filters() -> None:
    """By inner products, ``|w|^2 + |v|^2 - 2 w.v``, a distance of 1e-9 would be lost in rounding."""
    c = case("conv-nobn")
    with torch.no_grad():
        c.model.conv1.weight[:] = c.model.conv1.weight[0].clone()
        c.model.conv1.weight[3, 0, 0, 0] += 1e-9
    found = scores(c, "fpgm", data=Untouchable())[:4]
    assert torch.allclose(found, torch.tensor([1e-9, 1e-9, 1e-9, 3e-9], dtype=torch.float64), rtol=1e-6)


# --- from gradients


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", to_score())
def test_fisher_squares_the_slope_of_every_example(name: str, gate: str) -> None:
    c = case(name)
    vectors = thetas(c.model, c.norms, gate)
    slopes = baselines.example_slopes(c.model, vectors, c.inputs, c.targets, CE)
    found = scores(c, "fisher", gate)
    assert off(found, 0.5 * slopes.square().mean(0)) < EXACT
    literal = baselines.activation_slopes(c.model, c.norms, gate, c.inputs, c.targets, CE)
    assert off(found, 0.5 * literal.square().mean(0)) < EXACT


@pytest.mark.parametrize("method", ["fisher", "taylor", "taylor-bn", "snip", "hrank", "ccp"])
def test_all_the_data_counts_and_nothing_but_the_data(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the last batch only, not the mean of batch means, and cut into other chunks it is the same."""
    monkeypatch.setattr(taylor, "MINIBATCH", 3)  # chunks of four end in the middle of one
    c = case("conv-bn")
    whole = scores(c, method, data=[(c.inputs, c.targets)])
    for data in (unequal(c.inputs, c.targets), [(x[None], y[None]) for x, y in zip(c.inputs, c.targets, strict=True)]):
        assert off(scores(c, method, data=data), whole) < EXACT
    monkeypatch.setattr("sosp.scoring.passes.CPU_CHUNK", 1)
    assert off(scores(c, method, data=[(c.inputs, c.targets)]), whole) < EXACT
    assert off(scores(c, method, data=unequal(c.inputs, c.targets)[-1:]), whole) > 1e-3


def test_the_parts_of_fisher_add_up() -> None:
    c = case("residual")
    parts = [scores(c, "fisher", data=[batch]) for batch in unequal(c.inputs, c.targets)]
    wanted = (4 * parts[0] + parts[1] + 5 * parts[2]) / 10
    assert off(scores(c, "fisher"), wanted) < EXACT
    assert off(sum(parts) / 3, wanted) > 1e-2


@pytest.mark.parametrize(
    ("name", "size"), [*((n, 4) for n in to_score()), ("residual", 1), ("residual", 64), ("mlp", 9)]
)
def test_taylor_squares_the_slope_of_every_minibatch(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taylor, "MINIBATCH", size)
    c = case(name)
    vectors = thetas(c.model, c.norms, "weights")
    wanted = baselines.minibatch_squares(c.model, vectors, c.inputs, c.targets, CE, size)
    assert off(scores(c, "taylor", "features"), wanted) < EXACT  # at its own place, whatever the structures say


@pytest.mark.parametrize("name", NORMED)
def test_taylor_bn_is_the_slope_in_scale_and_shift(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taylor, "MINIBATCH", 4)
    c = case(name)
    vectors = thetas(c.model, c.norms, "features")
    wanted = baselines.minibatch_squares(c.model, vectors, c.inputs, c.targets, CE, 4)
    assert off(scores(c, "taylor-bn", "weights"), wanted) < EXACT
    one = torch.zeros_like(wanted)
    for x, y in zip(c.inputs.split(4), c.targets.split(4), strict=True):
        g = baselines.gradient(c.model, x, y, CE)
        parts = [
            (g[f"{n}.weight"] * c.model.get_submodule(n).weight + g[f"{n}.bias"] * c.model.get_submodule(n).bias)
            for n in c.norms.values()
        ]
        one += len(x) / 10 * torch.cat(parts).detach().square()
    assert off(wanted, one) < EXACT


def test_one_minibatch_of_everything_is_the_first_order_term_squared() -> None:
    c = case("residual")
    first = dense.first(c.model, thetas(c.model, c.norms, "weights"), c.inputs, c.targets, CE)
    assert off(scores(c, "taylor"), first.square()) < EXACT


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_minibatches_are_the_same_for_any_number_of_processes(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process r of R holds the examples r, r + R, ...: each must go to the minibatch it has in all the data."""
    size, found = 4, {}
    for rank in range(ranks):
        monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "count_ranks", lambda: ranks)
        mine = list(range(rank, 23, ranks))
        for start in range(0, len(mine), 5):  # chunks of five
            part = mine[start : start + 5]
            for b, low, high in example_gradients._split_minibatches(start, len(part), size):
                found |= dict.fromkeys(part[low:high], b)
    assert found == {i: i // size for i in range(23)}


@pytest.mark.parametrize("name", to_score())
def test_snip_is_normalised_over_all_structures(name: str) -> None:
    c = case(name)
    wanted = baselines.sensitivities(c.model, thetas(c.model, c.norms, "weights"), c.inputs, c.targets, CE)
    found = scores(c, "snip", "features")
    assert off(found, wanted) < EXACT
    assert float(found.sum()) == pytest.approx(1)


def test_snip_of_single_weights() -> None:
    c = case("mlp")
    found = sosp.find_structures(c.model, c.inputs[:2], kind="weights")
    g = baselines.gradient(c.model, c.inputs, c.targets, CE)
    products = torch.cat([(g[x.name] * c.model.get_parameter(x.name)).detach().abs().flatten() for x in found.layers])
    snip = sosp.score(c.model, unequal(c.inputs, c.targets), method="snip", structures=found)
    assert off(snip.scores, products / products.sum()) < EXACT


def test_snip_at_initialisation_and_without_any_slope() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()
    x, y = torch.randn(10, 2, 4, 4).double(), torch.arange(10) % 3
    c = Case("fresh", model, x, {"0": ("1",)}, targets=y, output="4")
    wanted = baselines.sensitivities(model, thetas(model, c.norms, "weights"), c.inputs, c.targets, CE)
    assert off(scores(c, "snip"), wanted) < EXACT
    nn.init.zeros_(model[0].weight), nn.init.zeros_(model[0].bias)
    assert scores(c, "snip").tolist() == [0.0] * 4


@pytest.mark.parametrize("method", ["fisher", "taylor", "ccp"])
@pytest.mark.parametrize("name", ["residual", "attention", "shared"])
def test_the_slow_way_finds_the_same(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(name)
    wanted = scores(c, method)

    @contextmanager
    def broken(*_: Any) -> Any:
        raise sosp.scoring.jets.UnsupportedError("not today")
        yield

    monkeypatch.setattr(example_gradients, "install_jet_gates", broken)
    with pytest.warns(sosp.SlowPathWarning):
        assert off(scores(c, method), wanted) < EXACT


# --- coupled groups

STREAMS = [  # of "residual": who makes the channels, who reads them
    (["conv1", "block1.conv2"], ["block1.conv1", "block2.conv1", "block2.downsample.0"]),
    (["block1.conv1"], ["block1.conv2"]),
    (["block2.conv1"], ["block2.conv2"]),
    (["block2.conv2", "block2.downsample.0"], ["head"]),
]


def coupled(c: Case) -> sosp.Structures:
    return sosp.find_structures(c.model, c.inputs[:2], groups="coupled")


def by_stream(c: Case, found: sosp.Structures, values: Tensor) -> list[Tensor]:
    """The values of the structures of each of STREAMS, in the order of its channels."""
    ids = {layer.name: ids for layer, ids in zip(found.layers, found.ids, strict=True)}
    return [values[ids[made[0]]] for made, _ in STREAMS]


def test_group_fisher_is_read_off_where_a_channel_is_read() -> None:
    """As the authors compute it: at the inputs of the layers that read a channel, for ReLUs the same number."""
    c = case("residual")
    found = coupled(c)
    data = unequal(c.inputs, c.targets)
    memory, macs = (
        by_stream(c, found, sosp.score(c.model, data, method=m, structures=found).scores)
        for m in ("group-fisher", "group-fisher-macs")
    )
    slopes = baselines.consumer_slopes(c.model, [read for _, read in STREAMS], c.inputs, c.targets, CE)
    positions = counts.positions(c.model, c.inputs)
    for i, (made, read) in enumerate(STREAMS):
        squares = slopes[i].square().mean(0)
        held = sum(baselines.output_elements(c.model, c.inputs, n) for n in made)
        assert off(memory[i], squares / held) < EXACT
        makers = sum(counts.filter_macs(c.model.get_submodule(n), positions[n]) for n in made)
        readers = sum(macs_per_input(c.model.get_submodule(n), positions[n]) for n in read)
        assert off(macs[i], squares / (makers + readers)) < EXACT


def macs_per_input(layer: nn.Module, positions: int) -> int:
    """Every filter of the layer reads the channel once per position, with k x k weights."""
    return layer.weight[:, 0].numel() * positions


@pytest.mark.parametrize("name", ["residual", "depthwise", "concat", "conv-bn", "preact"])
def test_group_fisher_sums_before_it_squares(name: str) -> None:
    c = case(name)
    found = coupled(c)
    members: dict[int, list[tuple[str, int]]] = {}
    for layer, ids in zip(found.layers, found.ids, strict=True):
        for channel, s in enumerate(ids.tolist()):
            members.setdefault(s, []).append((layer.name, channel))
    groups = [members[s] for s in range(len(found))]
    slopes = baselines.example_slopes(c.model, thetas(c.model, c.norms, "features", groups), c.inputs, c.targets, CE)
    held = [sum(baselines.output_elements(c.model, c.inputs, layer) for layer, _ in group) for group in groups]
    wanted = slopes.square().mean(0) / torch.tensor(held).double()
    s = sosp.score(c.model, unequal(c.inputs, c.targets), method="group-fisher")  # finds the groups by itself
    assert off(s.scores, wanted) < EXACT
    assert (s.examples, s.scope) == (10, "global")


@pytest.mark.parametrize("name", ["residual", "depthwise", "grouped"])
def test_saved_macs_are_those_of_the_network_without_the_structure(name: str) -> None:
    c = case(name)
    found = coupled(c)
    whole = sosp.count(c.model, c.inputs[:2]).macs
    for s, saved in enumerate(fisher.saved_macs(found).tolist()):
        mask = sosp.Mask.from_structures(found, torch.tensor([s]))
        assert whole - sosp.count(c.model, c.inputs[:2], mask).macs == saved


class Padded(nn.Module):
    """The two channels in the middle meet those of a narrower layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.thin, self.head = nn.Conv2d(1, 4, 1), nn.Conv2d(1, 2, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x) + nn.functional.pad(self.thin(x), (0, 0, 0, 0, 1, 1))
        return self.head(x.relu().mean((2, 3)))


def test_channels_of_one_layer_that_meet_others_save_more() -> None:
    model, x = Padded(), torch.randn(2, 1, 4, 4)
    groups = [{"wide": [1], "thin": [0]}, {"wide": [2], "thin": [1]}]
    found = sosp.find_structures(model, x, groups=groups)
    # One weight at 16 positions, nine more in the narrow layer, two in the head; beside the padding the head keeps its.
    assert fisher.saved_macs(found).tolist() == [16, 16 + 9 * 16 + 2, 16 + 9 * 16 + 2, 16]


# --- feature maps


@pytest.mark.parametrize("name", [*PICTURES, "mlp", "conv1d", "attention", "shared", "preact"])
def test_hrank_is_the_mean_rank_of_the_maps(name: str) -> None:
    c = case(name)
    wanted = baselines.mean_ranks(c.model, c.norms, c.inputs)
    assert off(scores(c, "hrank", "weights"), wanted) < EXACT  # behind the norm, whatever the structures say


def test_a_neuron_has_the_rank_of_its_activity() -> None:
    c = case("mlp")
    active = (c.model.fc1(c.inputs) > 0).double().mean(0)
    assert torch.allclose(scores(c, "hrank")[:7], active)


def test_hrank_of_maps_in_space_and_of_groups() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 27, 2)).double()
    x, y = torch.randn(10, 1, 4, 4, 4).double(), torch.arange(10) % 2
    c = Case("space", model, x, {"0": ()}, targets=y, output="3")
    wanted = baselines.mean_ranks(model, c.norms, c.inputs)
    assert off(scores(c, "hrank"), wanted) < EXACT
    tied = sosp.find_structures(model, c.inputs[:2], groups=[{"0": [0, 2]}])
    found = sosp.score(model, (c.inputs, c.targets), method="hrank", structures=tied).scores
    assert torch.allclose(found, torch.stack([(wanted[0] + wanted[2]) / 2, wanted[1]]))


# --- CCP


@pytest.mark.parametrize("name", ["conv-bn", "residual", "concat", "depthwise", "mlp", "attention"])
def test_ccp_has_pairs_within_layers_behind_the_softmax(name: str) -> None:
    c = case(name)
    vectors = thetas(c.model, c.norms, "features")
    s = sosp.score(c.model, unequal(c.inputs, c.targets), method="ccp")
    owner = s.structures.owner()
    same = owner[:, None] == owner
    wanted = baselines.behind_softmax(c.model, vectors, c.inputs, c.targets)
    assert s.pairs is not None
    assert s.first is not None
    assert off(s.pairs, wanted * same) < EXACT
    assert off(s.first, dense.first(c.model, vectors, c.inputs, c.targets, CE)) < EXACT
    assert (s.objective, s.scope, s.examples) == ("signed", "layer", 10)
    assert torch.equal(s.scores, 0.5 * s.pairs.diagonal() - s.first)
    # Not SOSP-I: that drops the second derivatives in front of the softmax.
    assert off(gauss_newton.pairs(c.model, vectors, c.inputs, c.targets, CE) * same, wanted * same) > 1e-2


def test_ccp_of_the_squared_loss_is_gauss_newton_and_of_ones_own_loss_the_outer_product() -> None:
    c = case("residual")
    y, vectors = real_targets(c), thetas(c.model, c.norms, "features")
    owner = sosp.find_structures(c.model, c.inputs[:2]).owner()
    same = owner[:, None] == owner
    squared = sosp.score(c.model, unequal(c.inputs, y), method="ccp", loss="mse").pairs
    assert off(squared, gauss_newton.pairs(c.model, vectors, c.inputs, y, "mse") * same) < EXACT

    def own(f: Tensor, y: Tensor) -> Tensor:
        return (f - y).cosh().log().sum(1)

    slopes = baselines.example_slopes(c.model, vectors, c.inputs, y, own)
    found = sosp.score(c.model, unequal(c.inputs, y), method="ccp", loss=own).pairs
    assert off(found, slopes.T @ slopes / 10 * same) < EXACT
