"""Gradient, H·1, J^T R J and the full Hessian in gate space, against oracles that never saw a gate."""

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import sosp
from networks import Case, case, real_targets, to_score
from oracles import correlation, dense, differences, gauss_newton, theta
from sosp.core.batches import iterate_chunks
from sosp.core.borrowed_model import borrow_model
from sosp.scoring import derivatives, passes
from sosp.scoring import gauss_newton as gauss_newton_module

# float64 sums of at most a few hundred terms of order one: 1e-15 each, 1e-12 with room for cancellation.
EXACT = 1e-11
GATES = ("weights", "features")


def unequal(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Batches of 4, 1 and 5: averaging batch means would be off by far more than the tolerance."""
    return [(x[a:b], y[a:b]) for a, b in ((0, 4), (4, 5), (5, 10))]


def off(found: Tensor | None, wanted: Tensor) -> float:
    assert found is not None
    assert found.shape == wanted.shape
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-300))


def scored(c: Case, method: str, gate: str, **options: object) -> sosp.Saliency:
    """Score, with any slower way than jets an error."""
    found = sosp.find_structures(c.model, c.inputs[:2], gate=gate)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sosp.SlowPathWarning)
        return sosp.score(c.model, unequal(c.inputs, c.targets), method=method, structures=found, **options)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", to_score())
def test_sosp_h_and_first_order_equal_the_dense_hessian_times_theta(name: str, gate: str) -> None:
    c = case(name)
    thetas = theta.thetas(c.model, c.norms, gate)
    first = dense.first(c.model, thetas, c.inputs, c.targets, "cross_entropy")
    second = dense.second(c.model, thetas, c.inputs, c.targets, "cross_entropy")
    h = scored(c, "sosp-h", gate)
    assert off(h.first, first) < EXACT
    assert off(h.second, second) < EXACT
    assert h.pairs is None
    assert off(scored(c, "first-order", gate).first, first) < EXACT


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", to_score())
def test_sosp_i_equals_the_dense_gauss_newton_matrix(name: str, gate: str) -> None:
    c = case(name)
    thetas = theta.thetas(c.model, c.norms, gate)
    i = scored(c, "sosp-i", gate)
    pairs = gauss_newton.pairs(c.model, thetas, c.inputs, c.targets, "cross_entropy")
    assert off(i.pairs, pairs) < EXACT
    assert off(i.second, pairs.sum(1)) < EXACT
    assert off(i.first, dense.first(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT
    assert off(scored(c, "sosp-i-diagonal", gate).second, pairs.diagonal()) < EXACT


@pytest.mark.parametrize("name", ["mlp", "conv-bn", "residual", "layernorm", "attention", "shared"])
def test_the_full_hessian_equals_the_dense_one_and_sums_to_sosp_h(name: str) -> None:
    c = case(name)
    exact = scored(c, "exact", "features")
    thetas = theta.thetas(c.model, c.norms, "features")
    assert exact.pairs is not None
    assert off(exact.pairs, dense.pairs(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT
    h = scored(c, "sosp-h", "features")
    assert h.second is not None
    assert off(exact.pairs.sum(1), h.second) < EXACT
    assert off(exact.first, dense.first(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT


def test_smooth_networks_agree_with_finite_differences() -> None:
    c = case("softplus")
    thetas = theta.thetas(c.model, c.norms, "weights")
    h = scored(c, "sosp-h", "weights")
    # Central differences: error of order eps^2 for the slope, eps^2 + 1e-16/eps^2 for the curvature.
    assert off(h.first, differences.first(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < 1e-7
    assert off(h.second, differences.second(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < 1e-5


def test_gauss_newton_is_exact_where_the_network_is_linear_in_its_gates() -> None:
    c = case("linear-in-gates")
    i, exact = scored(c, "sosp-i", "features"), scored(c, "exact", "features")
    assert i.pairs is not None
    assert exact.pairs is not None
    assert off(i.pairs, exact.pairs) < EXACT
    relu = case("mlp")
    assert off(scored(relu, "sosp-i", "features").pairs, scored(relu, "exact", "features").pairs) > 0.01


def test_gauss_newton_is_the_correlation_of_outputs_in_a_relu_net_without_biases() -> None:
    c = case("mlp-nobias")
    wanted = correlation.pairs(c.model, c.norms, c.inputs, c.targets, "cross_entropy")
    assert off(scored(c, "sosp-i", "weights").pairs, wanted) < EXACT


def cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    """A convex loss that is neither of the two with a closed R."""
    return (outputs - targets).cosh().log().sum(1)


@pytest.mark.parametrize("loss", ["mse", cosh])
@pytest.mark.parametrize("name", ["mlp", "residual", "attention"])
def test_other_losses(name: str, loss: object) -> None:
    c = case(name)
    y = real_targets(c)
    thetas = theta.thetas(c.model, c.norms, "features")
    found = sosp.find_structures(c.model, c.inputs[:2])
    i, h = (
        sosp.score(c.model, unequal(c.inputs, y), method=m, loss=loss, structures=found) for m in ("sosp-i", "sosp-h")
    )
    assert off(i.pairs, gauss_newton.pairs(c.model, thetas, c.inputs, y, loss)) < EXACT
    assert off(h.second, dense.second(c.model, thetas, c.inputs, y, loss)) < EXACT
    assert off(h.first, dense.first(c.model, thetas, c.inputs, y, loss)) < EXACT


def test_channels_that_share_a_gate_add_their_thetas() -> None:
    c = case("residual")
    layers = list(c.norms)
    tied = [{layers[0]: [0], layers[1]: [0, 1]}, {layers[2]: [0, 1]}]
    found = sosp.find_structures(c.model, c.inputs[:2], groups=tied)
    members: dict[int, list[tuple[str, int]]] = {}
    for layer, ids in zip(found.layers, found.ids, strict=True):
        for channel, s in enumerate(ids.tolist()):
            members.setdefault(s, []).append((layer.name, channel))
    thetas = theta.thetas(c.model, c.norms, "features", groups=[members[s] for s in range(len(found))])
    assert sorted(map(len, members.values()))[-2:] == [2, 3]
    data = unequal(c.inputs, c.targets)
    h = sosp.score(c.model, data, structures=found)
    i = sosp.score(c.model, data, method="sosp-i", structures=found)
    assert off(h.second, dense.second(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT
    assert off(i.pairs, gauss_newton.pairs(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT


@pytest.mark.parametrize("name", ["residual", "concat", "preact", "layernorm"])
def test_blocks_are_groups_of_all_channels_a_branch_ends_in(name: str) -> None:
    c = case(name)
    found = sosp.find_structures(c.model, c.inputs[:2], kind="blocks")
    groups: list[list[tuple[str, int]]] = [[] for _ in range(len(found))]
    for layer, ids in zip(found.layers, found.ids, strict=True):
        groups[int(ids[0])] += [(layer.name, channel) for channel in range(layer.channels)]
    thetas = theta.thetas(c.model, c.norms, "features", groups=groups)
    h = sosp.score(c.model, (c.inputs, c.targets), structures=found)
    exact = sosp.score(c.model, (c.inputs, c.targets), method="exact", structures=found)
    assert off(h.second, dense.second(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT
    assert off(exact.pairs, dense.pairs(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT


@pytest.mark.parametrize("name", ["mlp", "conv-bn", "residual", "layernorm", "attention"])
def test_single_weights_equal_the_dense_hessian(name: str) -> None:
    c = case(name)
    found = sosp.find_structures(c.model, c.inputs[:2], kind="weights")
    parameters = dict(c.model.named_parameters())
    chosen = [layer.name for layer in found.layers]
    assert len(found) == sum(parameters[n].numel() for n in chosen)
    with torch.no_grad():
        whole = {n: p.detach().double() if n in chosen else torch.zeros_like(p) for n, p in parameters.items()}
    flat = torch.cat([whole[n].flatten() for n in parameters])
    picked = torch.cat([torch.full((p.numel(),), n in chosen) for n, p in parameters.items()])
    H = dense.hessian(c.model, c.inputs, c.targets, "cross_entropy")
    g = dense.gradient(c.model, c.inputs, c.targets, "cross_entropy")
    order = torch.cat([torch.arange(len(flat))[slice(*_span(parameters, n))] for n in chosen])
    h = sosp.score(c.model, unequal(c.inputs, c.targets), structures=found)
    f = sosp.score(c.model, unequal(c.inputs, c.targets), method="first-order", structures=found)
    assert int(picked.sum()) == len(order)
    assert off(h.second, (flat * (H @ flat))[order]) < EXACT
    assert off(h.first, (flat * g)[order]) < EXACT
    assert off(f.first, (flat * g)[order]) < EXACT


def _span(parameters: dict[str, nn.Parameter], name: str) -> tuple[int, int]:
    start = 0
    for n, p in parameters.items():
        if n == name:
            return start, start + p.numel()
        start += p.numel()
    raise KeyError(name)


@pytest.fixture
def problem() -> Iterator[tuple[Case, passes.Problem]]:
    c = case("residual")
    found = sosp.find_structures(c.model, c.inputs[:2])
    with borrow_model(c.model):
        yield (
            c,
            passes.Problem(c.model, found, "cross_entropy", list(iterate_chunks((c.inputs, c.targets), None, None))),
        )


@pytest.mark.parametrize("way", list(derivatives.hessian_ways()))
def test_every_way_to_the_hessian_gives_the_same(problem: tuple[Case, passes.Problem], way: str) -> None:
    c, p = problem
    chunk = next(iter(p.chunks))
    d = torch.linspace(-1, 2, len(p.structures), dtype=torch.float64)
    thetas = theta.thetas(c.model, c.norms, "features")
    wanted = dense.pairs(c.model, thetas, c.inputs, c.targets, "cross_entropy") @ d
    _, second = derivatives.hessian_ways()[way](p, chunk, d)
    assert off(second / chunk.size, wanted) < EXACT


def test_chunks_that_do_not_fit_are_halved_and_nothing_is_lost(
    problem: tuple[Case, passes.Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    c, p = problem
    sizes: list[int] = []

    def narrow(problem: passes.Problem, chunk: passes.Chunk) -> passes.Sums:
        if chunk.size > 3:
            raise torch.OutOfMemoryError("pretend")
        sizes.append(chunk.size)
        return real(problem, chunk)

    real = derivatives._gradient_jets
    monkeypatch.setattr(derivatives, "_gradient_jets", narrow)
    terms = derivatives.gradient(p)
    thetas = theta.thetas(c.model, c.norms, "features")
    assert sum(sizes) == terms.examples == 10
    assert len(sizes) > 3
    assert off(terms.first, dense.first(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT


class TokensFirst(nn.Module):
    """Positions before examples, as recurrent networks like it: the first dimension is not the example."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.mix = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.transpose(0, 1)).relu()
        return self.head(torch.tanh(self.mix(h)).mean(0))


def test_sosp_i_where_the_first_dimension_is_not_the_example() -> None:
    g = torch.Generator().manual_seed(0)
    model = TokensFirst().double().eval()
    x, y = torch.randn(6, 5, 3, dtype=torch.float64, generator=g), torch.randint(0, 3, (6,), generator=g)
    layers: dict[str, str | None] = {"embed": None, "mix": None}
    i = sosp.score(model, (x, y), method="sosp-i")
    thetas = theta.thetas(model, layers, "features")
    assert off(i.pairs, gauss_newton.pairs(model, thetas, x, y, "cross_entropy")) < EXACT


@pytest.mark.parametrize("targets", ["labels", "own"])
def test_sampled_outputs_approach_all_outputs(targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosp.scoring.passes.CPU_CHUNK", 1)  # four examples at a time: each must have its own signs
    c = case("mlp")
    data = (c.inputs, c.targets)
    everything = sosp.score(c.model, data, method="sosp-i", targets=targets).pairs
    many = (c.inputs.repeat(200, 1), c.targets.repeat(200))
    sampled = sosp.score(c.model, many, method="sosp-i", classes=1, examples=None, targets=targets).pairs
    few = sosp.score(c.model, data, method="sosp-i", classes=1, targets=targets).pairs
    assert everything is not None
    # The error of an average over 200 draws falls like 1 / sqrt(200): about 5 % of the norm.
    assert off(sampled, everything) < 0.15
    assert off(few, everything) > off(sampled, everything)
    as_many = sosp.score(c.model, data, method="sosp-i", classes=4, targets=targets).pairs  # outputs
    assert off(as_many, everything) < 1e-12


def test_many_positions_per_example_are_averaged() -> None:
    """A fully convolutional net with a label at every pixel: R_n is block diagonal over the pixels."""
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double().eval()
    x = torch.randn(5, 2, 3, 2, dtype=torch.float64, generator=g)
    y = torch.randint(0, 3, (5, 3, 2), generator=g)

    def pixelwise(outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.view(len(outputs), 3, 3, 2)
        return F.cross_entropy(outputs, targets, reduction="none").mean((1, 2))

    flat = nn.Sequential(model, nn.Flatten())
    layers: dict[str, str | None] = {"0.0": None}
    thetas = theta.thetas(flat, layers, "features")
    wanted = gauss_newton.pairs(flat, thetas, x, y, pixelwise)
    assert off(sosp.score(model, (x, y), method="sosp-i").pairs, wanted) < EXACT
    assert off(sosp.score(model, (x, y)).second, dense.second(flat, thetas, x, y, pixelwise)) < EXACT


class OtherNorm(nn.BatchNorm2d):
    """Uses its statistics with other factors than its own, as some weight decay schemes have it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, 1 + self.weight, self.bias, False, 0.0, self.eps)


def against_double_backward(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """How far SOSP-H is from differentiating twice through the untouched network, gate by gate."""
    found = sosp.find_structures(model, x[:2], gate="weights")
    gates = [torch.ones(layer.channels, dtype=x.dtype, requires_grad=True) for layer in found.layers]
    hooks = [
        model.get_submodule(layer.name).register_forward_hook(
            lambda m, i, o, g=g, axis=layer.axis: o * (g.view(-1, *[1] * (o.dim() - 2)) if axis == 1 else g)
        )
        for layer, g in zip(found.layers, gates, strict=True)
    ]
    loss = F.cross_entropy(model(x), y)
    slope = torch.autograd.grad(loss, gates, create_graph=True)
    wanted = torch.cat(torch.autograd.grad(torch.cat(slope).sum(), gates))
    for hook in hooks:
        hook.remove()
    return off(sosp.score(model, (x, y), structures=found).second, wanted)


def small(*middle: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), *middle, nn.Conv2d(4, 3, 3), nn.Flatten(1), nn.Linear(12, 3))
        return model.double().eval()


@pytest.fixture
def images() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(5, 2, 6, 6, dtype=torch.float64, generator=g), torch.randint(0, 3, (5,), generator=g)


def test_a_norm_with_other_factors_than_its_module_s(images: tuple[Tensor, Tensor]) -> None:
    model = small(nn.BatchNorm2d(4), nn.SiLU(), OtherNorm(4), nn.SiLU())
    assert against_double_backward(model, *images) < EXACT


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Silu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


def scripted_module() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(Silu())


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.act = torch.jit.script(silu)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Checkpointed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore::sosp.SlowPathWarning")
def test_torchscript_functions_lose_no_tangent(images: tuple[Tensor, Tensor]) -> None:
    """Forward mode drops tangents in TorchScript without a word: reverse mode must be asked."""
    for middle in (Scripted(), scripted_module()):
        with pytest.warns(sosp.SlowPathWarning, match="double backward"):
            assert against_double_backward(small(middle), *images) < EXACT


def test_layers_that_run_again_in_backward_still_find_their_gates(images: tuple[Tensor, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sosp.SlowPathWarning)
        model = small(Checkpointed())
        x, y = images
        thetas = theta.thetas(model, {"0": None, "2": None}, "features")
        first = dense.first(model, thetas, x, y, "cross_entropy")
        assert off(sosp.score(model, (x, y), method="first-order").first, first) < EXACT
        i = sosp.score(model, (x, y), method="sosp-i")
    assert off(i.first, first) < EXACT
    assert off(i.pairs, gauss_newton.pairs(model, thetas, x, y, "cross_entropy")) < EXACT


def test_running_out_of_memory_half_way_through_a_chunk_never_counts_rows_twice() -> None:
    gram = gauss_newton_module.Gram(3, diagonal=False)

    def rows(count: int) -> Iterator[Tensor]:
        yield from torch.ones(count, gauss_newton_module.ROWS, 3)
        raise torch.OutOfMemoryError("pretend")

    with pytest.raises(torch.OutOfMemoryError), gram.all_or_nothing():
        gram.add(rows(0))
    with pytest.raises(MemoryError, match="3 structures"), gram.all_or_nothing():
        gram.add(rows(1))


def test_networks_in_half_precision_are_summed_in_single() -> None:
    c = case("conv-bn")
    model, x = c.model.to(torch.bfloat16), c.inputs.to(torch.bfloat16)
    i = sosp.score(model, (x, c.targets), method="sosp-i")
    assert i.pairs is not None
    assert i.pairs.dtype == torch.float32
    exact = sosp.score(case("conv-bn").model, (c.inputs, c.targets), method="sosp-i")
    # bfloat16 holds 8 bits: a few parts in a hundred after two convolutions.
    assert off(i.pairs.double(), exact.pairs) < 0.1


def test_channels_without_a_gate_stand_still() -> None:
    c = case("conv-bn")
    found = sosp.find_structures(c.model, c.inputs[:2])
    ids = [torch.where(i == 1, -1, torch.where(i > 1, i - 1, i)) for i in found.ids]  # channel 1 loses its gate
    fewer = replace(found, ids=tuple(ids))
    thetas = [t for s, t in enumerate(theta.thetas(c.model, c.norms, "features")) if s != 1]
    h = sosp.score(c.model, (c.inputs, c.targets), structures=fewer)
    i = sosp.score(c.model, (c.inputs, c.targets), method="sosp-i", structures=fewer)
    assert len(fewer) == len(thetas) == len(found) - 1
    assert off(h.first, dense.first(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT
    assert off(h.second, dense.second(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT
    assert off(i.pairs, gauss_newton.pairs(c.model, thetas, c.inputs, c.targets, "cross_entropy")) < EXACT


@pytest.mark.filterwarnings("ignore::sosp.SlowPathWarning")
def test_single_weights_lose_no_tangent_in_torchscript(images: tuple[Tensor, Tensor]) -> None:
    scripted, plain = small(scripted_module()), small(Silu())
    x, y = images
    seconds = []
    for model in (scripted, plain):
        found = sosp.find_structures(model, x[:2], kind="weights")
        seconds.append(sosp.score(model, (x, y), structures=found).second)
    assert seconds[1] is not None
    assert off(seconds[0], seconds[1]) < EXACT
