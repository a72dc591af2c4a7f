"""The channel flow of a network: its streams by hand, and what is pinned, by which line of the user's code, and why."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from helpers.unchanged import check_unchanged
from networks import case, to_score
from sosp.errors import StructureError
from sosp.graph import ops

Streams = list[tuple[int, list[str], list[str], int]]  # width, producers, consumers, pinned


def streams(flow: sosp.Flow) -> Streams:
    return [(s.width, list(s.producers), list(s.consumers), s.pinned) for s in flow.streams]


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def picture(width: int = 3, size: int = 6, examples: int = 4) -> Tensor:
    return torch.randn(examples, width, size, size, generator=torch.Generator().manual_seed(1))


# --- streams by hand


BY_HAND: dict[str, Streams] = {
    # The stem and the end of block 1 are added; so are the two ends of block 2.
    "residual": [
        (3, ["conv1", "block1.conv2"], ["block1.conv1", "block2.conv1", "block2.downsample.0"], 0),
        (2, ["block1.conv1"], ["block1.conv2"], 0),
        (3, ["block2.conv1"], ["block2.conv2"], 0),
        (4, ["block2.conv2", "block2.downsample.0"], ["head"], 0),
        (3, ["head"], [], 3),
    ],
    "concat": [
        (3, ["left"], ["mix"], 0),
        (4, ["right"], ["mix"], 0),
        (5, ["mix"], ["head"], 0),
        (4, ["head"], [], 4),
    ],
    # What is concatenated is read by all that comes later.
    "preact": [
        (3, ["conv"], ["dense1.conv", "dense2.conv", "head"], 0),
        (2, ["dense1.conv"], ["dense2.conv", "head"], 0),
        (2, ["dense2.conv"], ["head"], 0),
        (3, ["head"], [], 3),
    ],
    "depthwise": [
        (6, ["expand"], ["depthwise"], 0),
        (6, ["depthwise"], ["project"], 0),
        (4, ["project"], ["head"], 0),
        (3, ["head"], [], 3),
    ],
    "mlp": [(7, ["fc1"], ["fc2"], 0), (6, ["fc2"], ["head"], 0), (4, ["head"], [], 4)],
    # A layer applied to its own output: one stream with the stem.
    "shared": [(5, ["stem", "twice"], ["twice", "head"], 0), (3, ["head"], [], 3)],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_streams_by_hand(name: str) -> None:
    c = case(name)
    flow = sosp.trace(c.model, c.inputs)
    assert streams(flow) == BY_HAND[name]
    assert flow.modes == ("eval", "train")
    assert flow.untraced == {}
    assert not flow.real


@pytest.mark.parametrize("name", to_score())
def test_every_layer_feeds_one_stream_and_the_output_is_pinned(name: str) -> None:
    c = case(name)
    c.model.train()
    given = c.inputs.clone()
    with check_unchanged(c.model):
        flow = sosp.trace(c.model, c.inputs)
    assert torch.equal(c.inputs, given)
    producers = [p for s in flow.streams for p in s.producers]
    assert sorted(producers) == sorted([*c.norms, c.output])
    (last,) = [s for s in flow.streams if c.output in s.producers]
    assert last.pinned == last.width == c.model.get_submodule(c.output).out_features


def test_how_it_prints() -> None:
    c = case("residual")
    flow = sosp.trace(c.model, c.inputs)
    assert repr(flow) == "Flow(7 layers, 5 streams, 4 of them free, 1 pin)"
    lines = str(flow).splitlines()
    assert lines[:7] == [
        repr(flow),
        "stream 0: 3 channels",
        "  from  conv1, block1.conv2",
        "  to    block1.conv1, block2.conv1, block2.downsample.0",
        "stream 1: 2 channels",
        "  from  block1.conv1",
        "  to    block1.conv2",
    ]
    assert lines[13:16] == ["stream 4: 3 channels, 3 pinned", "  from  head", "  to    the output"]
    assert lines[16] == "pinned:"
    assert lines[17].startswith("  head: return at ")
    assert lines[17].endswith("the model returns it")


# --- pins


class Middle(nn.Module):
    """Two layers, and between them something that is not understood."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc = nn.Linear(6, 2)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(self.middle(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


class Normed(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)  # here


class Softmaxed(Middle):
    def middle(self, x: Tensor) -> Tensor:
        return x.softmax(1)  # here


class Viewed(Middle):
    def middle(self, x: Tensor) -> Tensor:
        return x.view(len(x), 4, -1).view(x.shape)  # here


class Item(Middle):
    def middle(self, x: Tensor) -> Tensor:
        return x * (2.0 if x[0, 1, 0, 0].item() > 1e9 else 1.0)  # here


class Condition(Middle):
    def middle(self, x: Tensor) -> Tensor:
        if x[0, 2, 0, 0] > 1e9:  # here
            return x + 1
        return x


class Listed(Middle):
    def middle(self, x: Tensor) -> Tensor:
        scale = max(x.amax((0, 2, 3)).tolist())  # here
        return x * (1.0 if scale > -1e9 else 2.0)


class WrittenView(Middle):
    def middle(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        x[:, 1:3].add_(1)  # here
        return x


class WrittenItem(Middle):
    def middle(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        x[:, 0] = 2.0  # here
        return x


class Numpy(Middle):
    def middle(self, x: Tensor) -> Tensor:
        array = x.detach().numpy()  # here
        return torch.from_numpy(array[:, ::-1] + array)


class Mirror(torch.autograd.Function):
    """Channel i and channel 3 - i together, with a derivative written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(1) + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(1) + grad


class Custom(Middle):
    def middle(self, x: Tensor) -> Tensor:
        return Mirror.apply(x)


class Scripted(Middle):
    """Compiled code in the middle: some of it mixes channels, some does not."""

    def __init__(self, what: str = "mirror") -> None:
        super().__init__()
        self.what = what

    def middle(self, x: Tensor) -> Tensor:
        return compiled()[self.what](x)


def mirror(x: Tensor) -> Tensor:
    return x.flip(1) + x


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def first_half(x: Tensor) -> Tensor:
    return torch.cat([x[:, :2], x[:, :2] - x[:, 2:]], 1)


def neighbours(x: Tensor) -> Tensor:
    return x[:, torch.tensor([1, 0, 3, 2], device=x.device)]


@cache
def compiled() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it; users still have it
        return {f.__name__: torch.jit.script(f) for f in (mirror, softmax, doubled, first_half, neighbours)}


def marked_line(cls: type) -> str:
    """``file.py:12`` of the line of a class that says "# here"."""
    lines, start = inspect.getsourcelines(cls)
    return (
        f"{Path(__file__).name}:{start + next(i for i, line in enumerate(lines) if line.rstrip().endswith('# here'))}"
    )


PINNED: dict[type[Middle], tuple[str, str, int]] = {  # op, a word of the reason, how many channels
    Normed: ("layer_norm", "mixes the channels", 4),
    Softmaxed: ("softmax", "mixes the channels", 4),
    Viewed: ("view", "the code requires a fixed number of channels here", 4),
    Item: ("item", "values decide", 4),  # and which one it reads depends on how many there are
    Condition: ("gt", "mixes the channels", 4),
    Listed: ("tolist", "values decide", 4),
    WrittenView: ("add", "writes into a view", 4),
    WrittenItem: ("__setitem__", "writes into a view", 4),
}


def reason(flow: sosp.Flow, layer: str = "conv1") -> tuple[str, str, str]:
    """(op, line, why) of the first thing that pins this layer."""
    pin = next(p for p in flow.pinned if layer in p.layers)
    assert str(pin) in str(flow)
    assert str(pin).endswith(f"{pin.op} at {pin.where}: {pin.why}")
    return pin.op, pin.where, pin.why


PATHS = pytest.mark.filterwarnings("ignore::sosp.graph.forward_code.PathWarning")


@PATHS
@pytest.mark.parametrize("cls", PINNED)
def test_what_is_pinned_by_which_line_and_why(cls: type[Middle]) -> None:
    model, x = made(cls), picture()
    with check_unchanged(model):
        flow = sosp.trace(model, x)
    op, where, why = reason(flow)
    wanted, word, channels = PINNED[cls]
    assert op == wanted
    assert where == marked_line(cls)
    assert word in why
    assert [(s.producers, s.pinned) for s in flow.streams] == [(("conv1",), channels), (("conv2",), 0), (("fc",), 2)]
    check_shrinks(model, x, {"conv1": [1, 3], "conv2": [0, 5]})


@pytest.mark.parametrize("what", ["mirror", "softmax", "doubled", "first_half", "neighbours"])
def test_compiled_code_is_followed_or_pinned_but_never_wrong(what: str) -> None:
    """How much of it can be seen depends on torch; what mixes channels must be pinned."""
    model, x = made(lambda: Scripted(what)), picture()
    with check_unchanged(model):
        flow = sosp.trace(model, x)
    pins = [pin for pin in flow.pinned if "conv1" in pin.layers]
    assert all(pin.where.startswith(f"{Path(__file__).name}:") and str(pin) in str(flow) for pin in pins)
    if what in ("softmax", "first_half"):
        assert flow.streams[0].pinned == 4
    for channels in ([1], [0, 3]):
        mask = sosp.Mask.from_removed(model, {"conv1": channels}, x)
        check_close(sosp.shrink(model, mask, x), zeroed(model, {"conv1": channels}), x)


class Ends(Middle):
    """Compiled code at the very end, and numbers that the code looks at: nothing of it is seen."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x if x.sum().item() < 1e9 else x + 1)
        return compiled()["softmax"](out)


@PATHS
def test_a_model_that_ends_in_compiled_code() -> None:
    model, x = made(Ends), picture()
    flow = sosp.trace(model, x)
    assert flow.real
    assert flow.streams[-1].pinned == 2
    removed = {"conv1": [1], "conv2": [0, 5]}
    small = sosp.shrink(model, sosp.Mask.from_removed(model, removed, x), x)
    check_close(small, zeroed(model, removed), x)


def test_memory_that_nobody_wrote_to_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds the shape of compiled code with ``empty_like``: whatever is in that memory, it is not followed."""
    run = ops.OpCall.run

    def zeros(call: ops.OpCall, leaves: Any) -> list[Tensor]:
        found = run(call, leaves)
        return [torch.zeros_like(y) for y in found] if call.name in ("empty_like", "new_empty") else found

    monkeypatch.setattr(ops, "CACHE", {})
    monkeypatch.setattr(ops.OpCall, "run", zeros)
    model, x = made(lambda: Scripted("softmax")), picture()
    assert sosp.trace(model, x).streams[0].pinned == 4
    mask = sosp.Mask.from_removed(model, {"conv1": [1]}, x)
    check_close(sosp.shrink(model, mask, x), zeroed(model, {"conv1": [1]}), x)


def test_numbers_read_by_other_libraries() -> None:
    model, x = made(Numpy), picture()
    flow = sosp.trace(model, x)
    assert reason(flow) == ("numpy", marked_line(Numpy), "its values decide what the code does")
    assert flow.real


def test_an_autograd_function_is_followed_inside() -> None:
    """Removing channel 0 alone frees nothing behind the mirror, 0 and 3 together free two."""
    model, x = made(Custom), picture()
    with check_unchanged(model):
        flow = sosp.trace(model, x)
    assert streams(flow)[0][1:] == (["conv1"], ["conv2"], 0)
    assert check_shrinks(model, x, {"conv1": [0], "conv2": [0]}).conv2.in_channels == 4
    small = check_shrinks(model, x, {"conv1": [0, 3]})
    assert small.conv2.in_channels == 2
    grown = x.requires_grad_()
    small(grown).sum().backward()  # the user's own derivative runs too
    assert grown.grad is not None


def test_outputs_are_pinned() -> None:
    class Features(Middle):
        def forward(self, x: Tensor) -> dict[str, Any]:
            x = F.relu(self.conv1(x))
            return {"features": [x], "logits": self.fc(self.conv2(x).mean((2, 3)))}

    model = made(Features)
    flow = sosp.trace(model, picture())
    for layer in ("conv1", "fc"):
        op, _, why = reason(flow, layer)
        assert (op, why) == ("return", "the model returns it")
    assert [s.pinned for s in flow.streams] == [4, 0, 2]


def test_a_pin_on_one_channel_of_a_stream_counts_one() -> None:
    class First(Middle):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.relu(self.conv1(x))
            return self.fc(self.conv2(x).mean((2, 3))), x[:, 0]

    flow = sosp.trace(made(First), picture())
    assert [s.pinned for s in flow.streams] == [1, 0, 2]


class Tokens(nn.Module):
    """As vision transformers begin: patches and a token of its own, a place for each, a norm over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.fc, self.head = nn.Conv2d(3, 8, 3, 3), nn.Linear(8, 8), nn.Linear(8, 2)
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        x = x + self.fc(self.norm(x))  # here
        return self.head(x[:, 0])


def test_a_norm_over_the_channels_is_named_where_it_is_the_reason() -> None:
    model, x = made(Tokens), picture()
    flow = sosp.trace(model, x)
    (pin,) = (p for p in flow.pinned if p.op != "return")
    assert (pin.op, pin.where, pin.layers) == ("layer_norm", marked_line(Tokens), ("patch", "fc"))
    assert streams(flow)[0] == (8, ["patch", "fc"], ["head"], 8)
    check_shrinks(model, x, {"patch": [1, 3], "fc": [0, 3]})


def test_what_meets_mixed_channels_says_which_op_mixed_them() -> None:
    class Meets(Middle):
        def middle(self, x: Tensor) -> Tensor:
            return x + x.detach().sort(1).values  # here

    flow = sosp.trace(made(Meets), picture())
    why = [(p.op, p.why) for p in flow.pinned if "conv1" in p.layers]
    where = marked_line(Meets)
    assert why[0] == ("sort", "sort mixes the channels it is given")
    assert why[1] == ("add", f"it is combined with the output of sort at {where}, which mixes channels")


class Own(Middle):
    def middle(self, x: Tensor) -> Tensor:
        self.kept = [x]
        return x


@pytest.mark.parametrize("job", [sosp.trace, sosp.count])
def test_a_tensor_that_forward_kept_is_named_with_the_way_out(job: Callable[..., Any]) -> None:
    model, x = made(lambda: nn.Sequential(Own())), picture()
    model(x)
    with pytest.raises(StructureError, match=r"'0\.kept'.*self\.kept = x\.detach\(\).*model\.0\.kept = None"):
        job(model, x)
    with torch.no_grad():
        model(x)
    job(model, x)


def test_weight_norm_of_the_old_kind_is_named_with_the_new_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it; users still have it
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(StructureError, match=r"'0\.weight'.*torch\.nn\.utils\.parametrizations"):
        sosp.trace(model, torch.zeros(2, 4))


# --- networks whose code looks at numbers


class Forks(Middle):
    """Takes one of two ways, by what it sees."""

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.threshold = threshold
        self.other = nn.Conv2d(4, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x))
        y = self.conv2(y) if x.sum() > self.threshold else self.other(y)
        return self.fc(F.relu(y).mean((2, 3)))


@PATHS
@pytest.mark.parametrize(("threshold", "way"), [(-1e9, "conv2"), (1e9, "other")])
def test_a_forward_that_depends_on_values(threshold: float, way: str) -> None:
    model, x = made(lambda: Forks(threshold)), picture()
    flow = sosp.trace(model, x)
    assert flow.real
    assert [s.producers for s in flow.streams] == [("conv1",), (way,), ("fc",)]
    small = check_shrinks(model, x, {"conv1": [1, 3], way: [0, 5]})
    # Narrower themselves, but what they give keeps its width: the way not taken reads it (test_forward_code.py).
    assert small.get_submodule(way).weight.shape == (4, 4, 3, 3)
    assert small.fc.in_features == 6


def zeroed(model: nn.Module, removed: dict[str, list[int]]) -> nn.Module:
    """By hand: rows and biases of zero."""
    twin = deepcopy(model)
    with torch.no_grad():
        for name, channels in removed.items():
            twin.get_submodule(name).weight[channels] = 0
            twin.get_submodule(name).bias[channels] = 0
    return twin


def check_close(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)


def check_shrinks(model: nn.Module, x: Tensor, removed: dict[str, list[int]]) -> nn.Module:
    """The rows are gone, and what is left computes what it computes with zeros in their place."""
    small = sosp.shrink(model, sosp.Mask.from_removed(model, removed, x), x)
    for name, channels in removed.items():
        rows = model.get_submodule(name).weight.shape[0]
        assert small.get_submodule(name).weight.shape[0] == rows - len(channels)
    check_close(small, zeroed(model, removed), x)
    return small


# --- modes


class OnlyEval(Middle):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise NotImplementedError("no training today")
        return super().forward(x)


def test_a_network_that_does_not_train_is_followed_in_eval_mode() -> None:
    model, x = made(OnlyEval), picture()
    with check_unchanged(model):
        flow = sosp.trace(model, x)
    assert flow.modes == ("eval",)
    assert flow.untraced == {"train": "NotImplementedError: no training today"}
    assert "not followed in train mode: NotImplementedError: no training today" in str(flow)
    small = check_shrinks(model, x, {"conv1": [0], "conv2": [1, 2]})
    assert not small.training


def test_a_branch_that_is_there_in_train_mode_only() -> None:
    class Auxiliary(Middle):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            y = F.relu(self.conv1(x))
            out = self.fc(F.relu(self.conv2(y)).mean((2, 3)))
            return (out, self.extra(y.mean((2, 3)))) if self.training else out

    model, x = made(Auxiliary), picture()
    flow = sosp.trace(model, x)
    assert streams(flow)[0] == (4, ["conv1"], ["conv2", "extra"], 0)
    small = check_shrinks(model, x, {"conv1": [2], "conv2": [1]})
    assert small.extra.in_features == 3


# --- examples


@pytest.mark.parametrize("examples", [1, 2, 5])
def test_the_number_of_examples_does_not_matter(examples: int) -> None:
    c = case("residual")
    assert streams(sosp.trace(c.model, c.inputs[:examples])) == BY_HAND["residual"]


def test_arguments_as_a_tuple_or_a_dict() -> None:
    class Two(Middle):
        def forward(self, x: Tensor, scale: Tensor, shift: float = 0.0) -> Tensor:
            return super().forward(x * scale + shift)

    model, x = made(Two), picture()
    scale = torch.ones(4, 1, 1, 1)
    wanted = [(4, ["conv1"], ["conv2"], 0), (6, ["conv2"], ["fc"], 0), (2, ["fc"], [], 2)]
    assert streams(sosp.trace(model, (x, scale))) == wanted
    assert streams(sosp.trace(model, {"x": x, "scale": scale, "shift": 1.0})) == wanted


@pytest.mark.parametrize(
    ("example", "shape"),
    [
        (picture(5), "(4, 5, 6, 6)"),
        (torch.zeros(2, 3), "(2, 3)"),
        ((picture(), picture()), "(4, 3, 6, 6)"),
        ({"y": picture()}, "'y': (4, 3, 6, 6)"),
        (None, "None"),
        ("a picture", "a picture"),
    ],
)
def test_an_example_that_the_model_does_not_take(example: Any, shape: str) -> None:
    model = made(Middle)
    with check_unchanged(model), pytest.raises(StructureError) as caught:
        sosp.trace(model, example)
    assert "does not run on the example" in str(caught.value)
    assert shape in str(caught.value)


# --- tensors without channels, in the shape of those with some


class MaskedAttention(nn.Module):
    """Two heads; tokens beyond the end of a text are masked, by whole numbers or by truth values."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.query, self.key, self.value = (nn.Linear(4, 6) for _ in range(3))
        self.out, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.max().item() <= x.shape[1]  # run with numbers: the values of the mask are known
        query, key, value = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1)
        absent = (torch.arange(x.shape[1]) >= lengths[:, None])[:, None, None]
        y = scores.masked_fill(self.mask(absent, scores), -1e9).softmax(-1) @ value
        return self.head(F.relu(self.out(y.transpose(1, 2).flatten(2))))


@pytest.mark.parametrize(
    "mask", [lambda m, like: m, lambda m, like: m.expand_as(like), lambda m, like: m.long().expand_as(like).bool()]
)
def test_the_values_of_a_mask_are_no_channels(mask: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, example = MaskedAttention(mask).double().eval(), (torch.randn(3, 5, 4).double(), torch.tensor([5, 3, 2]))
    flow = sosp.trace(model, example)
    assert flow.real
    assert {p.op for p in flow.pinned} == {"return"}
    wanted = sosp.Mask.from_removed(model, {name: [0, 1, 2] for name in ("query", "key", "value")}, example)
    small = sosp.shrink(model, wanted, example)
    assert small.query.out_features == small.key.out_features == small.value.out_features == 3
    # Sums of at most 6 terms in double precision.
    torch.testing.assert_close(small(*example), sosp.masked(model, wanted)(*example), rtol=0, atol=1e-12)


class Numbered(Middle):
    def middle(self, x: Tensor) -> Tensor:
        x.mean().item()  # run with numbers, as above
        return x + torch.arange(4)[:, None, None].expand_as(x)  # here


class Positive(Middle):
    def middle(self, x: Tensor) -> Tensor:
        return x + x[x > 0].mean()  # here


@pytest.mark.filterwarnings("ignore::sosp.graph.forward_code.PathWarning")
@pytest.mark.parametrize(("cls", "op"), [(Numbered, "expand_as"), (Positive, "__getitem__")])
def test_an_index_or_a_table_in_the_shape_of_channels_pins_them(cls: type[nn.Module], op: str) -> None:
    model, x = made(cls), picture()
    flow = sosp.trace(model, x)
    assert [p.where for p in flow.pinned if p.op == op and "conv1" in p.layers] == [marked_line(cls)]
    mask = sosp.Mask.from_removed(model, {"conv1": [1], "conv2": [0]}, x)
    # Sums of some 100 terms in single precision.
    torch.testing.assert_close(sosp.shrink(model, mask, x)(x), sosp.masked(model, mask)(x), rtol=0, atol=1e-5)


# --- nothing is left behind


@pytest.mark.parametrize("real", [False, True])
def test_buffers_attributes_and_chance_are_left_as_they_were(real: bool) -> None:
    class Keeps(Middle):
        """Counts, remembers, draws, and perhaps looks at a number."""

        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.seen: list[Any] = []

        def middle(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x.shape)
            self.last = x
            if real and x.sum().item() > 1e9:
                x = x + 1
            return F.dropout(self.bn(x), 0.5, self.training) + 0 * torch.rand_like(x)

    model, x = made(Keeps).train(), picture()
    with check_unchanged(model):
        flow = sosp.trace(model, x)
    assert flow.real == real
    assert int(model.calls) == 0
    assert model.seen == []
    assert not hasattr(model, "last")


def test_hooks_of_the_user_run_on_copies_only() -> None:
    model = made(Middle)
    shapes: list[Any] = []
    model.conv1.register_forward_hook(lambda m, args, out: shapes.append((m is model.conv1, out.device.type)))
    with check_unchanged(model):
        sosp.trace(model, picture())
    assert shapes
    assert not any(own for own, _ in shapes)


@pytest.mark.parametrize(("kind", "width", "steps"), [(nn.LSTM, 7, 9), (nn.GRU, 5, 30)])
def test_recurrent_ops_are_not_tried_out(
    kind: type[nn.RNNBase], width: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gates of another width than its states have torch reads beyond them, and the process dies."""

    class Sentence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner = nn.Linear(4, 5), kind(5, width, batch_first=True)
            self.head = nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(self.words(x))[0][:, -1])

    tried: list[str] = []
    run = ops.OpCall.run

    def noted(self: ops.OpCall, leaves: Any) -> list[Tensor]:
        tried.append(self.name)
        if self.name in ("lstm", "gru"):
            raise ValueError("not on other widths")
        return run(self, leaves)

    monkeypatch.setattr(ops.OpCall, "run", noted)
    flow = sosp.trace(made(Sentence), torch.randn(3, steps, 4))
    assert not {"lstm", "gru"} & set(tried)
    (pin,) = (p for p in flow.pinned if p.op in ("lstm", "gru"))
    assert (pin.layers, pin.why) == (("words",), f"{pin.op} mixes the channels it is given")


# --- ops that are not tried out


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that are tried out on small random tensors."""
    names: list[str] = []
    run = ops.OpCall.run

    def noted(self: ops.OpCall, leaves: Any) -> list[Tensor]:
        names.append(self.name)
        return run(self, leaves)

    monkeypatch.setattr(ops.OpCall, "run", noted)
    return names


class WeightNormed(Middle):
    """Slices of a weight of length one: per filter, per input, or per place of the kernel as in HuBERT."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv2 = nn.utils.parametrizations.weight_norm(self.conv2, dim=dim)


@pytest.mark.parametrize("dim", [0, 1, 3])
def test_weight_norm_is_followed_in_pieces(dim: int, tried: list[str]) -> None:
    """Of a scale that is shorter than it should be, torch's private op for it reads past the end."""
    torch.manual_seed(0)
    model, x = WeightNormed(dim), picture()
    flow = sosp.trace(model, x)
    assert "_weight_norm" not in tried
    assert ("conv2" in {name for record in flow.pinned for name in record.layers}) == (dim > 0)
    for removed in ({"conv1": [1], "conv2": [0, 2]}, {"conv1": [0, 1, 2]}):
        mask = sosp.Mask.from_removed(model, removed, x)
        check_close(sosp.shrink(model, mask, x), sosp.masked(model, mask), x)


class Private(Middle):
    def middle(self, x: Tensor) -> Tensor:
        return torch._softmax(x, 1, False)


class Foreign(Middle):
    """It has the name of an op of torch that moves channels, and does something else."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.ops.sosp_tests.roll(x)


@pytest.fixture
def roll() -> Iterator[None]:
    library = torch.library.Library("sosp_tests", "DEF")
    library.define("roll(Tensor x) -> Tensor")
    library.impl("roll", lambda x: x.cumsum(1), "CPU")
    library.impl("roll", torch.empty_like, "Meta")
    library.impl("roll", lambda x: x.cumsum(1), "AutogradCPU")
    yield
    library._destroy()


@pytest.mark.parametrize("cls", [Private, Foreign])
def test_ops_that_may_not_check_their_arguments_are_not_tried_out(
    cls: type[Middle], roll: None, tried: list[str]
) -> None:
    model, x = made(cls), picture()
    flow = sosp.trace(model, x)
    assert not {"_softmax", "roll", "sosp_tests.roll"} & set(tried)
    assert "mixes the channels" in reason(flow)[2]
    mask = sosp.Mask.from_removed(model, {"conv1": [1], "conv2": [0, 2]}, x)
    check_close(sosp.shrink(model, mask, x), sosp.masked(model, mask), x)


# --- weights that are turned around, and rows that are not there


class Turned(nn.Linear):
    """A layer that multiplies by its transposed weight itself; ``twice``: and uses that in another way too."""

    twice = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.T
        y = x @ weight + self.bias
        return y + weight.sum(0) if self.twice else y


class TurnedTwice(Turned):
    twice = True


@pytest.mark.parametrize(("layer", "columns"), [(Turned, 3), (TurnedTwice, 6)])
def test_a_product_with_the_transposed_weight_is_the_layer(layer: type[Turned], columns: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer(4, 6), nn.ReLU(), layer(6, 8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    x = torch.randn(3, 4, dtype=torch.float64)
    assert sosp.count(model, x).macs == 4 * 6 + 6 * 8 + 8 * 2
    mask = sosp.Mask.from_removed(model, {"0": [0, 2, 5], "2": [1]}, x)
    small: Any = sosp.shrink(model, mask, x)
    assert (small[0].out_features, small[2].in_features, small[2].out_features) == (3, columns, 7)
    torch.testing.assert_close(small(x), sosp.masked(model, mask)(x), atol=1e-12, rtol=0)


class Routed(nn.Module):
    """Every row goes through the expert that its sum chooses: on some examples an expert has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem(x))
        which = (x.sum(1) > 0).long()
        found = torch.zeros_like(y)
        for k, expert in enumerate(self.experts):
            rows = (which == k).nonzero()[:, 0]
            found = found.index_add(0, rows, expert(y[rows]))
        return self.head(F.relu(found))


def test_an_expert_without_rows_keeps_what_it_reads() -> None:
    torch.manual_seed(0)
    model, x = Routed().double().eval(), torch.rand(4, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mask = sosp.Mask.from_removed(model, {"stem": [0, 1], "experts.1": [2]}, x)
        small = sosp.shrink(model, mask, x)
    for inputs in (x, -x):
        torch.testing.assert_close(small(inputs), sosp.masked(model, mask)(inputs), atol=1e-12, rtol=0)


class Positions(nn.Module):
    """As many numbers of positions, and of factors for them, as the input has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(5, 4), nn.Embedding(9, 4)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("numbers", torch.arange(9))
        self.register_buffer("factors", torch.linspace(1, 2, 9))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y = self.embed(x) + self.table(self.numbers[:length])
        return self.head(F.relu(self.body(y * self.factors[:length, None])))


def test_a_longer_input_finds_all_positions() -> None:
    torch.manual_seed(0)
    model, x = Positions().double().eval(), torch.zeros(2, 5, dtype=torch.long)
    model.factors = model.factors.double()
    mask = sosp.Mask.from_removed(model, {"body": [0, 3]}, x)
    small = sosp.shrink(model, mask, x)
    longer = torch.randint(5, (2, 8))
    torch.testing.assert_close(small(longer), sosp.masked(model, mask)(longer), atol=1e-12, rtol=0)


class Keeps(nn.Module):
    """A table that the first call computes and keeps, as relative positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.kept = nn.Linear(4, 6), nn.Linear(6, 2), None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.linspace(0, 1, 3, dtype=x.dtype, device=x.device).cumsum(0)[:, None]
        return self.head(F.relu(self.body(x)) + self.kept)


def test_what_the_first_call_keeps_does_not_pin() -> None:
    torch.manual_seed(0)
    model, x = Keeps().double().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    mask = sosp.Mask.from_removed(model, {"body": [0, 3]}, x)
    small = sosp.shrink(model, mask, x)
    assert (small.body.out_features, small.head.in_features) == (4, 6)  # the table is added to all six
    torch.testing.assert_close(small(x), sosp.masked(model, mask)(x), atol=1e-12, rtol=0)


class Limited(nn.Module):
    """An activation that is zero at zero or not, depending on the sign of a number that it holds."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("limit", torch.tensor(limit))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(torch.where(x > 0, x, torch.expm1(torch.min(x, self.limit)) - x))


@pytest.mark.parametrize("limit", [0.5, -0.5])
def test_whether_zero_stays_zero_does_not_depend_on_the_sign_that_was_tried(limit: float) -> None:
    torch.manual_seed(0)
    model, x = Limited(limit).double().eval(), torch.randn(3, 4, dtype=torch.float64)
    mask = sosp.Mask.from_removed(model, {"body": [0, 3]}, x)
    small = sosp.shrink(model, mask, x)
    torch.testing.assert_close(small(x), sosp.masked(model, mask)(x), atol=1e-12, rtol=0)
