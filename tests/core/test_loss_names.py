"""Losses as people pass them: torch's modules and functions, names, and functions that return one number."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import case, real_targets
from oracles import gauss_newton
from oracles import losses as oracle
from oracles.theta import thetas
from sosp.core.batches import Chunk
from sosp.core.loss_names import name_loss, resolve_loss
from sosp.core.losses import compute_example_losses
from sosp.errors import ArgumentError, DataError, LossError
from sosp.scoring.output_curvature import factor_curvature

ROUNDING = {"rtol": 1e-12, "atol": 1e-14}  # a few numbers of size 1, added in another order
W = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
METHODS = ("sosp-h", "sosp-i", "first-order", "exact")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chunk(targets: Tensor) -> Chunk:
    return Chunk(None, targets, ((0, 0, len(targets)),))


LABELS = torch.tensor([0, 3, 1, 1, 2, 3])
YES_OR_NO = (randn(6, 4, seed=2) > 0).long()


# --- what is known


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.CrossEntropyLoss(), "cross_entropy"),
        (F.cross_entropy, "cross_entropy"),
        (nn.BCEWithLogitsLoss(), "bce"),
        (F.binary_cross_entropy_with_logits, "bce"),
        (nn.MSELoss(), "mse"),
        (nn.MSELoss(reduction="sum"), "mse"),
        (F.mse_loss, "mse"),
    ],
)
def test_torchs_losses_are_known(loss: Any, name: str) -> None:
    assert name_loss(loss) == resolve_loss(loss) == resolve_loss(name) == name


class Focal(nn.CrossEntropyLoss):
    """Computes something of its own."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        values = F.cross_entropy(input, target, reduction="none")
        return (1 - (-values).exp()) ** 2 * values


def test_a_subclass_is_a_loss_of_its_own() -> None:
    assert name_loss(Focal()) is None
    values = compute_example_losses(Focal(), randn(6, 4), chunk(LABELS))
    assert torch.equal(values, Focal()(randn(6, 4), LABELS))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
def test_a_class_is_refused(loss: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"loss={loss.__name__} is a class.*{loss.__name__}\(\)"):
        sosp.score(nn.Linear(2, 2), (torch.ones(3, 2), torch.zeros(3)), loss=loss)


# --- their values


@pytest.mark.parametrize(
    "options",
    [{}, {"weight": W}, {"ignore_index": 1}, {"label_smoothing": 0.1}, {"weight": W, "label_smoothing": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_of_cross_entropy(options: dict[str, Any], reduction: str) -> None:
    found = compute_example_losses(nn.CrossEntropyLoss(**options, reduction=reduction), randn(6, 4), chunk(LABELS))
    assert torch.allclose(found, F.cross_entropy(randn(6, 4), LABELS, reduction="none", **options), **ROUNDING)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_of_several_positions(reduction: str) -> None:
    f, y = randn(2, 4, 3), torch.tensor([[0, 3, -100], [1, -100, -100]])
    terms = [[W[k] * -f[n].log_softmax(0)[k, p] for p, k in enumerate(row) if k >= 0] for n, row in enumerate(y)]
    wanted = torch.stack([sum(t) / (len(t) if reduction == "mean" else 1) for t in terms])
    found = compute_example_losses(nn.CrossEntropyLoss(W, reduction=reduction), f, chunk(y))
    assert torch.allclose(found, wanted, **ROUNDING)


def logistic(f: Tensor, y: Tensor) -> Tensor:
    p = 1 / (1 + (-f).exp())
    return -(y * p.log() + (1 - y) * (1 - p).log()).flatten(1).mean(1)


def test_binary_cross_entropy() -> None:
    f = randn(6, 4)
    for y in (YES_OR_NO, YES_OR_NO.double() * 0.8 + 0.1):
        found = compute_example_losses("bce", f, chunk(y))
        assert torch.allclose(found, logistic(f, y), **ROUNDING)
        assert torch.allclose(found.mean(), nn.BCEWithLogitsLoss()(f, y.double()), **ROUNDING)


@pytest.mark.parametrize("options", [{"weight": W}, {"pos_weight": W}], ids=str)
def test_options_of_binary_cross_entropy(options: dict[str, Tensor]) -> None:
    found = compute_example_losses(nn.BCEWithLogitsLoss(**options), randn(6, 4), chunk(YES_OR_NO))
    wanted = nn.BCEWithLogitsLoss(**options, reduction="none")(randn(6, 4), YES_OR_NO.double()).mean(1)
    assert torch.allclose(found, wanted, **ROUNDING)
    summed = compute_example_losses(nn.BCEWithLogitsLoss(**options, reduction="sum"), randn(6, 4), chunk(YES_OR_NO))
    assert torch.allclose(summed, 4 * wanted, **ROUNDING)


@pytest.mark.parametrize(
    ("loss", "y", "words"),
    [
        ("bce", LABELS, ["(6, 4)", "(6,)", "y[:, None]"]),
        ("bce", YES_OR_NO * 2, ["example 0 of batch 0", "2", "from 0 to 1"]),
        (nn.CrossEntropyLoss(ignore_index=0), LABELS - 100, ["example", "labels 0 to 3"]),
    ],
)
def test_targets_that_do_not_fit(loss: Any, y: Tensor, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        compute_example_losses(loss, randn(6, 4), chunk(y))
    assert [w for w in words if w not in str(caught.value)] == []


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(LossError, match="weights for 4 classes, and the model 3"):
        compute_example_losses(nn.CrossEntropyLoss(W), randn(6, 3), chunk(LABELS % 3))
    with pytest.raises(LossError, match=r"weight of shape \(6, 4\)"):
        compute_example_losses(nn.BCEWithLogitsLoss(randn(6, 4)), randn(6, 4), chunk(YES_OR_NO))


# --- their curvature, and through the library


def curvature(loss: Any, f: Tensor, y: Tensor, classes: int | None = None) -> Tensor:
    return sum(torch.einsum("ni,nj->nij", v, v) for v in factor_curvature(loss, f, chunk(y), classes, None))


def test_factors_of_binary_cross_entropy() -> None:
    R = oracle.curvatures(randn(6, 4), YES_OR_NO, logistic)
    assert torch.allclose(curvature("bce", randn(6, 4), YES_OR_NO), R, rtol=1e-10, atol=1e-12)
    draws = 4000
    found = curvature("bce", randn(2, 4).repeat(draws, 1), YES_OR_NO[:2].repeat(draws, 1), classes=2)
    # Entries of (p - y)(p - y)^T / 4 lie in [-1/4, 1/4]. 5 sigma of the mean of 2 * draws of them.
    R = oracle.curvatures(randn(2, 4), YES_OR_NO[:2], logistic)
    assert (found.view(draws, 2, 4, 4).mean(0) - R).abs().max() < 5 / 4 / (2 * draws) ** 0.5


def weighted(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, weight=W.to(f), reduction="none")


def smoothed(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, label_smoothing=0.1, reduction="none")


KNOWN: dict[str, tuple[Any, Any, Callable[[Any], Tensor]]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), "cross_entropy", lambda c: c.targets),
    "function": (F.cross_entropy, "cross_entropy", lambda c: c.targets),
    "weighted": (nn.CrossEntropyLoss(W), weighted, lambda c: c.targets),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), smoothed, lambda c: c.targets),
    "bce": (nn.BCEWithLogitsLoss(), logistic, lambda c: F.one_hot(c.targets, 4)),
    "bce function": (F.binary_cross_entropy_with_logits, logistic, lambda c: F.one_hot(c.targets, 4).double()),
    "mse": (nn.MSELoss(), "mse", real_targets),
    "mse function": (F.mse_loss, "mse", real_targets),
    "mean of the user": (lambda f, y: F.cross_entropy(f, y), "cross_entropy", lambda c: c.targets),
    "mean of a class": (nn.HuberLoss(), lambda f, y: F.huber_loss(f, y, reduction="none").mean(1), real_targets),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.filterwarnings("ignore::sosp.SlowPathWarning")
def test_a_known_loss_gives_the_scores_of_its_losses_per_example(name: str, method: str) -> None:
    c = case("softplus")
    given, same, targets = KNOWN[name]
    found, wanted = (sosp.score(c.model, (c.inputs, targets(c)), method=method, loss=x).scores for x in (given, same))
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["cross-entropy", "weighted", "smoothed", "bce", "mean of the user"])
def test_known_losses_take_the_fast_way(name: str) -> None:
    """Warnings are errors: a slower way would be told."""
    c = case("softplus")
    loss, _, targets = KNOWN[name]
    assert sosp.score(c.model, (c.inputs, targets(c)), loss=loss).scores.isfinite().all()


def test_pairs_of_binary_cross_entropy_are_the_dense_ones() -> None:
    c = case("softplus")
    y = F.one_hot(c.targets, 4)
    found = sosp.score(c.model, (c.inputs, y), method="sosp-i", loss="bce").pairs
    assert found is not None
    wanted = gauss_newton.pairs(c.model, thetas(c.model, c.norms, "features"), c.inputs, y, logistic)
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", ["bce", nn.BCEWithLogitsLoss(pos_weight=W), nn.CrossEntropyLoss(W), nn.MSELoss()])
def test_known_losses_need_no_labels_where_the_method_needs_none(loss: Any) -> None:
    c = case("softplus")
    assert sosp.score(c.model, c.inputs, method="obd", loss=loss).scores.isfinite().all()


# --- repair fits outputs as the loss takes them


@pytest.mark.parametrize(
    ("loss", "name"),
    [(nn.CrossEntropyLoss(), "cross_entropy"), (nn.CrossEntropyLoss(label_smoothing=0.1), "cross_entropy"),
     (F.mse_loss, "mse"), (nn.BCEWithLogitsLoss(), "mse"), ("bce", "mse")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*inputs.*")
def test_repair_takes_known_losses(loss: Any, name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(200, 5)
    small = sosp.prune(model, x, ratio=0.5, method="sosp-obs", loss=name).model
    found, wanted = (sosp.repair(small, model, x, loss=k) for k in (loss, name))
    assert found.classes == (name == "cross_entropy")
    assert torch.equal(found.model[2].weight, wanted.model[2].weight)
    through = sosp.prune(
        model, (x, model(x).argmax(1)), ratio=0.5, method="magnitude-l1", loss=loss, repair=True
    ).repaired
    assert through is not None
    assert through.classes == found.classes


def test_repair_refuses_a_loss_that_says_nothing_about_outputs() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(ArgumentError, match=r"loss=.*not known.*cross_entropy, bce, mse"):
        sosp.repair(model, model, torch.randn(200, 5), loss=lambda f, y: f.sum(1))


# --- a function that returns one number


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: {"f": f}, lambda f: SimpleNamespace(f=f)])
def test_a_mean_over_examples_is_taken_per_example(wrap: Any) -> None:
    f, y = randn(6, 4), LABELS

    def loss(out: Any, y: Tensor) -> Tensor:
        f = out if isinstance(out, Tensor) else out["f"] if isinstance(out, dict) else out.f
        return F.cross_entropy(f, y)

    found = compute_example_losses(loss, wrap(f), chunk(y))
    assert torch.allclose(found, oracle.per_example(f, y, "cross_entropy"), **ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_recognised_in_low_precision(dtype: torch.dtype) -> None:
    f, y = randn(500, 4).to(dtype), LABELS[torch.arange(500) % 6]
    assert compute_example_losses(lambda f, y: F.cross_entropy(f, y), f, chunk(y)).shape == (500,)


NOT_MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum": lambda f, y: F.cross_entropy(f, y, reduction="sum"),
    "a weighted mean": lambda f, y: F.cross_entropy(f, y, weight=W),
    "a mean over those that count": lambda f, y: F.cross_entropy(f, y, ignore_index=3),
    "examples compared": lambda f, y: (f.T @ f).square().mean(),
}


@pytest.mark.parametrize("name", NOT_MEANS)
def test_what_is_not_a_mean_over_examples_is_refused(name: str) -> None:
    with pytest.raises(LossError, match=r"one number for 6 examples.*not the mean.*one loss per example"):
        compute_example_losses(NOT_MEANS[name], randn(6, 4), chunk(LABELS))


def test_a_number_that_is_not_finite_names_its_example() -> None:
    f = randn(6, 4)
    f[3, 0] = float("nan")
    with pytest.raises(LossError, match="example 3 of batch 0 is nan"):
        compute_example_losses(lambda f, y: F.cross_entropy(f, y), f, chunk(LABELS))
