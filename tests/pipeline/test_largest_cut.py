"""Quality as the budget: the smallest network whose quality on unused inputs falls by at most so much."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from helpers.quarters import Net, pictures
from sosp.errors import ArgumentError, BudgetError, DataError


def widths(network: nn.Module) -> int:
    return sum(m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d))


def test_the_smallest_network_within_the_drop(model: Net) -> None:
    """The metric is the share of all filters, so that a drop of 0.3 allows to remove 30 % of them and no more."""
    whole = widths(model)
    found = sosp.prune(model, pictures(), max_drop=0.3, metric=lambda net: widths(net) / whole, repair=False)
    assert found.search is not None
    good = [t for t in found.search.trials if t.quality is not None and t.quality.drop <= 0.3]
    assert len(found.search.trials) == 6
    assert found.macs_left == min(t.left for t in good if t.left is not None)
    assert 0.7 <= widths(found.model) / whole < 0.85
    assert str(found).count("metric falls by") == len([t for t in found.search.trials if t.quality])


def test_held_out_labels_decide(model: Net) -> None:
    x, y = pictures()
    found = sosp.prune(model, (x, y), max_drop=0.0)
    answers = found.measured.answers  # type: ignore[union-attr]
    assert answers.accuracy.inputs == 8  # type: ignore[union-attr]
    assert answers.accuracy.drop <= 0  # type: ignore[union-attr]
    assert found.macs_left < 0.9
    names = {t.quality.name for t in found.search.trials if t.quality is not None}  # type: ignore[union-attr]
    assert names == {"accuracy"}
    inputs = sosp.prune(model, x, max_drop=0.0).search
    assert {t.quality.name for t in inputs.trials if t.quality is not None} == {"agreement"}  # type: ignore[union-attr]


def test_every_image_is_decoded_once_for_six_repairs(model: Net) -> None:
    read: list[int] = []

    class Images(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            read.append(i)
            return pictures()[0][i], pictures()[1][i]

    once = sosp.prune(model, Images(), max_drop=0.1)
    counts = torch.bincount(torch.tensor(read), minlength=64)
    assert int(counts.max()) <= 4  # as an example, to see how it divides, for scoring, for repair
    pair = sosp.prune(model, pictures(), max_drop=0.1)
    assert all(torch.equal(a, b) for a, b in zip(once.model.parameters(), pair.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"max_drop": 0.1, "macs": 0.5}, ArgumentError, "leave out macs"),
        ({"max_drop": -0.1}, ArgumentError, "max_drop=-0.1 must be a number"),
        ({"metric": lambda net: 1.0}, ArgumentError, "Give max_drop as well"),
        ({"max_drop": 0.1, "metric": lambda net: "good"}, ArgumentError, "metric= returned 'good'"),
        ({"max_drop": 0.001, "metric": widths}, BudgetError, "the best keeps"),
        ({"max_drop": 0.1, "scoring": sosp.Scoring(examples=None)}, DataError, "uses all inputs"),
    ],
)
def test_refusals(model: Net, options: dict[str, Any], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        sosp.prune(model, pictures(), repair=False, **options)
