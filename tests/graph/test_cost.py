"""Parameters and MACs: of the whole network, of what a mask leaves, by hand, by torch's own counter, by the papers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sosp
from networks import case, to_score
from networks.compare import mask_of, some_channels
from networks.literature import cifar_resnet, densenet121, mobilenet_v2, resnet50
from oracles import counts
from sosp.errors import ArgumentError, StructureError
from sosp.graph.plan import compute_whole_cost, plan_removal

EVERY = pytest.mark.parametrize("name", to_score())


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(model: nn.Module, x: Tensor) -> int:
    """Torch's own count: two operations per multiply-accumulate."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert counter.get_total_flops() % (2 * len(x)) == 0
    return counter.get_total_flops() // (2 * len(x))


def width(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def some(model: nn.Module, layers: list[str], share: float, seed: int = 0) -> dict[str, list[int]]:
    """Every channel goes with that probability; each layer keeps one at least."""
    g = torch.Generator().manual_seed(seed)
    removed = {}
    for name in layers:
        size = width(model.get_submodule(name))
        gone = torch.rand(size, generator=g) < share
        gone[int(torch.randint(size, (), generator=g))] = False
        removed[name] = gone.nonzero().flatten().tolist()
    return removed


def random_mask(model: nn.Module, x: Tensor, layers: list[str], share: float, seed: int = 0) -> sosp.Mask:
    return sosp.Mask.from_removed(model, some(model, layers, share, seed), x)


def check_layers(cost: sosp.Cost, model: nn.Module, positions: dict[str, int]) -> None:
    """Every entry by the hand formulas, applied to the network that is there."""
    modules = dict(model.named_modules())
    for layer in cost.layers:
        module = modules[layer.name]
        assert layer.params == sum(p.numel() for p in module.parameters(recurse=False)), layer
        if isinstance(module, (nn.Linear, *counts.CONVOLUTIONS)):
            assert layer.params == width(module) * counts.filter_parameters(module), layer
            assert layer.macs == width(module) * counts.filter_macs(module, positions[layer.name]), layer
        else:
            assert layer.macs == 0, layer
    assert cost.params == sum(layer.params for layer in cost.layers)
    assert cost.macs == sum(layer.macs for layer in cost.layers)


# --- as it is


@EVERY
def test_the_whole_network(name: str) -> None:
    c = case(name)
    cost = sosp.count(c.model, c.inputs)
    assert cost.params == parameters(c.model)
    if name != "attention":  # torch also counts the scores
        assert cost.macs == macs(c.model, c.inputs)
    check_layers(cost, c.model, counts.positions(c.model, c.inputs))
    assert {x.name for x in cost.layers} == {n for n, m in c.model.named_modules() if [*m.parameters(recurse=False)]}


def test_the_size_of_the_batch_does_not_matter_and_that_of_the_picture_does() -> None:
    c = case("conv-nobn")
    one, five = sosp.count(c.model, c.inputs[:1]), sosp.count(c.model, c.inputs[:5])
    assert one == five
    larger = sosp.count(c.model, torch.zeros(1, 2, 9, 7, dtype=torch.float64))
    assert larger.params == one.params
    # conv1 on 9 x 7 pixels, conv2 (3 x 3, stride 2) on 4 x 3, and a linear layer
    assert larger.macs == 2 * 4 * 9 * 63 + 4 * 5 * 9 * 12 + 5 * 4


def test_a_parameter_in_two_layers_counts_once_and_its_macs_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    cost = sosp.count(model, torch.zeros(2, 4))
    assert cost.params == parameters(model) == 16 + 4 + 10
    assert cost.macs == 16 + 16 + 8


def test_parameters_used_by_hand_count() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 3, 1, 1))
            self.scale = nn.Parameter(torch.ones(6, 1, 1))
            self.unused = nn.Parameter(torch.ones(7))
            self.fc = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc((F.conv2d(x, self.weight) * self.scale).mean((2, 3)))

    cost = sosp.count(ByHand(), torch.zeros(2, 3, 4, 4))
    assert cost.params == 18 + 6 + 7 + 14
    assert cost.macs == 18 * 16 + 12


def test_two_weights_used_by_hand_in_one_module_both_count() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(2, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.first).relu(), self.second)

    assert sosp.count(ByHand(), torch.zeros(2, 3)).macs == 18 + 12


def test_a_layer_over_tokens_and_one_applied_twice() -> None:
    tokens = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    assert sosp.count(tokens, torch.zeros(2, 7, 3)).macs == 7 * (15 + 10)
    shared = case("shared")
    assert sosp.count(shared.model, shared.inputs).macs == 15 + 2 * 25 + 15


def test_a_convolution_without_a_batch_counts_too() -> None:
    class OneByOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.stack([self.conv(one).mean((1, 2)) for one in x]))

    cost = sosp.count(OneByOne(), torch.zeros(3, 2, 5, 5))
    assert cost.macs == 2 * 3 * 9 * 9 + 6


def test_how_it_prints() -> None:
    c = case("mlp")
    cost = sosp.count(c.model, c.inputs)
    assert repr(cost) == "Cost(118 parameters, 101 MACs)"  # 42 + 48 + 28; 35 + 42 + 24
    assert str(cost).splitlines() == [
        "Cost(118 parameters, 101 MACs)",
        "  fc1             42               35",
        "  fc2             48               42",
        "  head            28               24",
    ]


# --- under a mask


@EVERY
def test_under_a_mask_it_is_the_cost_of_the_shrunk_network(name: str) -> None:
    c = case(name)
    mask = random_mask(c.model, c.inputs, list(c.norms), 0.6)
    cost = sosp.count(c.model, c.inputs, mask)
    small = sosp.shrink(c.model, mask, c.inputs)
    assert cost.params == parameters(small)
    check_layers(cost, small, counts.positions(c.model, c.inputs))
    if name != "attention":
        assert cost.macs == macs(small, c.inputs)
    other = sosp.count(c.model, c.inputs, mask, convention="alternative")
    assert other.params <= cost.params
    assert other.macs <= cost.macs


@pytest.mark.parametrize("name", ["residual", "grouped", "attention"])
def test_a_mask_that_removes_nothing(name: str) -> None:
    c = case(name)
    nothing = sosp.Mask.from_removed(c.model, {}, c.inputs)
    cost = sosp.count(c.model, c.inputs)
    for convention in ("exact", "alternative"):
        assert sosp.count(c.model, c.inputs, nothing, convention=convention) == cost
        assert sosp.count(c.model, c.inputs, convention=convention) == cost


@pytest.mark.parametrize("layer", ["block1.conv1", "block1.conv2", "block2.conv2", "block2.downsample.0"])
def test_a_layer_that_is_gone_as_a_whole_costs_nothing(layer: str) -> None:
    c = case("residual")
    mask = sosp.Mask.from_removed(c.model, {layer: range(width(c.model.get_submodule(layer)))}, c.inputs)
    cost, small = sosp.count(c.model, c.inputs, mask), sosp.shrink(c.model, mask, c.inputs)
    assert cost.params == parameters(small)
    assert cost.macs == macs(small, c.inputs)
    entry = next(x for x in cost.layers if x.name == layer)
    assert (entry.params, entry.macs) == (0, 0)


def test_a_shrunk_network_is_counted_again_under_a_second_mask() -> None:
    c = case("residual")
    small = sosp.shrink(c.model, random_mask(c.model, c.inputs, list(c.norms), 0.3), c.inputs)
    layers = [x.name for x in sosp.find_structures(small, c.inputs).layers]
    mask = random_mask(small, c.inputs, layers, 0.4, seed=1)
    smaller = sosp.shrink(small, mask, c.inputs)
    assert sosp.count(small, c.inputs, mask).params == parameters(smaller)
    assert sosp.count(small, c.inputs, mask).macs == macs(smaller, c.inputs)


def test_the_model_stays_as_it_was_and_may_be_in_train_mode() -> None:
    c = case("residual")
    before = {n: t.clone() for n, t in c.model.state_dict().items()}
    mask = random_mask(c.model, c.inputs, list(c.norms), 0.5)
    cost = sosp.count(c.model, c.inputs, mask)
    assert sosp.count(c.model.train(), c.inputs, mask) == cost
    assert all(m.training for m in c.model.modules())
    assert all(torch.equal(t, before[n]) for n, t in c.model.state_dict().items())


# --- the networks of the literature: parameters and, where they are given, MACs as published

KNOWN: dict[str, tuple[Callable[[], nn.Module], int, int, int | None]] = {  # pixels, parameters, MACs
    "ResNet-56, A": (lambda: cifar_resnet(option="A"), 32, 853_018, 125_485_696),
    # and two projections: 16 x 32 weights on 16 x 16 pixels, 32 x 64 on 8 x 8
    "ResNet-56, B": (cifar_resnet, 32, 855_770, 125_485_696 + 16 * 32 * 256 + 32 * 64 * 64),
    "ResNet-50": (resnet50, 224, 25_557_032, 4_089_184_256),
    "MobileNetV2": (mobilenet_v2, 32, 3_504_872, None),
    "DenseNet-121": (densenet121, 32, 7_978_856, None),
}


def without_numbers(name: str, size: int) -> tuple[nn.Module, Tensor]:
    """The network on the meta device: counting needs no numbers."""
    with torch.device("meta"):
        return KNOWN[name][0]().eval(), torch.empty(1, 3, size, size)


@pytest.mark.parametrize("name", [n for n in KNOWN if n != "ResNet-56, B"])
def test_networks_of_the_literature(name: str) -> None:
    """As they are, and without a third of their filters."""
    _, size, params, operations = KNOWN[name]
    model, x = without_numbers(name, size)
    found = sosp.find_structures(model, x)
    cost = compute_whole_cost(found.flow)  # as count does, without following it once more
    assert (cost.params, cost.macs) == (params, operations or cost.macs)
    assert parameters(model) == params
    g = torch.Generator().manual_seed(0)
    mask = sosp.Mask.from_structures(found, torch.randperm(len(found), generator=g)[: len(found) // 3])
    plan = plan_removal(found.flow, mask)
    small, after = sosp.shrink(model, plan, x, verify=False), plan.cost
    assert after.params == parameters(small) < 0.75 * params
    assert after.macs == macs(small, x) < 0.75 * cost.macs


def test_a_network_of_the_literature_with_projections() -> None:
    model, x = without_numbers("ResNet-56, B", 32)
    cost = sosp.count(model, x)
    assert (cost.params, cost.macs) == KNOWN["ResNet-56, B"][2:]
    assert cost.macs == macs(model, x)


# --- App. D: as if the skips were adapted to the chain


class Net(nn.Module):
    """A stem, residual blocks and a linear layer; a block is a chain of convolutions and perhaps one on the skip."""

    def __init__(self, stem: nn.Module, blocks: list[tuple[list[nn.Conv2d], nn.Conv2d | None]], classes: int) -> None:
        super().__init__()
        self.stem, self.stem_bn = stem, nn.BatchNorm2d(stem.out_channels)
        self.chains = nn.ModuleList([nn.ModuleList(chain) for chain, _ in blocks])
        self.norms = nn.ModuleList([nn.ModuleList([nn.BatchNorm2d(c.out_channels) for c in b[0]]) for b in blocks])
        self.downs = nn.ModuleList([nn.Identity() if down is None else down for _, down in blocks])
        ends = [nn.Identity() if down is None else nn.BatchNorm2d(down.out_channels) for _, down in blocks]
        self.down_norms = nn.ModuleList(ends)
        self.fc = nn.Linear(blocks[-1][0][-1].out_channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_bn(self.stem(x)))
        for chain, norms, down, norm in zip(self.chains, self.norms, self.downs, self.down_norms, strict=True):
            y = x
            for i, (conv, bn) in enumerate(zip(chain, norms, strict=True)):
                y = bn(conv(y if i == 0 else F.relu(y)))
            x = F.relu(y + norm(down(x)))
        return self.fc(x.mean((2, 3)))


def conv(width_in: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=False)


def basic_net() -> Net:
    first = ([conv(4, 5, 3), conv(5, 4, 3)], None)
    second = ([conv(4, 5, 3, 2), conv(5, 6, 3)], conv(4, 6, 1, 2))
    return Net(conv(3, 4, 3), [first, second], 3)


BASIC = {"stem": [0], "chains.0.0": [0, 1], "chains.0.1": [1, 2], "chains.1.0": [4], "chains.1.1": [0, 1, 2]}
# (in, out, kernel size, pixels) on 8 x 8 and, behind the stride, 4 x 4 pixels. The chain keeps 3, 3, 2, 4, 3 filters.
BASIC_ALTERNATIVE = {
    "stem": (3, 3, 9, 64),
    "chains.0.0": (3, 3, 9, 64),
    "chains.0.1": (3, 2, 9, 64),
    "chains.1.0": (2, 4, 9, 16),
    "chains.1.1": (4, 3, 9, 16),
    "downs.1": (2, 3, 1, 16),
}
# Stem 1 2 3 and chains.0.1 0 3 together are all four channels of their stream; the downsampling layer keeps all six.
# (The paper counts per junction, so that chains.0.0 reads the three of the stem; what is built has one stream.)
BASIC_EXACT = {
    "stem": (3, 3, 9, 64),
    "chains.0.0": (4, 3, 9, 64),
    "chains.0.1": (3, 2, 9, 64),
    "chains.1.0": (4, 4, 9, 16),
    "chains.1.1": (4, 3, 9, 16),
    "downs.1": (4, 6, 1, 16),
}


def bottleneck_net() -> Net:
    first = ([conv(4, 3, 1), conv(3, 3, 3), conv(3, 8, 1)], conv(4, 8, 1))
    second = ([conv(8, 3, 1), conv(3, 4, 3), conv(4, 8, 1)], None)
    return Net(conv(2, 4, 3, 2), [first, second], 5)


BOTTLENECK = {
    "stem": [3],
    "chains.0.0": [0],
    "chains.0.1": [1],
    "chains.0.2": [0, 1, 2],
    "chains.1.0": [2],
    "chains.1.1": [0, 3],
    "chains.1.2": [0, 1, 2, 3, 4],
}
BOTTLENECK_ALTERNATIVE = {
    "stem": (2, 3, 9, 16),
    "chains.0.0": (3, 2, 1, 16),
    "chains.0.1": (2, 2, 9, 16),
    "chains.0.2": (2, 5, 1, 16),
    "downs.0": (3, 5, 1, 16),
    "chains.1.0": (5, 2, 1, 16),
    "chains.1.1": (2, 2, 9, 16),
    "chains.1.2": (2, 3, 1, 16),
}
BOTTLENECK_EXACT = {**BOTTLENECK_ALTERNATIVE, "downs.0": (3, 8, 1, 16), "chains.1.0": (8, 2, 1, 16)}

# network, mask, layers by hand, inputs of the last linear layer
BY_HAND = {
    ("basic", "alternative"): (basic_net, BASIC, BASIC_ALTERNATIVE, 3),
    ("basic", "exact"): (basic_net, BASIC, BASIC_EXACT, 6),
    ("bottleneck", "alternative"): (bottleneck_net, BOTTLENECK, BOTTLENECK_ALTERNATIVE, 3),
    ("bottleneck", "exact"): (bottleneck_net, BOTTLENECK, BOTTLENECK_EXACT, 8),
}


@pytest.mark.parametrize(("net", "convention"), BY_HAND)
def test_both_conventions_by_hand(net: str, convention: str) -> None:
    build, removed, layers, last = BY_HAND[net, convention]
    model = build().eval()
    x = torch.zeros(2, model.stem.in_channels, 8, 8)
    cost = sosp.count(model, x, sosp.Mask.from_removed(model, removed, x), convention=convention)
    found = {layer.name: (layer.params, layer.macs) for layer in cost.layers}
    for name, (into, out, kernel, pixels) in layers.items():
        assert found[name] == (into * out * kernel, into * out * kernel * pixels), name
    classes = model.fc.out_features
    assert found["fc"] == (last * classes + classes, last * classes)
    norms = sum(2 * out for _, out, _, _ in layers.values())
    assert cost.params == sum(i * o * k for i, o, k, _ in layers.values()) + norms + last * classes + classes
    assert cost.macs == sum(i * o * k * p for i, o, k, p in layers.values()) + last * classes


@pytest.mark.parametrize("build", [basic_net, bottleneck_net])
def test_the_conventions_agree_without_a_mask(build: Callable[[], Net]) -> None:
    model = build().eval()
    x = torch.zeros(2, model.stem.in_channels, 8, 8)
    exact = sosp.count(model, x)
    assert exact.params == parameters(model)
    assert exact.macs == macs(model, x)
    assert sosp.count(model, x, convention="alternative") == exact
    nothing = sosp.Mask.from_removed(model, {}, x)
    assert sosp.count(model, x, nothing, convention="alternative") == exact


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("build", [basic_net, bottleneck_net])
def test_the_alternative_needs_only_the_numbers_of_filters(build: Callable[[], Net], seed: int) -> None:
    """App. D: it can be computed "by just knowing the numbers of pruned filters in each convolutional layer"."""
    model = build().eval()
    x = torch.zeros(2, model.stem.in_channels, 8, 8)
    g = torch.Generator().manual_seed(seed)
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and not n.startswith("downs")]
    removed = some(model, layers, 0.4, seed)
    widths = {n: width(model.get_submodule(n)) for n in layers}
    other = {n: torch.randperm(widths[n], generator=g)[: len(gone)].tolist() for n, gone in removed.items()}
    masks = [sosp.Mask.from_removed(model, r, x) for r in (removed, other)]
    found = [sosp.count(model, x, mask, convention="alternative") for mask in masks]
    assert found[0] == found[1]
    left = {n: widths[n] - len(gone) for n, gone in removed.items()}
    before = model.stem.in_channels
    for name in layers:
        entry = next(e for e in found[0].layers if e.name == name)
        kernel = model.get_submodule(name).kernel_size
        assert entry.params == before * left[name] * kernel[0] * kernel[1], name
        before = left[name]


@pytest.mark.parametrize("seed", range(3))
def test_the_alternative_is_never_more_in_groups(seed: int) -> None:
    c = case("grouped")
    mask = random_mask(c.model, c.inputs, list(c.norms), 0.7, seed)
    exact, other = (sosp.count(c.model, c.inputs, mask, convention=x) for x in ("exact", "alternative"))
    assert other.params <= exact.params
    assert other.macs <= exact.macs


@pytest.mark.parametrize("name", ["squeeze-excite", "depthwise-bias", "prelu", "layer-scale", "weight-norm"])
def test_the_alternative_is_never_more_whatever_follows_the_channels(name: str) -> None:
    """Slopes, scales and computed weights have channels too."""
    c = case(name)
    mask = mask_of(c.model, some_channels(c, 0.7), c)
    exact, other = (sosp.count(c.model, c.example, mask, convention=x) for x in ("exact", "alternative"))
    assert exact.params == parameters(sosp.shrink(c.model, mask, c.example))
    assert other.params <= exact.params
    assert other.macs <= exact.macs


@pytest.mark.parametrize("name", ["depthwise-multiplier", "resnext", "transposed-grouped"])
@pytest.mark.parametrize(("share", "seed"), [(0.5, 0), (0.7, 1)])
def test_layers_in_groups_cost_what_the_shrunk_network_has(name: str, share: float, seed: int) -> None:
    c = case(name)
    mask = mask_of(c.model, some_channels(c, share, seed), c)
    cost, small = sosp.count(c.model, c.example, mask), sosp.shrink(c.model, mask, c.example)
    assert cost.params == parameters(small)
    assert cost.macs == macs(small, c.example)


class Part(nn.Module):
    """Half of what it gives is read."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)[:, :3]


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean((2, 3))).sigmoid()[:, :, None, None]


class Tailed(nn.Module):
    """A stream of four channels, and something behind it."""

    def __init__(self, tail: nn.Module, width: int) -> None:
        super().__init__()
        self.stem, self.branch = conv(3, 4, 1), conv(4, 4, 1)
        self.tail, self.head = tail, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(self.tail((x + self.branch(x)).relu()).mean((2, 3)))


PIXELS = 4
# The chain keeps two channels of the stream, of which nothing goes in what is built: MACs by the alternative, by hand.
TAILS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, int]]] = {
    "half of it is read": (Part, 3, {"tail.last": 2 * 3 * PIXELS, "head": 3 * 2}),
    "a gate": (Gate, 4, {"tail.fc": 2 * 4, "head": 2 * 2}),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, 1, 1, groups=4, bias=False), 4, {"tail": 2 * 9 * PIXELS, "head": 2 * 2}),
}


@pytest.mark.parametrize("tail", TAILS)
def test_the_chain_goes_on_behind_an_add(tail: str) -> None:
    build, width, wanted = TAILS[tail]
    model, x = Tailed(build(), width).eval(), torch.zeros(2, 3, 2, 2)
    mask = sosp.Mask.from_removed(model, {"stem": [0], "branch": [1, 2]}, x)
    cost = sosp.count(model, x, mask, convention="alternative")
    assert {n.name: n.macs for n in cost.layers if n.name in wanted} == wanted


def test_norms_do_not_make_a_chain_longer() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.skip = conv(3, 5, 1), conv(5, 4, 1), conv(3, 4, 1)
            self.norms, self.head = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.first(x).relu())
            return self.head((self.norms(self.skip(x)) + y).relu().mean((2, 3)))

    model, x = Norms().eval(), torch.zeros(2, 3, 2, 2)
    mask = sosp.Mask.from_removed(model, {"second": [0, 1, 2], "skip": [3]}, x)
    found = {n.name: n.macs for n in sosp.count(model, x, mask, convention="alternative").layers}
    assert (found["second"], found["head"]) == (5 * PIXELS, 1 * 2)


class Pair(nn.Module):
    """Two layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.logaddexp(self.a(x), self.b(x)))


class Shared(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x).relu()) + self.head(self.b(x).relu())


def test_the_conventions_agree_where_zeros_do_not_make_a_zero() -> None:
    model, x = Pair(), torch.zeros(2, 3)
    mask = sosp.Mask.from_removed(model, {"a": [0], "b": [0, 1]}, x)
    exact, other = (sosp.count(model, x, mask, convention=c) for c in ("exact", "alternative"))
    assert exact == other
    assert exact.macs == 3 * 3 + 3 * 2 + 4 * 2


def test_a_layer_that_reads_twice_has_the_inputs_of_the_wider_one() -> None:
    model, x = Shared(), torch.zeros(2, 3)
    mask = sosp.Mask.from_removed(model, {"a": [0], "b": [1, 2]}, x)
    assert sosp.count(model, x, mask).macs == 3 * 3 + 3 * 2 + 2 * 4 * 2
    assert sosp.count(model, x, mask, convention="alternative").macs == 3 * 3 + 3 * 2 + 2 * 3 * 2


CHAINS = ["mlp", "mlp-nobias", "conv-bn", "conv-nobn", "softplus", "conv1d", "linear-in-gates", "transposed"]
CONCATS = ["concat", "preact"]


@pytest.mark.parametrize("name", [*CHAINS, *CONCATS, "depthwise"])
def test_the_conventions_agree_where_nothing_is_added(name: str) -> None:
    c = case(name)
    mask = random_mask(c.model, c.inputs, list(c.norms), 0.5, seed=5)
    assert sosp.count(c.model, c.inputs, mask, convention="alternative") == sosp.count(c.model, c.inputs, mask)


def test_on_a_real_resnet_the_alternative_is_less_and_follows_the_chain() -> None:
    model = cifar_resnet(blocks=1, width=8).eval()
    x = torch.zeros(2, 3, 8, 8)
    mask = random_mask(model, x, ["features.0", "features.3.branch.3", "features.4.branch.3"], 0.5)
    exact, other = (sosp.count(model, x, mask, convention=c) for c in ("exact", "alternative"))
    assert other.params < exact.params
    assert other.macs < exact.macs


# --- what is refused


def test_an_unknown_convention() -> None:
    c = case("mlp")
    with pytest.raises(ArgumentError, match=r"convention='aproximate'.*exact, alternative"):
        sosp.count(c.model, c.inputs, convention="aproximate")


def test_a_mask_of_single_weights() -> None:
    c = case("mlp")
    mask = sosp.Mask.from_removed(c.model, {"fc1.weight": [0]}, c.inputs, kind="weights")
    with pytest.raises(StructureError, match="weights"):
        sosp.count(c.model, c.inputs, mask)


# --- recurrent layers


class Recurrent(nn.Module):
    """Every kind, in every form, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 5)
        self.gru = nn.GRU(5, 7, 2, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(14, 8, proj_size=3)
        self.rnn = nn.RNN(3, 4, nonlinearity="relu")
        self.cell, self.lstm_cell, self.rnn_cell = nn.GRUCell(4, 4), nn.LSTMCell(4, 4), nn.RNNCell(4, 9)
        self.hidden, self.head = nn.Linear(9, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gru(self.into(x))[0].transpose(0, 1)
        x = self.rnn(self.lstm(x)[0])[0]
        h = x[0]
        for step in x[1:4]:
            h, _ = self.lstm_cell(self.cell(step, h))
        return self.head(self.hidden(self.rnn_cell(h)).relu())


STEPS = 9
RECURRENT = {
    "gru": STEPS * 2 * 3 * 7 * ((5 + 7) + (14 + 7)),  # two directions, three gates; the second layer reads both
    "lstm": STEPS * (4 * 8 * (14 + 3) + 3 * 8),  # the state that is fed back is projected from 8 to 3
    "rnn": STEPS * 4 * (3 + 4),
    "cell": 3 * 3 * 4 * (4 + 4),
    "lstm_cell": 3 * 4 * 4 * (4 + 4),
    "rnn_cell": 9 * (4 + 9),
}


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_recurrent_layers_by_hand(rows: int) -> None:
    cost = sosp.count(Recurrent(), torch.randn(rows, STEPS, 6))
    found = {layer.name: layer.macs for layer in cost.layers}
    assert {name: found[name] for name in RECURRENT} == RECURRENT
    assert cost.macs == sum(RECURRENT.values()) + STEPS * 6 * 5 + 9 * 8 + 8 * 2


class Sequences(nn.Module):
    """Nearly all of the work is in the recurrent layer, which is not pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gru = nn.Linear(6, 5), nn.GRU(5, 7, batch_first=True)
        self.hidden, self.head = nn.Linear(7, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.gru(self.into(x))[0][:, -1]).relu())


def test_a_budget_counts_what_recurrent_layers_cost() -> None:
    model, x = Sequences(), torch.randn(4, STEPS, 6)
    structures = sosp.find_structures(model, x, exclude=["into"])
    saliency = sosp.Saliency(structures, "first-order", torch.arange(float(len(structures))))
    whole = STEPS * (6 * 5 + 3 * 7 * (5 + 7)) + 7 * 8 + 8 * 2
    assert sosp.count(model, x).macs == whole
    # Without the hidden layer one zero is left for the output layer to read.
    with pytest.raises(ArgumentError, match=rf"macs=0\.5 cannot be met.*{whole - 70:,} of {whole:,} macs remain"):
        sosp.select(saliency, macs=0.5)
    mask = sosp.select(saliency, macs=whole - 20)  # a neuron has seven inputs and two outputs
    small = sosp.shrink(model, mask, x)
    assert sosp.count(small, x).macs == sosp.count(model, x, mask).macs == whole - 3 * 9


def test_both_conventions_count_recurrent_layers() -> None:
    model, x = Sequences(), torch.randn(4, STEPS, 6)
    mask = sosp.Mask.from_removed(model, {"hidden": [0, 1, 2]}, x)
    whole = STEPS * (6 * 5 + 3 * 7 * (5 + 7)) + 7 * 8 + 8 * 2
    for convention in ("exact", "alternative"):
        assert sosp.count(model, x, mask, convention=convention).macs == whole - 3 * 9


def test_a_recurrent_layer_in_a_loop_counts_each_time() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(self.gru(x)[0])[0][:, -1])

    assert sosp.count(Twice(), torch.randn(3, 5, 4)).macs == 2 * 5 * 3 * 4 * 8 + 8


class Read(nn.Module):
    """What a recurrent layer, or one step of a cell, gives is read by a linear layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.head(y[0] if isinstance(y, tuple) else y)


GATES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "GRU": (lambda: nn.GRU(5, 7, batch_first=True), 3),
    "LSTM": (lambda: nn.LSTM(5, 7, batch_first=True), 4),
    "RNN": (lambda: nn.RNN(5, 7, batch_first=True), 1),
    "RNN, relu": (lambda: nn.RNN(5, 7, batch_first=True, nonlinearity="relu"), 1),
    "GRUCell": (lambda: nn.GRUCell(5, 7), 3),
    "LSTMCell": (lambda: nn.LSTMCell(5, 7), 4),
    "RNNCell": (lambda: nn.RNNCell(5, 7), 1),
    "RNNCell, relu": (lambda: nn.RNNCell(5, 7, nonlinearity="relu"), 1),
}


@pytest.mark.parametrize("kind", GATES)
def test_every_kind_of_recurrent_layer_counts_its_gates(kind: str) -> None:
    build, gates = GATES[kind]
    steps = 1 if "Cell" in kind else STEPS
    x = torch.randn(3, 5) if "Cell" in kind else torch.randn(3, STEPS, 5)
    assert sosp.count(Read(build()), x).macs == steps * (gates * 7 * (5 + 7) + 7 * 2)


def test_a_packed_sequence_has_no_steps_of_padding() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True)
            return self.head(self.lstm(packed)[1][0][0])

    assert sosp.count(Packed(), torch.randn(2, 5, 4)).macs == (5 + 3) // 2 * 4 * 4 * 8 + 8


def test_recurrent_layers_that_share_their_matrices_both_count() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.GRUCell(4, 4), nn.GRUCell(4, 4), nn.Linear(4, 2)
            self.second.weight_ih, self.second.weight_hh = self.first.weight_ih, self.first.weight_hh

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(x)))

    cost = sosp.count(Tied(), torch.randn(3, 4))
    assert cost.params == parameters(Tied()) == 3 * 4 * 8 + 2 * 24 + 10
    assert cost.macs == 2 * 3 * 4 * 8 + 8


def test_a_matrix_of_a_recurrent_layer_that_is_computed_counts() -> None:
    model = Read(nn.utils.parametrizations.weight_norm(nn.GRUCell(5, 7), "weight_hh"))
    assert sosp.count(model, torch.randn(3, 5)).macs == 3 * 7 * (5 + 7) + 7 * 2


def test_a_weight_used_by_hand_is_counted_under_its_module() -> None:
    model = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, batch_first=True)
    layers = {layer.name: layer.macs for layer in sosp.count(model, torch.randn(2, 5, 8)).layers}
    assert "" not in layers
    assert layers["self_attn"] == 5 * 3 * 8 * 8
