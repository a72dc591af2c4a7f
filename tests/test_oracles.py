"""The oracles and the table of cases checked against each other; the library is not imported."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from networks import SCORED_EXAMPLES, Case, case, real_targets, to_score
from oracles import correlation, counts, dense, differences, gauss_newton, losses, network, subsets
from oracles.theta import structures, thetas, width
from oracles.zeroed import zeroed

GATES = ["weights", "features"]
SMOOTH = ["softplus", "layernorm", "conv1d", "attention", "linear-in-gates"]
LOSSES = ["cross_entropy", "mse"]
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
NORMED = [name for name in to_score() if any(case(name).norms.values())]
# Without a norm the two gates are the same thing.
GATED = [(name, "weights") for name in to_score()] + [(name, "features") for name in NORMED]

# Sums of at most 500 terms of size at most 100 in another order: 500 * 100 * 1.1e-16 = 5e-12.
ROUNDING = {"rtol": 1e-10, "atol": 1e-11}
# eps^2/6 f''' + u|f|/eps with eps = 5e-6, f''' up to 100, f up to 10: 4e-10 + 2e-10.
FIRST = {"rtol": 1e-7, "atol": 2e-9}
# eps^2/3 L'''' + u|L|/eps^2 with eps = 1e-4, L'''' up to 100, L up to 5: 3e-7 + 6e-8.
SECOND = {"rtol": 1e-6, "atol": 1e-6}
# u|g|/eps with eps = 1e-6, and gradients g of up to 20 summed over 500 parameters: 20 * 1e-10 at worst.
SLOPES = {"rtol": 1e-6, "atol": 5e-9}


def close(a: Tensor, b: Tensor, tolerance: dict[str, float] = ROUNDING) -> bool:
    assert a.shape == b.shape, (a.shape, b.shape)
    return torch.allclose(a, b, **tolerance)


def targets_for(c: Case, loss: str) -> Tensor:
    return real_targets(c) if loss == "mse" else c.targets


def log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    """A convex loss that is neither of the two by name; its R_n depends on the targets."""
    return torch.log(torch.cosh(outputs - targets)).sum(1)


def run(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(inputs)


def scaled_by_hooks(model: nn.Module, layers: dict[str, str | None], gate: str, factors: Tensor) -> nn.Module:
    """A copy whose feature maps are multiplied by factors (S,) where the gate sits; parameters stay."""
    copy = deepcopy(model)
    rows = iter(factors.split([width(copy.get_submodule(name)) for name in layers]))
    for layer, norm in layers.items():
        at = copy.get_submodule(norm if gate == "features" and norm else layer)
        at.register_forward_hook(multiply(next(rows)))
    return copy


def multiply(row: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """A forward hook: channels lie on the last axis of a linear layer, else on axis 1."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return y * (row if isinstance(module, nn.Linear) else row.reshape(-1, *[1] * (y.ndim - 2)))

    return hook


def with_parameters(model: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    copy = deepcopy(model)
    copy.load_state_dict(parameters, strict=False)
    return copy


# --- the table of cases


@pytest.mark.parametrize("name", to_score())
def test_case_is_tiny_float64_and_in_eval_mode(name: str) -> None:
    c = case(name)
    assert 6 <= len(structures(c.model, c.norms)) <= 30
    assert sum(p.numel() for p in c.model.parameters()) < 600
    assert not any(m.training for m in c.model.modules())
    assert all(t.dtype == torch.float64 for t in [c.inputs, *c.model.parameters()])
    assert run(c.model, c.inputs).shape == (SCORED_EXAMPLES, int(c.targets.max()) + 1)
    assert c.targets.unique().numel() == c.model.get_submodule(c.output).out_features
    assert c.output not in c.norms


@pytest.mark.parametrize("name", to_score())
def test_case_is_the_same_on_every_call_and_seeds_nothing(name: str) -> None:
    before = torch.get_rng_state()
    a, b = case(name), case(name)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(a.inputs, b.inputs)
    assert torch.equal(a.targets, b.targets)
    assert all(torch.equal(x, b.model.state_dict()[key]) for key, x in a.model.state_dict().items())
    assert a.model is not b.model


@pytest.mark.parametrize("name", to_score())
def test_case_constants_are_away_from_their_defaults(name: str) -> None:
    for module in case(name).model.modules():
        if isinstance(module, (*NORMS, nn.LayerNorm)):
            assert (module.weight - 1).abs().min() >= 0.2
        if isinstance(module, NORMS):
            assert module.running_mean.abs().min() >= 0.2
            assert (module.running_var - 1).abs().min() >= 0.2
            assert module.running_var.min() > 0
        if getattr(module, "bias", None) is not None:
            assert module.bias.abs().min() >= 0.2


@pytest.mark.parametrize("name", to_score())
def test_case_layers_run_in_order_each_straight_into_its_own_norm(name: str) -> None:
    c = case(name)
    calls: list[tuple[str, Tensor, Tensor]] = []
    for path, module in c.model.named_modules():
        if isinstance(module, (nn.Linear, *counts.CONVOLUTIONS, *NORMS)):
            module.register_forward_hook(lambda m, args, y, path=path: calls.append((path, args[0], y)))
    run(c.model, c.inputs)
    order = list(dict.fromkeys(path for path, _, _ in calls))
    convs = [path for path in order if not isinstance(c.model.get_submodule(path), NORMS)]
    assert convs == [*c.norms, c.output]
    for layer, norm in c.norms.items():
        made = [y for path, _, y in calls if path == layer]
        read = [x for path, x, _ in calls if path == norm]
        assert norm is None or all(x is y for x, y in zip(read, made, strict=True))


@pytest.mark.parametrize(("name", "gate"), GATED)
def test_every_structure_of_a_case_moves_the_outputs(name: str, gate: str) -> None:
    c = case(name)
    J = gauss_newton.products(c.model, thetas(c.model, c.norms, gate), c.inputs)
    moved = (J.abs() > 1e-6).any(1).sum(0)  # (S,) number of examples
    assert moved.min() >= 3


# --- theta


@pytest.mark.parametrize(("name", "gate"), GATED)
def test_scaling_theta_is_scaling_the_feature_map(name: str, gate: str) -> None:
    c = case(name)
    theta = thetas(c.model, c.norms, gate)
    factors = torch.linspace(0.5, 1.7, len(theta), dtype=torch.float64)
    by_parameters = network.outputs(c.model, differences.shifted(c.model, theta, factors - 1), c.inputs)
    by_hooks = run(scaled_by_hooks(c.model, c.norms, gate, factors), c.inputs)
    assert close(by_parameters, by_hooks)
    assert not close(by_parameters, run(c.model, c.inputs), {"rtol": 0, "atol": 1e-3})


@pytest.mark.parametrize(("name", "gate"), GATED)
def test_each_parameter_belongs_to_at_most_one_structure(name: str, gate: str) -> None:
    c = case(name)
    T = network.matrix(c.model, thetas(c.model, c.norms, gate))
    owners = {(norm if gate == "features" and norm else layer) for layer, norm in c.norms.items()}
    whole = {path: p if path.rpartition(".")[0] in owners else 0 * p for path, p in c.model.named_parameters()}
    assert ((T != 0).sum(0) <= 1).all()
    assert torch.equal(T.sum(0), network.flat([p.detach() for p in whole.values()]))


@pytest.mark.parametrize("gate", GATES)
def test_a_group_is_the_sum_of_its_structures(gate: str) -> None:
    c = case("concat")
    groups = [[("left", 0), ("right", 2), ("mix", 1)], [("left", 2)], [("mix", 0), ("mix", 4)]]
    members = structures(c.model, c.norms)
    G = torch.zeros(len(groups), len(members), dtype=torch.float64)
    for row, group in zip(G, groups, strict=True):
        row[[members.index(s) for s in group]] = 1
    alone, together = thetas(c.model, c.norms, gate), thetas(c.model, c.norms, gate, groups)
    data = (c.inputs, c.targets, "cross_entropy")
    assert torch.equal(network.matrix(c.model, together), G @ network.matrix(c.model, alone))
    assert close(dense.first(c.model, together, *data), G @ dense.first(c.model, alone, *data))
    assert close(gauss_newton.pairs(c.model, together, *data), G @ gauss_newton.pairs(c.model, alone, *data) @ G.T)


# --- dense derivatives against differences


@pytest.mark.parametrize(("name", "gate"), GATED)
def test_dense_first_is_the_difference_of_losses(name: str, gate: str) -> None:
    c = case(name)
    theta = thetas(c.model, c.norms, gate)
    for loss in LOSSES:
        data = (c.inputs, targets_for(c, loss), loss)
        assert close(dense.first(c.model, theta, *data), differences.first(c.model, theta, *data), FIRST)


@pytest.mark.parametrize(("name", "gate"), [(n, "weights") for n in SMOOTH] + [("conv1d", "features")])
def test_dense_pairs_are_mixed_differences_of_losses(name: str, gate: str) -> None:
    c = case(name)
    theta = thetas(c.model, c.norms, gate)
    data = (c.inputs, c.targets, "cross_entropy")
    assert close(dense.pairs(c.model, theta, *data), differences.pairs(c.model, theta, *data), SECOND)
    # The direction of the second term is the sum of S thetas: S^2 times the truncation error of one pair.
    loose = {"rtol": 1e-6, "atol": 1e-6 * len(theta)}
    assert close(dense.second(c.model, theta, *data), differences.second(c.model, theta, *data), loose)


@pytest.mark.parametrize("loss", ["mse", log_cosh])
def test_dense_pairs_are_mixed_differences_for_other_losses(loss: losses.Loss) -> None:
    c = case("softplus")
    theta = thetas(c.model, c.norms, "weights")
    data = (c.inputs, real_targets(c), loss)
    assert close(dense.pairs(c.model, theta, *data), differences.pairs(c.model, theta, *data), SECOND)


@pytest.mark.parametrize("name", to_score())
def test_dense_hessian_is_the_difference_of_slopes(name: str) -> None:
    c = case(name)
    data = (c.inputs, c.targets, "cross_entropy")
    H = dense.hessian(c.model, *data)
    assert close(H, H.T)
    for gate in GATES if name in NORMED else ["weights"]:
        theta = thetas(c.model, c.norms, gate)
        T = network.matrix(c.model, theta)
        assert close(T @ H @ T.T, differences.pairs_of_slopes(c.model, theta, *data), SLOPES)


@pytest.mark.parametrize(("name", "gate"), [("shared", "weights"), ("conv1d", "weights"), ("conv1d", "features")])
def test_second_is_the_row_sum_of_pairs(name: str, gate: str) -> None:
    c = case(name)
    args = (c.model, thetas(c.model, c.norms, gate), c.inputs, c.targets, "cross_entropy")
    P = dense.pairs(*args)
    assert close(P, P.T)
    assert close(dense.second(*args), P.sum(1))
    assert close(gauss_newton.second(*args), gauss_newton.pairs(*args).sum(0))


def test_unequal_batches_weighted_by_their_size_give_the_whole() -> None:
    c = case("mlp")
    theta = thetas(c.model, c.norms, "weights")
    for oracle in (dense.first, dense.pairs, dense.second, gauss_newton.pairs, gauss_newton.second):
        whole = oracle(c.model, theta, c.inputs, c.targets, "cross_entropy")
        a = oracle(c.model, theta, c.inputs[:8], c.targets[:8], "cross_entropy")
        b = oracle(c.model, theta, c.inputs[8:], c.targets[8:], "cross_entropy")
        assert close(whole, (8 * a + 2 * b) / 10)
        assert not close(whole, (a + b) / 2, {"rtol": 1e-2, "atol": 0})


def test_oracles_read_a_float32_model_in_train_mode_and_leave_it_alone() -> None:
    c = case("conv-bn")
    model = deepcopy(c.model).float().train().requires_grad_(False)
    before = deepcopy(model.state_dict())
    args = (c.inputs.float(), c.targets, "cross_entropy")
    rounded = deepcopy(model).double().eval()
    theta, expected = (thetas(m, c.norms, "features") for m in (model, rounded))
    for oracle in (dense.first, differences.first, gauss_newton.second):
        want = oracle(rounded, expected, c.inputs.float().double(), *args[1:])
        assert close(oracle(model, theta, *args), want)
    assert all(torch.equal(before[key], x) for key, x in model.state_dict().items())
    assert all(m.training for m in model.modules())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


# --- Gauss-Newton


@pytest.mark.parametrize(("name", "gate"), GATED)
def test_gauss_newton_products_are_differences_of_outputs(name: str, gate: str) -> None:
    c = case(name)
    args = (c.model, thetas(c.model, c.norms, gate), c.inputs)
    assert close(gauss_newton.products(*args), differences.products(*args), FIRST)


@pytest.mark.parametrize("loss", [*LOSSES, log_cosh])
def test_gauss_newton_is_exact_for_a_network_linear_in_its_gates(loss: losses.Loss) -> None:
    c = case("linear-in-gates")
    theta = thetas(c.model, c.norms, "weights")
    data = (c.inputs, c.targets if loss == "cross_entropy" else real_targets(c), loss)
    assert close(gauss_newton.pairs(c.model, theta, *data), dense.pairs(c.model, theta, *data))


@pytest.mark.parametrize("name", ["softplus", "shared", "conv1d", "depthwise"])
def test_hessian_is_gauss_newton_plus_the_curvature_of_the_outputs(name: str) -> None:
    """``H = G + 1/N sum_nd (p_n - y_n)_d d^2 f_d(x_n)``: the rest is the Hessian of a loss linear in f."""
    c = case(name)
    theta = thetas(c.model, c.norms, "features")
    f = run(c.model, c.inputs)
    slopes = f.softmax(1) - nn.functional.one_hot(c.targets, f.shape[1])
    rest = dense.pairs(c.model, theta, c.inputs, slopes, lambda f, slopes: (f * slopes).sum(1))
    G = gauss_newton.pairs(c.model, theta, c.inputs, c.targets, "cross_entropy")
    assert close(dense.pairs(c.model, theta, c.inputs, c.targets, "cross_entropy"), G + rest)
    assert rest.abs().max() > 1e-3  # so that a Gauss-Newton matrix cannot pass for the Hessian


def test_gauss_newton_is_positive_semidefinite_and_ignores_the_labels() -> None:
    c = case("residual")
    theta = thetas(c.model, c.norms, "features")
    G = gauss_newton.pairs(c.model, theta, c.inputs, c.targets, "cross_entropy")
    assert torch.linalg.eigvalsh(G).min() > -1e-12  # rounding of a matrix of norm about 10
    assert torch.equal(G, gauss_newton.pairs(c.model, theta, c.inputs, c.targets.flip(0), "cross_entropy"))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_curvatures_agree_with_torch(loss: str) -> None:
    c = case("mlp")
    f, y = run(c.model, c.inputs), targets_for(c, loss)
    torchs = {
        "cross_entropy": lambda f, y: nn.functional.cross_entropy(f, y, reduction="none"),
        "mse": lambda f, y: 0.5 * nn.functional.mse_loss(f, y, reduction="none").sum(1),
    }[loss]
    assert close(losses.per_example(f, y, loss), torchs(f, y))
    assert close(losses.curvatures(f, y, loss), losses.curvatures(f, y, torchs))


# --- App. C


@pytest.mark.parametrize("loss", LOSSES)
def test_output_correlations_are_gauss_newton(loss: str) -> None:
    c = case("mlp-nobias")
    theta = thetas(c.model, c.norms, "weights")
    data = (c.inputs, targets_for(c, loss), loss)
    assert close(correlation.outputs(c.model, c.norms, c.inputs), gauss_newton.products(c.model, theta, c.inputs))
    assert close(correlation.pairs(c.model, c.norms, *data), gauss_newton.pairs(c.model, theta, *data))


def test_run_afresh_the_edited_network_agrees_in_the_last_hidden_layer_only() -> None:
    c = case("mlp-nobias")
    fixed = correlation.outputs(c.model, c.norms, c.inputs)
    fresh = correlation.literal_outputs(c.model, c.norms, c.inputs)
    early = width(c.model.fc1)
    assert close(fixed[..., early:], fresh[..., early:])
    assert (fixed[..., :early] - fresh[..., :early]).abs().max() > 0.1


def test_the_structures_of_one_layer_add_up_to_the_outputs() -> None:
    """Euler: f is homogeneous of degree one in each layer's weights, so ``sum_s phi(x) theta_s = f(x)``."""
    c = case("mlp-nobias")
    J = gauss_newton.products(c.model, thetas(c.model, c.norms, "weights"), c.inputs)
    early = width(c.model.fc1)
    for part in (J[..., :early], J[..., early:]):
        assert close(part.sum(-1), run(c.model, c.inputs))


@pytest.mark.parametrize("name", ["mlp", "conv-bn"])
def test_output_correlations_refuse_biases_and_norms(name: str) -> None:
    c = case(name)
    with pytest.raises(AssertionError, match="biases"):
        correlation.outputs(c.model, c.norms, c.inputs)


# --- subsets


def random_terms(seed: int, S: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(S, generator=generator, dtype=torch.float64)
    pairs = torch.randn(S, S, generator=generator, dtype=torch.float64)
    return first, pairs + pairs.T


def test_objectives_by_hand() -> None:
    first = torch.tensor([1.0, -2.0, 9.0])
    pairs = torch.tensor([[4.0, -3.0, 9.0], [-3.0, 1.0, 9.0], [9.0, 9.0, 9.0]])
    # sums over {0, 1}: |f| 3, |H| 4 + 1 + 3 + 3 = 11, f -1, H 4 + 1 - 3 - 3 = -1.
    assert subsets.value("individual", first, pairs, [0, 1]) == 3 + 5.5
    assert subsets.value("structure", first, pairs, [0, 1]) == abs(1 - 2) + abs(-2 - 0.5) + 3
    assert subsets.value("order", first, pairs, [0, 1]) == 1 + 0.5
    assert subsets.value("joint", first, pairs, [0, 1]) == abs(-1 + 0.5)


def test_pulling_the_absolute_values_in_only_raises_an_objective() -> None:
    first, pairs = random_terms(0)
    for k in range(1, 9):
        subset = list(range(k))
        v = {name: subsets.value(name, first, pairs, subset) for name in subsets.OBJECTIVES}
        assert v["joint"] <= v["order"] + 1e-12  # rounding
        assert v["joint"] <= v["structure"] + 1e-12
        assert max(v["order"], v["structure"]) <= v["individual"] + 1e-12


@pytest.mark.parametrize("objective", subsets.OBJECTIVES)
def test_greedy_is_optimal_for_one_and_never_better_than_the_best(objective: str) -> None:
    beaten = 0
    for seed in range(5):
        first, pairs = random_terms(seed)
        assert subsets.greedy(1, objective, first, pairs) == [*subsets.best_subset(1, objective, first, pairs)]
        assert sorted(subsets.greedy(8, objective, first, pairs)) == list(range(8))
        for k in range(2, 8):
            best, greedy = (f(k, objective, first, pairs) for f in (subsets.best_subset, subsets.greedy))
            gap = subsets.value(objective, first, pairs, greedy) - subsets.value(objective, first, pairs, best)
            assert len(set(greedy)) == k
            assert gap >= -1e-12  # the same subset summed in another order
            beaten += gap > 1e-6
    assert beaten > 0  # greedy is not optimal: the two are different searches


def test_greedy_on_the_individual_objective_is_the_papers_selection_rule() -> None:
    """``argmin_s Q_ss + 2 sum_{s' in M} Q_ss'`` with ``Q = 1/2 |H| + diag |f|``."""
    for seed in range(5):
        first, pairs = random_terms(seed)
        Q = 0.5 * pairs.abs() + first.abs().diag()
        chosen: list[int] = []
        for _ in range(6):
            cost = Q.diag() + 2 * Q[:, chosen].sum(1)
            cost[chosen] = torch.inf
            chosen.append(int(cost.argmin()))
        assert subsets.greedy(6, "individual", first, pairs) == chosen


def test_ties_go_to_the_lowest_index() -> None:
    first, pairs = torch.ones(4), torch.zeros(4, 4)
    for objective in subsets.OBJECTIVES:
        assert subsets.greedy(3, objective, first, pairs) == [0, 1, 2]
        assert subsets.best_subset(3, objective, first, pairs) == (0, 1, 2)


# --- zeroed


def some_removed(c: Case) -> dict[str, list[int]]:
    """1, 2, 1, 2, ... channels per layer, not the same ones."""
    widths = {layer: width(c.model.get_submodule(layer)) for layer in c.norms}
    return {layer: [i % n, (i + 1) % n][: 1 + i % 2] for i, (layer, n) in enumerate(widths.items())}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", to_score())
def test_zeroed_is_multiplying_the_removed_feature_maps_by_zero(name: str, train: bool) -> None:
    c = case(name)
    removed = some_removed(c)
    gone = [(layer, i) for layer, channels in removed.items() for i in channels]
    kept = torch.tensor([float(s not in gone) for s in structures(c.model, c.norms)], dtype=torch.float64)
    by_hand = zeroed(c.model, c.norms, removed).train(train)
    by_hooks = scaled_by_hooks(c.model, c.norms, "features", kept).train(train)
    assert close(run(by_hand, c.inputs), run(by_hooks, c.inputs))
    assert not close(run(by_hand, c.inputs), run(deepcopy(c.model).train(train), c.inputs))


@pytest.mark.parametrize("name", to_score())
def test_zeroed_is_theta_without_the_removed_thetas(name: str) -> None:
    c = case(name)
    before = deepcopy(c.model.state_dict())
    removed = some_removed(c)
    gone = [(layer, i) for layer, channels in removed.items() for i in channels]
    theta = thetas(c.model, c.norms, "features", [gone])
    expected = with_parameters(c.model, differences.shifted(c.model, theta, -torch.ones(1))).state_dict()
    found = zeroed(c.model, c.norms, removed).state_dict()
    assert all(torch.equal(expected[key], x) for key, x in found.items())
    assert all(torch.equal(before[key], x) for key, x in c.model.state_dict().items())


# --- counts


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 4, (2, 3), stride=2), (3, 6, 7)),
        (nn.Conv2d(4, 6, 3, groups=2, dilation=2), (4, 7, 6)),
        (nn.Conv2d(5, 5, 3, groups=5), (5, 6, 5)),
        (nn.Conv1d(2, 3, 4), (2, 9)),
        (nn.ConvTranspose2d(3, 5, (3, 2), stride=2), (3, 4, 3)),
        (nn.Linear(4, 6), (5, 4)),
    ],
)
def test_a_filter_of_ones_on_ones_adds_up_to_its_macs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Every multiplication contributes 1 to the sum of the outputs, so the sum counts them."""
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    x = torch.ones(1, *shape)
    total = run(layer, x).sum().item()
    positions = counts.positions(nn.Sequential(layer), x)["0"]
    assert counts.filter_macs(layer, positions) * width(layer) == total


@pytest.mark.parametrize("name", to_score())
def test_filters_add_up_to_the_parameters_of_their_layer(name: str) -> None:
    c = case(name)
    for path in [*c.norms, c.output]:
        layer = c.model.get_submodule(path)
        assert counts.filter_parameters(layer) * width(layer) == sum(p.numel() for p in layer.parameters())


def test_positions_by_hand() -> None:
    found = {name: counts.positions(c.model, c.inputs) for name in to_score() for c in [case(name)]}
    assert found["residual"] == {
        "conv1": 16,  # 4 x 4, padded
        "block1.conv1": 16,
        "block1.conv2": 16,
        "block2.conv1": 4,  # stride 2
        "block2.conv2": 4,
        "block2.downsample.0": 4,
        "head": 1,
    }
    assert found["transposed"] == {"down": 4, "up": 4, "up_plain": 25, "head": 1}  # inputs 2x2 and 5x5
    assert found["shared"] == {"stem": 1, "twice": 2, "head": 1}  # both calls
    assert found["attention"]["q"] == 4  # tokens
    assert found["conv1d"]["conv2"] == counts.output_size(7, 3, stride=2)


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [(3, 1, 1, 1), (3, 2, 0, 2), (2, 3, 1, 1)])
def test_output_size_is_torchs(kernel: int, stride: int, padding: int, dilation: int) -> None:
    conv = nn.Conv1d(1, 1, kernel, stride=stride, padding=padding, dilation=dilation)
    for size in (7, 8, 9):
        assert counts.output_size(size, kernel, stride, padding, dilation) == run(conv, torch.ones(1, size)).shape[-1]
