"""What can be removed, read off a forward pass: layers, their norms, their wiring and their sizes, all by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import Case, case, to_score
from oracles import counts, dense
from oracles.theta import thetas, width
from sosp.core.layers import LAYERS, find_layer_type
from sosp.errors import StructureError

PARALLEL = {"residual", "preact", "concat", "attention", "layernorm"}


def find(c: Case, **options: Any) -> sosp.Structures:
    return sosp.find_structures(c.model, c.inputs[:2], **options)


def found_in(model: nn.Module, *example: Tensor, **options: Any) -> dict[str, tuple[str, ...]]:
    """Layer -> its own norms, in order."""
    structures = sosp.find_structures(model.eval(), example, **options)
    return {layer.name: layer.norms for layer in structures.layers}


def members(structures: sosp.Structures) -> list[dict[str, list[int]]]:
    """For each structure, its channels."""
    return [
        {name: channels.tolist() for name, channels in structures.channels_of(torch.tensor([s])).items()}
        for s in range(len(structures))
    ]


# --- filters


@pytest.mark.parametrize("name", to_score())
def test_layers_and_their_norms(name: str) -> None:
    c = case(name)
    layers = find(c).layers
    assert [(layer.name, layer.norms) for layer in layers] == [(n, (bn,) if bn else ()) for n, bn in c.norms.items()]


@pytest.mark.parametrize("name", to_score())
def test_one_structure_per_channel_in_order(name: str) -> None:
    c = case(name)
    s = find(c)
    widths = [width(c.model.get_submodule(n)) for n in c.norms]
    assert [layer.channels for layer in s.layers] == widths
    assert len(s) == s.count == sum(widths)
    assert torch.cat(s.ids).tolist() == list(range(sum(widths)))
    assert s.plain
    assert (s.kind, s.gate) == ("filters", "features")
    assert s.owner().tolist() == [i for i, n in enumerate(widths) for _ in range(n)]


@pytest.mark.parametrize("name", to_score())
def test_sizes_are_the_hand_counts(name: str) -> None:
    c = case(name)
    positions = counts.positions(c.model, c.inputs)
    for layer in find(c).layers:
        module = c.model.get_submodule(layer.name)
        assert layer.params == counts.filter_parameters(module)
        assert layer.macs == counts.filter_macs(module, positions[layer.name])
        assert layer.axis == (-1 if isinstance(module, nn.Linear) else 1)
        assert layer.kernel == (1 if isinstance(module, nn.Linear) else module.kernel_size[0])
        assert layer.depthwise == (layer.name == "depthwise")


@pytest.mark.parametrize(
    ("layer", "x", "kernel", "positions"),
    [
        (nn.Conv1d(2, 3, 5), (2, 9), 5, 5),
        (nn.Conv2d(2, 3, (1, 9)), (2, 4, 9), 3, 4),
        (nn.Conv2d(2, 3, (2, 3), stride=2), (2, 4, 7), sqrt(6), 2 * 3),
        (nn.Conv3d(2, 3, (1, 2, 4)), (2, 3, 3, 4), 2, 3 * 2 * 1),
        (nn.ConvTranspose1d(2, 3, 4), (2, 6), 4, 6),
        (nn.ConvTranspose3d(2, 3, (1, 1, 8)), (2, 2, 3, 4), 2, 24),
        (nn.Linear(6, 3), (2, 5, 6), 1, 10),
    ],
)
@pytest.mark.parametrize("examples", [1, 3])
def test_kernels_and_positions(
    layer: nn.Module, x: tuple[int, ...], kernel: float, positions: int, examples: int
) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(1, *x))
    (found,) = sosp.find_structures(model, torch.randn(examples, *x)).layers
    assert found.kernel == pytest.approx(kernel)
    assert found.params == counts.filter_parameters(layer)
    assert found.macs == counts.filter_macs(layer, positions)


class Windows(nn.Module):
    """A linear layer over windows of tokens: its first dimension is no example."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, 3)
        windows = self.fc(x.reshape(-1, 2, 3))
        return self.head(windows.reshape(*x.shape[:2], 4).mean(1))


@pytest.mark.parametrize("examples", [1, 4])
def test_positions_are_counted_per_example(examples: int) -> None:
    (layer,) = sosp.find_structures(Windows(), torch.randn(examples, 6, 3)).layers
    assert layer.macs == 3 * 6


def test_the_example_may_be_a_tensor_a_tuple_or_a_dict() -> None:
    c = case("mlp")
    x = c.inputs[:1]
    assert all(len(sosp.find_structures(c.model, e)) == 13 for e in (x, (x,), [x], {"input": x}))


def test_the_network_itself_runs_once_and_in_eval_mode() -> None:
    c = case("conv-bn")
    modes: list[bool] = []
    c.model.train()
    c.model.bn1.register_forward_hook(lambda m, args, y: modes.append(m.training) if m is c.model.bn1 else None)
    find(c)
    assert modes == [False]


def test_footprint_is_bytes_per_example() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    assert {sosp.find_structures(model, torch.randn(n, 3)).footprint for n in (1, 2, 7)} == {4 * (5 + 5 + 2)}


# --- norms


class Net(nn.Module):
    """Two convolutions with two norms, put together by ``forward_``."""

    def __init__(
        self, forward_: Callable[[Any, Tensor], Tensor], norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1)
        self.norm1, self.norm2 = norm(3), norm(3)
        self.head = nn.Linear(3, 2)
        self.forward_ = forward_

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_(self, x).mean((2, 3)))


PIXELS = torch.ones(2, 2, 4, 4)
NORMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, tuple[str, ...]]]] = {
    "one norm behind two layers": (lambda m, x: m.norm1(m.a(x)) + m.norm1(m.b(x)), {"a": (), "b": ()}),
    "a norm that takes something else too": (lambda m, x: m.norm1(m.a(x)) + m.norm1(x[:, [0, 1, 0]]), {"a": ()}),
    "two norms behind one layer's two calls": (
        lambda m, x: m.norm1(m.a(x)) + m.norm2(m.a(x + 1)),
        {"a": ("norm1", "norm2")},
    ),
    "a norm behind only one of two calls": (lambda m, x: m.norm1(m.a(x)) + m.a(x + 1), {"a": ()}),
    "two norms on one output": (lambda m, x: (lambda y: m.norm1(y) + m.norm2(y))(m.a(x)), {"a": ()}),
    "the output feeds something else too": (lambda m, x: (lambda y: m.norm1(y) + y)(m.a(x)), {"a": ()}),
    "the same norm twice on one output": (lambda m, x: (lambda y: m.norm1(y) * m.norm1(y))(m.a(x)), {"a": ()}),
    "something between": (lambda m, x: m.norm1(F.relu(m.a(x))), {"a": ()}),
    "a sum of two": (lambda m, x: m.norm1(m.a(x) + m.b(x)), {"a": (), "b": ()}),
    "one after the other": (lambda m, x: m.norm2(m.norm1(m.a(x))), {"a": ("norm1",)}),
    "each its own": (lambda m, x: m.norm1(m.a(x)) + m.norm2(m.b(x)), {"a": ("norm1",), "b": ("norm2",)}),
    "its shape is used": (lambda m, x: (lambda y: m.norm1(y) * y.shape[1])(m.a(x)), {"a": ("norm1",)}),
    "its shadow is used": (lambda m, x: (lambda y: m.norm1(y) + y.detach())(m.a(x)), {"a": ("norm1",)}),
}


@pytest.mark.parametrize("how", NORMS)
def test_whose_norm_it_is(how: str) -> None:
    forward, expected = NORMS[how]
    assert found_in(Net(forward), PIXELS) == expected


class FrozenBatchNorm2d(nn.Module):
    """As torchvision spells it: an affine map in buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.view(1, -1, 1, 1)


@pytest.mark.parametrize(
    ("norm", "own"),
    [
        (nn.BatchNorm2d, True),
        (nn.SyncBatchNorm, True),
        (nn.InstanceNorm2d, True),
        (lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True), True),
        (FrozenBatchNorm2d, True),
        (lambda n: nn.BatchNorm2d(n, affine=False), True),
        (lambda n: nn.GroupNorm(1, n), False),  # mixes the channels, as do the next two
        (lambda n: nn.LayerNorm([n, 4, 4]), False),
        (lambda n: nn.LocalResponseNorm(2), False),
        (nn.Identity, False),
    ],
)
def test_which_norms_belong_to_a_layer(norm: Callable[[int], nn.Module], own: bool) -> None:
    model = Net(lambda m, x: m.norm1(m.a(x)), norm)
    assert found_in(model, PIXELS) == {"a": ("norm1",) if own else ()}


def test_a_norm_in_another_container() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Identity(), nn.Conv2d(2, 3, 1)),
        nn.Sequential(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())),
        nn.Flatten(),
        nn.Linear(48, 2),
    )
    assert found_in(model, PIXELS) == {"0.1": ("1.0.0",)}


def test_a_norm_over_tokens_is_not_one_over_neurons() -> None:
    """BatchNorm1d takes (N, C, L): behind a linear layer with outputs (N, T, F) it normalises tokens."""
    tokens = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(20, 2))
    assert found_in(tokens, torch.randn(2, 5, 3)) == {"0": ()}
    neurons = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert found_in(neurons, torch.randn(2, 3)) == {"0": ("1",)}


# --- wiring


def test_wiring_of_the_residual_net() -> None:
    assert dict(find(case("residual")).wiring) == {
        "conv1": ("<input>",),
        "block1.conv1": ("conv1",),
        "block1.conv2": ("block1.conv1",),
        "block2.conv1": ("block1.conv2", "conv1"),
        "block2.conv2": ("block2.conv1",),
        "block2.downsample.0": ("block1.conv2", "conv1"),
        "head": ("block2.conv2", "block2.downsample.0"),
        "<output>": ("head",),
    }


def test_wiring_of_the_concat_net() -> None:
    assert dict(find(case("concat")).wiring) == {
        "left": ("<input>",),
        "right": ("<input>",),
        "mix": ("left", "right"),
        "head": ("mix",),
        "<output>": ("head",),
    }


def test_wiring_of_a_layer_that_feeds_itself() -> None:
    wiring = find(case("shared")).wiring
    assert wiring["twice"] == ("stem", "twice")
    assert wiring["head"] == ("twice",)


def test_wiring_past_the_input() -> None:
    """The attention net adds to its input, so the input reaches the head without a layer between."""
    assert find(case("attention")).wiring["head"] == ("<input>", "fc2", "proj")


# --- models of all sorts


class Tokens(nn.Module):
    """Integers in: embedded, and a position added."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.fc, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(F.relu(self.fc(x)).mean(1))


class Numbered(nn.Embedding):
    """Positions of tokens, and their embeddings."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1])
        return super().forward(positions), positions


def test_an_embedding_that_returns_several_things() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.fc, self.head = Numbered(9, 4), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.fc(self.positions(x)[0])) * x[..., None])

    found = sosp.find_structures(Net(), torch.ones(2, 5))
    assert [layer.name for layer in found.layers] == ["fc"]
    assert found.wiring["fc"] == ("<input>",)


def test_networks_of_tokens() -> None:
    structures = sosp.find_structures(Tokens(), torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert [layer.name for layer in structures.layers] == ["fc"]
    assert structures.layers[0].macs == 4 * 3
    assert dict(structures.wiring) == {"fc": ("<input>",), "head": ("fc",), "<output>": ("head",)}


@dataclass
class Output:
    logits: Tensor
    loss: None = None


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.head, self.wrap = nn.Linear(3, 4), nn.Linear(4, 2), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.head(F.relu(self.fc(x))))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, None),
        lambda y: [y],
        lambda y: {"logits": y, "name": "x"},
        lambda y: {"deep": {"out": (y,)}},
        Output,
        lambda y: (y, y.argmax(1)),
    ],
)
def test_models_that_return_more_than_a_tensor(wrap: Callable[[Tensor], Any]) -> None:
    assert found_in(Wrapped(wrap), torch.randn(2, 3)) == {"fc": ()}


class TwoHeads(nn.Module):
    """Two outputs behind a common layer, one of them with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid = nn.Linear(3, 4), nn.Linear(4, 5)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(5, 3)
        self.unused = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.stem(x))
        return self.left(x), self.right(F.relu(self.mid(x)))


def test_every_output_layer_stays() -> None:
    structures = sosp.find_structures(TwoHeads(), torch.randn(2, 3))
    assert [layer.name for layer in structures.layers] == ["stem", "mid"]
    assert structures.wiring["<output>"] == ("left", "right")


def test_layers_that_are_not_called_are_no_structures() -> None:
    s = sosp.find_structures(TwoHeads(), torch.randn(2, 3), kind="weights")
    assert not any(layer.name.startswith("unused") for layer in s.layers)


class Slim(nn.Conv2d):
    """A layer type of the user's own, derived from a known one."""


def test_subclasses_are_layers() -> None:
    assert find_layer_type(Slim(1, 1, 1)) is LAYERS[nn.Conv2d]
    assert find_layer_type(nn.ReLU()) is None
    model = nn.Sequential(Slim(2, 3, 1), nn.Flatten(), nn.Linear(48, 2))
    assert found_in(model, PIXELS) == {"0": ()}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.head(F.relu(self.fc(x), inplace=True))


def test_networks_that_write_into_their_input() -> None:
    x = torch.zeros(2, 3)
    assert found_in(InPlace(), x) == {"fc": ()}
    assert torch.equal(x, torch.zeros(2, 3))


class Encoder(nn.Module):
    """Torch's own transformer, right behind an embedding: in eval mode it would run fused, on packed sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens), src_key_padding_mask=tokens == 0)[:, 0])


def test_multihead_attention_inside() -> None:
    torch.manual_seed(0)
    model = Encoder().double().eval()
    x, y = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0]]), torch.tensor([0, 1, 2])
    structures = sosp.find_structures(model, x)
    # The projections of attention are no layers of their own.
    layers = {"body.layers.0.linear1": None, "body.layers.0.linear2": None}
    assert [layer.name for layer in structures.layers] == list(layers)
    found = sosp.score(model, (x, y), method="first-order", structures=structures).first
    wanted = dense.first(model, thetas(model, layers, "features"), x, y, "cross_entropy")
    assert found is not None
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_multihead_attention_between_layers() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x)
            return self.head(self.attend(x, x, x, need_weights=False)[0].mean(1))

    structures = sosp.find_structures(Attending().eval(), torch.randn(2, 5, 3))
    assert [layer.name for layer in structures.layers] == ["fc"]
    assert structures.wiring["head"] == ("fc",)


# --- exclude


def left_of_residual(*exclude: Any) -> list[str]:
    return [layer.name for layer in find(case("residual"), exclude=exclude).layers]


ALL = list(case("residual").layers)


def test_exclude_by_name_pattern_and_container() -> None:
    assert left_of_residual("conv1") == ALL[1:]
    assert left_of_residual("block1") == [n for n in ALL if not n.startswith("block1")]
    assert left_of_residual("block1.*") == left_of_residual("block1")
    assert left_of_residual("*.conv1") == [n for n in ALL if not n.endswith(".conv1")]
    assert left_of_residual("*conv1", "block2.conv[2-9]") == ["block1.conv2", "block2.downsample.0"]
    assert left_of_residual("block2.downsample") == ALL[:-1]
    assert left_of_residual("relu", "head") == ALL


def test_exclude_by_module() -> None:
    c = case("residual")
    assert [x.name for x in find(c, exclude=[c.model.block1]).layers] == left_of_residual("block1")
    assert [x.name for x in find(c, exclude=[c.model.block2.conv1, "conv1"]).layers] == left_of_residual(
        "block2.conv1", "conv1"
    )


def test_exclude_takes_one_entry_and_anything_to_loop_over() -> None:
    c = case("residual")
    for exclude in ("conv1", c.model.conv1, {"conv1"}, (n for n in ["conv1"])):
        assert [x.name for x in find(c, exclude=exclude).layers] == ALL[1:]


def test_exclude_a_shared_layer_by_any_of_its_names() -> None:
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.again(F.relu(self.other(F.relu(self.first(x)))))))

    x = torch.randn(2, 3)
    assert found_in(Alias(), x) == {"first": (), "other": ()}
    assert found_in(Alias(), x, exclude=["first"]) == found_in(Alias(), x, exclude=["again"]) == {"other": ()}


def test_excluded_layers_stay_in_the_wiring() -> None:
    c = case("residual")
    assert find(c, exclude=["block1"]).wiring == find(c).wiring


def test_downsampling() -> None:
    c = case("residual")
    assert sosp.downsampling(c.model) == ("block2.downsample.0",)
    assert left_of_residual(*sosp.downsampling(c.model)) == ALL[:-1]
    assert sosp.downsampling(case("concat").model) == ()


@pytest.mark.parametrize("word", ["downsample", "shortcut", "skip"])
def test_downsampling_goes_by_whole_words(word: str) -> None:
    model = nn.ModuleDict({word: nn.Sequential(nn.Conv2d(1, 1, 1)), f"{word}less": nn.Conv2d(1, 1, 1)})
    assert sosp.downsampling(model) == (f"{word}.0",)


# --- groups


def test_groups_of_channels() -> None:
    s = find(case("concat"), groups=[{"left": [0], "right": [1, 3]}, {"mix": [4, 0]}])
    assert len(s) == 3 + 4 + 5 - 2 - 1
    assert not s.plain
    assert [i.tolist() for i in s.ids] == [[0, 1, 2], [3, 0, 4, 0], [5, 6, 7, 8, 5]]
    assert members(s)[0] == {"left": [0], "right": [1, 3]}
    assert members(s)[5] == {"mix": [0, 4]}
    assert s.owner().tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]


def test_groups_of_layers_tie_channel_to_channel() -> None:
    s = find(case("residual"), groups=[["conv1", "block1.conv2"], ["block2.conv2", "block2.downsample.0"]])
    assert len(s) == 3 + 2 + 3 + 4
    assert members(s)[:3] == [{"conv1": [c], "block1.conv2": [c]} for c in range(3)]
    assert members(s)[-4:] == [{"block2.conv2": [c], "block2.downsample.0": [c]} for c in range(4)]


def test_groups_add_up() -> None:
    c = case("residual")
    s, plain = find(c, groups=[["conv1", "block1.conv2"]]), find(c)
    size = {layer.name: layer for layer in plain.layers}
    assert s.sizes("params")[0] == size["conv1"].params + size["block1.conv2"].params
    assert s.sizes("macs")[0] == size["conv1"].macs + size["block1.conv2"].macs
    assert s.sizes("kernel")[0] == 3


def test_no_groups_are_no_groups() -> None:
    c = case("mlp")
    assert [i.tolist() for i in find(c, groups=[]).ids] == [i.tolist() for i in find(c).ids]
    assert find(c, groups=[[], {}]).plain


# --- blocks

BLOCKS = {
    # The skip of block1 has no layer of its own; that of block2 is a branch like the other.
    "residual": [{"block1.conv2": [0, 1, 2]}, {"block2.conv2": [0, 1, 2, 3]}, {"block2.downsample.0": [0, 1, 2, 3]}],
    # What a dense block adds to its own input; the stem reaches everything and is no branch.
    "preact": [{"dense1.conv": [0, 1]}, {"dense2.conv": [0, 1]}],
    "concat": [{"left": [0, 1, 2]}, {"right": [0, 1, 2, 3]}],
    "attention": [{"proj": [0, 1, 2]}, {"fc2": [0, 1, 2]}],
    "layernorm": [{"fc2": [0, 1, 2, 3, 4, 5]}],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
    s = find(case(name), kind="blocks")
    assert members(s) == BLOCKS[name]
    assert len(s) == len(BLOCKS[name])
    assert s.kind == "blocks"


@pytest.mark.parametrize("name", [n for n in to_score() if n not in PARALLEL])
def test_chains_have_no_blocks(name: str) -> None:
    with pytest.raises(StructureError, match=r"no removable block.*kind='filters'"):
        find(case(name), kind="blocks")


def test_blocks_can_be_excluded() -> None:
    c = case("residual")
    s = find(c, kind="blocks", exclude=sosp.downsampling(c.model))
    assert members(s) == BLOCKS["residual"][:2]
    assert s.layers[0].norms == ("block1.bn2",)


def test_a_branch_that_ends_in_two_layers_is_one_block() -> None:
    class Split(nn.Module):
        """x + cat(a(h), b(h))."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 3)
            self.head = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            return self.head(x + self.a(x) @ torch.ones(2, 5) + self.b(x) @ torch.ones(3, 5))

    s = sosp.find_structures(Split(), torch.randn(2, 3), kind="blocks")
    assert members(s) == [{"a": [0, 1]}, {"b": [0, 1, 2]}]

    class Joined(Split):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            return self.head(x + self.a(x).repeat(1, 3)[:, :5] * (self.b(x) @ torch.ones(3, 5)))

    s = sosp.find_structures(Joined(), torch.randn(2, 3), kind="blocks")
    assert members(s) == [{"a": [0, 1], "b": [0, 1, 2]}]


def test_the_innermost_branch_is_the_block() -> None:
    class Nested(nn.Module):
        """x + u with u = h + b(h), h = a(x): b ends a branch of its own within the branch of a and b."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            h = F.relu(self.a(x))
            return self.head(x + (h + self.b(h)))

    s = sosp.find_structures(Nested(), torch.randn(2, 3), kind="blocks")
    assert members(s) == [{"b": [0, 1, 2, 3]}]


# --- weights


@pytest.mark.parametrize("name", to_score())
def test_every_weight_is_a_structure(name: str) -> None:
    c = case(name)
    s = find(c, kind="weights")
    layers = [*c.norms, c.output]
    parameters = {
        f"{n}.{key}": p for n in layers for key, p in c.model.get_submodule(n).named_parameters(recurse=False)
    }
    assert [layer.name for layer in s.layers] == list(parameters)
    assert len(s) == sum(p.numel() for p in parameters.values())
    assert torch.cat(s.ids).tolist() == list(range(len(s)))
    assert set(s.sizes("params").tolist()) == {1.0}


@pytest.mark.parametrize("name", ["residual", "transposed", "attention", "shared", "grouped"])
def test_macs_of_weights_add_up_to_those_of_filters(name: str) -> None:
    c = case(name)
    positions = counts.positions(c.model, c.inputs)
    total = sum(
        counts.filter_macs(m, positions[n]) * width(m) for n in [*c.norms, c.output] for m in [c.model.get_submodule(n)]
    )
    assert find(c, kind="weights").sizes("macs").sum().item() == pytest.approx(total)


def test_weights_can_be_excluded_one_by_one() -> None:
    c = case("mlp")

    def left(*exclude: Any) -> list[str]:
        return [layer.name for layer in find(c, kind="weights", exclude=exclude).layers]

    assert left("fc1", "*.bias") == ["fc2.weight", "head.weight"]
    assert left("fc1.weight", "head") == ["fc1.bias", "fc2.weight", "fc2.bias"]
    assert left(c.model.fc2) == ["fc1.weight", "fc1.bias", "head.weight", "head.bias"]


def test_a_shared_weight_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    s = sosp.find_structures(model, torch.randn(2, 3), kind="weights")
    assert [layer.name for layer in s.layers] == ["0.weight", "0.bias", "2.bias"]


class WithHiddenState(nn.Module):
    """Returns a hidden state beside its logits, as encoder-decoder models do, and has a head of its own for it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aside, self.head = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"logits": self.head(hidden.relu()), "hidden": hidden, "aside": self.aside(hidden)}


def test_a_hidden_state_beside_the_logits_does_not_make_its_layer_an_output() -> None:
    found = sosp.find_structures(WithHiddenState(), torch.randn(2, 4))
    assert [layer.name for layer in found.layers] == ["body"]


def test_looking_at_a_spectral_norm_in_train_mode_changes_nothing() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert len(sosp.find_structures(model, torch.randn(2, 4))) == 5
    with pytest.raises(StructureError, match="computed from other parameters"):
        sosp.find_structures(model, torch.randn(2, 4), kind="weights")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_few_rows_of_a_large_example_are_enough() -> None:
    """Unless the code counts on its batch."""
    seen: list[int] = []

    class Counting(nn.Module):
        def __init__(self, fixed: int | None) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fixed = nn.Linear(4, 6), nn.Linear(6, 2), fixed

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            assert self.fixed in (None, len(x))
            return self.fc2(torch.relu(self.fc1(x)))

    assert len(sosp.find_structures(Counting(None), torch.zeros(100, 4))) == 6
    assert max(seen) <= 8
    assert len(sosp.find_structures(Counting(100), torch.zeros(100, 4))) == 6
    with pytest.raises(StructureError, match=r"\(100, 4\)"):
        sosp.find_structures(Counting(7), torch.zeros(100, 4))


class Siamese(nn.Module):
    """Two inputs through the same layer and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.head = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(4, 2)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (F.relu(self.b(F.relu(self.norm(self.a(z))))) for z in (x, y))
        return self.head(x - y)


def test_a_layer_whose_norm_is_called_twice_is_coupled_like_others() -> None:
    torch.manual_seed(0)
    model, example = Siamese().eval(), (torch.randn(5, 3), torch.randn(5, 3))
    found = sosp.find_structures(model, example, groups="coupled")
    assert [ids.tolist() for ids in found.ids] == [list(range(6)), list(range(6, 10))]
    mask = sosp.Mask.from_structures(found, torch.tensor([0, 2, 5, 7]))
    small = sosp.shrink(model, mask, example)
    assert (small.a.out_features, small.norm.num_features, small.b.in_features, small.b.out_features) == (3, 3, 3, 3)
    assert not any(type(m).__name__ == "Scatter" for m in small.modules())
    torch.testing.assert_close(small(*example), sosp.masked(model, mask)(*example), atol=1e-6, rtol=0)


def test_streams_padded_with_zeros_lose_channels_of_all_stages() -> None:
    """Behind the padded skips the zeros that nothing is added to are dropped, so that the stream really narrows."""
    torch.manual_seed(0)
    model, example = sosp.nets.digits_resnet(skip="A").eval(), torch.randn(3, 1, 8, 8)
    found = sosp.find_structures(model, example, groups="coupled")
    ids = dict(zip((layer.name for layer in found.layers), found.ids, strict=True))
    assert all((x >= 0).all() for x in ids.values())
    narrow, middle, wide = (ids[f"layer{k}.0.conv2"] for k in (1, 2, 3))
    assert len(wide) == 2 * len(middle) == 4 * len(narrow)
    assert torch.equal(middle[len(narrow) // 2 :][: len(narrow)], narrow)  # the padding lies on both sides
    mask = sosp.Mask.from_structures(found, wide[::2])
    small = sosp.shrink(model, mask, example)
    left = [int((~torch.isin(x, wide[::2])).sum()) for x in (narrow, middle, wide)]
    assert left == [len(narrow) // 2, len(middle) // 2, len(wide) // 2]
    assert [small.get_submodule(f"layer{k}.0.bn2").num_features for k in (1, 2, 3)] == left
    readers = (small.layer2[0].conv1.in_channels, small.layer3[0].conv1.in_channels, small.linear.in_features)
    assert list(readers) == left
    inputs = torch.randn(5, 1, 8, 8)
    for mode in (False, True):
        ours, theirs = small.train(mode)(inputs), sosp.masked(model, mask).train(mode)(inputs)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)  # float32, 7 layers


class Grouped(nn.Module):
    """A residual stream and a concatenation, each under a norm of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Conv2d(8, 6, 1)
        self.norm2, self.back = nn.GroupNorm(3, 6), nn.Conv2d(6, 8, 1)
        self.norm3, self.head = nn.GroupNorm(7, 14), nn.Linear(14, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.silu(self.norm2(self.inner(F.silu(self.norm(x)))))
        x = x + self.back(y)
        return self.head(F.relu(self.norm3(torch.cat([x, y], 1))).mean((2, 3)))


@pytest.mark.parametrize("affine", [True, False])
def test_groups_of_a_norm_go_as_a_whole(affine: bool) -> None:
    torch.manual_seed(0)
    model, example = Grouped().double().eval(), torch.randn(3, 3, 5, 5, dtype=torch.float64)
    if affine:
        for norm in (model.norm, model.norm2, model.norm3):
            nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    else:
        model.norm2 = nn.GroupNorm(3, 6, affine=False).double()
    found = sosp.find_structures(model, example, groups="coupled")
    assert dict(zip((layer.name for layer in found.layers), (ids.tolist() for ids in found.ids), strict=True)) == {
        "stem": [0, 0, 1, 1, 2, 2, 3, 3],
        "inner": [4, 4, 5, 5, 6, 6],
        "back": [0, 0, 1, 1, 2, 2, 3, 3],
    }
    mask = sosp.Mask.from_structures(found, torch.tensor([1, 2, 5]))
    small = sosp.shrink(model, mask, example)
    norms = [(m.num_groups, m.num_channels) for m in (small.norm, small.norm2, small.norm3)]
    assert norms == [(2, 4), (2, 4), (4, 8)]
    assert (small.stem.out_channels, small.inner.out_channels, small.back.in_channels) == (4, 4, 4)
    inputs = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(small(inputs), sosp.masked(model, mask)(inputs), atol=1e-12, rtol=0)


def test_a_group_that_loses_some_channels_keeps_its_statistics() -> None:
    torch.manual_seed(0)
    model, example = Grouped().double().eval(), torch.randn(3, 3, 5, 5, dtype=torch.float64)
    mask = sosp.Mask.from_removed(model, {"inner": [0, 2, 3], "stem": [1], "back": [1]}, example)
    small = sosp.shrink(model, mask, example)
    assert (small.inner.out_channels, small.norm2.num_groups, small.norm2.num_channels) == (3, 2, 4)
    torch.testing.assert_close(small(example), sosp.masked(model, mask)(example), atol=1e-12, rtol=0)


def test_channels_that_become_a_constant_are_not_coupled() -> None:
    """Without its first layer a sigmoid gives 1/2, which the next layer reads: only the other layer loses channels."""
    layers = [nn.Linear(3, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)]
    found = sosp.find_structures(nn.Sequential(*layers), torch.randn(4, 3), groups="coupled")
    assert [layer.name for layer in found.layers] == ["0", "2"]
    assert [ids.tolist() for ids in found.ids] == [[-1] * 6, [0, 1, 2, 3, 4, 5]]


# --- layers that do not reach the output


class WithPooler(nn.Module):
    """The state of the first token goes through a layer that nothing reads, as in a BERT under a token head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.pooler, self.fc2, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, 4)
        x = F.relu(self.fc1(x))
        torch.tanh(self.pooler(x[:, 0]))
        return self.head(F.relu(self.fc2(x)))


class WithIndexer(nn.Module):
    """A layer says which tokens the others see."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.index, self.fc2, self.head = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, 4)
        x = F.relu(self.fc1(x))
        best = self.index(x).topk(2, 1).indices.expand(-1, -1, x.shape[-1])
        return self.head(F.relu(self.fc2(x.gather(1, best))))


class WithDetachedFeature(nn.Module):
    """A feature is added that learns nothing from the output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.side, self.fc2, self.head = nn.Linear(4, 6), nn.Linear(6, 7), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, 4)
        x = F.relu(self.fc1(x))
        return self.head(F.relu(self.fc2(x) + self.side(x).detach()))


class WithTargetBranch(WithDetachedFeature):
    """The same feature is computed without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        with torch.no_grad():
            side = self.side(x)
        return self.head(F.relu(self.fc2(x) + side))


ASIDE = {WithPooler: "pooler", WithIndexer: "index", WithDetachedFeature: "side", WithTargetBranch: "side"}


def random_tokens(model: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return model().double().eval(), torch.randn(5, 4, 4).double()


@pytest.mark.filterwarnings("ignore::sosp.scoring.passes.SlowPathWarning")  # no_grad has no fast way
@pytest.mark.parametrize("model", ASIDE)
@pytest.mark.parametrize("groups", ["independent", "coupled"])
def test_a_layer_that_does_not_reach_the_output_stays(model: type[nn.Module], groups: str) -> None:
    net, x = random_tokens(model)
    aside = net.get_submodule(ASIDE[model])
    pruned = sosp.prune(
        net, (x, torch.zeros_like(net(x))), loss="mse", ratio=0.4, repair=False, selection=sosp.Selection(groups=groups)
    )
    assert ASIDE[model] not in pruned.mask.removed
    assert pruned.mask.removed
    assert pruned.model.get_submodule(ASIDE[model]).out_features == aside.out_features
    # Sums of at most 7 terms in double precision.
    torch.testing.assert_close(pruned.model(x), sosp.masked(net, pruned.mask)(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ASIDE)
def test_single_weights_of_a_layer_that_does_not_reach_the_output_stay(model: type[nn.Module]) -> None:
    net, x = random_tokens(model)
    found = sosp.find_structures(net, x, kind="weights")
    assert {layer.name.partition(".")[0] for layer in found.layers} == {"fc1", "fc2", "head"}


@pytest.mark.parametrize("kind", ["filters", "blocks", "weights"])
def test_no_layer_that_reaches_the_output_is_an_error(kind: str) -> None:
    class Shadow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(self.fc1(x)).detach()

    with pytest.raises(StructureError, match=r"'fc1', 'fc2' run, but .*output does not depend .*\.detach\(\)"):
        sosp.find_structures(Shadow(), torch.randn(2, 4), kind=kind)


# --- layers that share a parameter


class TiedAutoencoder(nn.Module):
    """Two blocks of a decoder have the weights of the encoder's, each in modules of its own."""

    def __init__(self, key: str = "weight") -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.encoder, self.decoder = (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)) for _ in range(2))
        for i in (0, 2):
            setattr(self.decoder[i], key, getattr(self.encoder[i], key))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.encoder(F.relu(self.fc1(x))))
        return self.head(F.relu(self.decoder(F.relu(self.fc2(x)))))


@pytest.mark.parametrize("key", ["weight", "bias"])
@pytest.mark.parametrize("groups", ["independent", "coupled"])
def test_layers_that_share_a_parameter_stay(key: str, groups: str) -> None:
    torch.manual_seed(0)
    net, x = TiedAutoencoder(key).double().eval(), torch.randn(7, 4).double()
    pruned = sosp.prune(
        net,
        (x, torch.zeros(7, 3).double()),
        loss="mse",
        ratio=0.3,
        repair=False,
        selection=sosp.Selection(groups=groups),
    )
    assert {layer.name for layer in pruned.saliency.structures.layers} == {"fc1", "fc2"}
    assert {n: pruned.model.get_submodule(n).out_features for n in ("encoder.0", "decoder.2")} == {
        "encoder.0": 5,
        "decoder.2": 6,
    }
    # Sums of at most 7 terms in double precision.
    torch.testing.assert_close(pruned.model(x), sosp.masked(net, pruned.mask)(x), rtol=0, atol=1e-12)


def test_one_of_the_layers_that_share_a_parameter_can_lose_channels_if_the_other_is_excluded() -> None:
    found = sosp.find_structures(TiedAutoencoder(), torch.randn(2, 4), exclude=["decoder"])
    assert [layer.name for layer in found.layers] == ["fc1", "encoder.0", "encoder.2", "fc2"]


def test_heads_that_share_rotary_embeddings_are_structures_of_their_own() -> None:
    c = case("attention-frequencies")
    found = sosp.find_structures(c.model, c.example, groups="coupled")
    ids = dict(zip((layer.name for layer in found.layers), found.ids, strict=True))
    assert [ids[name].tolist() for name in ("q", "k", "v")] == 3 * [4 * [int(ids["q"][0])] + 4 * [int(ids["q"][4])]]
    assert ids["q"][0] != ids["q"][4]
