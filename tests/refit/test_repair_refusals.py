"""What repair refuses, by name; the networks it was given are left as they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_repair import inputs, randomly_cut
from torch import Tensor, nn

import sosp
from helpers.unchanged import check_unchanged
from networks import case
from sosp.errors import ArgumentError, DataError, SospError, StructureError
from sosp.refit import refit


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[130, 0] = torch.nan
    return x


def broken(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.conv2.weight[1] = torch.inf
    return model


def other() -> nn.Module:
    return case("conv-nobn").model


# Name -> (small, model, inputs) -> what is called with, the error, and what it says.
REFUSED: dict[str, tuple[Callable[..., tuple[Any, Any, Any, dict[str, Any]]], type[SospError], str]] = {
    "nan inputs": (
        lambda s, m, x: (s, m, with_nan(x), {}),
        DataError,
        r"the input or output of 'conv1' is not finite on .* Check those inputs",
    ),
    "infinite weights": (lambda s, m, x: (s, broken(m), x, {}), DataError, r"'conv2' is not finite on the data,"),
    "the wrong way round": (
        lambda s, m, x: (m, s, x, {}),
        StructureError,
        r"shrunk 0 times and the original one 1 times: they seem to be the wrong way round",
    ),
    "another network": (
        lambda s, m, x: (s, other(), x, {}),
        StructureError,
        r"the small network has 'bn1.weight', which the original one does not have\. Give the network that",
    ),
    "another width": (
        lambda s, m, x: (s, sosp.widen(m, {"conv1": 2.0}, x[:4]), x, {}),
        StructureError,
        r"'conv1.weight' of the small network is \(2, 2, 3, 3\).* makes it",
    ),
    "inputs of another shape": (
        lambda s, m, x: (s, m, x[:, :1], {}),
        StructureError,
        r"the networks do not run on the data.*expected input",
    ),
    "one input": (lambda s, m, x: (s, m, x[:1], {}), DataError, r"1 inputs are too few: .* Give hundreds"),
    "no inputs": (lambda s, m, x: (s, m, [], {}), DataError, r"0 inputs are too few"),
    "no data": (lambda s, m, x: (s, m, "images", {}), DataError, r"data is a str"),
    "another loss": (
        lambda s, m, x: (s, m, x, {"loss": "cross entropy"}),
        ArgumentError,
        r"loss='cross entropy' is not known. Did you mean 'cross_entropy'",
    ),
    "no sweeps": (
        lambda s, m, x: (s, m, x, {"sweeps": 0}),
        ArgumentError,
        r"sweeps=0 must be a whole number, at least 1",
    ),
    "one example": (lambda s, m, x: (s, m, x, {"examples": 1}), ArgumentError, r"examples=1 must be .* at least 2"),
    "a seed below zero": (lambda s, m, x: (s, m, x, {"seed": -1}), ArgumentError, r"seed=-1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    model, small, x = randomly_cut("conv-bn")
    call, error, words = REFUSED[name]
    a, b, data, options = call(small, model, x)
    with check_unchanged(a), check_unchanged(b), pytest.raises(error, match=words):
        sosp.repair(a, b, data, **options)


def test_batch_norms_without_statistics_are_refused() -> None:
    model, small, x = randomly_cut("conv-bn")
    for network in (model, small):
        network.bn1.running_mean = network.bn1.running_var = None
    with pytest.raises(SospError, match="'bn1' is a batch norm without running statistics"):
        sosp.repair(small, model, x)


def test_an_error_on_the_way_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, small, x = randomly_cut("residual")

    def fails(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(refit, "write_fit", fails)
    with check_unchanged(model), check_unchanged(small), pytest.raises(KeyboardInterrupt):
        sosp.repair(small, model, x)


def test_rounds_need_repair() -> None:
    c = case("conv-bn")
    with pytest.raises(ArgumentError, match=r"rounds=0 must be a whole number"):
        sosp.prune(c.model, (c.inputs, c.targets), repair=sosp.Repair(rounds=0))


def test_a_model_on_another_device_than_the_data() -> None:
    model, small, _ = randomly_cut("conv-bn")
    with pytest.raises(DataError, match="is on meta and the model on cpu"):
        sosp.repair(small, model, inputs(torch.zeros(1, 2, 4, 4)).to("meta"))
