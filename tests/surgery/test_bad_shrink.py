"""What cannot be shrunk, counted, widened or timed is refused by name, and the model stays as it was."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from helpers.unchanged import check_refused, check_unchanged
from networks import Case, case
from sosp.errors import ArgumentError, SospError, StructureError

Job = Callable[[nn.Module, Any, Any], object]  # model, mask, example

WITH_MASK: dict[str, Job] = {
    "shrink": lambda model, mask, x: sosp.shrink(model, mask, x),
    "shrink, unverified": lambda model, mask, x: sosp.shrink(model, mask, x, verify=False),
    "count": lambda model, mask, x: sosp.count(model, x, mask),
    "count, alternative": lambda model, mask, x: sosp.count(model, x, mask, convention="alternative"),
}
WITH_EXAMPLE: dict[str, Job] = {
    "trace": lambda model, mask, x: sosp.trace(model, x),
    "shrink": WITH_MASK["shrink"],
    "shrink, unverified": WITH_MASK["shrink, unverified"],
    "count": WITH_MASK["count"],
    "count, as it is": lambda model, mask, x: sosp.count(model, x),
    "widen, copy": lambda model, mask, x: sosp.widen(model, {"fc1": 2}, x, init="copy"),
    "widen, random": lambda model, mask, x: sosp.widen(model, {"fc1": 2}, x),
}
MASKS = pytest.mark.parametrize("job", WITH_MASK)
EXAMPLES = pytest.mark.parametrize("job", WITH_EXAMPLE)


def mask_of(c: Case, removed: dict[str, Any]) -> sosp.Mask:
    return sosp.Mask.from_removed(c.model, removed, c.inputs)


def forged(c: Case, **removed: list[int]) -> sosp.Mask:
    """A mask that no function of the library makes."""
    mask = mask_of(c, {next(iter(c.norms)): [0]})
    return replace(mask, removed={name: torch.tensor(channels) for name, channels in removed.items()})


# --- masks


@MASKS
def test_a_mask_for_another_model(job: str) -> None:
    c, other = case("mlp"), case("conv-bn")
    mask = mask_of(other, {"conv1": [0]})
    with check_refused(c.model, StructureError, "'conv1'", "does not have"):
        WITH_MASK[job](c.model, mask, c.inputs)


@MASKS
def test_a_mask_for_a_model_of_other_widths(job: str) -> None:
    c = case("mlp")
    mask = mask_of(c, {"fc1": [0]})
    wider = sosp.widen(c.model, {"fc1": 2}, c.inputs)
    with check_refused(wider, StructureError, "'fc1'", "7 channels", "14"):
        WITH_MASK[job](wider, mask, c.inputs)
    small = sosp.shrink(c.model, mask, c.inputs)
    with check_refused(small, StructureError, "'fc1'", "7 channels", "6"):
        WITH_MASK[job](small, mask, c.inputs)


@MASKS
def test_a_mask_of_single_weights(job: str) -> None:
    c = case("mlp")
    mask = sosp.Mask.from_removed(c.model, {"fc1.weight": [0, 3]}, c.inputs, kind="weights")
    with check_refused(c.model, StructureError, "single weights", "kind='filters'"):
        WITH_MASK[job](c.model, mask, c.inputs)


@MASKS
def test_an_unknown_layer(job: str) -> None:
    c = case("mlp")
    with check_refused(c.model, StructureError, "'fc3'", "Did you mean 'fc2'?"):
        WITH_MASK[job](c.model, forged(c, fc3=[0]), c.inputs)


@pytest.mark.parametrize("job", ["shrink", "count"])
@pytest.mark.parametrize("channel", [7, -1])
def test_a_channel_that_is_not_there(job: str, channel: int) -> None:
    c = case("mlp")
    with check_refused(c.model, StructureError, str(channel), "'fc1'", "0 to 6"):
        WITH_MASK[job](c.model, forged(c, fc1=[channel]), c.inputs)


@pytest.mark.parametrize("job", ["shrink", "count"])
def test_the_output_layer(job: str) -> None:
    c = case("mlp")
    with check_refused(c.model, StructureError, "'head'"):
        WITH_MASK[job](c.model, forged(c, head=[0]), c.inputs)


@pytest.mark.parametrize("job", ["shrink", "count"])
@pytest.mark.parametrize("mask", [{"fc1": [0]}, "fc1"])
def test_what_is_no_mask(job: str, mask: Any) -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, "Mask"):
        WITH_MASK[job](c.model, mask, c.inputs)


def test_shrinking_without_a_mask() -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, "Mask"):
        sosp.shrink(c.model, None, c.inputs)


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ({"fc3": [0]}, ["'fc3'", "Did you mean 'fc2'?"]),
        ({"head": [0]}, ["'head'", "output layer"]),
        ({"act1": [0]}, ["'act1'", "not a prunable layer"]),
        ({"fc1": [7]}, ["channel 7", "'fc1'", "0 to 6"]),
        ({"fc1": [-1]}, ["channel -1", "'fc1'", "0 to 6"]),
        ({"fc1": [2, 0, 2]}, ["channel 2", "'fc1'", "twice"]),
        ({"fc1": [0.5]}, ["0.5", "'fc1'"]),
        ({"fc1": [True]}, ["True", "'fc1'"]),
        ({"fc1": 0}, ["'fc1'", "[0]"]),
        ({"fc1": "0"}, ["'fc1'", "0"]),
    ],
)
def test_masks_by_hand(removed: dict[str, Any], words: list[str]) -> None:
    c = case("mlp")
    with check_refused(c.model, StructureError, *words):
        mask_of(c, removed)


def test_a_channel_that_a_shrunk_layer_has_lost() -> None:
    """Also where the weight is computed from others, and the layer must be told how wide it is now."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    nn.utils.parametrizations.weight_norm(model[0])
    x = torch.zeros(2, 3)
    small = sosp.shrink(model, sosp.Mask.from_removed(model, {"0": [1]}, x), x)
    assert small[0].weight.shape == (4, 3)
    assert small[0].out_features == 4
    with check_refused(small, StructureError, "channel 4", "0 to 3"):
        sosp.Mask.from_removed(small, {"0": [4]}, x)


# --- examples


class Through(nn.Module):
    """Layers of the names that the jobs use, over pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = torch.relu(self.fc1(x))
        return self.fc2(x if shift is None else x + shift)


def through() -> tuple[nn.Module, sosp.Mask]:
    model = Through().eval()
    return model, sosp.Mask.from_removed(model, {"fc1": [0]}, torch.zeros(2, 5))


@EXAMPLES
@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.zeros(2, 4), ["(2, 4)"]),
        ((torch.zeros(2, 5), torch.zeros(2, 9)), ["(2, 5)", "(2, 9)"]),
        ((torch.zeros(2, 5),) * 3, ["(2, 5)", "TypeError"]),
        ({"y": torch.zeros(2, 5)}, ["'y'", "(2, 5)", "TypeError"]),
        (None, ["None"]),
        ("a picture", ["a picture"]),
    ],
)
def test_an_example_that_the_model_does_not_take(job: str, example: Any, words: list[str]) -> None:
    model, mask = through()
    with check_refused(model, StructureError, "does not run on the example", *words):
        WITH_EXAMPLE[job](model, mask, example)


@pytest.mark.parametrize("job", ["shrink", "widen, copy"])
@pytest.mark.parametrize("what", ["another precision", "whole numbers", "another device"])
def test_an_example_of_another_kind(job: str, what: str) -> None:
    """Shapes alone do not tell: it shows when the two networks are compared."""
    model, mask = through()
    x = torch.zeros(2, 5)
    example = {"another precision": x.double(), "whole numbers": x.long(), "another device": x.to("meta")}[what]
    with check_unchanged(model), pytest.raises(SospError, match="does not run on the example"):
        WITH_EXAMPLE[job](model, mask, example)


@pytest.mark.parametrize("job", ["shrink", "count", "count, as it is", "widen, copy"])
def test_an_example_without_examples(job: str) -> None:
    """Nothing could be counted per example, or compared."""
    model, mask = through()
    with check_unchanged(model), pytest.raises(SospError, match="empty"):
        WITH_EXAMPLE[job](model, mask, torch.zeros(0, 5))


# --- models


@EXAMPLES
def test_lazy_layers(job: str) -> None:
    model, mask = through()
    model.fc1 = nn.LazyLinear(7)
    with pytest.raises(StructureError, match=r"'fc1\.weight' is not initialised yet"):
        WITH_EXAMPLE[job](model, mask, torch.zeros(2, 5))
    assert isinstance(model.fc1, nn.LazyLinear)
    assert model.fc1.has_uninitialized_params()


def test_a_lazy_layer_that_has_seen_a_batch() -> None:
    model, mask = through()
    model.fc1 = nn.LazyLinear(7)
    x = torch.randn(2, 5)
    model(x)
    small = sosp.shrink(model, mask, x)
    assert small.fc1.weight.shape == (6, 5)
    with torch.no_grad():
        assert torch.allclose(small(x), sosp.masked(model, mask)(x), atol=1e-6)


@EXAMPLES
def test_a_model_that_fails_by_itself_says_so_in_its_own_words(job: str) -> None:
    class Fails(Through):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("the user's own mistake")

    model, mask = Fails().eval(), through()[1]
    with check_refused(model, StructureError, "KeyError", "the user's own mistake"):
        WITH_EXAMPLE[job](model, mask, torch.zeros(2, 5))


# --- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"join": "glue"}, ["join='glue'", "scatter, zeros"]),
        ({"round_to": 0}, ["round_to=0"]),
        ({"round_to": 2.0}, ["round_to=2.0"]),
        ({"round_to": True}, ["round_to=True"]),
    ],
)
def test_options_of_shrink(options: dict[str, Any], words: list[str]) -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, *words):
        sosp.shrink(c.model, mask_of(c, {"fc1": [0]}), c.inputs, **options)


@pytest.mark.parametrize("convention", ["Exact", "approximate", None, 1])
def test_options_of_count(convention: Any) -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, f"convention={convention!r}", "exact, alternative"):
        sosp.count(c.model, c.inputs, convention=convention)


@pytest.mark.parametrize("example", [torch.zeros(2, 4), None, {"y": torch.zeros(2, 5)}])
def test_latency_of_a_model_that_does_not_run(example: Any) -> None:
    model, _ = through()
    with check_unchanged(model), pytest.raises(SospError, match="does not run on the example"):
        sosp.latency(model, example, runs=1)
