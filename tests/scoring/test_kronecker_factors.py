"""Kronecker factors against patches by loops and gradients one example at a time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sosp
from networks import Case, case
from oracles import kfac as oracle
from sosp.core.batches import iterate_chunks
from sosp.core.borrowed_model import borrow_model
from sosp.errors import DataError, LossError, SospError, StructureError
from sosp.scoring.kronecker_factors import (
    FISHERS,
    KroneckerFactors,
    estimate_kronecker_factors,
    explain_refusal,
    extract_patches,
)
from sosp.scoring.passes import Problem

EXACT = {"rtol": 1e-10, "atol": 1e-13}
LINEAR_AND_CONVOLUTIONS = ["mlp", "mlp-nobias", "conv-bn", "conv-nobn", "residual", "shared", "conv1d", "attention"]
UNEQUAL = (4, 1, 3, 2)


def batches(c: Case, sizes: tuple[int, ...] = UNEQUAL) -> list[tuple[Tensor, Tensor]]:
    return list(zip(c.inputs.split(sizes), c.targets.split(sizes), strict=True))


def found(
    c: Case, data: object = None, loss: object = "cross_entropy", **options: object
) -> dict[str, KroneckerFactors]:
    """The library's factors, also on data that is not cut like the loader's."""
    structures = sosp.find_structures(c.model, c.inputs)
    with borrow_model(c.model):
        chunks = iterate_chunks((c.inputs, c.targets) if data is None else data, None, None)
        return estimate_kronecker_factors(Problem(c.model, structures, loss, chunks), **options)


def ends(c: Case, fisher: str) -> list[oracle.Ends]:
    if fisher == "exact":
        return [oracle.expected] * len(c.inputs)
    return [oracle.sampled(int(y)) for y in c.targets]


def wanted(c: Case, name: str, fisher: str, bias: bool = True) -> tuple[Tensor, Tensor]:
    layer = c.model.get_submodule(name)
    calls = oracle.calls(c.model, name, c.inputs, ends(c, fisher))
    return oracle.factors(calls, bias=bias and layer.bias is not None)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("name", LINEAR_AND_CONVOLUTIONS)
def test_factors_are_those_of_patches_and_gradients(name: str, fisher: str) -> None:
    c = case(name)
    factors = found(c, batches(c), fisher=fisher)
    assert list(factors) == list(c.norms)
    for layer, factor in factors.items():
        A, G = wanted(c, layer, fisher)
        torch.testing.assert_close(factor.A, A, **EXACT)
        torch.testing.assert_close(factor.G, G, **EXACT)


@pytest.mark.parametrize("name", ["conv-bn", "conv-nobn", "residual", "mlp", "attention"])
def test_channel_factors_average_the_taps(name: str) -> None:
    c = case(name)
    for layer, factor in found(c, batches(c), taps="channels", fisher="exact").items():
        A, G = wanted(c, layer, "exact", bias=False)
        torch.testing.assert_close(factor.A, oracle.channels(A, c.model.get_submodule(layer).weight.shape[1]), **EXACT)
        torch.testing.assert_close(factor.G, G, **EXACT)


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("sizes", [(8, 2), (1,) * 10])
def test_batches_do_not_matter(fisher: str, sizes: tuple[int, ...]) -> None:
    c = case("residual")
    one, many = found(c, fisher=fisher), found(c, batches(c, sizes), fisher=fisher)
    for layer in one:
        torch.testing.assert_close(many[layer].A, one[layer].A, **EXACT)
        torch.testing.assert_close(many[layer].G, one[layer].G, **EXACT)


def test_one_example_at_a_time_runs_twice_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case("residual")
    whole = found(c, fisher="exact")
    monkeypatch.setattr("sosp.scoring.passes.chunk_size", lambda *_: 1)
    for layer, factor in found(c, fisher="exact").items():
        torch.testing.assert_close(factor.A, whole[layer].A, **EXACT)
        torch.testing.assert_close(factor.G, whole[layer].G, **EXACT)


def test_sampled_labels_are_the_networks_own() -> None:
    c = case("conv-nobn")
    p = c.model(c.inputs).softmax(1)
    labels = torch.multinomial(p, 1, replacement=True, generator=torch.Generator().manual_seed(5)).flatten()
    factors = found(c, batches(c), generator=torch.Generator().manual_seed(5))
    drawn = [oracle.sampled(int(y)) for y in labels]
    for layer, factor in factors.items():
        _, G = oracle.factors(oracle.calls(c.model, layer, c.inputs, drawn), bias=True)
        torch.testing.assert_close(factor.G, G, **EXACT)


def test_sampled_is_exact_on_average() -> None:
    c = case("mlp")
    draws = 400
    sampled = found(c, (c.inputs.repeat(draws, 1), c.targets.repeat(draws)))
    for layer, factor in found(c, fisher="exact").items():
        # The entries of G vary by about their own size from draw to draw: 1 / sqrt(400) is 5 %.
        assert (sampled[layer].G - factor.G).norm() < 0.15 * factor.G.norm()


def test_sampled_needs_no_seed_and_draws_nothing_of_the_users() -> None:
    c = case("mlp")
    before = torch.get_rng_state()
    one, two = found(c), found(c)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one["fc1"].G, two["fc1"].G)
    other = found(c, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(one["fc1"].G, other["fc1"].G)


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 2}, {"dilation": 2}, {"padding": (0, 1)}, {}])
def test_patches_are_what_a_convolution_multiplies(options: dict[str, object]) -> None:
    layer = nn.Conv2d(3, 4, (3, 2), **options).double()
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made = extract_patches(layer, x)
    torch.testing.assert_close(made, torch.stack([oracle.patches(layer, row) for row in x]), **EXACT)
    z = made @ layer.weight.flatten(1).T + layer.bias
    torch.testing.assert_close(z.transpose(1, 2), layer(x).flatten(2), **EXACT)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_patches_of_any_border(kind: type[nn.Module], padding: object, mode: str) -> None:
    layer = kind(2, 3, 3, padding=padding, padding_mode=mode).double()
    x = torch.randn(2, 2, *[5] * len(layer.kernel_size), dtype=torch.float64)
    z = extract_patches(layer, x) @ layer.weight.flatten(1).T + layer.bias
    torch.testing.assert_close(z.transpose(1, 2), layer(x).flatten(2), **EXACT)


class Checkpointed(nn.Module):
    """Its convolution runs again in the backward pass."""

    def __init__(self, c: Case) -> None:
        super().__init__()
        self.net = c.model

    def forward(self, x: Tensor) -> Tensor:
        return self.net[3:](checkpoint(self.net[:3], x, use_reentrant=False))


def test_layers_that_run_again_count_once() -> None:
    c = case("conv-bn")
    again = replace(c, model=Checkpointed(c))
    for layer, factor in found(c, fisher="exact").items():
        other = found(again, fisher="exact")[f"net.{layer}"]
        torch.testing.assert_close(other.A, factor.A, **EXACT)
        torch.testing.assert_close(other.G, factor.G, **EXACT)


def test_an_input_that_wants_a_gradient_changes_nothing() -> None:
    c = case("mlp")
    one = found(c, fisher="exact")
    two = found(c, (c.inputs.clone().requires_grad_(), c.targets), fisher="exact")
    for layer in one:
        torch.testing.assert_close(two[layer].G, one[layer].G, **EXACT)


@pytest.mark.parametrize("loss", ["mse", "own"])
def test_squared_loss_has_the_identity_in_its_outputs(loss: str) -> None:
    """``1/2 |f - y|^2``: the slopes of every output, squared and summed."""
    c = case("conv-nobn")
    targets = torch.randn(len(c.inputs), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = lambda f, y: 0.5 * (f - y).square().sum(1)  # noqa: E731
    factors = found(c, (c.inputs, targets), loss=own if loss == "own" else loss, fisher="exact")
    every = [lambda f: list(f)] * len(c.inputs)
    for layer, factor in factors.items():
        _, G = oracle.factors(oracle.calls(c.model, layer, c.inputs, every), bias=True)
        torch.testing.assert_close(factor.G, G, **EXACT)


def test_a_loss_of_the_users_own_has_no_labels_to_sample() -> None:
    c = case("mlp")
    own = lambda f, y: torch.nn.functional.cross_entropy(f, y, reduction="none")  # noqa: E731
    sampled, exact = found(c, loss=own), found(c, fisher="exact")
    for layer in exact:
        torch.testing.assert_close(sampled[layer].G, exact[layer].G, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["conv-bn", "residual"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    c = case(name)
    c.model.train()
    before = {k: v.clone() for k, v in c.model.state_dict().items()}
    found(c)
    assert c.model.training
    assert all(torch.equal(v, before[k]) for k, v in c.model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in c.model.modules())
    assert all(p.requires_grad and p.grad is None for p in c.model.parameters())


def test_single_precision_is_summed_in_double() -> None:
    c = case("residual")
    wide = found(c, fisher="exact")
    c.model.float()
    single = replace(c, example=c.inputs.float())
    for layer, factor in found(single, fisher="exact").items():
        assert factor.A.dtype == torch.float64
        torch.testing.assert_close(factor.A, wide[layer].A, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(factor.G, wide[layer].G, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "layer"), [("depthwise", "depthwise"), ("grouped", "conv2"), ("transposed", "up")])
def test_other_layers_are_refused_by_name(name: str, layer: str) -> None:
    with pytest.raises(StructureError, match=f"'{layer}' .*exclude=.*obd"):
        found(case(name))


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.Conv2d(2, 2, 1)])
def test_layers_that_are_known(layer: nn.Module) -> None:
    assert explain_refusal(layer, grouped=False) is None


def test_a_class_of_its_own_is_not_known() -> None:
    class Padded(nn.Conv2d):
        """May pad in its own way."""

    assert explain_refusal(Padded(1, 1, 1), grouped=True) == "is a Padded"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fisher": "true"}, SospError, "sampled, exact, empirical"),
        ({"taps": "pixels"}, SospError, "patches, channels"),
        ({"data": []}, DataError, "empty"),
        ({"loss": lambda f, y: f.sum(1) * torch.nan}, LossError, "example 0"),
    ],
)
def test_bad_input(options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        found(case("mlp"), **options)


def test_a_layer_without_gradient_is_named() -> None:
    class Cut(nn.Module):
        """Detaches its first layer, once it has been looked at."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.cut = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.head(self.two(x.detach() if self.cut else x).relu())

    model, x = Cut(), torch.randn(4, 3)
    structures = sosp.find_structures(model, x)
    model.cut = True
    with borrow_model(model), pytest.raises(SospError, match=r"no gradient .* 'one'.*exclude="):
        estimate_kronecker_factors(
            Problem(model, structures, "cross_entropy", iterate_chunks((x, torch.tensor([0, 1, 0, 1])), None, None))
        )
