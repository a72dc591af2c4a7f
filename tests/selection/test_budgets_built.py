"""Budgets are met by the network that is built, also where building it shows that the code fixes a width."""

from typing import Any

import pytest
import torch
from test_budgets import cost
from torch import Tensor, nn

import sosp
from sosp.errors import ArgumentError, DisconnectedError
from sosp.selection.select import select_and_plan
from sosp.selection.selection_options import Selection


class Shuffle(nn.Module):
    """Four groups, by number: as long as each keeps something, the code runs with any width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 1, groups=4)
        self.spatial = nn.Conv2d(32, 32, 3, padding=1, groups=8)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.stem(x).relu())
        B, C, H, W = x.shape
        x = x.view(B, 4, C // 4, H, W).transpose(1, 2).reshape(B, C, H, W)
        return self.head(self.spatial(x).relu().mean((2, 3)))


def scores(seed: int) -> tuple[nn.Module, Tensor, sosp.Saliency]:
    torch.manual_seed(seed)
    model, x = Shuffle().eval(), torch.randn(2, 3, 6, 6)
    found = sosp.find_structures(model, x)
    return model, x, sosp.Saliency(found, "random", torch.rand(len(found)))


OPTIONS: list[dict[str, Any]] = [
    *({"macs": 0.5}, {"params": 0.5}, {"macs": 0.35}),
    *({"macs": 0.5, "round_to": 2}, {"macs": 0.6, "join": "zeros"}, {"params": 0.6, "join": "zeros", "round_to": 2}),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_never_more_than_the_budget(options: dict[str, Any]) -> None:
    met = 0
    what = "macs" if "macs" in options else "params"
    style = {name: options[name] for name in ("join", "round_to") if name in options}
    for seed in range(16):
        model, x, saliency = scores(seed)
        try:
            mask = sosp.select(saliency, **options)
        except (ArgumentError, DisconnectedError):
            continue
        met += 1
        small = sosp.shrink(model, mask, x, **style)
        assert cost(small, x)[what] <= options[what] * cost(model, x)[what]
    assert met >= 12


def test_the_plan_finds_what_the_code_fixes_and_changes_nothing() -> None:
    """The first mask that should do leaves nothing of one group, which the code does not take."""
    structures = scores(0)[2].structures
    found = []
    for _ in range(16):
        saliency = sosp.Saliency(structures, "random", torch.rand(80))
        found.append(select_and_plan(saliency, Selection(rule="saliency"), macs=0.5)[1])
    assert any(plan.flow.fixed for plan in found if plan is not None)
    assert structures.flow.fixed == structures.flow.learned == ()


@pytest.mark.parametrize("seed", [5, 8])
def test_no_more_goes_than_the_budget_needs_where_the_search_goes_on(seed: int) -> None:
    model, x, saliency = scores(seed)
    mask = sosp.select(saliency, macs=0.35)
    order = torch.argsort(saliency.scores, stable=True)
    assert mask == sosp.Mask.from_structures(saliency.structures, order[: mask.chosen])
    fewer = sosp.Mask.from_structures(saliency.structures, order[: mask.chosen - 1])
    assert cost(sosp.shrink(model, fewer, x), x)["macs"] > 0.35 * cost(model, x)["macs"]
