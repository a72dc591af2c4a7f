"""Smaller networks that compute what the masked ones compute: outputs, statistics, gradients, and really smaller."""

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from oracles.removed import removed as without
from oracles.removed import zero_inputs
from shrinking import case, names
from shrinking.compare import (
    all_apart,
    apart,
    channels_left,
    loss_of,
    mask_of,
    one_layer,
    origins,
    outputs,
    parameters,
    some_channels,
    union,
    width_in,
    width_out,
)
from shrinking.recipe import Case, Removal, cast

# The same sums of at most a few hundred terms with zeros left out: rounding of float64, 2e-16, times what batch
# statistics of four examples amplify it by. float32 has 6e-8.
EXACT = 1e-10
SINGLE = 1e-5

EVERY = pytest.mark.parametrize("name", names())
WITH_BLOCKS = ["resnet", "resnet-preact", "densenet", "inception", "unet", "inverted-residual", "conv1d", "convnext"]
AGAIN = [
    "resnet",
    "resnet-preact",
    "densenet",
    "mobilenet-v3",
    "resnext",
    "flatten-constant",
    "groupnorm",
    "attention-hf",
    "swiglu",
    "twice",
    "depthwise-bias",
]


# --- the same numbers


def check_same(c: Case, removed: Removal) -> None:
    """Shrunk and masked agree in every number, and the model that was given is as it was."""
    mask = mask_of(c.model, removed, c)
    before = state(c.model)
    small = sosp.shrink(c.model, mask, c.example)
    assert changed(c.model, before) == []
    check_names(small, c.model)
    masked = sosp.masked(c.model, mask)
    assert all_apart(outputs(small, c.example), outputs(masked, c.example)) < EXACT, "eval mode"
    check_training(small, masked, c, origins(c, mask))


def check_names(small: nn.Module, model: nn.Module) -> None:
    """The same classes under the same names, what is added is the library's; no parameter is new."""
    mine = {n: type(m) for n, m in small.named_modules() if not type(m).__module__.startswith("sosp.")}
    assert mine == {n: type(m) for n, m in model.named_modules()}
    assert set(small.state_dict()) <= set(model.state_dict())
    assert {n: small.get_submodule(n).training for n in mine} == {n: m.training for n, m in model.named_modules()}
    assert parameters(small) <= parameters(model)


def check_training(small: nn.Module, masked: nn.Module, c: Case, source: dict[str, Tensor]) -> None:
    """Outputs, gradients and statistics of one step in train mode; what is gone had nothing to learn."""
    found = [outputs(model, c.example, training=True) for model in (small, masked)]
    assert all_apart(*found) < EXACT, "train mode"
    for outs in found:
        loss_of(outs).backward()
    theirs = dict(masked.named_parameters())
    scale = max((float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None), default=1.0)
    for name, p in theirs.items():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        kept = check_copies(f"gradient of {name}", small_gradient(small, name), gradient, source.get(name), scale)
        lost = gradient.flatten()[~kept]
        assert apart(lost, torch.zeros_like(lost), scale) < EXACT, f"gradient of what {name} lost"
    mine = dict(small.named_buffers())
    for name, buffer in masked.named_buffers():
        if name in mine and buffer.is_floating_point():
            check_copies(name, mine[name], buffer, source[name], None)
        elif name.endswith("num_batches_tracked") and name in mine:
            assert torch.equal(mine[name], buffer), name


def small_gradient(small: nn.Module, name: str) -> Tensor | None:
    p = dict(small.named_parameters()).get(name)
    return p if p is None else torch.zeros_like(p) if p.grad is None else p.grad


def check_copies(what: str, mine: Tensor | None, theirs: Tensor, source: Tensor | None, scale: float | None) -> Tensor:
    """The elements of a shrunk tensor are those of the original they come from; returns which of these are left."""
    left = torch.zeros(theirs.numel(), dtype=torch.bool)
    if mine is None or source is None:
        return left
    copied = source >= 0
    assert apart(mine[copied], theirs.flatten()[source[copied]], scale) < EXACT, what
    left[source[copied]] = True
    return left


def state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that must not change."""
    return {
        "numbers": {n: t.clone() for n, t in model.state_dict().items()},
        "modules": {n: id(m) for n, m in model.named_modules()},
        "tensors": {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "wishes": {n: p.requires_grad for n, p in model.named_parameters()},
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {n: (list(m._forward_hooks), list(m._forward_pre_hooks)) for n, m in model.named_modules()},
        "chance": torch.get_rng_state(),
    }


def changed(model: nn.Module, before: dict[str, Any]) -> list[str]:
    now = state(model)
    numbers = now.pop("numbers"), before["numbers"]
    same = numbers[0].keys() == numbers[1].keys() and all(torch.equal(numbers[0][n], t) for n, t in numbers[1].items())
    chance = torch.equal(now.pop("chance"), before["chance"])
    return [n for n in now if now[n] != before[n]] + ["numbers"] * (not same) + ["chance"] * (not chance)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
@EVERY
def test_shrunk_computes_what_masked_computes(name: str, share: float) -> None:
    c = case(name)
    check_same(c, some_channels(c, share))


@EVERY
def test_with_one_layer_pruned(name: str) -> None:
    c = case(name)
    check_same(c, one_layer(c))


@pytest.mark.parametrize("name", [n for n in names() if case(n).whole])
def test_with_a_whole_layer_removed(name: str) -> None:
    for layer in case(name).whole:
        c = case(name)
        check_same(c, {layer: list(range(width_out(c.model.get_submodule(layer))))})


@EVERY
def test_with_an_empty_mask_nothing_changes(name: str) -> None:
    c = case(name)
    small = sosp.shrink(c.model, mask_of(c.model, {}, c), c.example)
    assert {n: t.shape for n, t in small.state_dict().items()} == {n: t.shape for n, t in c.model.state_dict().items()}
    assert all_apart(outputs(small, c.example), outputs(c.model, c.example)) == 0


@EVERY
def test_in_single_precision(name: str) -> None:
    c = case(name)
    model, example = c.model.float(), cast(c.example, torch.float32)
    mask = mask_of(case(name).model, some_channels(c, 0.3), case(name))
    small, masked = sosp.shrink(model, mask, example), sosp.masked(model, mask)
    for training in (False, True):
        assert all_apart(outputs(small, example, training), outputs(masked, example, training)) < SINGLE


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.7])
@EVERY
def test_masked_is_what_the_oracle_says_removal_means(name: str, share: float, training: bool) -> None:
    c = case(name)
    removed = some_channels(c, share)
    masked = sosp.masked(c.model, mask_of(c.model, removed, c))
    twin = without(c.model, c.example, removed, c.layers)
    assert all_apart(outputs(masked, c.example, training), outputs(twin, c.example, training)) < EXACT


def test_modes_and_hooks_of_the_given_model_stay_and_the_copy_has_them_too() -> None:
    c = case("resnet")
    seen: list[str] = []
    c.model.train()
    c.model.layer1.eval()
    c.model.layer2[0].register_forward_hook(lambda m, a, o: seen.append("layer2.0"))
    c.model.fc.weight.requires_grad_(False)
    before = state(c.model)
    small = sosp.shrink(c.model, mask_of(case("resnet").model, some_channels(c, 0.3), c), c.example)
    assert changed(c.model, before) == []
    check_names(small, c.model)
    assert {n: p.requires_grad for n, p in small.named_parameters()} == before["wishes"]
    seen.clear()
    outputs(small, c.example)
    assert seen == ["layer2.0"]


# --- really smaller


@EVERY
def test_layers_lose_the_rows_of_a_mask_on_them(name: str) -> None:
    c = case(name)
    wrong = {}
    for layer in (n for n in c.layers if n in c.shrinks):
        small = sosp.shrink(c.model, mask_of(c.model, {layer: c.by[layer]}, c), c.example)
        lost = width_out(c.model.get_submodule(layer)) - width_out(small.get_submodule(layer))
        if lost != len(c.by[layer]):
            wrong[layer] = f"lost {lost} rows of {c.by[layer]}"
    assert wrong == {}


@EVERY
def test_consumers_lose_the_columns_that_are_always_zero(name: str) -> None:
    c = case(name)
    wrong = []
    for consumer, removed in c.narrows:
        small = sosp.shrink(c.model, mask_of(c.model, removed, c), c.example)
        lost = width_in(c.model.get_submodule(consumer)) - width_in(small.get_submodule(consumer))
        zeros = zero_inputs(c.model, c.example, removed, c.layers)
        wanted = int(zeros[consumer].sum()) if consumer in zeros else max(map(len, removed.values()))
        if lost != wanted:
            wrong.append(f"{consumer} lost {lost} of {wanted} columns without {removed}")
    assert wrong == []


@pytest.mark.parametrize("name", [n for n in names() if case(n).frees])
def test_layers_lose_rows_that_nothing_reads_any_more(name: str) -> None:
    c = case(name)
    for layer, removed in c.frees:
        small = sosp.shrink(c.model, mask_of(c.model, removed, c), c.example)
        assert width_out(small.get_submodule(layer)) < width_out(c.model.get_submodule(layer)), (layer, removed)


# --- again


def left_of(c: Case, small: nn.Module, mask: sosp.Mask, removed: Removal) -> Removal:
    """Channels of the original as channels of the shrunk model; those that are gone already are left out."""
    source = origins(c, mask)
    translated = {}
    for layer, gone in removed.items():
        left = channels_left(c, layer, source)
        translated[layer] = [left.index(i) for i in gone if i in left]
    return {layer: gone for layer, gone in translated.items() if gone}


@EVERY
def test_shrunk_twice_is_shrunk_once_with_the_union(name: str) -> None:
    c = case(name)
    first, second = some_channels(c, 0.3, seed=2), some_channels(c, 0.3, seed=7)
    both = union(first, second)
    whole = {n for n, gone in both.items() if len(gone) == width_out(c.model.get_submodule(n))}
    second = {n: gone for n, gone in second.items() if n not in whole}
    mask = mask_of(c.model, first, c)
    small = sosp.shrink(c.model, mask, c.example)
    again = sosp.shrink(small, mask_of(small, left_of(c, small, mask, second), c), c.example)
    once = sosp.shrink(c.model, mask_of(c.model, union(first, second), c), c.example)
    assert {n: t.shape for n, t in again.state_dict().items()} == {n: t.shape for n, t in once.state_dict().items()}
    for training in (False, True):
        assert all_apart(outputs(again, c.example, training), outputs(once, c.example, training)) < EXACT


def scores(model: nn.Module, c: Case) -> sosp.Saliency:
    labels = torch.arange(len(c.example)) % outputs(model, c.example)[0].shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sosp.SlowPathWarning)
        return sosp.score(model, (c.example, labels))


@pytest.mark.parametrize("name", AGAIN)
def test_a_shrunk_model_has_the_scores_of_the_masked_one_and_can_be_pruned_again(name: str) -> None:
    c = case(name)
    removed = some_channels(c, 0.3)
    mask = mask_of(c.model, removed, c)
    small, source = sosp.shrink(c.model, mask, c.example), origins(c, mask)
    mine, theirs = scores(small, c), scores(sosp.masked(c.model, mask), c)
    ids = {layer.name: ids for layer, ids in zip(theirs.structures.layers, theirs.structures.ids, strict=True)}
    kept = torch.cat([ids[layer.name][channels_left(c, layer.name, source)] for layer in mine.structures.layers])
    assert apart(mine.first, theirs.first[kept]) < EXACT
    assert apart(mine.second, theirs.second[kept]) < EXACT
    again = sosp.select(mine, ratio=0.3, cap=0.6)
    smaller, masked = sosp.shrink(small, again, c.example), sosp.masked(small, again)
    assert parameters(smaller) < parameters(small)
    for training in (False, True):
        assert all_apart(outputs(smaller, c.example, training), outputs(masked, c.example, training)) < EXACT


# --- other masks


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_blocks(name: str) -> None:
    count = len(sosp.find_structures(case(name).model, case(name).example, kind="blocks"))
    for block in range(count):
        c = case(name)
        found = sosp.find_structures(c.model, c.example, kind="blocks")
        mask = sosp.Mask.from_structures(found, torch.tensor([block]))
        small, masked = sosp.shrink(c.model, mask, c.example), sosp.masked(c.model, mask)
        assert parameters(small) < parameters(c.model)
        for training in (False, True):
            assert all_apart(outputs(small, c.example, training), outputs(masked, c.example, training)) < EXACT


def wide_outputs(model: nn.Module, c: Case) -> dict[str, tuple[int, int]]:
    """Layers whose output is wider than their weight: zeros were put back."""
    found: dict[str, tuple[int, int]] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            width = output.shape[-1] if isinstance(module, nn.Linear) else output.shape[1]
            if width != width_out(module):
                found[name] = (width_out(module), width)

        return hook

    twin = deepcopy(model)
    for name in c.layers:
        twin.get_submodule(name).register_forward_hook(look(name))
    outputs(twin, c.example)
    return found


COUPLED = ["resnet", "resnet-preact", "densenet", "inverted-residual", "mobilenet-v3", "two-streams", "swiglu"]


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_channels_go_together_and_nothing_is_put_back(name: str) -> None:
    c = case(name)
    found = sosp.find_structures(c.model, c.example, groups="coupled")
    single = sosp.find_structures(c.model, c.example)
    assert len(found) < len(single)
    picked = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[: len(found) // 3]
    mask = sosp.Mask.from_structures(found, picked)
    small, masked = sosp.shrink(c.model, mask, c.example), sosp.masked(c.model, mask)
    assert wide_outputs(small, c) == {}
    for training in (False, True):
        assert all_apart(outputs(small, c.example, training), outputs(masked, c.example, training)) < EXACT


def test_coupled_channels_of_a_residual_stage_are_one_structure() -> None:
    c = case("resnet")
    found = sosp.find_structures(c.model, c.example, groups="coupled")
    for structure in range(len(found)):
        together = {n: gone.tolist() for n, gone in found.channels_of(torch.tensor([structure])).items()}
        if "conv1" in together:
            (channel,) = together["conv1"]
            assert together == {n: [channel] for n in ("conv1", "layer1.0.conv2", "layer1.1.conv2")}


# --- the report


def line_of(module: Any, text: str) -> str:
    """``file.py:line`` of the only line that contains ``text``."""
    with open(module.__file__) as file:
        lines = [number for number, line in enumerate(file, 1) if text in line]
    assert len(lines) == 1, text
    return f"{module.__file__.rpartition('/')[2]}:{lines[0]}"


PINNED = [  # case -> a layer whose channels are pinned, and the line in the user's code that does it
    ("flatten-constant", "features.3", "convolutions", "view(-1, 5 * 2 * 2)"),
    ("shuffle-constant", "conv1", "movement", "view(b, 2, 4, h, w)"),
    ("stored-size", "conv", "tokens", ".view(x.shape[0], self.hidden_dim)"),
    ("cumsum", "conv1", "mixing", "x.cumsum(1)"),
    ("softmax-channels", "conv1", "mixing", "F.softmax(x, dim=1)"),
    ("rmsnorm", "embed", "norms", "torch.rsqrt(x.pow(2)"),
]


@pytest.mark.parametrize(("name", "layer", "file", "text"), PINNED)
def test_what_is_pinned_is_reported_with_its_line(name: str, layer: str, file: str, text: str) -> None:
    import shrinking

    c = case(name)
    flow = sosp.trace(c.model, c.example)
    where = line_of(getattr(shrinking, file), text)
    assert where in [record.where for record in flow.pinned if layer in record.layers]
    assert layer in str(flow)
    assert where in str(flow)


@pytest.mark.parametrize("name", ["mlp", "resnet", "densenet", "inverted-residual", "flatten", "chunk"])
def test_where_everything_can_be_followed_no_layer_is_pinned(name: str) -> None:
    c = case(name)
    flow = sosp.trace(c.model, c.example)
    assert [record for record in flow.pinned if set(record.layers) & set(c.layers)] == []
