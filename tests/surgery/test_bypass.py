"""A branch that is emptied disappears: what runs, what is left of the modules, and where they must stay."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sosp
from networks.compare import check_both_modes, parameters
from sosp.core.layers import BypassedModule
from sosp.graph.flow import follow_channels
from sosp.graph.plan import Plan, plan_removal


class OpCounter(TorchDispatchMode):
    """Count the ops that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_ops(model: nn.Module, x: Tensor) -> int:
    with OpCounter() as counter, torch.no_grad():
        model(x)
    return counter.count


class Block(nn.Module):
    """A residual block of 3x3 convolutions, written in one of several ways."""

    def __init__(self, way: str = "plain", act: nn.Module | None = None) -> None:
        super().__init__()
        self.way, self.size = way, 4
        self.conv1, self.bn1 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.gate, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 1, 1))
        self.skip = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) if way == "skip" else nn.Identity()
        self.act = act or nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        if self.way == "scaled":
            y = F.dropout(self.scale * y * self.gate(y.mean((2, 3))).sigmoid()[:, :, None, None], 0.5, self.training)
        if self.way == "in place":
            y += self.skip(x)
            return self.act(y)
        if self.way == "values" and bool((y > 10).any()):
            return y
        y = self.act(y + self.skip(x))
        return (y,) if self.way == "tuple" else y


class Around(nn.Module):
    """A stem, a block, and a linear layer. ``between`` is done with the output of the block, and its input."""

    def __init__(self, block: nn.Module, between: Callable[[Any, Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 4, 3), block, nn.Linear(4, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x if isinstance(getattr(self.block, "act", None), nn.SiLU) else x.relu()
        y = self.block(x)
        y = self.between(self, y, x) if self.between is not None else y
        return self.head(y.mean((2, 3)))


def add_input(net: Any, y: Tensor, x: Tensor) -> Tensor:
    """What the block was given must still be that."""
    return y + x


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class PreNorm(nn.Module):
    """Two branches of tokens, each behind a norm; the second may write its sum in place."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.embed, self.norm1, self.norm2 = nn.Linear(3, 4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.mix, self.mlp, self.head = nn.Linear(4, 4), Mlp(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.mix(self.norm1(x)).tanh()
        y = self.mlp(self.norm2(x))
        y = y.add_(x) if self.in_place else y + x
        return self.head(y)


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(6, 4), nn.Dropout(0.1), nn.LayerNorm(4)

    def forward(self, hidden: Tensor, skip: Tensor) -> Tensor:
        return self.norm(self.drop(self.dense(hidden)) + skip)


class PostNorm(nn.Module):
    """BERT's order: the norm comes after the sum, and the module that adds is given the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.out, self.head = nn.Linear(3, 4), nn.Linear(4, 6), Output(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.out(F.gelu(self.up(x)), skip=x))


def plan_without(model: nn.Module, layers: list[str], x: Tensor) -> Plan:
    widths = {n: range(len(model.get_parameter(f"{n}.weight"))) for n in layers}
    return plan_removal(follow_channels(model, x), sosp.Mask.from_removed(model, widths, x))


def make(network: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """In double precision, with norms that have seen something, and an example that fits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network().double()
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.normal_(norm.bias)
                nn.init.normal_(norm.running_mean)
        shape = (5, 3, 6, 6) if isinstance(model, Around) else (5, 7, 3)
        return model.eval(), torch.randn(shape, dtype=torch.float64)


VANISH = {
    "a block": (lambda: Around(Block()), ["block.conv2"], {"block": "argument 0"}),
    "that adds in place": (lambda: Around(Block("in place")), ["block.conv2"], {"block": "argument 0"}),
    "with a gate and a scale": (lambda: Around(Block("scaled")), ["block.conv2"], {"block": "argument 0"}),
    "with a skip": (lambda: Around(Block("skip")), ["block.conv2"], {"block": "argument 0 -> skip -> act"}),
    "whose activation changes its input": (
        lambda: Around(Block("in place", nn.SiLU(inplace=True)), add_input),
        ["block.conv2"],
        {"block": "argument 0 -> act"},
    ),
    "a branch in the middle": (PreNorm, ["mlp.fc2"], {"norm2": "argument 0", "mlp": "zeros"}),
    "a skip that is an argument by name": (PostNorm, ["out.dense"], {"out": "argument 'skip' -> norm"}),
}


@pytest.mark.parametrize("name", VANISH)
def test_an_emptied_branch_disappears(name: str, tmp_path: Path) -> None:
    """It computes what the masked network does, and nothing that is left is without a gradient."""
    network, layers, expected = VANISH[name]
    model, x = make(network)
    plan = plan_without(model, layers, x)
    small = sosp.shrink(model, plan, x)
    found = {n: m.extra_repr() for n, m in small.named_modules() if isinstance(m, BypassedModule)}
    assert found == expected
    check_both_modes(small, sosp.masked(model, plan.mask), x)
    assert (plan.cost.params, plan.cost.macs) == (parameters(small), sosp.count(small, x).macs)
    assert parameters(small) < parameters(model)
    assert count_ops(small, x) < count_ops(model, x)
    small.train()(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    sosp.save(tmp_path / "small", small)
    for again in (sosp.load(tmp_path / "small", model), copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(again.eval()(x), small.eval()(x))
        assert again.state_dict().keys() == small.state_dict().keys()


def test_no_op_of_a_removed_block_runs() -> None:
    """A ResNet runs as many ops as one that was built without the blocks; a skip stays."""
    model, x = sosp.nets.resnet20().eval(), torch.randn(2, 3, 32, 32)
    plan = plan_without(model, ["layer1.1.conv2", "layer2.0.conv2", "layer3.2.conv2"], x)
    by_hand: Any = copy.deepcopy(model)
    by_hand.layer1[1], by_hand.layer2[0], by_hand.layer3[2] = nn.Identity(), model.layer2[0].downsample, nn.Identity()
    small: Any = sosp.shrink(model, plan, x)
    assert count_ops(small, x) == count_ops(by_hand, x)
    nodes = torch.export.export(small, (x,)).graph.nodes
    assert len([n for n in nodes if "relu" in str(n.target)]) == 1 + 2 * 6
    assert small.layer1[1].conv1.kernel_size == (3, 3)
    assert not list(small.layer1[1].parameters())


def test_a_layer_without_bias_that_reads_nothing_but_zeros_has_no_weights() -> None:
    """Its norm still gives a shift, and learns."""
    model, x = make(lambda: Around(Block()))
    model.block.conv2.bias = None  # type: ignore[union-attr]
    plan = plan_without(model, ["block.conv1"], x)
    small = sosp.shrink(model, plan, x)
    assert {n for n, _ in small.named_parameters()} == {
        *("stem.weight", "stem.bias", "block.bn2.weight", "block.bn2.bias", "block.gate.weight", "block.gate.bias"),
        *("block.scale", "head.weight", "head.bias"),
    }
    check_both_modes(small, sosp.masked(model, plan.mask), x)
    assert plan.cost.macs == sosp.count(small, x).macs


def test_hooks_on_the_block_itself_still_run() -> None:
    """With and without keywords, forward and backward."""
    model, x = make(lambda: Around(Block()))
    seen: list[str] = []
    block: Any = model.block
    block.register_forward_pre_hook(lambda m, args, kwargs: seen.append("before"), with_kwargs=True)
    block.register_forward_hook(lambda m, args, kwargs, y: seen.append("after"), with_kwargs=True)
    block.register_full_backward_hook(lambda m, inside, outside: seen.append("back"))
    small: Any = sosp.shrink(model, plan_without(model, ["block.conv2"], x), x)
    assert isinstance(small.block, BypassedModule)
    seen.clear()
    small(x).sum().backward()
    assert seen == ["before", "after", "back"]


def hook(model: Any) -> None:
    model.block.conv1.register_forward_hook(lambda m, a, y: None)


STAY = {
    "a hook of the user on a part": (Block(), None, hook),
    "a part that other code calls": (Block(), lambda net, y, x: y + net.block.conv1(x)[:, :4], None),
    "a parameter that other code takes": (Block("scaled"), lambda net, y, x: y * net.block.scale, None),
    "a write into its output": (Block(), lambda net, y, x: y.mul_(2) + x, None),
    "a question about its class": (Block(), lambda net, y, x: y * (2 if type(net.block) is Block else 3), None),
    "an attribute that is not copied": (Block(), lambda net, y, x: y * len(net.block.way_names), None),
    "a tuple": (Block("tuple"), lambda net, y, x: y[0], None),
    "code that looks at values": (Block("values"), None, None),
}


@pytest.mark.filterwarnings("ignore::sosp.graph.forward_code.PathWarning")
@pytest.mark.parametrize("name", STAY)
def test_a_block_stays_where_the_code_needs_it(name: str) -> None:
    """And the network is still what the masked one is."""
    block, between, change = STAY[name]
    model, x = make(lambda: Around(copy.deepcopy(block), between))
    model.block.way_names = [1, 2]  # type: ignore[union-attr]
    if change is not None:
        change(model)
    plan = plan_without(model, ["block.conv2"], x)
    small = sosp.shrink(model, plan, x)
    assert not isinstance(small.block, BypassedModule)
    check_both_modes(small, sosp.masked(model, plan.mask), x)


def test_zeros_that_code_writes_into_have_memory() -> None:
    model, x = make(lambda: PreNorm(in_place=True))
    plan = plan_without(model, ["mlp.fc2"], x)
    assert "mlp" not in plan.recipe.bypassed
    check_both_modes(sosp.shrink(model, plan, x), sosp.masked(model, plan.mask), x)


def test_nothing_is_bypassed_without_a_removal() -> None:
    """Not even what is for nothing in the user's own code: a ReLU behind a ReLU, a norm that nothing reads."""
    model, x = make(lambda: Around(nn.Sequential(nn.ReLU(), Block()), lambda net, y, x: y.relu()))
    plan = plan_removal(follow_channels(model, x), sosp.Mask.from_removed(model, {"block.1.conv1": [0]}, x))
    assert plan.recipe.bypassed == {}
