"""Scores by the network's own outputs: equal to a loss of one's own on soft targets, with no slope and no labels."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import Case, case, to_score
from sosp.errors import ArgumentError, LossError
from sosp.scoring.label_certainty import FewEffectiveExamplesWarning

EXACT = 1e-10  # sums of a few hundred terms in double precision
T = 4.0
METHODS = ("sosp-h", "sosp-i", "sosp-i-diagonal", "exact")


def structures(c: Case) -> sosp.Structures:
    return sosp.find_structures(c.model, c.inputs[:2])


def terms(saliency: sosp.Saliency) -> list[Tensor]:
    return [t for t in (saliency.first, saliency.second, saliency.pairs) if t is not None]


def softened(f: Tensor, q: Tensor) -> Tensor:
    return F.cross_entropy(f / T, q, reduction="none")


def outputs(c: Case) -> Tensor:
    with torch.no_grad():
        return c.model(c.inputs)


def check_equal(found: sosp.Saliency, wanted: sosp.Saliency) -> None:
    for a, b in zip(terms(found), terms(wanted), strict=True):
        assert (a - b).abs().max() <= EXACT * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", to_score())
def test_it_is_the_cross_entropy_with_soft_targets(name: str, method: str) -> None:
    c = case(name)
    s, data = structures(c), [(c.inputs, (outputs(c) / T).softmax(1))]
    wanted = sosp.score(c.model, data, method=method, structures=s, loss=softened)
    found = sosp.score(c.model, c.inputs, method=method, structures=s, targets="own", temperature=T)
    check_equal(found, wanted)
    assert found.first is not None
    assert found.first.abs().max() < EXACT  # a network that is its own target has no slope
    assert found.scores.any()


def squared(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (f - y).square().sum(1)


def binary(f: Tensor, q: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(f / T, q, reduction="none").mean(1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("loss", "own", "targets"),
    [("mse", squared, lambda f: f), ("bce", binary, lambda f: (f / T).sigmoid())],
    ids=["mse", "bce"],
)
def test_numbers_and_independent_logits(loss: str, own: Any, targets: Any, method: str) -> None:
    c = case("residual")
    s, data = structures(c), [(c.inputs, targets(outputs(c)))]
    wanted = sosp.score(c.model, data, method=method, structures=s, loss=own)
    check_equal(
        sosp.score(c.model, c.inputs, method=method, structures=s, loss=loss, targets="own", temperature=T), wanted
    )


@pytest.mark.parametrize("method", ["sosp-h", "sosp-i"])
def test_labels_and_batches_do_not_matter(method: str) -> None:
    c = case("conv-bn")
    s = structures(c)
    wrong = (c.targets + 1) % 3
    forms = [c.inputs, (c.inputs, c.targets), [(c.inputs[:3], wrong[:3]), (c.inputs[3:], wrong[3:])]]
    first, *others = (sosp.score(c.model, x, method=method, structures=s, targets="own") for x in forms)
    for other in others:
        check_equal(other, first)


class Tokens(nn.Module):
    """Numbers for every token, under a name, and the answers of a span."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.words, self.hidden, self.head = nn.Embedding(9, 6), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        f = self.head(torch.tanh(self.hidden(self.words(input_ids))))
        return {self.name: f[..., 0] if self.name == "start_logits" else f}


@pytest.mark.parametrize("method", ["sosp-h", "sosp-i"])
@pytest.mark.parametrize("name", ["logits", "start_logits", "last_hidden_state"])
def test_padding_does_not_count(name: str, method: str) -> None:
    torch.manual_seed(0)
    model, ids = Tokens(name).double().eval(), torch.randint(9, (4, 6))
    mask = (torch.arange(6) < torch.tensor([[6], [4], [2], [3]])).long()
    other = torch.where(mask.bool(), ids, (ids + 1) % 9)
    found = [
        sosp.score(model, [{"input_ids": x, "attention_mask": mask}], method=method, targets="own")
        for x in (ids, other)
    ]
    check_equal(*found)
    assert found[0].scores.any()


class Heads(nn.Module):
    """Several outputs under names, computed from what a network returns."""

    def __init__(self, model: nn.Module, heads: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.heads = model, heads

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        f = self.model(x)
        return {name: head(f) for name, head in self.heads.items()}


HEADS = {"box": lambda f: torch.stack([f[:, 0], 50 * f[:, 1]], 1), "kind_logits": lambda f: 2 * f[:, 1:]}


@pytest.mark.parametrize("method", METHODS)
def test_numbers_count_in_units_of_their_variance(method: str) -> None:
    c = case("residual")
    model = Heads(c.model, {"box": HEADS["box"]})
    s = sosp.find_structures(model, c.inputs[:2])
    with torch.no_grad():
        y = model(c.inputs)["box"]
    variance = (y - y.mean(0)).square().mean(0)

    def relative(f: dict[str, Tensor], y: Tensor) -> Tensor:
        return 0.5 * ((f["box"] - y) ** 2 / variance).mean(1)

    wanted = sosp.score(model, [(c.inputs, y)], method=method, structures=s, loss=relative)
    found = sosp.score(model, c.inputs, method=method, structures=s, targets="own")
    check_equal(found, wanted)
    assert found.targets == "own box (squared error)"
    assert found.loss == "mse"


@pytest.mark.parametrize("method", METHODS)
def test_several_outputs_are_added(method: str) -> None:
    c = case("residual")
    both, *single = (
        sosp.score(Heads(c.model, heads), c.inputs, method=method, targets="own", temperature=T)
        for heads in (HEADS, *({name: head} for name, head in HEADS.items()))
    )
    for a, *parts in zip(terms(both), *map(terms, single), strict=True):
        assert (a - sum(parts)).abs().max() <= EXACT * max(1.0, float(a.abs().max()))
    assert all(part.scores.any() for part in single)
    assert both.targets == "own box (squared error) + kind_logits (cross-entropy, T = 4)"


def test_several_outputs_are_sampled_together() -> None:
    c = case("residual")
    model, x = Heads(c.model, HEADS), c.inputs.repeat(400, 1, 1, 1)
    every = sosp.score(model, c.inputs, method="sosp-i", targets="own").pairs
    found = sosp.score(model, x, method="sosp-i", targets="own", classes=1, examples=None).pairs
    assert every is not None
    assert found is not None
    assert (found - every).norm() < 0.1 * every.norm()  # 400 draws of every example: 1 / sqrt(400) = 5 %


@pytest.mark.parametrize("scale", [1.0, 100.0, 200.0, 400.0])
def test_the_temperature_leaves_a_quarter_of_the_examples_effective(scale: float) -> None:
    c = case("mlp")
    model, x = nn.Sequential(c.model, Scaled(scale)), c.inputs.repeat(7, 1)[:64]
    with torch.no_grad():
        p = [(model(x) / T).softmax(1) for T in (1, 2, 4, 8)]
    r = [1 - q.square().sum(1) for q in p]
    wanted = next((T for T, u in zip((1, 2, 4), r[:3], strict=True) if u.sum() ** 2 > 16 * u.square().sum()), 8)
    found = sosp.score(model, x, method="sosp-i", targets="own")
    check_equal(found, sosp.score(model, x, method="sosp-i", targets="own", temperature=wanted))
    assert found.targets == f"own logits (cross-entropy, T = {wanted})"
    assert wanted == {1.0: 1, 100.0: 2, 200.0: 4, 400.0: 8}[scale]


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


@pytest.mark.parametrize("method", ["sosp-h", "sosp-i", "taylor"])
def test_labels_that_the_network_is_certain_of_warn(method: str) -> None:
    c = case("mlp")
    x = 1e3 * c.inputs.repeat(6, 1)
    x[:5] *= 1e-3  # the network is not certain of these
    y = torch.zeros(60, dtype=torch.long)
    with torch.no_grad():
        r = 1 - c.model(x).softmax(1).square().sum(1)
    effective = round(float(r.sum() ** 2 / r.square().sum()))
    remedy = "more examples" if method == "taylor" else "own outputs"
    with pytest.warns(FewEffectiveExamplesWarning, match=f"{effective} of 60 examples decide.*{remedy}"):
        sosp.score(c.model, (x, y), method=method)
    sosp.score(c.model, (1e-3 * x, y), method=method)  # a warning is an error in these tests


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": "mine"}, "targets='mine'"),
        ({"temperature": 0}, "temperature=0 must be a positive number"),
        ({"method": "first-order"}, "no slope, which method='first-order' needs"),
        ({"loss": lambda f, y: f.sum(1)}, "a known loss"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    c = case("mlp")
    with pytest.raises(ArgumentError, match=words):
        sosp.score(c.model, c.inputs, **{"method": "sosp-i", "targets": "own", **options})


def test_outputs_that_are_not_finite() -> None:
    c = case("mlp")
    broken = c.inputs.clone()
    broken[3] = float("nan")
    with pytest.raises(LossError, match="example 3"):
        sosp.score(c.model, broken, method="sosp-i", targets="own", structures=structures(c), examples=None)
