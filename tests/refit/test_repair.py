"""Repair a cut network: redundant channels leave no trace, errors on the way are made up for, nothing gets worse."""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosp
from helpers.unchanged import check_unchanged
from networks import case, to_score
from sosp.refit import FewInputsWarning, repair_plan
from sosp.refit.agreement import OutputAgreement
from sosp.refit.comparison_points import track_channels
from sosp.refit.filter_scale import restore_filter_lengths

INPUTS = 240
EXACT = 1e-8  # normal equations of a few dozen unknowns in double, squared condition numbers up to 1e6

LEVELLED = ("conv-bn", "residual", "depthwise")  # layers with batch norms of their own, which no one else looks at
# Network -> layer -> (kept, copied): what the second channel gives is made a copy of what the first one gives.
COPIES: dict[str, dict[str, list[tuple[int, int]]]] = {
    "mlp": {"fc1": [(0, 1), (2, 3)], "fc2": [(4, 5)]},
    "mlp-nobias": {"fc1": [(0, 1)], "fc2": [(2, 0)]},
    "conv-bn": {"conv1": [(0, 3)], "conv2": [(1, 2)]},
    "conv-nobn": {"conv1": [(0, 3)], "conv2": [(1, 2)]},
    "residual": {"block1.conv1": [(0, 1)], "block2.conv1": [(2, 0)]},
    "concat": {"left": [(0, 1)], "right": [(3, 2)], "mix": [(0, 4)]},
    "depthwise": {"expand": [(0, 1)], "depthwise": [(0, 1)], "project": [(1, 2)]},
    "grouped": {"conv1": [(0, 1), (2, 3)]},
    "softplus": {"fc1": [(0, 1)], "fc2": [(4, 5)]},
    "conv1d": {"conv1": [(0, 3)], "conv2": [(1, 2)]},
    "attention": {"v": [(0, 1), (2, 3)], "fc1": [(0, 4)]},
    "transposed": {"down": [(0, 1)], "up": [(2, 3)], "up_plain": [(0, 2)]},
}


@torch.no_grad()
def copy_channel(model: nn.Module, layer: str, norm: str | None, kept: int, copied: int) -> None:
    module = model.get_submodule(layer)
    axis = int(isinstance(module, nn.ConvTranspose2d))
    module.weight.select(axis, copied).copy_(module.weight.select(axis, kept))
    for owner in (module, None if norm is None else model.get_submodule(norm)):
        for x in [] if owner is None else [*owner.parameters(), *owner.buffers()]:
            if x.dim() == 1:
                x[copied] = x[kept]


def redundant(name: str) -> tuple[nn.Module, sosp.Mask, Tensor]:
    """A network with copies of channels, the mask of the copies, and inputs."""
    c = case(name)
    for layer, pairs in COPIES[name].items():
        for kept, copied in pairs:
            copy_channel(c.model, layer, c.norms[layer], kept, copied)
    x = inputs(c.inputs)
    mask = sosp.Mask.from_removed(c.model, {n: [b for _, b in p] for n, p in COPIES[name].items()}, x[:4])
    return c.model, mask, x


def inputs(like: Tensor, count: int = INPUTS) -> Tensor:
    return torch.randn(count, *like.shape[1:], generator=torch.Generator().manual_seed(5), dtype=like.dtype)


def off(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((a(x) - b(x)).abs().max() / b(x).abs().max())


def randomly_cut(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A case, what is left of it when a third of every layer is gone, and inputs."""
    c = case(name)
    gone = {layer.name: list(range(0, layer.channels, 3)) for layer in sosp.find_structures(c.model, c.inputs).layers}
    mask = sosp.Mask.from_removed(c.model, gone, c.inputs)
    return c.model, sosp.shrink(c.model, mask, c.inputs), inputs(c.inputs)


# --- exact ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COPIES)
def test_redundant_channels_leave_no_trace(name: str) -> None:
    model, mask, x = redundant(name)
    small = sosp.shrink(model, mask, x[:4])
    assert off(small, model, x) > 1e-3
    found = sosp.repair(small, model, x, examples=None)
    assert off(found.model, model, inputs(x, 50) + 0.1) < EXACT  # also on other inputs
    assert found.agreement_after == 1


def test_linear_dependence_is_enough_without_an_activation() -> None:
    c = case("linear-in-gates")
    with torch.no_grad():
        for x in c.model.fc.parameters():
            x[5] = 0.5 * x[0] - 2 * x[1]
    x = inputs(c.inputs)
    small = sosp.shrink(c.model, sosp.Mask.from_removed(c.model, {"fc": [5]}, x[:4]), x[:4])
    assert off(sosp.repair(small, c.model, x).model, c.model, x) < EXACT


class Sum(nn.Module):
    """Two branches that are added; the second one is computed last."""

    def __init__(self, scale: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.gamma = nn.Parameter(torch.tensor([0.5, -2.0, 1.0, 3.0])) if scale else None
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        left = self.a(x)
        right = self.bn(self.b(x))
        right = right if self.gamma is None else right * self.gamma[:, None, None]
        left += right
        return self.head(F.relu_(left).mean((2, 3)))


@pytest.mark.parametrize("scale", [False, True])
def test_a_layer_makes_up_for_what_it_is_added_to(scale: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Sum(scale).double().eval()
        model.bn.running_mean += 0.3
        model.bn.running_var *= 2
    x = inputs(torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    small = sosp.shrink(model, sosp.Mask.from_removed(model, {"a": [0, 2]}, x[:4]), x[:4])
    assert off(small, model, x) > 1e-2
    found = sosp.repair(small, model, x)
    assert off(found.model, model, x) < EXACT
    changed = {e.layer: e.before - e.after for e in found.layers}
    assert changed["b"] > 1e-2
    assert changed["a"] < EXACT
    assert changed["head"] < EXACT


class LinearBlock(nn.Module):
    """A branch that is linear, so that a layer before or behind it can make up for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


@pytest.mark.parametrize("emptied", [["0"], ["1"], ["0", "1"]])
def test_a_layer_makes_up_for_blocks_that_disappear(emptied: list[str]) -> None:
    """It is compared behind the sum of a block of which nothing is left, and later sums keep their place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = nn.Sequential(LinearBlock(), LinearBlock(), nn.ReLU(), LinearBlock())
        model = nn.Sequential(nn.Conv2d(3, 4, 1), blocks, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double().eval()
    x = inputs(torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    small: Any = sosp.shrink(
        model, sosp.Mask.from_removed(model, {f"1.{n}.conv": range(4) for n in emptied}, x[:4]), x[:4]
    )
    assert all(not list(small[1].get_submodule(n).parameters()) for n in emptied)
    assert off(small, model, x) > 1e-2
    assert off(sosp.repair(small, model, x).model, model, x) < EXACT


def test_wrong_targets_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mask, x = redundant("conv-bn")
    small = sosp.shrink(model, mask, x[:4])
    right = repair_plan.find_original_channels
    monkeypatch.setattr(
        repair_plan, "find_original_channels", lambda *given: right(*given).roll(1)
    )  # each is told to be its neighbour
    assert off(sosp.repair(small, model, x).model, model, x) > 1e-3


# --- never worse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", to_score())
def test_no_layer_and_no_network_gets_worse(name: str) -> None:
    model, small, x = randomly_cut(name)
    small.train()
    with check_unchanged(model), check_unchanged(small):
        found = sosp.repair(small, model, x, loss="mse")
    assert found.model.training
    assert not model.training
    assert all(0 <= e.after <= e.before for e in found.layers)
    with torch.no_grad():
        goal, old, new = model(x), small.eval()(x), found.model.eval()(x)
    assert (new - goal).square().mean() < (old - goal).square().mean()


@pytest.mark.parametrize("name", ["conv-bn", "residual", "depthwise"])
def test_norms_know_the_statistics_of_what_they_are_given(name: str) -> None:
    """So that the network computes nearly the same in train mode: nothing jumps when fine-tuning begins."""
    model, small, x = randomly_cut(name)
    found = sosp.repair(small, model, x)
    seen: dict[str, Tensor] = {}
    for key, module in found.model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda m, args, key=key: seen.update({key: args[0]}))
    fitted = x[[i for k in range(0, INPUTS, 125) for i in range(k, min(k + 125, INPUTS) - (13 if k == 0 else 12))]]
    with torch.no_grad():
        found.model(fitted)
    refitted = {e.layer for e in found.layers if e.ridge is not None}
    layers = case(name).norms
    checked = 0
    for layer in refitted & layers.keys():
        norm: Any = found.model.get_submodule(layers[layer] or "")
        y = seen[layers[layer] or ""]
        if len(y.flatten()) and norm.running_mean.shape == y.mean((0, 2, 3)).shape:
            torch.testing.assert_close(norm.running_mean, y.mean((0, 2, 3)), rtol=0.2, atol=0.2)
            torch.testing.assert_close(norm.running_var, y.var((0, 2, 3)), rtol=0.5, atol=0.2)
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize("name", to_score())
def test_filters_keep_their_length_and_the_network_its_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that fine-tuning turns them at the rate it is asked for."""
    model, small, x = randomly_cut(name)
    found = sosp.repair(small, model, x).model
    refit: Any = sys.modules["sosp.refit.refit"]
    monkeypatch.setattr(refit, "restore_filter_lengths", lambda *given: None)
    longer = sosp.repair(small, model, x).model
    assert off(found.eval(), longer.eval(), x) < EXACT
    changed = 0
    for layer, norm in case(name).norms.items():
        if isinstance(small.get_submodule(norm or ""), nn.BatchNorm2d) and name in LEVELLED:
            a, b, c = (net.get_submodule(layer).weight.flatten(1).norm(dim=1) for net in (small, found, longer))
            torch.testing.assert_close(b, a)
            changed += not torch.allclose(a, c)
    assert changed or name not in LEVELLED


class Peeked(nn.Module):
    """Something else than its norm reads what a layer computes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.bn = how, nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.b, self.head = nn.Conv2d(6, 6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        raw = self.a(x)
        y = self.b(self.bn(raw).relu())
        y = y + raw if self.how == "added" else y
        y = self.head(y.mean((2, 3)))
        return (y, raw) if self.how == "returned" else y


@pytest.mark.parametrize("how", ["alone", "added", "returned"])
def test_filters_that_others_read_are_left_as_long_as_they_are(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Peeked(how).double().eval()
    x = inputs(torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    trails = track_channels(model, lambda m: m(x[:4]))[0]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.a.weight *= 2
        longer = twin.a.weight.clone()
        want = twin(x)
        restore_filter_lengths(model, twin, trails, ["a"])
        torch.testing.assert_close(twin(x), want)
    assert torch.equal(twin.a.weight, longer) == (how != "alone")
    torch.testing.assert_close(twin.a.weight, model.a.weight if how == "alone" else longer)


@pytest.mark.parametrize("name", ["mlp", "conv-bn"])
def test_the_better_of_refitted_weights_and_none_is_returned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, small, x = randomly_cut(name)
    for module in small.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean += 0.5
            module.running_var *= 3
    refit: Any = sys.modules["sosp.refit.refit"]
    monkeypatch.setattr(refit, "write_fit", lambda net, task, *rest: net.get_submodule(task.layer).weight.neg_())
    found = sosp.repair(small, model, x, loss="mse")
    for (key, new), old in zip(found.model.state_dict().items(), small.state_dict().values(), strict=True):
        assert torch.equal(new, old) == ("running" not in key), key
    assert {e.ridge for e in found.layers} == {None}
    before, after = 1 - found.agreement_before, 1 - found.agreement_after
    if name == "mlp":
        assert before == after
        assert "so the weights are unchanged" in found.summary
    else:
        assert after < before
        assert "so only batch-norm statistics are re-estimated" in found.summary
    assert f"Refitting did not improve the outputs (error {after:.4g} -> " in found.summary
    for module in found.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.momentum, int(module.num_batches_tracked)) == (0.1, 0)


def test_agreement_decides_where_it_differs_by_more_than_chance() -> None:
    few, many = (OutputAgreement(share, error, 400) for share, error in ((0.90, 0.1), (0.96, 0.2)))
    assert many.is_better(few)
    assert not few.is_better(many)
    assert OutputAgreement(0.92, 0.1, 400).is_better(many)


def test_channels_kept_as_zeros_stay_zero() -> None:
    c = case("residual")
    mask = sosp.Mask.from_removed(c.model, {"block1.conv2": [1], "block2.conv1": [0]}, c.inputs)
    small = sosp.shrink(c.model, mask, c.inputs, join="zeros")
    found = sosp.repair(small, c.model, inputs(c.inputs)).model
    zero = {n: ~p.reshape(len(p), -1).any(1) for n, p in small.named_parameters()}
    assert sum(int(rows.sum()) for rows in zero.values()) >= 2
    assert not any(found.get_parameter(n)[rows].any() for n, rows in zero.items())


def test_layers_that_cannot_be_refitted_say_why() -> None:
    model, small, x = randomly_cut("conv-in-bn-shared")
    why = {e.layer: e.why for e in sosp.repair(small, model, x).layers}
    assert why == {"stem": "", "conv": "it is called several times", "head": ""}


# --- what is given --------------------------------------------------------------------------------------


def loaders(x: Tensor) -> Iterator[Any]:
    labels = torch.full((len(x),), torch.nan)
    yield x
    yield x, labels
    yield DataLoader(TensorDataset(x, labels), batch_size=50)
    yield [x[:100], x[100:150], x[150:]]
    yield ((part, None) for part in x.split(33))
    yield DataLoader(list(x), batch_size=64)


def test_labels_and_batches_do_not_matter() -> None:
    model, small, x = randomly_cut("residual")
    found = [sosp.repair(small, model, data) for data in loaders(x)]
    for other in found[1:]:
        assert off(other.model, found[0].model, x) < 1e-12
    assert {f.examples for f in found} == {INPUTS}


def test_a_source_of_data_and_examples() -> None:
    model, small, x = randomly_cut("conv-bn")
    images = sosp.data.digits().train
    net = sosp.nets.make("digits_resnet", width=0.25).eval()
    example = next(iter(images.ordered(batch=4)))[0]
    cut = sosp.shrink(net, sosp.Mask.from_removed(net, {"layer1.0.conv1": [0, 1]}, example), example)
    assert sosp.repair(cut, net, images, examples=60).examples == 60
    assert sosp.repair(small, model, x, examples=100).examples == 100


def test_equations_do_not_grow_with_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_plan, "ROWS", 150)
    model, small, x = randomly_cut("conv-bn")
    few = sosp.repair(small, model, x)
    many = sosp.repair(small, model, torch.cat([x, x, x, x]))
    for a, b in zip(few.layers, many.layers, strict=True):
        assert b.rows <= 2 * 150
        assert abs(a.rows - b.rows) <= 0.1 * b.rows
    assert off(many.model, model, x) < off(small, model, x)


def test_too_few_inputs_are_said_and_regularised() -> None:
    model, small, x = randomly_cut("conv-bn")
    told = r"'head' has 13 unknowns .* Of 12 inputs 2 are held out .* only 10 equations.* 15 inputs would be enough"
    with pytest.warns(FewInputsWarning, match=told) as caught:
        found = sosp.repair(small, model, x[:12])
    assert len(caught) == 1
    sosp.repair(small, model, x[:15])  # enough, as it was said
    sosp.repair(small, model, x, examples=12)  # which were asked for
    assert off(found.model, model, x) < 2 * off(small, model, x)


def test_a_network_that_lost_nothing_needs_few_inputs_and_stays() -> None:
    c = case("conv-bn")
    x = inputs(c.inputs)[:12]
    same = sosp.shrink(c.model, sosp.Mask.from_removed(c.model, {}, x), x)
    found = sosp.repair(same, c.model, x)  # warnings are errors
    assert off(found.model, c.model, x) == 0
    assert found.agreement_after == 1
    assert not found.note


def test_more_sweeps_and_another_seed() -> None:
    model, small, x = randomly_cut("residual")
    one, two, same = (sosp.repair(small, model, x, sweeps=n, seed=s) for n, s in ((1, 0), (2, 0), (1, 0)))
    assert off(one.model, same.model, x) == 0
    assert off(two.model, one.model, x) > 0
    assert sum(e.after for e in two.layers) <= 1.05 * sum(e.after for e in one.layers)


def test_a_network_from_a_file_and_one_cut_twice(tmp_path: Any) -> None:
    model, mask, x = redundant("conv-bn")
    small = sosp.shrink(model, mask, x[:4])
    sosp.save(tmp_path / "small.safetensors", small, mask)
    loaded = sosp.load(tmp_path / "small.safetensors", model)
    assert off(sosp.repair(loaded, model, x).model, model, x) < EXACT
    again = sosp.shrink(small, sosp.Mask.from_removed(small, {"conv2": [1]}, x[:4]), x[:4])
    for origin in (small, model):
        assert off(sosp.repair(again, origin, x).model, model, x) < off(again, model, x)
    assert off(sosp.repair(again, model, x).model, model, x) < 0.5


def test_repaired_networks_are_saved_like_others(tmp_path: Any) -> None:
    model, small, x = randomly_cut("residual")
    found = sosp.repair(small, model, x).model
    sosp.save(tmp_path / "it.safetensors", found)
    assert off(sosp.load(tmp_path / "it.safetensors", model), found, x) == 0


# --- towards probabilities ------------------------------------------------------------------------------


def test_logits_are_fitted_for_their_probabilities() -> None:
    model, small, x = randomly_cut("conv-bn")
    x = inputs(x, 1500)
    with torch.no_grad():
        for p in model.head.parameters():
            p *= 8  # confident
        for p in small.head.parameters():
            p *= 8

    def divergence(found: sosp.Repaired) -> float:
        with torch.no_grad():
            p, q = model(x).log_softmax(1), found.model(x).log_softmax(1)
        return float(F.kl_div(q, p, log_target=True, reduction="batchmean"))

    plain, aware = (sosp.repair(small, model, x, loss=loss) for loss in ("mse", "cross_entropy"))
    assert divergence(aware) < 0.9 * divergence(plain)


def test_numbers_have_an_error_and_classes_agree() -> None:
    model, small, x = randomly_cut("mlp")
    found = sosp.repair(small, model, x, loss="mse")
    assert not found.classes
    errors = f"{1 - found.agreement_before:.4f} -> {1 - found.agreement_after:.4f}"
    assert found.summary.endswith(f"error of the outputs {errors} of the original's variance")
    assert "%" not in found.summary
    classes = sosp.repair(small, model, x)
    assert classes.classes
    assert "agreement with the original " in classes.summary


def test_what_it_prints() -> None:
    model, small, x = randomly_cut("conv-bn")
    text = str(sosp.repair(small, model, x)).splitlines()
    assert text[0].startswith("repaired: ")
    assert "240 inputs" in text[0]
    assert len(text) == 4
    assert text[1].split()[:2] == ["conv1", "error"]
