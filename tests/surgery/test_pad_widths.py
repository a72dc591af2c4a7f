"""A pruned network with room around it: the same function, the same gradients, the same training; and the way back."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from helpers.training_worker import weights
from networks.literature import Classifier, Pad, Residual, conv_bn
from sosp import Schedule, Speed
from sosp.surgery.pad_widths import MULTIPLE, PaddedModel, pad_model
from sosp.training.learner import Learner

SHORT = Schedule(epochs=2, batch=8, rate=0.1, decay=1e-3, milestones=(0.5,))


# --- networks -------------------------------------------------------------------------------------------


def residual() -> nn.Module:
    """Two streams, the second padded with zeros; every producer of a stream loses other channels."""
    first = Residual([*conv_bn(12, 10, 3), nn.ReLU(), *conv_bn(10, 12, 3)], nn.Identity())
    second = Residual([*conv_bn(12, 20, 3, 2), nn.ReLU(), *conv_bn(20, 20, 3)], Pad(8))
    return Classifier([*conv_bn(3, 12, 3), nn.ReLU(), first, second], 20, 5)


class Dense(nn.Module):
    """What every layer gives is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9)
        self.b, self.norm_b = nn.Conv2d(9, 7, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_a(self.a(x)))
        x = torch.cat([x, self.b(x)], 1)
        return self.head(F.relu(self.norm_b(x)).mean((2, 3)))


def flattened() -> nn.Module:
    """Pixels of a channel become columns of a linear layer; sigmoids make something of zeros."""
    return nn.Sequential(
        *(nn.Conv2d(3, 11, 3, padding=1), nn.Sigmoid(), nn.Conv2d(11, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(96, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, 5)),
    )


def separable() -> nn.Module:
    """A depthwise convolution holds the width of what it reads."""
    layers = [*conv_bn(3, 12, 3), nn.ReLU(), *conv_bn(12, 12, 3, groups=12), nn.ReLU(), *conv_bn(12, 21), nn.ReLU()]
    return Classifier(layers, 21, 5)


class Unnormed(nn.Module):
    """Layers with a bias feed a sum without a norm; the last one is trained only in part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 5)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(torch.sigmoid(x + self.branch(x)).mean((2, 3)))


NETS: dict[str, Callable[[], nn.Module]] = {
    "residual": residual,
    "dense": Dense,
    "flattened": flattened,
    "separable": separable,
    "unnormed": Unnormed,
    "emptied": residual,
}
EMPTIED = {"emptied": {"features.3.branch.3": range(12)}}  # layers that lose every channel


def images(count: int = 20) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=g), torch.arange(count) % 5


def pruned(name: str, ratio: float = 0.4) -> nn.Module:
    """At random, in double precision, with norms that are not as they are made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETS[name]().double()
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                for x in (m.weight, m.bias, m.running_mean):
                    nn.init.normal_(x, 0.5, 0.3)
    x, y = images(4)
    generator = torch.Generator().manual_seed(2)
    saliency = sosp.score(model, (x, y), method="random", generator=generator)
    mask = sosp.select(saliency, ratio=ratio)
    if name in EMPTIED:
        mask = sosp.Mask.from_removed(model, {**mask.removed, **EMPTIED[name]}, x)
    return sosp.shrink(model, mask, x)


def roomy(name: str) -> PaddedModel:
    room = pad_model(pruned(name), images(4)[0])
    assert room is not None
    return room


def scatters(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if "scatter" in m._modules]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    x, y = images()
    F.cross_entropy(model.train()(x), y).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# --- the network ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_it_computes_the_same_with_the_same_gradients(name: str) -> None:
    room, x = roomy(name), images()[0]
    for mode in (False, True):
        small, wide = (copy.deepcopy(m).train(mode) for m in (room.small, room.model))
        torch.testing.assert_close(wide(x), small(x), rtol=1e-10, atol=1e-12)
    wanted, found = gradients(copy.deepcopy(room.small)), gradients(copy.deepcopy(room.model))
    assert found.keys() == wanted.keys()
    for n, grad in wanted.items():
        torch.testing.assert_close(room.narrow(n, found[n]), grad, rtol=1e-8, atol=1e-12, msg=lambda m, n=n: f"{n} {m}")


def test_widths_are_what_kernels_like_and_nothing_is_scattered() -> None:
    room = roomy("residual")
    assert len(scatters(room.small)) > 1
    assert scatters(room.model) == ["features.4.skip"]  # drops zeros that no layer computes
    odd = [n for n, m in room.model.named_modules() if isinstance(m, nn.Conv2d) and m.out_channels % MULTIPLE]
    streams = {"features.0", "features.3.branch.3", "features.4.branch.3"}  # of 12 and 20: zeros pad one to the other
    assert set(odd) <= streams
    *layers, last = [m for m in roomy("flattened").model if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [m.weight.shape[0] % MULTIPLE for m in layers] == [0, 0, 0]
    assert last.weight.shape == (5, layers[-1].weight.shape[0])


def test_a_layer_that_is_gone_holds_nothing_back() -> None:
    room = roomy("emptied")
    assert [*room.small.get_submodule("features.3.branch.3").parameters()] == []
    odd = [n for n, m in room.model.named_modules() if isinstance(m, nn.Conv2d) and m.out_channels % MULTIPLE]
    assert set(odd) <= {"features.0", "features.4.branch.3"}


def test_what_a_depthwise_convolution_reads_stays_as_wide_as_it_is() -> None:
    room = roomy("separable")
    for key in ("features.0", "features.3"):
        assert room.model.get_submodule(key).weight.shape == room.small.get_submodule(key).weight.shape
    assert room.model.get_submodule("features.6").weight.shape[0] % MULTIPLE == 0


@pytest.mark.parametrize("name", NETS)
def test_there_and_back(name: str) -> None:
    room = roomy(name)
    assert weights(room.remove_padding(room.model)).keys() == weights(room.small).keys()
    for n, x in weights(room.small).items():
        assert torch.equal(room.narrow(n, room.widen(n, x)), x)
        assert torch.equal(weights(room.remove_padding(room.model))[n], x)
        if ".scatter." not in n:
            assert torch.equal(room.widen(n, x), weights(room.model)[n])


def test_nothing_to_gain_or_nothing_to_follow() -> None:
    x = images(4)[0].float()
    assert pad_model(Classifier([*conv_bn(3, 8, 3), nn.ReLU()], 8, 5), x) is None

    class Wild(nn.Module):
        """Its sizes are written into the code."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(192, 9), nn.Linear(9, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.flatten(1)).view(-1, 3, 3).mT.reshape(-1, 9))

    assert pad_model(Wild(), x) is None
    assert pad_model(Wild(), torch.zeros(2, 7)) is None  # it does not even run


# --- training -------------------------------------------------------------------------------------------


def trained(model: nn.Module, **more: Any) -> sosp.Trained:
    return sosp.train(model, (images(), images(9)), **{"schedule": SHORT, **more})


def assert_same_numbers(mine: nn.Module, theirs: nn.Module) -> None:
    a, b = weights(mine), weights(theirs)
    assert a.keys() == b.keys()
    for n in a:
        torch.testing.assert_close(a[n], b[n], rtol=1e-7, atol=1e-9, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", NETS)
def test_training_is_the_same(name: str) -> None:
    model, s = pruned(name), replace(SHORT, ema=0.7, nesterov=True)
    wanted, found = trained(model, schedule=s), trained(model, schedule=s, speed=Speed(pad_widths=True))
    assert_same_numbers(found.model, wanted.model)
    assert_same_numbers(found.average, wanted.average)
    assert [e.loss for e in found.history] == pytest.approx([e.loss for e in wanted.history], rel=1e-7)
    assert [e.test.top1 for e in found.history] == [e.test.top1 for e in wanted.history]
    assert [p.requires_grad for p in found.model.parameters()] == [p.requires_grad for p in model.parameters()]
    assert scatters(found.model) == scatters(model)
    torch.testing.assert_close(found.model(images()[0]), wanted.model(images()[0]), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", NETS)
def test_what_was_added_stays_empty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And would not, if nobody saw to it."""
    learners: list[Learner] = []
    finished = Learner.finished
    monkeypatch.setattr(Learner, "finished", lambda self: (learners.append(self), finished(self))[1])

    def full() -> float:
        masks = learners[-1].padded.masks(learners[-1].model)
        held = {n: p for n, p in learners[-1].model.named_parameters() if n in masks}
        return max(float((p.detach() * (1 - masks[n])).abs().max()) for n, p in held.items())

    trained(pruned(name), speed=Speed(pad_widths=True))
    assert full() == 0
    if name in ("residual", "unnormed", "flattened"):
        monkeypatch.setattr(Learner, "_mask_padding_gradients", lambda self: None)
        trained(pruned(name), speed=Speed(pad_widths=True))
        assert full() > 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_a_checkpoint_knows_nothing_of_room(first: bool, then: bool, tmp_path: Path) -> None:
    model = pruned("residual")
    whole = trained(model)

    def stop(name: str, epoch: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        trained(model, speed=Speed(pad_widths=first), folder=tmp_path, save_every=0, on_epoch=stop)
    found = trained(model, speed=Speed(pad_widths=then), folder=tmp_path)
    assert_same_numbers(found.model, whole.model)


def test_the_network_that_is_given_stays_as_it_was() -> None:
    model = pruned("residual")
    before = {n: x.clone() for n, x in weights(model).items()}
    trained(model, speed=Speed(pad_widths=True))
    assert all(torch.equal(x, before[n]) for n, x in weights(model).items())


def test_a_companion_sees_the_network_as_it_is() -> None:
    seen: list[int] = []

    class Looking(sosp.training.Companion):
        def begin(self, model: nn.Module) -> dict[str, nn.Parameter]:
            seen.append(sum(p.numel() for p in model.parameters()))
            return {}

    model = pruned("residual")
    trained(model, speed=Speed(pad_widths=True), companion=Looking())
    assert seen == [sum(p.numel() for p in model.parameters())]


def test_by_default_a_cpu_makes_no_room() -> None:
    assert Speed().on(torch.device("cpu")).pad_widths is False


@pytest.mark.gpu
def test_a_gpu_trains_it_as_a_cpu_does() -> None:
    model = pruned("residual").float()
    data = (tuple(t.float() if t.is_floating_point() else t for t in images()), None)
    wanted = sosp.train(model, data, SHORT)
    for speed in (Speed("float32"), Speed("float32", pad_widths=False)):
        found = sosp.train(model, data, SHORT, device="cuda", speed=speed)
        for n, x in weights(wanted.model).items():
            torch.testing.assert_close(weights(found.model)[n].cpu(), x, rtol=2e-2, atol=2e-3)
