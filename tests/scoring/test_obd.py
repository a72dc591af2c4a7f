"""Filter-wise OBD against ``1/2 theta^T (G (x) A) theta`` with the Kronecker product written out."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sosp
from networks import Case, case, to_score
from oracles import kfac as oracle
from sosp.errors import ArgumentError, StructureError
from sosp.scoring.criteria import obd as module

EXACT = {"rtol": 1e-10, "atol": 1e-14}
KRONECKER = [
    "mlp",
    "mlp-nobias",
    "conv-bn",
    "conv-nobn",
    "residual",
    "preact",
    "concat",
    "shared",
    "conv1d",
    "attention",
]
ONCE = [n for n in to_score() if n not in ("shared", "conv-in-bn-shared", "transposed")]


def batches(c: Case) -> list[tuple[Tensor, Tensor]]:
    return list(zip(c.inputs.split((4, 1, 3, 2)), c.targets.split((4, 1, 3, 2)), strict=True))


def drawn(c: Case, seed: int) -> list[oracle.Ends]:
    """The labels that a generator with this seed draws from the network's own outputs."""
    p = c.model(c.inputs).softmax(1)
    labels = torch.multinomial(p, 1, replacement=True, generator=torch.Generator().manual_seed(seed)).flatten()
    return [oracle.sampled(int(y)) for y in labels]


def scored(c: Case, method: str, **options: object) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return sosp.score(c.model, batches(c), method=method, generator=generator, **options).scores


def layer_factors(c: Case, name: str) -> tuple[nn.Module, Tensor, Tensor]:
    layer = c.model.get_submodule(name)
    calls = oracle.calls(c.model, name, c.inputs, drawn(c, 3))
    return layer, *oracle.factors(calls, bias=layer.bias is not None)


@pytest.mark.parametrize(("name", "gate"), [*((name, "features") for name in KRONECKER), ("conv-bn", "weights")])
def test_a_filter_costs_its_quadratic_form(name: str, gate: str) -> None:
    """Wherever the gate sits."""
    c = case(name)
    wanted: list[Tensor] = []
    for layer in c.norms:
        module, A, G = layer_factors(c, layer)
        wanted += [oracle.damage(module, A, G, [s]) for s in range(len(module.weight))]
    structures = sosp.find_structures(c.model, c.inputs, gate=gate)
    torch.testing.assert_close(scored(c, "obd", structures=structures), torch.stack(wanted), **EXACT)


def test_a_block_costs_all_correlations_within_it() -> None:
    c = case("residual")
    structures = sosp.find_structures(c.model, c.inputs, kind="blocks")
    found = scored(c, "obd", structures=structures)
    for s in range(len(structures)):
        total = torch.zeros((), dtype=torch.float64)
        for layer, ids in zip(structures.layers, structures.ids, strict=True):
            module, A, G = layer_factors(c, layer.name)
            total += oracle.damage(module, A, G, (ids == s).nonzero().flatten().tolist())
        torch.testing.assert_close(found[s], total, **EXACT)
    alone = scored(c, "obd")
    assert abs(float(found.sum() - alone.sum())) > 0.1 * float(alone.sum())  # the correlations matter


@pytest.mark.parametrize("groups", [[{"conv1": [0, 2], "conv2": [1]}], [{"conv1": [0], "conv2": [1]}], "coupled"])
def test_groups_add_up_over_layers(groups: object) -> None:
    c = case("conv-bn")
    structures = sosp.find_structures(c.model, c.inputs, groups=groups)
    found = scored(c, "obd", structures=structures)
    wanted = torch.zeros(len(structures), dtype=torch.float64)
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        module, A, G = layer_factors(c, layer.name)
        for s in ids[ids >= 0].unique().tolist():
            wanted[s] += oracle.damage(module, A, G, (ids == s).nonzero().flatten().tolist())
    torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("name", ["grouped", "depthwise", "transposed"])
def test_any_layer_by_its_own_output(name: str) -> None:
    """``w_s^T A w_s`` is the mean square of what the filter gives, also where A is not one matrix."""
    c = case(name)
    wanted: list[Tensor] = []
    for layer in c.norms:
        calls = oracle.calls(Outputs(c.model, layer), "watched", c.inputs, drawn(c, 3))
        squares = torch.cat([call.given for example in calls for call in example]).square()
        wanted.append(0.5 * oracle.factors(calls, bias=False)[1].diagonal() * squares.mean(0))
    torch.testing.assert_close(scored(c, "obd"), torch.cat(wanted), **EXACT)


class Outputs(nn.Module):
    """The same network, with a convolution that does nothing behind a layer, for the oracle to watch instead."""

    def __init__(self, model: nn.Sequential, layer: str) -> None:
        super().__init__()
        width = model.get_submodule(layer).out_channels
        self.watched = nn.Conv2d(width, width, 1, bias=False).double()
        nn.init.dirac_(self.watched.weight)
        self.net = nn.ModuleDict(dict(model.named_children()))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for name, part in self.net.items():
            x = part(x)
            x = self.watched(x) if name == self.layer else x
        return x


@pytest.mark.parametrize("name", ONCE)
def test_diagonal_squares_the_gradient_of_every_example(name: str) -> None:
    c = case(name)
    wanted = [oracle.diagonal_damage(c.model, layer, c.inputs, drawn(c, 3)) for layer in c.norms]
    torch.testing.assert_close(scored(c, "obd-diagonal"), torch.cat(wanted), **EXACT)


def test_diagonal_a_few_examples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case("residual")
    whole = scored(c, "obd-diagonal")
    monkeypatch.setattr(module, "BLOCK", 500)
    torch.testing.assert_close(scored(c, "obd-diagonal"), whole, **EXACT)


class Checkpointed(nn.Module):
    """Its first convolution runs again in the backward pass."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.net = model

    def forward(self, x: Tensor) -> Tensor:
        return self.net[3:](checkpoint(self.net[:3], x, use_reentrant=False))


@pytest.mark.parametrize("method", ["obd", "obd-diagonal"])
def test_a_layer_that_runs_again_was_called_once(method: str) -> None:
    c = case("conv-bn")
    again = replace(c, model=Checkpointed(c.model))
    torch.testing.assert_close(scored(again, method), scored(c, method), **EXACT)


@pytest.mark.parametrize("method", ["obd", "obd-diagonal"])
def test_every_batch_counts(method: str) -> None:
    """The data twice over is the data; its last batch alone is not."""
    c = case("conv-bn")
    whole = sosp.score(c.model, [(c.inputs, c.targets)], method=method)
    last = sosp.score(c.model, batches(c)[-1:], method=method)
    assert whole.examples == 10
    assert not torch.allclose(whole.scores, last.scores, rtol=1e-2)


@pytest.mark.parametrize("method", ["obd", "obd-diagonal"])
def test_several_labels_for_every_example(method: str) -> None:
    """Many are the mean over all; one is not."""
    c = case("conv-bn")
    many, one = scored(c, method, classes=400), scored(c, method)
    layer = "conv2"
    if method == "obd":
        calls = oracle.calls(c.model, layer, c.inputs, [oracle.expected] * len(c.inputs))
        A, G = oracle.factors(calls, bias=True)
        wanted = torch.stack([oracle.damage(c.model.conv2, A, G, [s]) for s in range(5)])
    else:
        wanted = oracle.diagonal_damage(c.model, layer, c.inputs, [oracle.expected] * len(c.inputs))
    # 4000 draws: the mean is good to a few per cent.
    torch.testing.assert_close(many[4:], wanted, rtol=0.1, atol=0.0)
    assert not torch.allclose(one[4:], wanted, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("method", ["obd", "obd-diagonal"])
def test_two_examples_do(method: str) -> None:
    c = case("conv-nobn")
    two = sosp.score(c.model, (c.inputs[:2], c.targets[:2]), method=method)
    one = [sosp.score(c.model, (c.inputs[n : n + 1], c.targets[n : n + 1]), method=method) for n in range(2)]
    assert all(bool((s.scores >= 0).all() and s.scores.isfinite().all()) for s in (two, *one))
    assert float(two.scores.max()) > 0


def test_scaling_a_filter_up_and_what_reads_it_down_changes_nothing() -> None:
    """The damage is of the function, not of the numbers: unlike a norm it does not see such a change."""
    c = case("mlp")
    before = scored(c, "obd")
    with torch.no_grad():
        c.model.fc1.weight[0] *= 3
        c.model.fc1.bias[0] *= 3
        c.model.fc2.weight[:, 0] /= 3
    torch.testing.assert_close(scored(c, "obd"), before, **EXACT)


def test_a_mask_can_be_made_of_it() -> None:
    c = case("residual")
    mask = sosp.select(sosp.score(c.model, (c.inputs, c.targets), method="obd"), ratio=0.3)
    small = sosp.shrink(c.model, mask, c.inputs)
    assert sosp.count(small, c.inputs).params < sosp.count(c.model, c.inputs).params


def test_a_shrunk_network_is_scored_again() -> None:
    """Behind a scatter a layer's output is wider than its weight."""
    c = case("residual")
    mask = sosp.select(sosp.score(c.model, (c.inputs, c.targets), method="obd"), ratio=0.3)
    small = sosp.shrink(c.model, mask, c.inputs)
    again = sosp.score(small, (c.inputs, c.targets), method="obd")
    assert len(again.scores) == sum(layer.channels for layer in again.structures.layers)
    assert bool((again.scores > 0).any())


@pytest.mark.parametrize("method", ["obd", "obd-diagonal"])
def test_single_weights_are_refused(method: str) -> None:
    c = case("mlp")
    structures = sosp.find_structures(c.model, c.inputs, kind="weights")
    with pytest.raises(ArgumentError, match=f"method='{method}'.*kind='weights'.*'sosp-h'"):
        sosp.score(c.model, (c.inputs, c.targets), method=method, structures=structures)


@pytest.mark.parametrize(
    ("name", "layer", "words"), [("transposed", "up", "ConvTranspose2d"), ("shared", "twice", "called more than once")]
)
def test_diagonal_says_by_name_what_it_cannot_do(name: str, layer: str, words: str) -> None:
    c = case(name)
    with pytest.raises(StructureError, match=rf"'{layer}'.*{words}.*exclude=.*'obd'"):
        sosp.score(c.model, (c.inputs, c.targets), method="obd-diagonal")


class Folded(nn.Module):
    """A layer over examples and positions in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.one(x.flatten(0, 1)).relu().view(*x.shape[:2], -1).mean(1))


def test_diagonal_refuses_examples_it_cannot_tell_apart() -> None:
    x, y = torch.randn(6, 5, 3), torch.arange(6) % 2
    with pytest.raises(StructureError, match=r"first dimension.*'obd'"):
        sosp.score(Folded(), (x, y), method="obd-diagonal")
    assert bool((sosp.score(Folded(), (x, y), method="obd").scores >= 0).all())


def unread() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    raise AssertionError("read on")


def test_refusals_come_before_the_work() -> None:
    with pytest.raises(StructureError, match="ConvTranspose2d"):
        sosp.score(case("transposed").model, unread(), method="obd-diagonal")
