"""The loss of each example and the factors of its curvature in the outputs, against the oracle's dense ones."""

import math
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import Case, case, real_targets
from oracles import gauss_newton
from oracles import losses as oracle
from oracles.theta import thetas
from sosp.core.batches import Chunk
from sosp.core.losses import compute_example_losses
from sosp.core.outputs import find_logits
from sosp.errors import ArgumentError, DataError, LossError, OutputError
from sosp.scoring.output_curvature import factor_curvature

# D terms of size 1 (of size |f| <= 100 for the squared loss), added in another order.
ROUNDING = {"rtol": 1e-12, "atol": 1e-14}


def chunk(targets: Any, size: int | None = None, keyed: bool = False) -> Chunk:
    return Chunk(None, targets, ((0, 0, len(targets) if size is None else size),), keyed)


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(classes: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def curvature(loss: Any, outputs: Any, data: Chunk, classes: int | None = None, seed: int | None = None) -> Tensor:
    """``sum_v v v^T`` of every example, over all its outputs: (N, F, F)."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    V = [v.reshape(data.size, -1) for v in factor_curvature(loss, outputs, data, classes, generator)]
    return sum(torch.einsum("ni,nj->nij", v, v) for v in V) if V else torch.zeros(())


# --- R of cross-entropy


EXTREMES = torch.tensor(
    [[60.0, -60.0, 0.0], [-60.0, -60.0, 60.0], [60.0, 60.0, -60.0], [0.0, 0.0, 0.0], [-60.0, 59.0, 60.0],
     [1e3, 0.0, -1e3]],
    dtype=torch.float64,
)  # fmt: skip


@pytest.mark.parametrize("D", [2, 3, 4, 5, 6])
def test_factors_of_cross_entropy(D: int) -> None:
    f, y = randn(7, D, seed=D), labels(D, 7)
    found = list(factor_curvature("cross_entropy", f, chunk(y), None, None))
    assert len(found) == D - 1  # one fewer than outputs: adding a constant to all of them changes nothing
    assert torch.allclose(curvature("cross_entropy", f, chunk(y)), oracle.curvatures(f, y, "cross_entropy"), **ROUNDING)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_factors_of_extreme_outputs(shift: int) -> None:
    """The last class is special in the formula, so each class gets to be the last."""
    f, y = EXTREMES.roll(shift, 1), torch.zeros(len(EXTREMES), dtype=torch.long)
    found = curvature("cross_entropy", f, chunk(y))
    assert found.isfinite().all()
    assert torch.allclose(found, oracle.curvatures(f, y, "cross_entropy"), **ROUNDING)


def test_factors_do_not_depend_on_the_label() -> None:
    f = randn(4, 3)
    a, b = (curvature("cross_entropy", f, chunk(torch.full((4,), y))) for y in (0, 2))
    assert torch.equal(a, b)


# --- R of the squared loss and of others


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 2), (5, 1), (5,)])
def test_factors_of_the_squared_loss_are_the_unit_vectors(shape: tuple[int, ...]) -> None:
    f = randn(*shape)
    D = math.prod(shape[1:])
    assert torch.equal(curvature("mse", f, chunk(torch.zeros_like(f))), torch.eye(D, dtype=f.dtype).expand(5, D, D))


def exponential(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).exp().sum(1)


def logistic(f: Tensor, y: Tensor) -> Tensor:
    """One question per output, answered yes or no."""
    return F.softplus(-y.sign() * f).sum(1)


def smooth_huber(f: Tensor, y: Tensor) -> Tensor:
    return (1 + (f - y).square()).sqrt().sum(1)


def coupled(f: Tensor, y: Tensor) -> Tensor:
    """A curvature that is no diagonal."""
    return ((f - y).sum(1) ** 2 + (f[:, 0] - 2 * f[:, 1]) ** 4) / 7


def two_numbers_each(f: Tensor, y: Tensor) -> Tensor:
    return (f - y)[:, :2].square()


CONVEX = [exponential, logistic, smooth_huber, coupled, two_numbers_each]


def summed(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda f, y: loss(f, y).reshape(len(f), -1).sum(1)


@pytest.mark.parametrize("loss", CONVEX)
@pytest.mark.parametrize("D", [2, 5])
def test_factors_of_a_convex_loss(loss: Callable[[Tensor, Tensor], Tensor], D: int) -> None:
    f, y = randn(6, D, scale=1.0), randn(6, D, seed=1, scale=1.0)
    R = oracle.curvatures(f, y, summed(loss))
    assert torch.allclose(curvature(loss, f, chunk(y)), R, rtol=1e-10, atol=1e-12)


def test_factors_of_torchs_own_cross_entropy_are_the_same() -> None:
    f, y = randn(6, 4), labels(4, 6)
    found = curvature(nn.CrossEntropyLoss(reduction="none"), f, chunk(y))
    assert torch.allclose(found, oracle.curvatures(f, y, "cross_entropy"), rtol=1e-10, atol=1e-12)


def test_a_linear_loss_has_no_curvature() -> None:
    f = randn(4, 3)
    assert curvature(lambda f, y: f.sum(1), f, chunk(torch.zeros(4))).abs().max() == 0


def test_a_loss_with_parameters_of_its_own() -> None:
    """A slope that depends on something that asks for a gradient, but not on the outputs."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    f = randn(4, 3)
    assert curvature(lambda f, y: f @ weight, f, chunk(torch.zeros(4))).abs().max() == 0
    assert weight.grad is None


@pytest.mark.parametrize("loss", [lambda f, y: -f.square().sum(1), lambda f, y: f.sin().sum(1)])
def test_a_loss_that_is_not_convex_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(LossError, match=r"not convex.*sosp-h"):
        curvature(loss, randn(6, 3), chunk(torch.zeros(6)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_look_concave(dtype: torch.dtype) -> None:
    f, y = (8 * randn(20, 10)).to(dtype), torch.arange(20) % 10
    found = curvature(lambda f, y: F.cross_entropy(f, y, reduction="none"), f, chunk(y))
    exact = curvature("cross_entropy", f.double(), chunk(y))
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)


def test_too_many_outputs_for_a_loss_of_ones_own() -> None:
    with pytest.raises(LossError, match=r"3000.*sosp-h"):
        curvature(exponential, randn(2, 3000), chunk(torch.zeros(2)))


# --- sampled


@pytest.mark.parametrize("k", [1, 3])
def test_sampled_labels_are_unbiased(k: int) -> None:
    f, y = randn(2, 4, seed=3, scale=1.0), labels(4, 2)
    R = oracle.curvatures(f, y, "cross_entropy")
    draws = 4000
    copies = f.repeat(draws, 1)  # as many examples as draws: one call
    found = curvature("cross_entropy", copies, chunk(y.repeat(draws)), classes=k, seed=0)
    mean = found.view(draws, *R.shape).mean(0)
    # An entry of (p - e_y)(p - e_y)^T lies in [-1, 1]: its standard deviation is at most 1 / sqrt(k draws). 5 sigma.
    assert (mean - R).abs().max() < 5 / math.sqrt(k * draws)
    assert (mean - R).abs().max() > 0
    assert len(list(factor_curvature("cross_entropy", f, chunk(y), k, None))) == k


@pytest.mark.parametrize("k", [1, 2])
def test_sampled_outputs_of_the_squared_loss_are_unbiased(k: int) -> None:
    draws = 4000
    f = randn(draws, 3)
    mean = curvature("mse", f, chunk(torch.zeros_like(f)), classes=k, seed=0).mean(0)
    # Off the diagonal, means of k draws of +-1, each of standard deviation 1; on it, exactly 1.
    assert torch.allclose(mean.diagonal(), torch.ones(3, dtype=f.dtype), rtol=1e-12)
    assert (mean - torch.eye(3)).abs().max() < 5 / math.sqrt(k * draws)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_sampling_is_repeatable_and_depends_on_the_generator(loss: str) -> None:
    f = randn(20, 5)
    data = chunk(labels(5, 20) if loss == "cross_entropy" else torch.zeros_like(f))
    assert torch.equal(curvature(loss, f, data, 2), curvature(loss, f, data, 2))
    assert torch.equal(curvature(loss, f, data, 2, seed=1), curvature(loss, f, data, 2, seed=1))
    assert not torch.equal(curvature(loss, f, data, 2, seed=1), curvature(loss, f, data, 2, seed=2))


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    curvature("cross_entropy", randn(3, 4), chunk(labels(4, 3)), 2)
    curvature("mse", randn(3, 4), chunk(torch.zeros(3, 4)), 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("k", [0, -1, 1.5, True, "all"])
def test_classes_must_be_a_positive_number(loss: str, k: Any) -> None:
    f = randn(3, 4)
    with pytest.raises(ArgumentError, match=r"classes=.*positive whole number"):
        curvature(loss, f, chunk(labels(4, 3) if loss == "cross_entropy" else f), k)


def test_classes_are_for_losses_with_a_name() -> None:
    with pytest.raises(ArgumentError, match=r"classes=.*your own loss"):
        curvature(exponential, randn(3, 4), chunk(randn(3, 4)), 2)


# --- several positions per example: pixels (N, D, H, W), tokens (N, T, D)


def mean_over_positions(f: Tensor, y: Tensor) -> Tensor:
    """Classes last, (P, D) and (P,): the loss of one example, positions that are ignored left out."""
    kept = y != -100
    return oracle.cross_entropy(f[kept], y[kept]).sum() / max(1, int(kept.sum()))


def dense_R(f: Tensor, y: Tensor, last: bool) -> Tensor:
    """The Hessian of one example's loss in all of its outputs, in their own order, by autograd."""
    D = f.shape[-1] if last else f.shape[0]

    def loss(x: Tensor) -> Tensor:
        moved = x if last else x.movedim(0, -1)
        return mean_over_positions(moved.reshape(-1, D), y.reshape(-1))

    return torch.autograd.functional.hessian(loss, f).reshape(f.numel(), f.numel())


def with_ignored(y: Tensor) -> Tensor:
    """One example with some positions ignored, one with all."""
    y = y.clone()
    y[0].view(-1)[::2] = -100
    y[1] = -100
    return y


POSITIONS = {
    "tokens": ((4, 3, 5), (4, 3), True),
    "pixels": ((4, 5, 2, 3), (4, 2, 3), False),
    "one axis": ((4, 5, 3), (4, 3), False),
    "as many tokens as classes": ((4, 3, 3), (4, 3), False),  # torch's own order goes first
    "tokens in rows": ((4, 2, 3, 5), (4, 2, 3), True),
}


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
def test_several_positions(name: str, ignored: bool) -> None:
    shape, positions, last = POSITIONS[name]
    D = shape[-1] if last else shape[1]
    f, y = randn(*shape), labels(D, *positions)
    y = with_ignored(y) if ignored else y
    moved = f if last else f.movedim(1, -1)
    values = torch.stack([mean_over_positions(a.reshape(-1, D), b.reshape(-1)) for a, b in zip(moved, y, strict=True)])
    assert torch.allclose(compute_example_losses("cross_entropy", f, chunk(y)), values, **ROUNDING)
    R = torch.stack([dense_R(a, b, last) for a, b in zip(f, y, strict=True)])
    assert torch.allclose(curvature("cross_entropy", f, chunk(y)), R, rtol=1e-10, atol=1e-13)


def test_sampled_labels_of_several_positions_are_unbiased() -> None:
    f, y = randn(2, 3, 4, scale=1.0), with_ignored(labels(4, 2, 3))
    draws = 3000
    found = curvature("cross_entropy", f.repeat(draws, 1, 1), chunk(y.repeat(draws, 1)), classes=2, seed=0)
    mean = found.view(draws, 2, 12, 12).mean(0)
    R = torch.stack([dense_R(a, b, True) for a, b in zip(f, y, strict=True)])
    # Entries in [-1, 1] as above: positions share the weight 1.
    assert (mean - R).abs().max() < 5 / math.sqrt(2 * draws)
    assert mean[1].abs().max() == 0


def test_an_example_without_a_label_counts_nothing() -> None:
    f, y = randn(3, 4), torch.tensor([1, -100, 2])
    assert compute_example_losses("cross_entropy", f, chunk(y))[1] == 0
    R = curvature("cross_entropy", f, chunk(y))
    assert R[1].abs().max() == 0
    assert torch.allclose(R[[0, 2]], oracle.curvatures(f, y, "cross_entropy")[[0, 2]], **ROUNDING)


# --- soft labels


def test_soft_labels() -> None:
    f, y = randn(5, 4), randn(5, 4, seed=1).softmax(1)
    values = -(y * f.log_softmax(1)).sum(1)
    assert torch.allclose(compute_example_losses("cross_entropy", f, chunk(y)), values, **ROUNDING)
    assert torch.allclose(compute_example_losses("cross_entropy", f, chunk(y.float())), values, rtol=1e-6)
    R = oracle.curvatures(f, y, "cross_entropy")
    assert torch.allclose(curvature("cross_entropy", f, chunk(y)), R, rtol=1e-12, atol=1e-13)


def test_soft_labels_that_add_up_to_something_else() -> None:
    """Weights of examples in disguise: the curvature has them too."""
    f, y = randn(5, 4), randn(5, 4, seed=1).softmax(1) * torch.arange(5.0)[:, None]
    R = oracle.curvatures(f, y, lambda f, y: -(y * f.log_softmax(1)).sum(1))
    assert torch.allclose(curvature("cross_entropy", f, chunk(y)), R, rtol=1e-10, atol=1e-12)


def test_soft_labels_of_several_positions() -> None:
    f, y = randn(3, 4, 2), randn(3, 4, 2, seed=1).softmax(1)
    values = -(y * f.log_softmax(1)).sum(1).mean(1)
    assert torch.allclose(compute_example_losses("cross_entropy", f, chunk(y)), values, **ROUNDING)
    hard = curvature("cross_entropy", f, chunk(labels(4, 3, 2)))
    assert torch.allclose(curvature("cross_entropy", f, chunk(y)), hard, rtol=1e-12, atol=1e-13)


# --- one loss per example


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", smooth_huber])
def test_per_example_is_the_oracles(loss: Any) -> None:
    f = randn(6, 4)
    y = labels(4, 6) if loss == "cross_entropy" else randn(6, 4, seed=1)
    assert torch.allclose(compute_example_losses(loss, f, chunk(y)), oracle.per_example(f, y, loss), **ROUNDING)


def test_per_example_of_extreme_outputs_is_finite() -> None:
    y = torch.full((len(EXTREMES),), 2)
    assert torch.allclose(
        compute_example_losses("cross_entropy", EXTREMES, chunk(y)), oracle.cross_entropy(EXTREMES, y), **ROUNDING
    )


def test_the_squared_loss_sums_over_everything_but_the_examples() -> None:
    f, y = randn(3, 2, 4), randn(3, 2, 4, seed=1)
    flat = oracle.squared(f.flatten(1), y.flatten(1))
    assert torch.allclose(compute_example_losses("mse", f, chunk(y)), flat, **ROUNDING)
    one = compute_example_losses("mse", f[:, 0, 0], chunk(y[:, 0, 0]))
    assert torch.allclose(one, 0.5 * (f - y)[:, 0, 0] ** 2, **ROUNDING)


def test_a_models_own_loss_counts_once_per_example() -> None:
    found = compute_example_losses("cross_entropy", {"loss": torch.tensor(2.5)}, chunk(None, size=3, keyed=True))
    assert found.tolist() == [2.5, 2.5, 2.5]
    found = compute_example_losses(
        "cross_entropy", SimpleNamespace(loss=torch.tensor([1.0, 2.0])), chunk(None, 2, keyed=True)
    )
    assert found.tolist() == [1.5, 1.5]  # DataParallel returns a loss per device


def batch_mean(f: Tensor, y: Tensor, shifted: bool) -> Tensor:
    """As Hugging Face's models do: the mean over all tokens of the batch that count."""
    f, y = (f[:, :-1], y[:, 1:]) if shifted else (f, y)
    kept = y != -100
    return oracle.cross_entropy(f[kept], y[kept]).mean()


@pytest.mark.parametrize("shifted", [False, True])
def test_the_curvature_of_a_models_own_loss(shifted: bool) -> None:
    """Tokens share the weight of the batch, not of their sentence, and a language model's labels are one ahead."""
    f, y = randn(3, 4, 5), labels(5, 3, 4)
    y[0, 1:] = -100
    y[2, 3] = -100
    own = batch_mean(f, y, shifted)
    assert not torch.isclose(own, batch_mean(f, y, not shifted), rtol=0.01)
    H = torch.autograd.functional.hessian(lambda f: 3 * batch_mean(f, y, shifted), f).reshape(3, 20, 3, 20)
    found = curvature("cross_entropy", {"loss": own.float(), "logits": f}, chunk(y, keyed=True))
    assert torch.allclose(found, torch.stack([H[n, :, n] for n in range(3)]), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("own", "y"),
    [
        (torch.tensor(0.1), labels(4, 6)),
        (torch.tensor(0.1), randn(6, 4)),
        (torch.tensor(0.1), None),
        (torch.tensor(0.1), labels(4, 6, 2)),
    ],
)
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_models_own_loss_of_unknown_curvature_is_refused(loss: str, own: Tensor, y: Tensor | None) -> None:
    with pytest.raises(LossError, match=r"its own loss.*not the cross-entropy.*sosp-h"):
        curvature(loss, {"loss": own, "logits": randn(6, 4)}, chunk(y, size=6, keyed=True))


# --- finding the logits

Named = namedtuple("Named", ["features", "logits"])


@pytest.mark.parametrize(
    "outputs",
    [
        torch.ones(2),
        {"logits": torch.ones(2)},
        {"out": torch.ones(2), "aux": torch.zeros(2)},
        SimpleNamespace(logits=torch.ones(2)),
        Named(torch.zeros(2), torch.ones(2)),
        (torch.ones(2), torch.zeros(2)),
        [torch.ones(2)],
        {"ids": torch.zeros(2, dtype=torch.long), "x": torch.ones(2)},
        {"hidden_states": (torch.zeros(2),), "answer": {"x": torch.ones(2)}},
        SimpleNamespace(x=torch.ones(2)),
    ],
)
def test_logits_are_found(outputs: Any) -> None:
    assert torch.equal(find_logits(outputs), torch.ones(2))


@pytest.mark.parametrize(
    "outputs", [None, {}, {"x": torch.ones(2, dtype=torch.long)}, (), "abc", SimpleNamespace(x=1), ({},)]
)
def test_logits_that_cannot_be_found_are_refused(outputs: Any) -> None:
    with pytest.raises(OutputError, match=r"returns a .*logits.*Wrap the model"):
        find_logits(outputs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_outputs_without_a_derivative_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(OutputError, match=r"of type .*logits"):
        find_logits(torch.ones(2, dtype=dtype))


# --- a loss of one's own over what the model returns, whole


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda f: {"logits": f, "size": 3}, lambda o: o["logits"]),
        (lambda f: (f, f.sum()), lambda o: o[0]),
        (lambda f: SimpleNamespace(logits=f, name="x"), lambda o: o.logits),
        (lambda f: Named(f.sum(), f), lambda o: o.logits),
    ],
    ids=["dict", "tuple", "class", "named tuple"],
)
def test_a_loss_of_ones_own_gets_the_whole_output(wrap: Any, unwrap: Any) -> None:
    f, y = randn(5, 3), randn(5, 3, seed=1)
    found = curvature(lambda o, y: smooth_huber(unwrap(o), y), wrap(f), chunk(y))
    assert torch.allclose(found, oracle.curvatures(f, y, smooth_huber), rtol=1e-10, atol=1e-12)


def test_a_loss_over_two_outputs_has_no_gauss_newton_matrix_here() -> None:
    f = randn(5, 3)
    with pytest.raises(LossError, match=r"besides its logits.*sosp-h"):
        curvature(lambda o, y: o[0].square().sum(1) + o[1].square(), (f, f[:, 0]), chunk(torch.zeros(5)))


# --- what does not fit together is refused, in the user's words


@pytest.mark.parametrize(
    ("loss", "f", "y", "words"),
    [
        ("cross_entropy", randn(3, 4), torch.tensor([0, 4, 1]), ["example 1 of batch 0", "is 4", "labels 0 to 3"]),
        ("cross_entropy", randn(3, 4), torch.tensor([0, 1, -1]), ["example 2 of batch 0", "is -1"]),
        ("cross_entropy", randn(3, 4, 2), torch.tensor([[0, 1], [1, 9], [0, 0]]), ["example 1 of batch 0", "is 9"]),
        ("cross_entropy", randn(3, 4), torch.zeros(3, 1, dtype=torch.long), ["(3, 4)", "(3, 1)", "do not match"]),
        ("cross_entropy", randn(3, 4, 2), torch.zeros(3, dtype=torch.long), ["(3, 4, 2)", "(3,)", "do not match"]),
        ("cross_entropy", randn(6, 4), torch.zeros(3, dtype=torch.long), ["(6, 4)", "(3,)", "do not match"]),
        ("cross_entropy", randn(3), torch.zeros(3, dtype=torch.long), ["(3,)", "one output per class"]),
        ("cross_entropy", randn(3, 4), torch.zeros(3), ["real-valued", "(3,)", "y.long()"]),
        ("cross_entropy", randn(3, 4), torch.zeros(3, 5), ["(3, 5)", "(3, 4)", "probabilities"]),
        ("cross_entropy", randn(3, 4), randn(3, 4), ["probability", "example", "mse"]),
        ("cross_entropy", randn(3, 4), [0, 1, 2], ["tensor of labels", "list"]),
        ("mse", randn(3, 4), torch.zeros(3), ["(3, 4)", "(3,)", "Reshape"]),
        ("mse", randn(3, 1), torch.zeros(3), ["(3, 1)", "(3,)", "Reshape"]),
        ("mse", randn(3, 1), [0, 1, 2], ["(3, 1)", "list"]),
    ],
)  # fmt: skip
def test_labels_that_do_not_fit(loss: str, f: Tensor, y: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        compute_example_losses(loss, f, chunk(y))
    assert [w for w in words if w not in str(caught.value)] == []


def test_one_output_has_no_cross_entropy() -> None:
    with pytest.raises(LossError, match=r"single output.*binary_cross_entropy_with_logits"):
        compute_example_losses("cross_entropy", randn(3, 1), chunk(torch.zeros(3, dtype=torch.long)))


# --- and through the library: the Gauss-Newton matrix of a loss is the one the oracle makes of its R


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", smooth_huber, exponential])
def test_pairs_with_every_loss(loss: Any) -> None:
    c: Case = case("softplus")
    y = c.targets if loss == "cross_entropy" else 0.3 * real_targets(c)
    found = sosp.score(c.model, (c.inputs, y), method="sosp-i", loss=loss).pairs
    wanted = gauss_newton.pairs(c.model, thetas(c.model, c.norms, "features"), c.inputs, y, loss)
    assert found is not None
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
