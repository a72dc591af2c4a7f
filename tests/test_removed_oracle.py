"""The oracle of removal against networks whose constants were set to zero by hand."""

from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.recipe import randomise
from oracles.removed import removed, zero_inputs

EXACT = 1e-12  # both sides do the same sums, up to their order


def made(model: nn.Module) -> nn.Module:
    randomise(model.double().eval(), torch.Generator().manual_seed(3))
    return model


def chain(**modules: nn.Module) -> nn.Module:
    return made(nn.Sequential(OrderedDict(modules)))


def picture(width: int = 3) -> Tensor:
    return torch.randn(5, width, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def by_hand(model: nn.Module, silent: dict[str, list[int]]) -> nn.Module:
    """A copy with weight = bias = 0 for these channels of these modules."""
    copy = deepcopy(model)
    for name, channels in silent.items():
        module = copy.get_submodule(name)
        module.weight[channels] = 0
        if module.bias is not None:
            module.bias[channels] = 0
    return copy


def check_equal(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """In eval mode, in train mode, and in eval mode with the statistics of that."""
    for training in (False, True, False):
        a, b = model.train(training)(x), twin.train(training)(x)
        assert torch.allclose(a, b, rtol=EXACT, atol=EXACT)


class Dense(nn.Module):
    """A DenseNet of two layers: every batch norm sees what all layers before it have made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv1 = nn.Conv2d(4, 3, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(7)
        self.conv2 = nn.Conv2d(7, 2, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv0(x)
        x = torch.cat([x, self.conv1(F.relu(self.bn1(x)))], 1)
        x = torch.cat([x, self.conv2(F.relu(self.bn2(x)))], 1)
        return self.head(F.relu(self.bn3(x)).mean((2, 3)))


DENSE_NORMS = dict.fromkeys(["conv0", "conv1", "conv2"])


def test_densenet_loses_its_channels_in_every_batch_norm_behind() -> None:
    net = made(Dense())
    gone = {"conv0": [1, 3], "conv1": [0], "conv2": [1]}
    # Behind conv0's 4 channels come conv1's 3 and conv2's 2.
    twin = by_hand(net, gone | {"bn1": [1, 3], "bn2": [1, 3, 4], "bn3": [1, 3, 4, 8]})
    check_equal(removed(net, picture(), gone, DENSE_NORMS), twin, picture())
    shifts = by_hand(net, gone)  # the shifts of the batch norms are still there
    assert not torch.allclose(twin.eval()(picture()), shifts(picture()))


def test_a_whole_layer_of_a_densenet() -> None:
    net = made(Dense())
    gone = {"conv0": [0, 1, 2, 3]}
    # conv1 sees zeros only, and is still live: it could come back in training.
    twin = by_hand(net, gone | {"bn1": [0, 1, 2, 3], "bn2": [0, 1, 2, 3], "bn3": [0, 1, 2, 3]})
    check_equal(removed(net, picture(), gone, DENSE_NORMS), twin, picture())


def depthwise(bias: bool, multiplier: int = 1) -> nn.Module:
    wide = 4 * multiplier
    return chain(
        conv=nn.Conv2d(3, 4, 3, padding=1, bias=False),
        bn=nn.BatchNorm2d(4),
        relu=nn.ReLU(),
        dw=nn.Conv2d(4, wide, 3, padding=1, groups=4, bias=bias),
        act=nn.ReLU(),
        bn2=nn.BatchNorm2d(wide),
        out=nn.Conv2d(wide, 2, 4),
    )


NORMS = {"conv": "bn", "dw": None}


def test_a_depthwise_filter_without_bias_passes_zero_on() -> None:
    net = depthwise(bias=False)
    twin = by_hand(net, {"bn": [0, 2], "bn2": [0, 2]})
    check_equal(removed(net, picture(), {"conv": [0, 2]}, NORMS), twin, picture())


def test_two_depthwise_filters_per_channel_pass_zero_on() -> None:
    net = depthwise(bias=False, multiplier=2)
    twin = by_hand(net, {"bn": [2], "bn2": [4, 5]})
    check_equal(removed(net, picture(), {"conv": [2]}, NORMS), twin, picture())


def test_a_depthwise_filter_with_bias_does_not() -> None:
    net = depthwise(bias=True)
    check_equal(removed(net, picture(), {"conv": [0, 2]}, NORMS), by_hand(net, {"bn": [0, 2]}), picture())


def test_the_norm_behind_a_depthwise_filter_may_be_its_own() -> None:
    net = depthwise(bias=False)
    net.act = nn.Identity()
    norms = {"conv": "bn", "dw": "bn2"}
    twin = by_hand(net, {"bn": [0], "bn2": [0, 3]})
    check_equal(removed(net, picture(), {"conv": [0], "dw": [3]}, norms), twin, picture())


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Softplus(), nn.Hardsigmoid()])
def test_a_constant_in_front_of_a_norm_is_not_zero(last: nn.Module) -> None:
    net = chain(conv=nn.Conv2d(3, 4, 3), act=last, bn=nn.BatchNorm2d(4), out=nn.Conv2d(4, 2, 2))
    check_equal(removed(net, picture(), {"conv": [1]}, {"conv": None}), by_hand(net, {"conv": [1]}), picture())


def test_a_dense_layer_is_live_even_if_all_its_inputs_are_zero() -> None:
    net = chain(
        conv1=nn.Conv2d(3, 4, 3, bias=False), conv2=nn.Conv2d(4, 3, 1, bias=False), bn=nn.BatchNorm2d(3),
        out=nn.Conv2d(3, 2, 2),
    )  # fmt: skip
    gone = {"conv1": [0, 1, 2, 3]}
    model = removed(net, picture(), gone, {"conv1": None, "conv2": "bn"})
    check_equal(model, by_hand(net, gone), picture())
    assert (model.eval()(picture()) - net.out.bias.view(1, 2, 1, 1)).abs().max() > 0.01  # the shifts are still there


class Add(nn.Module):
    """A batch norm behind a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 1)
        self.b = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(F.relu(self.a(x)) + self.b(x))).mean((2, 3)))


class AddOfNorms(Add):
    """One batch norm for both sides of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head((F.relu(self.bn(self.a(x))) + self.bn(self.b(x))).mean((2, 3)))


def test_a_sum_is_zero_where_both_sides_are() -> None:
    net = made(Add())
    gone = {"a": [0, 1], "b": [1, 2]}
    twin = by_hand(net, gone | {"bn": [1]})
    check_equal(removed(net, picture(), gone, {"a": None, "b": None}), twin, picture())


def test_a_norm_that_runs_twice_is_left_alone() -> None:
    net = made(AddOfNorms())
    gone = {"a": [1], "b": [1]}
    check_equal(removed(net, picture(), gone, {"a": None, "b": None}), by_hand(net, gone), picture())


class Padded(nn.Module):
    """A norm over channels that are zero by themselves (padding) and others that may become so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.bn = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.conv(x), (0, 0, 0, 0, 1, 1))
        return self.head(F.relu(self.bn(x)).mean((2, 3)))


def test_what_was_zero_before_the_removal_keeps_its_shift() -> None:
    net = made(Padded())
    twin = by_hand(net, {"conv": [1], "bn": [2]})
    check_equal(removed(net, picture(), {"conv": [1]}, {"conv": None}), twin, picture())


def test_one_norm_after_another_goes_too() -> None:
    net = chain(
        conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), relu=nn.ReLU(), inorm=nn.InstanceNorm2d(4, affine=True),
        dw=nn.Conv2d(4, 4, 1, groups=4, bias=False), act=nn.Tanh(), bn3=nn.BatchNorm2d(4), out=nn.Conv2d(4, 2, 2),
    )  # fmt: skip
    twin = by_hand(net, {"bn": [2], "inorm": [2], "bn3": [2]})
    check_equal(removed(net, picture(), {"conv": [2]}, {"conv": "bn", "dw": None}), twin, picture())


def test_the_given_model_is_left_alone() -> None:
    net = made(Dense())
    before = {n: t.clone() for n, t in net.state_dict().items()}
    removed(net, picture(), {"conv0": [0]}, DENSE_NORMS)
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())
    assert not any(m.training for m in net.modules())


def test_zero_inputs_of_every_module() -> None:
    net = made(Dense())
    zeros = zero_inputs(net, picture(), {"conv0": [1], "conv1": [2]}, DENSE_NORMS)
    found = {name: z.nonzero().flatten().tolist() for name, z in zeros.items()}
    assert found == {
        "conv0": [],
        "bn1": [1],
        "conv1": [1],
        "bn2": [1, 6],
        "conv2": [1, 6],
        "bn3": [1, 6],
        "head": [1, 6],
    }


def test_zero_inputs_of_a_flattened_layer() -> None:
    net = chain(conv=nn.Conv2d(3, 2, 3), relu=nn.ReLU(), flatten=nn.Flatten(), fc=nn.Linear(8, 3))
    zeros = zero_inputs(net, picture(), {"conv": [1]}, {"conv": None})
    assert zeros["fc"].tolist() == [False] * 4 + [True] * 4
