"""The passes of a repair: which inputs are held out, how many run at once, and what need not be computed again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from sosp.errors import DataError
from sosp.refit import block_cache, inputs, repair_plan
from sosp.refit.block_cache import BlockCache
from sosp.refit.comparison_points import track_channels
from sosp.refit.hooks import OutputListener
from sosp.refit.inputs import read_chunks, split_chunks

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # a name is enough to be asked how much runs at once


@pytest.fixture(autouse=True)
def few_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_plan, "ROWS", 200)


# --- inputs ---------------------------------------------------------------------------------------------


def test_the_held_out_ones_are_spread_over_sorted_inputs() -> None:
    x = torch.arange(500.0)[:, None]
    parts = split_chunks(read_chunks(x, None, CPU, 0), 1, GPU)
    fitted, held = (part.chunk.inputs[:, 0].long().tolist() for part in parts)
    assert [part.held for part in parts] == [False, True]
    assert sorted(fitted + held) == list(range(500))
    assert len(held) == 52  # 13 of 125, rounded up
    assert [len([k for k in held if start <= k < start + 125]) for start in range(0, 500, 125)] == [13] * 4


def test_so_many_at_once_as_their_largest_tensor_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_TENSOR_NUMBERS", 1000)
    chunks = read_chunks(torch.zeros(500, 1), None, CPU, 0)
    sizes = [part.chunk.size for part in split_chunks(chunks, 5, GPU)]
    assert sizes == [200, 200, 48, 52]
    assert [part.number for part in split_chunks(chunks, 5, GPU)] == list(range(4))
    assert [part.chunk.size for part in split_chunks(chunks, 5, CPU)] == [125, 125, 125, 73, 52]
    assert len(split_chunks(chunks, 10**9, GPU)) == 500


def test_batches_of_one_that_cannot_be_joined() -> None:
    batches = [{"x": torch.full((1, 2), float(k))} for k in range(12)]
    parts = split_chunks(read_chunks(batches, None, CPU, 0), 1, CPU)
    assert [float(part.chunk.inputs["x"][0, 0]) for part in parts if part.held] == [0, 10]
    assert len(parts) == 12


# --- memory ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(4, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.b = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.bn(self.a(x))))


class Keeping(Block):
    """Keeps something of a pass for others."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean((2, 3))
        return super().forward(x)


class Writing(Block):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.1))


class Blocks(nn.Module):
    """Chains inside a chain; ops that write into what a block gave; a block that is called twice, one by its parts."""

    def __init__(self, strange: type[Block] = Block) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        bare = nn.ReLU(inplace=True), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 1)
        self.first = nn.Sequential(strange(), Block(), *bare, Block(), Block())
        self.loose = nn.ModuleList([Block(), Block()])
        self.again = Block()
        self.pieces = nn.Sequential(Block(), Block())
        self.last = nn.Sequential(nn.Sequential(Block(), Block()), Block())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        start = self.stem(x)
        x = self.again(torch.relu_(self.first(start)))
        for block in self.loose:
            x = block(x).mul_(0.9)
        x = self.again(x)
        kept = [x := piece(x) for piece in self.pieces]  # not as a chain: each one's output is looked at
        x = self.last(x + kept[0] + start).mean((2, 3))
        return self.head(x + getattr(self.first[0], "mean", 0))


def networks(strange: type[Block] = Block) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    model, x = Blocks(strange).double().eval(), torch.randn(40, 2, 4, 4, dtype=torch.float64)
    gone = {n: [0, 2] for n, m in model.named_modules() if n.endswith(".a") and not n.startswith("again")}
    gone |= {"first.4": [1], "last.0.1.b": [0, 3]}  # they are put back in their places where they are added
    return model, sosp.shrink(model, sosp.Mask.from_removed(model, gone, x[:4]), x[:4]), x


def overheard() -> tuple[Any, Any, Tensor]:
    """What a block inside of a chain gives is used behind."""
    model, small, x = networks()
    seen: list[Tensor] = []
    for net in (model, small):
        net.first[0].register_forward_hook(lambda m, args, output: seen.append(output))
        net.head.register_forward_pre_hook(lambda m, args: args[0] + seen[-1].mean((2, 3)))
    return model, small, x


WAYS: dict[str, Callable[[], tuple[Any, Any, Tensor]]] = {
    "plain": networks,
    "keeping": lambda: networks(Keeping),
    "writing": lambda: networks(Writing),
    "overheard": overheard,
}


@pytest.mark.parametrize("way", WAYS)
def test_memory_changes_nothing_but_the_number_of_calls(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    model, small, x = WAYS[way]()
    calls = {"with": 0, "without": 0}
    found = {}
    for name, room in (("with", block_cache.BYTES), ("without", 0)):
        monkeypatch.setattr(block_cache, "BYTES", room)
        forward = nn.Conv2d.forward

        def counted(self: Any, x: Tensor, name: str = name, forward: Any = forward) -> Tensor:
            calls[name] += 1
            return forward(self, x)

        with monkeypatch.context() as patch:
            patch.setattr(nn.Conv2d, "forward", counted)
            found[name] = sosp.repair(small, model, x)
    assert found["with"].layers == found["without"].layers
    for a, b in zip(*(f.model.state_dict().values() for f in found.values()), strict=True):
        assert torch.equal(a, b)
    assert calls["with"] < 0.7 * calls["without"]
    assert not any("forward" in m.__dict__ for m in found["with"].model.modules())


def test_only_what_is_still_read_is_kept() -> None:
    model, _, x = networks()
    with torch.no_grad():
        trails, _ = track_channels(model, lambda m: m(x))
        store, listener = BlockCache(model, trails), OutputListener(model)
        names = [n for n in trails.order if n != "head"]
        for layer in names:
            with listener.hooked(), store.reuse_blocks(trails.order.index(layer), 0, listener):
                listener.listen({layer: [lambda use, y: None]}, lambda m: m(x))
        # A block called twice runs, so what it is given is kept; what only the last block reads is not.
        assert {name for name, _ in store.kept} == {"first", "loose.1", "last.0"}
        wanted = model.first(model.stem(x))
    torch.testing.assert_close(store.kept["first", 0], wanted)


class Front(nn.Module):
    """Layers in front of blocks, then many in a row. ``unseen``: the front is read in a way that is missed."""

    def __init__(self, unseen: bool) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(2, 4, 5, padding=2), nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.row = nn.Sequential(*(nn.Conv2d(4, 4, 1) if k % 2 else nn.ReLU(inplace=True) for k in range(13)))
        self.side = nn.Linear(4, 4) if unseen else None
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.bn(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x)
        x = x if self.side is None else x + self.side(input=start.movedim(1, -1)).movedim(-1, 1)
        return self.head(self.row(x * 2).mean((2, 3)))


def front(unseen: bool) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    model, x = Front(unseen).double().eval(), torch.randn(40, 2, 4, 4, dtype=torch.float64)
    gone = {f"blocks.{k}.a": [k % 4] for k in range(4)} | {"row.5": [1]}
    return model, sosp.shrink(model, sosp.Mask.from_removed(model, gone, x[:4]), x[:4]), x


@pytest.mark.parametrize("unseen", [False, True])
def test_layers_in_front_and_long_rows_are_not_computed_again(monkeypatch: pytest.MonkeyPatch, unseen: bool) -> None:
    model, small, x = front(unseen)
    calls: dict[int, int] = {}
    forward = nn.Conv2d.forward

    def counted(self: Any, x: Tensor) -> Tensor:
        calls[self.kernel_size[0]] = calls.get(self.kernel_size[0], 0) + 1
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", counted)
    found = sosp.repair(small, model, x)
    # 15 layers change after the stem, in two parts of the inputs, and both networks run ten times in any case.
    assert (calls[5] > 35) == unseen
    assert calls[1] < 110  # six in a row
    monkeypatch.setattr(block_cache, "BYTES", 0)
    monkeypatch.setattr(BlockCache, "_is_unread", lambda *given: False)
    again = sosp.repair(small, model, x)
    assert found.layers == again.layers
    for a, b in zip(*(f.model.state_dict().values() for f in (found, again)), strict=True):
        assert torch.equal(a, b)


def test_a_forward_of_the_users_own_stays() -> None:
    model, small, x = networks()
    own = lambda y: y  # noqa: E731
    for net in (model, small):
        net.first[2].forward = own
    found = sosp.repair(small, model, x)
    assert found.model.first[2].forward is own
    assert small.first[2].forward is own


def test_the_batches_of_inputs_that_are_not_finite_are_named() -> None:
    model, small, x = networks()
    batches = [*x.split(14)]
    batches[1] = batches[1] * torch.nan
    with pytest.raises(DataError, match="output of 'stem' is not finite on batches 0 to 2,"):
        sosp.repair(small, model, batches)


# --- code that looks at its inputs ------------------------------------------------------------------------


class Forked(nn.Module):
    """Which layers run, and how many sums come before others, depends on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.large, self.small = nn.Linear(12, 12), nn.Linear(12, 12)
        self.last, self.skip, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        start = self.stem(x).relu()
        if bool(x.mean() > 1):
            y = (self.large(start) + start + 1).relu()
        else:
            y = self.small(start).tanh()
        return self.head((self.skip(y) + self.last(y)).relu())


def forked() -> tuple[nn.Module, nn.Module, Tensor]:
    """Every first batch of ten takes one way, every second the other."""
    torch.manual_seed(0)
    model, x = Forked(), torch.randn(20, 10, 6)
    x[1::2] += 2
    gone = {"stem": [0, 4], "last": [1, 2, 3], "skip": [1, 7]}
    return model, sosp.shrink(model, sosp.Mask.from_removed(model, gone, x[0]), x[0]), x


@pytest.mark.filterwarnings("ignore:the code branches on the values")
def test_layers_that_do_not_run_on_all_inputs_are_left_alone() -> None:
    model, small, x = forked()
    batches = [{"x": part} for part in x]  # which are never joined
    found = sosp.repair(small, model, batches)
    errors = {error.layer: error for error in found.layers}
    for name in ("small", "last"):  # the latter is compared by a sum: the first one, or the third
        assert "does not run on all inputs" in errors[name].why
    for name in ("large", "small", "last"):
        assert torch.equal(found.model.get_submodule(name).weight, small.get_submodule(name).weight), name
    assert errors["head"].ridge is not None
    with torch.no_grad():
        before, after = (sum(float((net(y) - model(y)).square().sum()) for y in x) for net in (small, found.model))
    assert after < before


@pytest.mark.filterwarnings("ignore:the code branches on the values")
def test_inputs_that_all_take_one_way_are_fitted_to_as_ever() -> None:
    model, small, x = forked()
    found = sosp.repair(small, model, [{"x": part} for part in x[::2]])
    assert [error.why for error in found.layers] == [""] * 5
