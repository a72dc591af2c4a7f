"""A smaller network that is tried out: its own failures, and those of the user's code."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from sosp.graph.plan import plan_removal

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls().double()


def remove(model: nn.Module, removed: dict[str, list[int]], x: Tensor = X) -> nn.Module:
    """The smaller network, which ``shrink`` compares with the masked one."""
    return sosp.shrink(model, sosp.Mask.from_removed(model, removed, x), x)


def widths(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in model.named_parameters() if name.endswith("weight")}


# --- code that asks an emptied layer


class Scaled(nn.Conv2d):
    """A layer with a method of its own."""

    def strength(self) -> float:
        return 0.5


class Asking(nn.Module):
    """Two branches and a chain; ``ask`` is what the code reads of the first branch on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = Scaled(3, 6, 4, stride=4), nn.BatchNorm2d(6)
        self.other = nn.Conv2d(3, 6, 4, stride=4)
        self.fc1, self.fc2 = nn.Linear(6, 12), nn.Linear(12, 3)

    def ask(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.ask(x)
        x = F.relu(self.norm(self.patch(x))) + F.relu(self.other(x))
        return self.fc2(F.relu(self.fc1(x.mean((2, 3)))))


class AskingType(Asking):
    def ask(self, x: Tensor) -> Tensor:
        return x.to(self.patch.weight.device, self.patch.weight.dtype)


class AskingBias(Asking):
    def ask(self, x: Tensor) -> Tensor:
        return x if self.patch.bias is None else x.to(self.patch.bias.dtype)


class AskingSizes(Asking):
    def ask(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.patch.in_channels == self.patch.weight.shape[1]
        return x[..., : self.patch.kernel_size[0] * 2, :]


ANSWERED = [AskingType, AskingBias, AskingSizes]


@pytest.mark.parametrize("cls", ANSWERED)
def test_an_emptied_layer_answers_as_the_layer_would(cls: type[Asking]) -> None:
    small = remove(build(cls), {"patch": [*range(6)], "fc1": [1, 5, 6]})
    left = widths(small)
    assert "patch.weight" not in left
    assert left["fc1.weight"] == [9, 6]
    assert "patch.weight" not in small.state_dict()
    assert small.float().patch.weight.dtype == torch.float32  # it follows the network


class AskingMethod(Asking):
    def ask(self, x: Tensor) -> Tensor:
        return x * self.patch.strength()


class AskingProperty(Asking):
    """Of an AttributeError inside a property torch says that the property is missing."""

    @property
    def scale(self) -> float:
        return self.patch.strength()

    def ask(self, x: Tensor) -> Tensor:
        return x * self.scale


class AskingNorm(Asking):
    def ask(self, x: Tensor) -> Tensor:
        return x.to(self.norm.running_mean.dtype)


@pytest.mark.parametrize("cls", [AskingMethod, AskingProperty, AskingNorm])
def test_a_layer_that_the_code_asks_for_more_keeps_one_channel(cls: type[Asking]) -> None:
    left = widths(remove(build(cls), {"patch": [*range(6)], "fc1": [1, 5, 6]}))
    assert left.get("patch.weight", [1, 3, 4, 4]) == [1, 3, 4, 4]
    assert left["fc1.weight"] == [9, 6]


def test_why_a_layer_keeps_one_channel_is_said_with_the_line() -> None:
    model = build(AskingMethod)
    plan = plan_removal(sosp.trace(model, X), sosp.Mask.from_removed(model, {"patch": [*range(6)]}, X))
    (pin,) = plan.flow.learned
    line = AskingMethod.ask.__code__.co_firstlineno + 1
    assert (pin.op, pin.where) == ("patch", f"test_dry_run.py:{line}")
    assert "attribute" in pin.why


@pytest.mark.parametrize("groups", ["independent", "coupled"])
@pytest.mark.parametrize("cls", [*ANSWERED, AskingMethod])
def test_a_network_that_asks_is_pruned(cls: type[Asking], groups: str) -> None:
    data = X, torch.tensor([0, 1, 2, 0])
    pruned = sosp.prune(build(cls), data, params=0.6, repair=False, selection=sosp.Selection(groups=groups))
    assert pruned.cost_after.params <= 0.6 * pruned.cost_before.params


# --- reshapes whose -1 stands for tokens


class Attention(nn.Module):
    """As many families of language models write it: -1 is the number of tokens, not that of heads."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v = (nn.Linear(8, heads * width) for _ in range(3))
        self.out = nn.Linear(heads * width, 8)

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.heads, self.width).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Sentence(nn.Module):
    """With ``decides``, the code also looks at values, so that real numbers are followed."""

    def __init__(self, heads: int, width: int, decides: bool) -> None:
        super().__init__()
        self.decides = decides
        self.embed, self.attention, self.head = nn.Linear(5, 8), Attention(heads, width), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.decides and bool((x > 99).all()):
            x = x * 2
        x = self.embed(x)
        return self.head(F.relu(x + self.attention(x)).mean(1))


@pytest.mark.filterwarnings("ignore::sosp.graph.forward_code.PathWarning")
@pytest.mark.parametrize("groups", ["independent", "coupled"])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(("heads", "width"), [(2, 4), (4, 2)])
def test_channels_are_never_read_as_tokens(heads: int, width: int, ratio: float, groups: str) -> None:
    """Half of the channels give half of the tokens; what the code does with values changes nothing of that."""
    x = torch.randn(8, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = []
    for decides in (False, True):
        torch.manual_seed(0)
        model = Sentence(heads, width, decides).double()
        pruned = sosp.prune(
            model, (x, torch.arange(8) % 3), ratio=ratio, repair=False, selection=sosp.Selection(groups=groups)
        )
        left.append(widths(pruned.model))
        assert pruned.cost_after.params < pruned.cost_before.params
    assert left[0] == left[1]
