"""The parts of a repair: layers as matrices, places to compare at, least squares, targets that follow what is fed."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles import repair as oracle
from sosp.refit import least_squares
from sosp.refit.activations import FULL_RANGE
from sosp.refit.comparison_points import ChannelTracker, track_channels
from sosp.refit.hooks import listen_to_outputs
from sosp.refit.layer_errors import build_divergence, build_squared_error
from sosp.refit.layer_matrix import LayerUse, count_groups, get_matrix, set_matrix, take_values
from sosp.refit.least_squares import RIDGES, LayerEquations, StandardisedInputs, compute_outputs, fit_weights
from sosp.refit.two_layer_fit import TwoLayerEquations, TwoLayerSearch


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- layers as matrices ---------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear over tokens": (lambda: nn.Linear(5, 4, bias=False), (3, 7, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2), (2, 3, 11)),
    "conv2d": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(1, 2), padding=(1, 0)), (2, 3, 6, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 2, 3, 4, 3)),
    "same": (lambda: nn.Conv2d(3, 4, (3, 5), dilation=2, padding="same"), (2, 3, 5, 6)),
    "reflect": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 5, 5)),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 5, 5)),
    "without a batch": (lambda: nn.Conv2d(3, 4, 3), (3, 5, 5)),
    "grouped": (lambda: nn.Conv2d(6, 4, 3, groups=2), (2, 6, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), (2, 3, 4, 5)),
    "transposed, dilated, grouped": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=3, dilation=2, groups=2), (2, 4, 5)),
    "transposed, cropped": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, padding=2), (2, 2, 5, 5)),
}


class PadsItself(nn.Conv2d):
    """More behind than before, as TensorFlow has it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 2)), self.weight, self.bias, self.stride)


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: a linear layer with its weight the other way round."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
LAYERS["padded by itself"] = (lambda: PadsItself(3, 4, 3, stride=2), (2, 3, 6, 7))
LAYERS["Conv1D"] = (lambda: Conv1D(4, 5), (3, 7, 5))


def made(name: str) -> tuple[Any, Tensor, Tensor, LayerUse]:
    """A layer, its input, its output, and how it was seen to use its weight."""
    build, shape = LAYERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(build().double())
    seen: list[Any] = []
    x = noise(*shape)
    with torch.no_grad():
        listen_to_outputs(model, {"0": [lambda use, y: seen.extend([y, use])]}, lambda m: m(x))
    return model[0], x, *seen


def axis_of(layer: nn.Module, y: Tensor) -> int:
    return -1 if isinstance(layer, nn.Linear | Conv1D) else y.dim() - len(layer.kernel_size) - 1  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_matrix_times_its_inputs(name: str) -> None:
    layer, _, y, use = made(name)
    axis = axis_of(layer, y)
    count = y.numel() // y.shape[axis]
    rows = torch.randint(count, (40,), generator=torch.Generator().manual_seed(2))
    ours = compute_outputs(use.inputs(y.shape, rows), get_matrix(layer).mT)
    ours = ours if layer.bias is None else ours + layer.bias
    theirs = take_values(y, axis, torch.arange(y.shape[axis]), rows)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(theirs, y.movedim(axis, -1).reshape(count, -1)[rows])


@pytest.mark.parametrize("name", LAYERS)
def test_a_matrix_is_written_as_it_is_read(name: str) -> None:
    layer, *_ = made(name)
    new = noise(*get_matrix(layer).shape, seed=3)
    set_matrix(layer, new)
    assert torch.equal(get_matrix(layer), new)


@pytest.mark.parametrize("name", ["linear", "linear over tokens", "conv1d", "conv2d", "conv3d", "same", "grouped"])
def test_a_layer_reads_where_it_is_said_to(name: str) -> None:
    layer, x, y, use = made(name)
    d = len(getattr(layer, "kernel_size", ()))
    axis = axis_of(layer, y)
    rows = torch.arange(y.numel() // y.shape[axis])
    found = use.read_positions(tuple(x.shape[x.dim() - d :]), tuple(y.shape[y.dim() - d :]), rows)
    assert found is not None
    values = x.movedim(axis, -1).reshape(-1, x.shape[axis])[found] * (found >= 0)[..., None]  # (R, T, C)
    G = count_groups(layer)
    ours = values.unflatten(2, (G, -1)).permute(2, 0, 3, 1).flatten(2)
    torch.testing.assert_close(ours, use.inputs(y.shape, rows))


def test_layers_whose_spots_cannot_be_told() -> None:
    _, x, y, use = made("transposed")
    assert use.read_positions(tuple(x.shape[2:]), tuple(y.shape[2:]), torch.arange(3)) is None
    for name in ("reflect", "padded by itself"):
        _, x, _, use = made(name)
        assert use.x is not x  # what they read is not what they are given


# --- where layers are compared --------------------------------------------------------------------------


class Net(nn.Module):
    """Every way to the next op."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.relu = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.b, self.six = nn.Conv2d(3, 4, 1), nn.ReLU6()
        self.c = nn.Conv2d(4, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0])[:, None, None])
        self.d = nn.Conv2d(3, 3, 1)
        self.drop = nn.Dropout(0.5)
        self.e, self.head = nn.Conv2d(3, 2, 1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.a(x)))
        y = self.c(self.six(self.b(x))) * self.scale
        x = x + y
        x = self.drop(self.d(F.gelu(x))) + x
        return self.head(self.e(x.tanh()).mean((2, 3)))


def trails() -> ChannelTracker:
    model = Net().eval()
    model.bn.running_var.fill_(4.0)
    with torch.no_grad():
        return track_channels(model, lambda m: m(torch.randn(2, 2, 4, 4)))[0]


def test_points() -> None:
    found = trails()
    assert found.order == ["a", "b", "c", "d", "e", "head"]
    assert {n: p.sum for n, p in found.points.items()} == {
        "a": None,
        "b": None,
        "c": 0,
        "d": 1,
        "e": None,
        "head": None,
    }
    assert found.points["a"].module == "bn"
    torch.testing.assert_close(found.points["a"].tracked.factor, torch.full((3,), (4 + 1e-5) ** -0.5))
    assert found.points["c"].tracked.factor.tolist() == [2, 3, 4]
    clips = {"a": (0, inf), "b": (0, 6), "c": FULL_RANGE, "d": FULL_RANGE, "e": FULL_RANGE, "head": FULL_RANGE}
    assert {n: p.clip for n, p in found.points.items()} == clips
    assert {n: p.needs for n, p in found.points.items()} == {"a": -1, "b": 0, "c": 1, "d": 2, "e": 3, "head": 4}


def test_a_layer_that_alone_reads_another() -> None:
    found = trails()
    feeds = {n: found.find_source(n) for n in found.order}
    assert {n: f and f[0] for n, f in feeds.items()} == {n: "b" if n == "c" else None for n in found.order}
    assert feeds["c"] is not None
    assert feeds["c"][1](torch.tensor([-1.0, 3.0, 9.0])).tolist() == [0, 3, 6]


# --- least squares --------------------------------------------------------------------------------------


def equations(R: int = 80, K: int = 6, C: int = 3, seed: int = 0, level: float = 0.1) -> LayerEquations:
    X, now = noise(1, R, K, seed=seed) * torch.arange(1, K + 1) + 2, noise(R, C, seed=seed + 1)
    return LayerEquations(X, now, now + X[0] @ noise(K, C, seed=7) + 0.5 + level * noise(R, C, seed=seed + 2))


@pytest.mark.parametrize("rows", [80, 4])  # with fewer rows than unknowns, in another way
@pytest.mark.parametrize("room", [least_squares.FACTORS, 1])  # side by side, and one by one
def test_ridge_regression(monkeypatch: pytest.MonkeyPatch, rows: int, room: int) -> None:
    monkeypatch.setattr(least_squares, "FACTORS", room)
    e = equations(rows)
    inputs = StandardisedInputs(e.X, intercept=True)
    right, shift = inputs.right_side(e.target - e.now)
    for strengths in ([1e-4, 1e-2, 1.0], [1e-2], [1.0, 1e-3]):
        found = inputs.solve(right, strengths)
        assert list(found) == strengths
        for strength, change in found.items():
            weights = (change * inputs.scale.mT)[0]
            ours = weights, shift - inputs.mean[0, 0] @ weights
            for a, b in zip(ours, oracle.ridge(e.X[0], e.target - e.now, strength), strict=True):
                torch.testing.assert_close(a, b)


def test_regularisations_with_which_nothing_can_be_solved_are_left_out() -> None:
    X = torch.ones(1, 20, 2, dtype=torch.float64) * noise(20, 1)
    inputs = StandardisedInputs(X, intercept=True)
    right, _ = inputs.right_side(noise(20, 3, seed=1))
    assert list(inputs.solve(right, [-1.0, 1e-2, -3.0])) == [1e-2]
    assert inputs.solve(right, [-1.0]) == {}


@pytest.mark.parametrize("most", [0, 512])  # unknowns with which all are tried
@pytest.mark.parametrize(("rows", "level"), [(12, 0.1), (12, 30.0), (400, 0.0)])
def test_the_ridge_is_the_best_on_rows_held_out(
    monkeypatch: pytest.MonkeyPatch, rows: int, level: float, most: int
) -> None:
    monkeypatch.setattr(least_squares, "MANY_UNKNOWNS", most)
    e, held = equations(rows, 10, level=level), equations(200, 10, seed=3, level=level)
    best = fit_weights(e, held, build_squared_error(FULL_RANGE), StandardisedInputs(e.X, intercept=True))
    assert best is not None
    errors = {}
    for strength in RIDGES:
        weights, shift = oracle.ridge(e.X[0], e.target - e.now, strength)
        errors[strength] = float((held.now + held.X[0] @ weights + shift - held.target).square().sum())
    assert best.ridge == min(errors, key=lambda s: errors[s])
    spread = float((held.target - held.target.mean(0)).square().sum())
    assert best.after == pytest.approx(errors[best.ridge] / spread, rel=1e-6)


def test_inputs_that_do_not_vary_and_no_intercept() -> None:
    e = equations()
    X = torch.cat([e.X, torch.full_like(e.X[:, :, :1], 3.0)], 2)
    found = fit_weights(
        replace(e, X=X), replace(e, X=X), build_squared_error(FULL_RANGE), StandardisedInputs(X, intercept=True)
    )
    assert found is not None
    assert not found.delta[0, :, -1].any()
    plain = fit_weights(e, e, build_squared_error(FULL_RANGE), StandardisedInputs(e.X, intercept=False))
    assert plain is not None
    assert not plain.shift.any()
    assert plain.after > found.after


# --- measures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [(0.0, inf), (0.0, 6.0), (-1.0, 1.0)])
def test_squares_of_moved_targets_lie_above_the_error(clip: tuple[float, float]) -> None:
    target, now, other = (8 * noise(500, 2, seed=s) for s in range(3))
    towards = build_squared_error(clip).towards
    assert towards is not None
    goal = towards(now, target)
    error = lambda y: (y.clamp(*clip) - target.clamp(*clip)).square()  # noqa: E731
    assert (error(other) <= (other - goal).square() + 1e-12).all()
    # And touch it, but where outputs lie beyond an end and their target does not: those are pulled back.
    touch = (now == now.clamp(*clip)) | (now.clamp(*clip) == target.clamp(*clip))
    torch.testing.assert_close(error(now)[touch], (now - goal).square()[touch])


def test_steps_towards_probabilities_lower_the_divergence() -> None:
    target, now = 3 * noise(50, 4), noise(50, 4, seed=1)
    measure = build_divergence()
    assert measure.towards is not None
    errors = []
    for _ in range(6):
        errors.append(float(measure.error(now, target)))
        now = measure.towards(now, target)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.8 * errors[0]
    mean = target.softmax(1).mean(0).log().expand_as(target)
    assert float(measure.error(mean, target)) == pytest.approx(1)
    assert float(measure.error(target + 5, target)) == pytest.approx(0, abs=1e-12)


# --- two layers -----------------------------------------------------------------------------------------


def chain(seed: int, width: int = 4, R: int = 300) -> TwoLayerEquations:
    """Two layers of one position, whose hidden width is too small for what they should give."""
    X = noise(1, R, 6, seed=seed)
    W, V = noise(6, 12, seed=50), noise(12, 5, seed=51)
    target = (X[0] @ W).relu() @ V
    now = X[0] @ W[:, :width]
    first = LayerEquations(X, now, now)
    rest = torch.zeros_like(target)
    return TwoLayerEquations(first, torch.arange(R), 1, 1, torch.relu, target, now.relu() @ V[:width], rest)


def test_the_first_of_two_layers_moves_for_the_second() -> None:
    fitted, held = chain(1), chain(2)
    inputs = StandardisedInputs(fitted.first.X, intercept=True)
    through = TwoLayerSearch(fitted, held, build_squared_error(FULL_RANGE), inputs)
    own = fit_weights(fitted.first, held.first, build_squared_error(FULL_RANGE), inputs)
    assert own is not None
    assert not own.delta.any()
    start = through.solve_second(own, RIDGES).fit.after
    best = through.best(own)
    assert best is not None
    assert best.after < 0.9 * start
    assert best.after == pytest.approx(through.solve_second(best, RIDGES).fit.after, rel=0.05)


def test_inputs_of_the_second_layer_and_back_are_transposed() -> None:
    c = replace(chain(0), where=torch.tensor([0, 2, 3, 5, 8, 9]), taps=2, target=noise(5, 5), groups=2)
    hidden, missing = noise(6, 4), noise(2, 5, 4)
    torch.testing.assert_close((c.inputs(hidden) * missing).sum(), (hidden * c.back(missing)).sum())
