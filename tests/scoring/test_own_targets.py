"""Scores by the network's own outputs: equal to a loss of one's own on soft targets, with no slope and no labels."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import Case, case, to_score
from sosp.errors import ArgumentError, LossError

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
    check_equal(sosp.score(c.model, c.inputs, method=method, structures=s, loss=loss, targets="own"), wanted)


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
    """Logits for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(9, 6), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.tanh(self.hidden(self.words(input_ids))))}


def test_padding_does_not_count() -> None:
    torch.manual_seed(0)
    model, ids = Tokens().double().eval(), torch.randint(9, (4, 6))
    mask = (torch.arange(6) < torch.tensor([[6], [4], [2], [3]])).long()
    other = torch.where(mask.bool(), ids, (ids + 1) % 9)
    found = [
        sosp.score(model, [{"input_ids": x, "attention_mask": mask}], method="sosp-i", targets="own")
        for x in (ids, other)
    ]
    check_equal(*found)
    assert found[0].scores.any()


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
