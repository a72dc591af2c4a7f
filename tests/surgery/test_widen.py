"""Larger networks: the same function with channels repeated, or new ones drawn beside those that were there."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from helpers.unchanged import check_unchanged
from networks import case
from networks.literature import cifar_resnet
from sosp.errors import ArgumentError, SospError, StructureError, SurgeryError

# The same sums with terms repeated and divided: rounding of float64, times what batch statistics amplify it by.
CLOSE = 1e-10


class SqueezeExcite(nn.Module):
    """Every channel is scaled by a sigmoid that all channels decide on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.squeeze = nn.Conv2d(4, 3, 1)
        self.excite = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        scale = self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()
        return self.head((x * scale).mean((2, 3)))


def squeeze_excite() -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SqueezeExcite().double().eval(), torch.randn(4, 2, 4, 4, dtype=torch.float64)


def net(name: str) -> tuple[nn.Module, Tensor]:
    if name == "squeeze-excite":
        return squeeze_excite()
    c = case(name)
    return c.model, c.inputs


def run(model: nn.Module, x: Tensor, training: bool) -> Tensor:
    with torch.no_grad():
        return deepcopy(model).train(training)(x)


def check_same_function(wide: nn.Module, model: nn.Module, x: Tensor) -> None:
    for training in (False, True):
        ours, theirs = run(wide, x, training), run(model, x, training)
        assert (ours - theirs).abs().max() < CLOSE * theirs.abs().max(), f"training={training}"


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in model.state_dict().items()}


def widths(model: nn.Module, *names: str) -> list[int]:
    layers = [model.get_submodule(n) for n in names]
    stated = [m.out_features if isinstance(m, nn.Linear) else m.out_channels for m in layers]
    held = [m.weight.shape[1] if isinstance(m, nn.ConvTranspose2d) else m.weight.shape[0] for m in layers]
    assert stated == held
    return held


# --- the same function


SAME = {  # case: what is widened, and the widths that it then has
    "mlp": ({"fc1": 2.0, "fc2": 1.5}, {"fc1": 14, "fc2": 9}),
    "conv-nobn": ({"conv1": 1.5, "conv2": 3}, {"conv1": 6, "conv2": 15}),
    "residual": ({"block1.conv1": 2, "block2.conv1": 1.67}, {"block1.conv1": 4, "block2.conv1": 5}),
    "residual, the stream": ({"conv1": 2}, {"conv1": 6, "block1.conv2": 6}),
    "residual, by its other end": ({"block1.conv2": 1.4}, {"conv1": 4, "block1.conv2": 4}),
    "residual, behind the projection": ({"block2.downsample.0": 2}, {"block2.conv2": 8, "block2.downsample.0": 8}),
    "residual, all": ({"*": 2}, {"conv1": 6, "block1.conv1": 4, "block2.conv2": 8, "head": 3}),
    "preact": ({"conv": 2, "dense1": 1.5}, {"conv": 6, "dense1.conv": 3, "dense2.conv": 2}),
    "concat": ({"left": 2, "right": 1.5, "mix": 1.2}, {"left": 6, "right": 6, "mix": 6}),
    "depthwise": ({"expand": 1.5}, {"expand": 9, "depthwise": 9, "project": 4}),
    "depthwise, by the depthwise layer": ({"depthwise": 2}, {"expand": 12, "depthwise": 12}),
    "grouped, read in groups": ({"conv1": 1.5}, {"conv1": 6, "conv2": 6}),
    "grouped, given in groups": ({"conv2": 2}, {"conv1": 4, "conv2": 12, "conv3": 3}),
    "conv-bn": ({"conv1": 2}, {"conv1": 8}),
    "conv-bn, flattened": ({"conv2": 2}, {"conv2": 10}),
    "conv-bn, flattened, a broken factor": ({"conv2": 1.6}, {"conv2": 8}),
    "grouped, flattened": ({"conv3": 2}, {"conv3": 6}),
    "transposed": ({"down": 1.5, "up": 2, "up_plain": 2}, {"down": 6, "up": 10, "up_plain": 6}),
    "squeeze-excite": ({"conv": 1.5, "squeeze": 2}, {"conv": 6, "excite": 6, "squeeze": 6}),
    "shared": ({"stem": 1.6}, {"stem": 8, "twice": 8}),
    "conv-in-bn-shared": ({"conv": 1.5}, {"stem": 6, "conv": 6}),
    "conv1d": ({"conv1": 2, "conv2": 1.2}, {"conv1": 8, "conv2": 6}),
    "attention": ({"fc1": 2}, {"fc1": 10, "fc2": 3, "q": 4}),
}


@pytest.mark.parametrize("name", SAME)
def test_copies_compute_the_same_function(name: str) -> None:
    factors, wanted = SAME[name]
    model, x = net(name.partition(",")[0])
    with check_unchanged(model):
        wide = sosp.widen(model, factors, x, init="copy")
    check_same_function(wide, model, x)
    assert widths(wide, *wanted) == list(wanted.values())
    check_kin(wide, model)


def check_kin(wide: nn.Module, model: nn.Module) -> None:
    """The same classes under the same names in the same mode; nothing is added, nothing got smaller."""
    assert type(wide) is type(model)
    theirs = dict(model.named_modules())
    for name, module in wide.named_modules():
        assert type(module) is type(theirs[name]), name
        assert module.training == theirs[name].training, name
    assert list(shapes(wide)) == list(shapes(model))
    assert all(
        ours >= theirs
        for name, shape in shapes(model).items()
        for ours, theirs in zip(shapes(wide)[name], shape, strict=True)
    )
    assert {n: p.requires_grad for n, p in wide.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("init", ["copy", "random"])
def test_what_is_not_widened_is_as_it_was(init: str) -> None:
    model, x = net("residual")
    model.train()
    model.head.weight.requires_grad_(False)
    wide = sosp.widen(model, {"block1.conv1": 2}, x, init=init)
    touched = ("block1.conv1.", "block1.bn1.", "block1.conv2.weight")
    for name, value in model.state_dict().items():
        if not name.startswith(touched):
            assert torch.equal(wide.state_dict()[name], value), name
    assert wide.training
    assert wide.head.weight.requires_grad is False
    assert wide.head.weight is not model.head.weight


def test_a_factor_of_one_changes_nothing() -> None:
    model, x = net("residual")
    for init in ("copy", "random"):
        wide = sosp.widen(model, {"conv1": 1, "block1": 1.0}, x, init=init)
        assert all(torch.equal(wide.state_dict()[n], v) for n, v in model.state_dict().items())


# --- which layers


def test_containers_and_patterns() -> None:
    model, x = net("residual")
    by_name = sosp.widen(model, {"block1.conv1": 2, "block1.conv2": 2}, x)
    assert shapes(sosp.widen(model, {"block1": 2}, x)) == shapes(by_name)
    assert shapes(sosp.widen(model, {"block1.*": 2}, x)) == shapes(by_name)
    assert shapes(sosp.widen(model, {"*1.conv?": 2}, x)) == shapes(by_name)
    assert widths(by_name, "conv1", "block1.conv1", "block1.conv2", "block2.conv1") == [6, 4, 6, 3]


def test_a_stream_takes_the_largest_factor_asked_of_it() -> None:
    model, x = net("residual")
    wide = sosp.widen(model, {"conv1": 4 / 3, "block1.conv2": 2}, x, init="copy")
    assert widths(wide, "conv1", "block1.conv2") == [6, 6]
    assert shapes(wide) == shapes(sosp.widen(model, {"block1.conv2": 2, "conv1": 4 / 3}, x))
    assert shapes(wide) == shapes(sosp.widen(model, {"conv1": 2}, x))
    assert shapes(wide) == shapes(sosp.widen(model, {"conv1": 2, "block1.conv2": 4 / 3}, x))
    twice_named = sosp.widen(model, {"block1": 1.5, "block1.conv1": 3}, x)
    assert widths(twice_named, "block1.conv1", "block1.conv2") == [6, 4]


def test_a_container_may_hold_layers_that_cannot_grow() -> None:
    model, x = net("mlp")
    wide = sosp.widen(model, {"*": 2}, x, init="copy")
    assert widths(wide, "fc1", "fc2", "head") == [14, 12, 4]
    check_same_function(wide, model, x)


def test_a_widened_resnet_has_the_shapes_of_one_built_wider() -> None:
    narrow, wide = cifar_resnet(blocks=1, width=4).eval(), cifar_resnet(blocks=1, width=8)
    x = torch.randn(2, 3, 8, 8)
    for init in ("random", "copy"):
        found = sosp.widen(narrow, {"features": 2}, x, init=init)
        assert shapes(found) == shapes(wide)
        assert [m.in_channels for m in found.modules() if isinstance(m, nn.Conv2d)] == [
            m.in_channels for m in wide.modules() if isinstance(m, nn.Conv2d)
        ]
    wide.load_state_dict(found.state_dict())
    wide.eval()
    assert torch.allclose(wide(x), narrow(x), atol=1e-5)


# --- new channels drawn


def places(old: Tensor, new: Tensor) -> list[int]:
    """Where the rows of ``old`` stand in ``new``, each at its first place behind the one before."""
    found: list[int] = []
    for row in old:
        start = found[-1] + 1 if found else 0
        found.append(next(i for i in range(start, len(new)) if torch.equal(new[i], row)))
    return found


@pytest.mark.parametrize("factor", [2.0, 1.5])
@pytest.mark.parametrize("name", ["mlp", "conv-bn", "transposed", "concat"])
def test_drawn_channels_are_new_and_old_ones_keep_their_numbers(name: str, factor: float) -> None:
    model, x = net(name)
    layer, reader = {
        "mlp": ("fc1", "fc2"),
        "conv-bn": ("conv1", "conv2"),
        "transposed": ("down", "up"),
        "concat": ("left", "mix"),
    }[name]
    drawn = sosp.widen(model, {layer: factor}, x)
    copied = sosp.widen(model, {layer: factor}, x, init="copy")
    assert shapes(drawn) == shapes(copied)
    check_kin(drawn, model)
    old, new = (m.get_submodule(layer).weight.detach() for m in (model, drawn))
    where = places(old, new)
    fresh = [i for i in range(len(new)) if i not in where]
    assert len(fresh) == len(new) - len(old) > 0
    assert not any(torch.equal(new[i], row) for i in fresh for row in old)
    assert all(new[i].unique().numel() == new[i].numel() for i in fresh)  # drawn, not filled
    if model.get_submodule(layer).bias is not None:
        assert torch.equal(drawn.get_submodule(layer).bias[where], model.get_submodule(layer).bias)
    # What reads them: the old columns stand where the old channels are.
    axis = 0 if isinstance(model.get_submodule(reader), nn.ConvTranspose2d) else 1
    columns = drawn.get_submodule(reader).weight.detach().movedim(axis, 0)
    before = model.get_submodule(reader).weight.detach().movedim(axis, 0)
    assert torch.equal(columns[where], before[: len(where)])
    assert not any(torch.equal(columns[i], column) for i in fresh for column in before)


def test_old_columns_behind_a_flatten_keep_their_places() -> None:
    """conv2 has 5 channels of 2 x 2 pixels: the linear layer reads the pixels of one channel side by side."""
    model, x = net("conv-bn")
    wide = sosp.widen(model, {"conv2": 2}, x)
    where = places(model.conv2.weight.detach(), wide.conv2.weight.detach())
    old, new = model.head.weight.detach().view(3, 5, 4), wide.head.weight.detach().view(3, 10, 4)
    assert torch.equal(new[:, where], old)


def test_new_norms_are_fresh_ones() -> None:
    model, x = net("residual")
    wide = sosp.widen(model, {"block1.conv1": 2}, x)
    where = places(model.block1.conv1.weight.detach(), wide.block1.conv1.weight.detach())
    fresh = [i for i in range(4) if i not in where]
    for key, value in {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}.items():
        old, new = (getattr(m.block1.bn1, key).detach() for m in (model, wide))
        assert torch.equal(new[where], old), key
        assert torch.equal(new[fresh], torch.full((2,), value, dtype=torch.float64)), key
    assert wide.block1.bn1.num_features == 4


def test_drawn_as_the_layer_itself_draws() -> None:
    """A linear layer of 400 inputs draws weights and biases within 1 / 20."""
    model = nn.Sequential(nn.Linear(400, 30), nn.ReLU(), nn.Linear(30, 3)).requires_grad_(False)
    for p in model.parameters():
        p.fill_(7.0)
    torch.manual_seed(0)
    wide = sosp.widen(model, {"0": 2}, torch.randn(2, 400))
    fresh = wide[0].weight[(wide[0].weight != 7).all(1)]
    assert len(fresh) == 30
    assert fresh.abs().max() <= 1 / 20
    # Uniform within +-1/20: a standard deviation of 0.0289, over 12,000 numbers within 2 % of it.
    assert fresh.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.02)


def test_chance_decides_and_repeats() -> None:
    model, x = net("concat")

    def widened(seed: int, init: str = "random") -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return sosp.widen(model, {"left": 2}, x, init=init).state_dict()

    first, again, other = widened(0), widened(0), widened(1)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["left.weight"], other["left.weight"])
    assert not torch.equal(first["mix.weight"], other["mix.weight"])
    copied, same = widened(0, "copy"), widened(1, "copy")
    assert all(torch.equal(copied[n], same[n]) for n in copied)


def test_copying_draws_nothing() -> None:
    model, x = net("concat")
    before = torch.get_rng_state()
    sosp.widen(model, {"left": 2}, x, init="copy")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_is_left_as_it_was() -> None:
    model, x = net("residual")
    given = x.clone()
    with torch.random.fork_rng(devices=[]):
        before = {n: t.clone() for n, t in model.state_dict().items()}
        wide = sosp.widen(model, {"*": 2}, x)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(x, given)
    with torch.no_grad():
        for p in wide.parameters():
            p.zero_()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


# --- what comes after


@pytest.mark.parametrize(
    ("name", "init"), [("residual", "copy"), ("residual", "random"), ("depthwise", "copy"), ("grouped", "random")]
)
def test_a_widened_network_can_be_shrunk(name: str, init: str) -> None:
    model, x = net(name)
    layer = next(iter(case(name).norms))
    wide = sosp.widen(model, {layer: 2}, x, init=init)
    mask = sosp.Mask.from_removed(wide, {layer: [0, 2, 3]}, x)
    small, masked = sosp.shrink(wide, mask, x), sosp.masked(wide, mask)
    check_same_function(small, masked, x)
    assert widths(small, layer) == [widths(wide, layer)[0] - 3]


@pytest.mark.parametrize("layer", ["block1.conv1", "block2.conv1", "conv1"])
def test_a_shrunk_network_can_be_widened(layer: str) -> None:
    """block1.conv2 keeps fewer channels than its stream and scatters them."""
    model, x = net("residual")
    mask = sosp.Mask.from_removed(model, {"block1.conv2": [0], "block2.conv1": [2]}, x)
    small = sosp.shrink(model, mask, x)
    wide = sosp.widen(small, {layer: 2}, x, init="copy")
    check_same_function(wide, small, x)
    assert widths(wide, layer) == [2 * widths(small, layer)[0]]


def test_a_widened_network_can_be_widened_and_trained() -> None:
    model, x = net("residual")
    wide = sosp.widen(sosp.widen(model, {"conv1": 2}, x, init="copy"), {"block1.conv1": 2}, x, init="copy")
    check_same_function(wide, model, x)
    wide.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in wide.parameters())


# --- what is refused


def outcome(model: nn.Module, factors: dict[str, float], x: Tensor, init: str) -> nn.Module | SospError:
    """The wider network, or the refusal: either is fine where the other would be."""
    try:
        return sosp.widen(model, factors, x, init=init)
    except SospError as error:
        return error


def check_refused(
    model: nn.Module, x: Tensor, factors: Any, kind: type[SospError], *words: str, **options: Any
) -> None:
    with check_unchanged(model), pytest.raises(SospError) as caught:
        sosp.widen(model, factors, x, **options)
    assert type(caught.value) is kind
    missing = [word for word in words if word not in str(caught.value)]
    assert missing == [], str(caught.value)


@pytest.mark.parametrize("init", ["copy", "random"])
def test_the_output_layer(init: str) -> None:
    model, x = net("mlp")
    check_refused(model, x, {"head": 2}, StructureError, "'head'", "cannot be widened", "returns it", init=init)


def test_an_output_layer_named_beside_others() -> None:
    """A container may hold what cannot grow; a layer that is named must."""
    model, x = net("mlp")
    check_refused(model, x, {"fc1": 2, "head": 2}, StructureError, "'head'", "cannot be widened")


def test_a_stream_with_a_layer_norm() -> None:
    model, x = net("layernorm")
    check_refused(model, x, {"fc1": 2}, StructureError, "'fc1'", "layer_norm", "scored.py:")


def test_attention_with_heads_of_a_fixed_size() -> None:
    model, x = net("attention")
    for factor in (2, 1.5, 1.3):
        check_refused(model, x, {"q": factor}, SurgeryError, "unflatten at scored.py:", "current widths")


@pytest.mark.parametrize("init", ["copy", "random"])
def test_a_width_that_the_groups_do_not_allow(init: str) -> None:
    """conv2 gives two groups and conv3 reads three: 6 channels become 12, and never 9."""
    model, x = net("grouped")
    wide = outcome(model, {"conv2": 1.5}, x, init)
    if isinstance(wide, SospError):
        assert "'conv2'" in str(wide)
    else:
        assert run(wide, x, False).shape == (10, 4)
        assert widths(wide, "conv2") == [12]


@pytest.mark.parametrize("where", ["parametrizations", "forward"])
def test_a_layer_whose_weight_is_computed(where: str) -> None:
    """It must not be left as it is without a word, and must say how wide it is."""

    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)

    kind = Standardised if where == "forward" else nn.Conv2d
    model = nn.Sequential(kind(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.Flatten()).eval()
    if where == "parametrizations":
        nn.utils.parametrizations.weight_norm(model[0])
    x = torch.randn(2, 2, 3, 3)
    wide = outcome(model, {"0": 2}, x, "copy")
    if isinstance(wide, SospError):
        assert "'0'" in str(wide)
    else:
        assert wide[2].in_channels == 8
        assert torch.allclose(wide(x), model(x), atol=1e-5)
        assert wide[0].out_channels == 8


def test_an_unknown_name() -> None:
    model, x = net("mlp")
    check_refused(model, x, {"fc3": 2}, StructureError, "'fc3'", "Did you mean 'fc2'?")
    with pytest.raises(SospError) as caught:
        sosp.widen(model, {"fc3": 2}, x)
    assert "exclude" not in str(caught.value)  # another function's argument
    check_refused(model, x, {"act1": 2}, StructureError, "'act1'", "nothing to widen")


@pytest.mark.parametrize("factor", [0.5, 0, -1, 65, 1e9, float("nan"), float("inf"), "2", True, None, [2], 2j])
def test_a_factor_that_is_none(factor: Any) -> None:
    model, x = net("mlp")
    check_refused(model, x, {"fc1": factor}, ArgumentError, "'fc1'", repr(factor), "from 1 to 64")


@pytest.mark.parametrize("factors", [{}, [("fc1", 2)], "fc1", 2.0, None])
def test_factors_of_another_form(factors: Any) -> None:
    model, x = net("mlp")
    check_refused(model, x, factors, ArgumentError, "{layer: factor}")


def test_an_unknown_init() -> None:
    model, x = net("mlp")
    check_refused(model, x, {"fc1": 2}, ArgumentError, "init='copies'", "random, copy", init="copies")


def test_an_example_that_the_model_does_not_take() -> None:
    model, _ = net("mlp")
    check_refused(model, torch.zeros(2, 3, dtype=torch.float64), {"fc1": 2}, StructureError, "(2, 3)")
