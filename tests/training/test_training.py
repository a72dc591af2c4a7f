"""The loop against one written by hand, bit for bit; data of every kind; what is refused; what is left as it was."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sosp
from helpers.training_worker import (
    CLASSES,
    NETS,
    SHORT,
    N,
    Pixels,
    Tied,
    Two,
    dropping,
    examples,
    fixed,
    normed,
    outcome,
    plain,
    same,
    story,
    weights,
)
from sosp import Schedule, Speed
from sosp.data import Dataset, Resident
from sosp.errors import ArgumentError, DataError, OutOfMemoryError, StructureError, TrainingError
from sosp.training import SlowTrainingWarning, loop

STEPS = 3  # of an epoch: 22 examples in batches of 8


# --- the oracle: a plain loop ---------------------------------------------------------------------------


class Batches:
    """A source of its own: what comes when is written out here."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def steps(self, batch: int) -> int:
        return math.ceil(len(self) / batch)

    def epoch(self, number: int, *, batch: int, seed: int, start: int = 0, rank: int = 0, ranks: int = 1) -> Any:
        assert (rank, ranks) == (0, 1)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(1000 * seed + number))
        for k in range(start, self.steps(batch)):
            rows = order[k * batch : (k + 1) * batch]
            yield self.x[rows], self.y[rows]

    def ordered(self, *, batch: int, limit: int | None = None, rank: int = 0, ranks: int = 1) -> Any:
        for i in range(0, len(self), batch):
            yield self.x[i : i + batch], self.y[i : i + batch]


def rates(s: Schedule, steps: int) -> list[list[float]]:
    """Of every step of every epoch, by the definitions."""
    found = []
    for epoch in range(s.epochs):
        row = []
        for k in range(steps):
            passed = epoch + k / steps
            if passed < s.warmup:
                rate = s.rate * passed / s.warmup
            elif s.shape == "cosine":
                rate = s.rate * 0.5 * (1 + math.cos(math.pi * passed / s.epochs))
            elif s.shape == "steps":
                rate = s.rate * s.factor ** len([m for m in s.milestones if epoch >= round(m * s.epochs)])
            else:
                rate = s.rate
            row.append(rate)
        found.append(row)
    return found


def loss_by_hand(outputs: Tensor, y: Tensor, s: Schedule, taught: Tensor | None) -> Tensor:
    loss = F.cross_entropy(outputs, y, label_smoothing=s.smoothing)
    if taught is None:
        return loss
    p = (taught / s.temperature).softmax(1)
    kl = (p * (p.log() - (outputs / s.temperature).log_softmax(1))).sum(1).mean()
    return (1 - s.distill) * loss + s.distill * s.temperature**2 * kl


class ByHand(NamedTuple):
    model: nn.Module
    average: dict[str, Tensor]
    losses: list[float]
    accuracies: list[float]


def by_hand(model: nn.Module, source: Any, s: Schedule, seed: int = 0, teacher: nn.Module | None = None) -> ByHand:
    """What anybody writes first."""
    model = copy.deepcopy(model).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(parameters, lr=s.rate, momentum=s.momentum, weight_decay=s.decay, nesterov=s.nesterov)
    average = weights(model)
    losses, accuracies = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for epoch, row in enumerate(rates(s, source.steps(s.batch))):
            total = right = 0.0
            for rate, (x, y) in zip(row, source.epoch(epoch, batch=s.batch, seed=seed), strict=True):
                optimiser.param_groups[0]["lr"] = rate
                optimiser.zero_grad()
                outputs = model(x)
                with torch.no_grad():
                    taught = None if teacher is None else teacher.eval()(x)
                loss = loss_by_hand(outputs, y, s, taught)
                loss.backward()
                optimiser.step()
                total += float(loss.detach().double()) * len(y)
                right += float((outputs.argmax(1) == y).sum())
                for n, w in weights(model).items():
                    moving = w.is_floating_point() and bool(w.isfinite().all())
                    average[n] = s.ema * average[n] + (1 - s.ema) * w if moving else w
            losses.append(total / len(source))
            accuracies.append(right / len(source))
    return ByHand(model, average, losses, accuracies)


# --- bit for bit ----------------------------------------------------------------------------------------


CHANGES: list[dict[str, Any]] = [
    {},
    {"shape": "cosine"},
    {"shape": "constant", "momentum": 0.0, "decay": 0.0},
    {"nesterov": True},
    {"warmup": 1.5, "shape": "cosine"},
    {"batch": 7},  # the last batch has one example, which a batch norm cannot take
    {"batch": 100, "epochs": 5},
]
LOOPS = [(n, c) for n in NETS for c in CHANGES if c.get("batch") != 7 or n not in ("normed", "frozen")]


@pytest.mark.parametrize(("name", "change"), LOOPS, ids=str)
def test_weights_are_those_of_a_plain_loop(name: str, change: Any) -> None:
    s = replace(SHORT, **change)
    source, model = Batches(*examples()), NETS[name]()
    found, wanted = sosp.train(model, source, s, seed=3), by_hand(model, source, s, seed=3)
    assert same(weights(found.model), weights(wanted.model))
    assert [e.loss for e in found.history] == pytest.approx(wanted.losses, rel=1e-6)  # float32: a mean, or a sum
    assert [e.accuracy for e in found.history] == wanted.accuracies
    assert [e.rate for e in found.history] == [row[-1] for row in rates(s, source.steps(s.batch))]


@pytest.mark.parametrize("name", ["plain", "normed", "tied", "counting"])
def test_the_moving_average(name: str) -> None:
    s = replace(SHORT, ema=0.7)
    source, model = Batches(*examples()), NETS[name]()
    found, wanted = sosp.train(model, source, s), by_hand(model, source, s)
    assert same(weights(found.model), weights(wanted.model))
    mine = weights(found.average)
    assert mine.keys() == wanted.average.keys()
    for n in mine:
        torch.testing.assert_close(mine[n], wanted.average[n], rtol=1e-5, atol=1e-6)
    assert not same(mine, weights(found.model))


def test_the_average_is_what_is_tested() -> None:
    s, test = replace(SHORT, ema=0.9), examples(13, 5)
    found = sosp.train(normed(), (examples(), test), s)
    assert astuple(found.history[-1].test) == astuple(sosp.evaluate(found.average, test))
    assert found.history[-1].test.loss != sosp.evaluate(found.model, test).loss
    assert not found.average.training
    assert all(p.requires_grad for p in found.average.parameters())


@pytest.mark.parametrize(
    "change", [{"smoothing": 0.2}, {"distill": 0.6, "temperature": 3.0}, {"distill": 1.0}], ids=str
)
def test_smooth_labels_and_a_teacher(change: Any) -> None:
    """float64: 9 steps of a differently ordered sum."""
    s = replace(SHORT, **change)
    teacher = normed().double() if s.distill else None
    source, model = Batches(*examples(kind=torch.float64)), plain().double()
    found, wanted = sosp.train(model, source, s, teacher=teacher), by_hand(model, source, s, teacher=teacher)
    for n, w in weights(found.model).items():
        torch.testing.assert_close(w, weights(wanted.model)[n], rtol=1e-11, atol=1e-12)
    assert [e.loss for e in found.history] == pytest.approx(wanted.losses, rel=1e-11)
    assert not same(weights(found.model), weights(by_hand(model, source, SHORT).model))


def test_the_teacher_is_not_trained() -> None:
    teacher = normed().train()
    before = weights(teacher)
    sosp.train(plain(), examples(), replace(SHORT, distill=0.5), teacher=teacher)
    assert same(weights(teacher), before)
    assert teacher.training


def test_in_bfloat16_the_weights_stay_float32() -> None:
    found = sosp.train(normed(), examples(), SHORT, speed=Speed(precision="bf16"))
    exact = sosp.train(normed(), examples(), SHORT)
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    assert not same(weights(found.model), weights(exact.model))
    # Eight bits of mantissa, nine steps.
    assert found.history[-1].loss == pytest.approx(exact.history[-1].loss, rel=0.1)


def test_channels_last_computes_the_same() -> None:
    found = sosp.train(normed(), examples(), SHORT, speed=Speed(channels_last=True))
    exact = sosp.train(normed(), examples(), SHORT)
    assert [e.loss for e in found.history] == pytest.approx([e.loss for e in exact.history], rel=1e-4)


def test_no_epochs_no_change() -> None:
    model = normed().train()
    found = sosp.train(model, examples(), replace(SHORT, epochs=0))
    assert same(weights(found.model), weights(model))
    assert (found.history, found.best, found.resumed) == ((), None, 0)
    assert not found.model.training


# --- side by side ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, {"a": 0, "b": 5, "c": 0}])
def test_side_by_side_each_is_as_it_is_alone(seed: Any) -> None:
    models = {"a": normed(), "b": fixed(Tied), "c": plain()}
    s, data = replace(SHORT, ema=0.5), (examples(), examples(9, 2))
    found = sosp.train(models, data, s, seed=seed)
    assert list(found) == ["a", "b", "c"]
    for name, model in models.items():
        alone = sosp.train(model, data, s, seed=seed if isinstance(seed, int) else seed[name])
        assert same(weights(found[name].model), weights(alone.model))
        assert same(weights(found[name].average), weights(alone.average))
        assert story(found[name]) == story(alone)


def test_different_seeds_see_different_orders() -> None:
    found = sosp.train({"a": plain(), "b": plain()}, examples(), SHORT, seed={"a": 1, "b": 2})
    assert not same(weights(found["a"].model), weights(found["b"].model))


def test_networks_side_by_side_are_told_by_name() -> None:
    told: list[tuple[str, int]] = []
    sosp.train({"a": plain(), "b": plain()}, examples(), SHORT, on_epoch=lambda n, e: told.append((n, e.number)))
    assert told == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]


def test_a_dict_of_one_gives_a_dict() -> None:
    assert list(sosp.train({"only": plain()}, examples(), SHORT)) == ["only"]


# --- data of every kind ---------------------------------------------------------------------------------


def test_a_resident_dataset() -> None:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (N, 3, 2, 2), dtype=torch.uint8, generator=g)
    labels = torch.arange(N) % CLASSES
    train = Resident.of(images, labels, pad=1, flip=True)
    data = Dataset("tiny", train, train.subset(10, 0), tuple("abcd"), (3, 2, 2))
    found, wanted = sosp.train(normed(), data, SHORT, seed=2), by_hand(normed(), train, SHORT, seed=2)
    assert same(weights(found.model), weights(wanted.model))
    assert found.history[-1].test.examples == 10
    assert sosp.train(normed(), train, SHORT, seed=2).history[-1].test is None


def test_a_loader_gives_its_own_batches() -> None:
    """Its size of batches counts, not the schedule's; unshuffled, so that the order is known."""
    loader = DataLoader(TensorDataset(*examples()), batch_size=5)

    class Loader(Batches):
        def steps(self, batch: int) -> int:
            return len(loader)

        def epoch(self, number: int, **options: Any) -> Any:
            return iter(loader)

    found = sosp.train(normed(), loader, replace(SHORT, batch=999))
    assert same(weights(found.model), weights(by_hand(normed(), Loader(*examples()), SHORT).model))


def test_a_shuffling_loader_sees_every_example_once_and_another_order_each_time() -> None:
    x, y = examples()
    x[:, 0, 0, 0] = torch.arange(N)
    seen: list[list[float]] = []
    model = plain()
    model[0].register_forward_hook(lambda m, args, out: seen.append(args[0][:, 0, 0, 0].tolist()))
    sosp.train(model, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True), replace(SHORT, rate=0.0))
    orders = [[*seen[i], *seen[i + 1], *seen[i + 2]] for i in (0, 3, 6)]
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_training_and_test_data_in_a_tuple() -> None:
    test = examples(9, 2)
    loader = DataLoader(TensorDataset(*examples()), batch_size=8)
    kinds = [
        (examples(), test),
        (loader, test),
        (examples(), DataLoader(TensorDataset(*test), batch_size=4, shuffle=True)),
        (Batches(*examples()), [test]),
    ]
    for data in kinds:
        found = sosp.train(normed(), data, SHORT)
        wanted = sosp.evaluate(found.model, test)
        assert found.history[-1].test.examples == 9
        assert found.history[-1].test.top1 == wanted.top1
        assert found.history[-1].test.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert sosp.train(normed(), (examples(), None), SHORT).history[-1].test is None


def test_a_test_set_changes_nothing_about_the_training() -> None:
    shuffled = DataLoader(TensorDataset(*examples(9, 2)), batch_size=4, shuffle=True)
    for test in (None, examples(9, 2), shuffled):
        found = sosp.train(dropping(), (examples(), test), SHORT)
        assert same(weights(found.model), weights(by_hand(dropping(), SourceOfPairs(), SHORT).model))


class SourceOfPairs(Batches):
    """The order in which a pair of tensors is taken, through the library's own generator of an epoch."""

    def __init__(self) -> None:
        super().__init__(*examples())

    def epoch(self, number: int, *, batch: int, seed: int, **options: Any) -> Any:
        from sosp.data.batch_source import make_generator

        order = torch.randperm(N, generator=make_generator(seed, number))
        return ((self.x[i], self.y[i]) for i in order.split(batch))


def test_inputs_by_place_and_by_name() -> None:
    x, y = examples()
    z = x.flip(0)
    whole = sosp.train(fixed(Two), ((x, z), y), SHORT)
    named = sosp.train(fixed(Two), ({"z": z, "x": x}, y), SHORT)
    assert same(weights(whole.model), weights(named.model))
    places = [((x[i : i + 8], z[i : i + 8]), y[i : i + 8]) for i in (0, 8, 16)]
    names = [({"x": x[i : i + 8], "z": z[i : i + 8]}, y[i : i + 8]) for i in (0, 8, 16)]
    loader = DataLoader(TensorDataset(x, z, y), batch_size=8, collate_fn=lambda rows: _pairs(rows))
    trained = [sosp.train(fixed(Two), data, SHORT) for data in (places, names, loader)]
    assert all(same(weights(t.model), weights(trained[0].model)) for t in trained)
    assert sosp.evaluate(whole.model, places) == sosp.evaluate(whole.model, ((x, z), y), batch=8)


def _pairs(rows: list[Any]) -> Any:
    x, z, y = (torch.stack(column) for column in zip(*rows, strict=True))
    return [x, z], y


def test_inputs_that_all_examples_share_stay_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, CLASSES)

        def forward(self, x: Tensor, scale: Tensor, factor: float) -> Tensor:
            assert scale.shape == (3, 1, 1)
            return self.fc((x * scale * factor).flatten(1))

    x, y = examples()
    scale = torch.tensor([1.0, 2.0, 0.5]).view(3, 1, 1)
    found = sosp.train(fixed(Scaled), ((x, scale, 2.0), y), SHORT)
    plainly = sosp.train(fixed(Scaled), ((x * scale * 2, torch.ones(3, 1, 1), 1.0), y), SHORT)
    assert found.history[-1].loss == pytest.approx(plainly.history[-1].loss, rel=1e-5)
    assert sosp.evaluate(found.model, ((x, scale, 2.0), y)).examples == N


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.int16])
def test_labels_of_any_whole_type(kind: torch.dtype) -> None:
    x, y = examples()
    wanted = weights(sosp.train(plain(), (x, y), SHORT).model)
    assert same(weights(sosp.train(plain(), (x, y.to(kind)), SHORT).model), wanted)
    batches, other = [(x[:8], y[:8])], [(x[:8], y[:8].to(kind))]
    assert story(sosp.train(plain(), batches, SHORT)) == story(sosp.train(plain(), other, SHORT))
    assert sosp.evaluate(plain(), batches) == sosp.evaluate(plain(), other)


# --- labels for every position --------------------------------------------------------------------------


def test_a_class_for_every_pixel() -> None:
    """The mean over the pixels that count, then over the examples."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(10, 3, 2, 3, generator=g, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (10, 2, 3), generator=g)
    y[0, 0], y[3, 1, 1:] = -100, -100
    model = fixed(Pixels).double()
    outputs = model(x).detach()
    losses, right = [], []
    for f, labels in zip(outputs, y, strict=True):
        known = labels != -100
        losses.append(F.cross_entropy(f[:, known].T, labels[known]))
        right.append((f.argmax(0) == labels)[known].double().mean())
    found = sosp.evaluate(model, (x, y), batch=4)
    assert found.loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-12)
    assert found.top1 == pytest.approx(float(torch.stack(right).mean()), rel=1e-12)
    trained = sosp.train(model, (x, y), Schedule(epochs=1, batch=10, rate=0.0))
    assert trained.history[0].loss == pytest.approx(found.loss, rel=1e-12)
    assert trained.history[0].accuracy == pytest.approx(found.top1, rel=1e-12)


def test_a_teacher_of_pixels_compares_classes() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 3, 2, 3, generator=g, dtype=torch.float64), torch.zeros(6, 2, 3, dtype=torch.long)
    model, teacher = fixed(Pixels).double(), nn.Conv2d(3, CLASSES, 1).double()
    s = Schedule(epochs=1, batch=6, rate=0.0, distill=1.0, temperature=2.0)
    p, q = (teacher(x) / 2).softmax(1), (model(x) / 2).softmax(1)
    wanted = 4 * (p * (p.log() - q.log())).sum(1).mean().detach()
    assert sosp.train(model, (x, y), s, teacher=teacher).history[0].loss == pytest.approx(float(wanted), rel=1e-12)


class Heads(NamedTuple):
    logits: Tensor
    aux_logits: Tensor


def test_heads_that_only_training_has_count_three_tenths() -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, CLASSES), nn.Linear(12, CLASSES)

        def forward(self, x: Tensor) -> Any:
            x = x.flatten(1)
            return Heads(self.a(x), self.b(x)) if self.training else self.a(x)

    x, y = examples()
    model = fixed(Headed)
    s = Schedule(epochs=1, batch=N, rate=0.0)
    wanted = F.cross_entropy(model.a(x.flatten(1)), y) + 0.3 * F.cross_entropy(model.b(x.flatten(1)), y)
    assert sosp.train(model, (x, y), s).history[0].loss == pytest.approx(float(wanted.detach()), rel=1e-6)


# --- evaluation -----------------------------------------------------------------------------------------


def accuracy_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float, float, int]:
    """Example by example."""
    model = copy.deepcopy(model).eval()
    first = five = loss = 0.0
    for row, label in zip(x, y, strict=True):
        f = model(row[None])[0].detach()
        ranked = sorted(range(len(f)), key=lambda k: -float(f[k]))
        first += ranked[0] == int(label)
        five += int(label) in ranked[:5]
        loss += float(-f.log_softmax(0)[label])
    return first / len(y), five / len(y), loss / len(y), len(y)


def wide_case() -> tuple[nn.Module, Tensor, Tensor]:
    """Nine classes: the best five are not all. Dropout and a batch norm, in train mode."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(77, 12, generator=g, dtype=torch.float64), torch.randint(0, 9, (77,), generator=g)
    model = fixed(lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 9)))
    return model.double().train(), x, y


def test_accuracies_and_loss_by_hand() -> None:
    model, x, y = wide_case()
    wanted = accuracy_by_hand(model, x, y)
    assert 0 < wanted[0] < wanted[1] < 1
    unequal = [(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])]
    for data in ((x, y), unequal, DataLoader(TensorDataset(x, y), batch_size=4), iter(unequal), Batches(x, y)):
        assert astuple(sosp.evaluate(model, data, batch=5)) == pytest.approx(wanted, rel=1e-12)
    assert "5: " in str(sosp.evaluate(model, (x, y)))


@pytest.mark.parametrize("limit", [1, 4, 5, 76, 77, 100])
def test_only_the_first_examples(limit: int) -> None:
    model, x, y = wide_case()
    wanted = accuracy_by_hand(model, x[:limit], y[:limit])
    unequal = [(x[:4], y[:4]), (x[4:], y[4:])]
    for data in ((x, y), unequal, DataLoader(TensorDataset(x, y), batch_size=4)):
        assert astuple(sosp.evaluate(model, data, batch=5, limit=limit)) == pytest.approx(wanted, rel=1e-12)


def test_the_test_part_of_a_dataset() -> None:
    images, labels = torch.rand(10, 3, 2, 2), torch.arange(10) % CLASSES
    train, test = Resident.of(images[:7], labels[:7]), Resident.of(images[7:], labels[7:])
    data = Dataset("tiny", train, test, tuple("abcd"), (3, 2, 2))
    assert sosp.evaluate(normed(), data) == sosp.evaluate(normed(), test)
    assert sosp.evaluate(normed(), data, device="cpu").examples == 3


def test_with_a_device_a_copy_runs_there() -> None:
    """The meta device computes nothing, but says where it was."""
    model, x, y = wide_case()
    places = []
    model[0].register_forward_hook(lambda m, args, out: places.append(args[0].device.type))
    with pytest.raises(NotImplementedError):
        sosp.evaluate(model, (x, y), device="meta")
    assert places == ["meta"]
    assert {p.device.type for p in model.parameters()} == {"cpu"}


class Caching(nn.Module):
    """Keeps a table for each length it meets, and trains with it later."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, CLASSES)
        self.tables: dict[int, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        self.tables.setdefault(len(x), torch.ones(len(x), 12))
        self.last = self.fc(x * self.tables[len(x)])
        return self.last


def test_what_a_network_keeps_from_a_test_does_not_stop_its_training() -> None:
    """First tested with five rows, later trained with five."""

    class Growing(Batches):
        def steps(self, batch: int) -> int:
            return 1

        def epoch(self, number: int, **options: Any) -> Any:
            yield self.x[: 4 + number], self.y[: 4 + number]

    found = sosp.train(fixed(Caching), (Growing(*examples(6)), examples(5, 2)), SHORT)
    assert len(found.history) == SHORT.epochs


# --- left as it was -------------------------------------------------------------------------------------


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model, its modes and wishes, torch's random numbers and flags."""

    def facts() -> list[Any]:
        modes = [m.training for m in model.modules()]
        wishes = [(n, p.requires_grad, p.grad) for n, p in model.named_parameters()]
        flags = [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.is_grad_enabled()]
        hooks = [len(m._forward_hooks) for m in model.modules()]
        return [modes, wishes, flags, hooks, torch.get_num_threads(), list(model.state_dict()), str(model)]

    before, numbers, random = facts(), weights(model), torch.get_rng_state()
    yield
    assert facts() == before
    assert same(weights(model), numbers)
    assert torch.equal(torch.get_rng_state(), random)


def odd(name: str) -> nn.Module:
    """Partly frozen, partly in eval mode."""
    model = NETS[name]().train()
    list(model.modules())[-1].eval()
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize("name", NETS)
def test_the_callers_model_and_the_rest_of_the_world_stay_as_they_were(name: str) -> None:
    model = odd(name)
    loader = DataLoader(TensorDataset(*examples()), batch_size=8, shuffle=True)
    for data in (examples(), loader):
        with untouched(model):
            found = sosp.train(model, (data, data), replace(SHORT, ema=0.5))
        wishes = [p.requires_grad for p in model.parameters()]
        assert [p.requires_grad for p in found.model.parameters()] == wishes
        assert [p.requires_grad for p in found.average.parameters()] == wishes
        assert all(p.grad is None for p in found.model.parameters())
        with untouched(model):
            sosp.evaluate(model, data)
        with untouched(model):
            sosp.recalibrate(model, data)


class Failing(nn.Module):
    """Gives up at the third call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.calls = nn.Linear(12, CLASSES), nn.BatchNorm1d(CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(3)
        if self.calls == 3:
            raise RuntimeError("no more")
        return self.norm(self.fc(x.flatten(1)))


@pytest.mark.parametrize(
    "act",
    [
        lambda m, d: sosp.train(m, d, SHORT),
        lambda m, d: sosp.evaluate(m, d, batch=8),
        lambda m, d: sosp.recalibrate(m, d, batch=8),
    ],
    ids=["train", "evaluate", "recalibrate"],
)
def test_also_when_it_fails(act: Callable[..., Any]) -> None:
    model = fixed(Failing)
    with untouched(model), pytest.raises(RuntimeError, match="no more"):
        act(model, examples())
    assert model.calls == 0


def test_evaluation_gives_back_what_a_forward_pass_keeps() -> None:
    model = fixed(Caching)
    sosp.evaluate(model, examples())
    assert model.tables == {}
    assert model.last is None


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_inside_no_grad_it_trains_all_the_same(around: Any) -> None:
    model, data = normed(), examples()
    wanted = outcome(sosp.train(model, data, SHORT))
    with around():
        found = sosp.train(model, data, SHORT)
    assert same(weights(found.model), wanted["weights"])


def test_what_is_returned_can_be_used_on() -> None:
    found = sosp.train(normed(), examples(), SHORT)
    again = sosp.train(found.model, examples(), SHORT)
    assert again.history[0].loss < found.history[0].loss
    F.cross_entropy(found.model.train()(examples()[0]), examples()[1]).backward()
    assert all(p.grad is not None for p in found.model.parameters())
    with pytest.raises(FrozenInstanceError):
        found.resumed = 3
    assert found.best is None


def test_the_best_epoch() -> None:
    found = sosp.train(normed(), (examples(), examples(30, 2)), replace(SHORT, epochs=6))
    assert found.best.test.top1 == max(e.test.top1 for e in found.history)


# --- told how it goes -----------------------------------------------------------------------------------


def test_on_step_and_on_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0)
    steps: list[Any] = []
    epochs: list[Any] = []
    found = sosp.train(
        plain(), examples(), SHORT, on_step=lambda *a: steps.append(a), on_epoch=lambda n, e: epochs.append((n, e))
    )
    assert [done for done, _, _ in steps] == list(range(1, 10))
    assert {total for _, total, _ in steps} == {9}
    assert [m.epoch for _, _, m in steps] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(m.images_per_second > 0 for _, _, m in steps)
    assert epochs == [("", e) for e in found.history]
    assert [e.number for e in found.history] == [1, 2, 3]
    last = [m for done, _, m in steps if done % 3 == 0]
    assert [(m.loss, m.accuracy) for m in last] == [(e.loss, e.accuracy) for e in found.history]


# --- out of memory --------------------------------------------------------------------------------------


class Big(nn.Module):
    """Too big for more than some examples."""

    def __init__(self, most: int, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.fc, self.norm, self.most, self.error = nn.Linear(12, CLASSES), nn.BatchNorm1d(CLASSES), most, error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error()
        return self.norm(self.fc(x.flatten(1)))


ERRORS = {
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    "python": MemoryError,
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(("most", "fits"), [(13, 10), (5, 5), (4, 2), (2, 2)])
def test_out_of_memory_says_what_would_fit(most: int, fits: int, kind: str) -> None:
    model = Big(most, ERRORS[kind])
    with pytest.raises(OutOfMemoryError, match=rf"a batch of 20 examples .* batch={fits} fits") as caught:
        sosp.train(model, examples(), replace(SHORT, batch=20))
    assert "more" not in str(caught.value)
    with pytest.raises(OutOfMemoryError, match=rf"batch={fits} fits"):
        sosp.evaluate(model, examples(), batch=20)
    with pytest.raises(OutOfMemoryError, match=rf"a batch of 20 examples .* batch={fits} fits"):
        sosp.recalibrate(model, examples(20), batch=20)


def test_a_loaders_own_batch_is_named() -> None:
    loader = DataLoader(TensorDataset(*examples()), batch_size=16)
    with pytest.raises(OutOfMemoryError, match=r"a batch of 16 examples .* batch=8 fits"):
        sosp.train(Big(9, ERRORS["gpu"]), loader, SHORT)


def test_not_even_one_example_fits() -> None:
    with pytest.raises(OutOfMemoryError, match="even a single example does not fit"):
        sosp.evaluate(Big(0, ERRORS["gpu"]).eval(), examples())


def test_what_the_failed_batch_held_is_let_go_before_a_smaller_one_is_tried() -> None:
    """Otherwise half of it would not fit either."""
    held: list[Any] = []

    class Hoarding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            if any(ref() is not None for ref in held):
                raise ERRORS["gpu"]()
            local = x * 2
            if len(x) > 8:
                import weakref

                held.append(weakref.ref(local))
                raise ERRORS["gpu"]()
            return self.fc(local.flatten(1))

    with pytest.raises(OutOfMemoryError, match="batch=8 fits"):
        sosp.train(Hoarding(), examples(), replace(SHORT, batch=16))


# --- what is refused ------------------------------------------------------------------------------------


def test_schedules_by_name() -> None:
    with pytest.raises(ArgumentError, match="Did you mean 'cifar'"):
        sosp.train(plain(), examples(), "cifar10")


@pytest.mark.parametrize(
    "data",
    [
        (torch.zeros(0, 3, 2, 2), torch.zeros(0, dtype=torch.long)),
        [],
        DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0))),
        ((torch.zeros(0, 3, 2, 2), torch.zeros(0, dtype=torch.long)), examples()),
    ],
    ids=["pair", "list", "loader", "tuple"],
)
def test_empty_data(data: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        sosp.train(plain(), data, SHORT)


def test_empty_data_to_evaluate_or_recalibrate() -> None:
    for act in (sosp.evaluate, sosp.recalibrate):
        for data in ([], (torch.zeros(0, 3, 2, 2), torch.zeros(0, dtype=torch.long))):
            with pytest.raises(DataError, match="empty"):
                act(normed(), data)


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    "data",
    [None, 3, torch.zeros(3), "cifar10", iter([examples()]), DataLoader(Endless()), (i for i in range(3))],
    ids=["None", "int", "tensor", "str", "iterator", "iterable dataset", "generator"],
)
def test_what_is_no_data(data: Any) -> None:
    with pytest.raises(DataError, match="a pair of tensors"):
        sosp.train(plain(), data, SHORT)


def test_a_loader_that_can_be_read_only_once() -> None:
    left = [examples(), examples()]

    class Once(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            while left:
                yield left.pop()

    with pytest.raises(DataError, match=r"no batch in epoch 2; give a loader that can be read more than once"):
        sosp.train(plain(), Once([1, 2]), SHORT)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": torch.zeros(3, 12), "labels": torch.zeros(3)}, "labels are torch.float32"),
        ({"x": torch.zeros(3, 12), "targets": torch.zeros(3)}, "a dict without 'labels'"),
        (torch.zeros(3, 12), "a batch is a Tensor"),
        ((torch.zeros(3, 12),), "a batch is a tuple of 1"),
        ((torch.zeros(3, 12), torch.zeros(3), torch.zeros(3)), "a batch is a tuple of 3"),
        ((torch.zeros(3, 12), [0, 1, 2]), "the labels are a list"),
        ((torch.zeros(3, 12), torch.zeros(3)), "labels are torch.float32"),
        ((torch.zeros(3, 12), torch.tensor(3)), r"of shape \(\)"),
    ],
)
def test_what_is_no_batch(batch: Any, said: str) -> None:
    for act in (lambda d: sosp.train(plain(), d, SHORT), lambda d: sosp.evaluate(plain(), d)):
        with pytest.raises(DataError, match=said):
            act([batch, batch, batch])


def test_a_pair_that_is_none() -> None:
    x, y = examples()
    with pytest.raises(DataError, match="inputs hold 22 examples and the labels 20"):
        sosp.train(plain(), (x, y[:20]), SHORT)
    with pytest.raises(DataError, match="class numbers"):
        sosp.train(plain(), (x, y.float()), SHORT)
    with pytest.raises(DataError, match="class numbers"):
        sosp.evaluate(plain(), (x, F.one_hot(y).float()))


@pytest.mark.parametrize("wrong", [CLASSES, 99, -1, -7])
def test_labels_that_the_network_has_no_output_for(wrong: int) -> None:
    x, y = examples()
    y[17] = wrong
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    for data in ((x, y), loader, Batches(x, y)):
        with pytest.raises(DataError, match=f"a label is {wrong}, but the network has 4 outputs") as caught:
            sosp.train(plain(), data, SHORT)
        assert "labels 0 to 3" in str(caught.value)
        with pytest.raises(DataError, match=f"a label is {wrong},"):
            sosp.evaluate(plain(), data, batch=8)


def test_labels_of_a_source_are_seen_before_the_first_step() -> None:
    """On a GPU nobody looks at the labels of each batch, so all of them are looked at first."""
    steps: list[int] = []
    x, y = examples()
    y[17] = 9

    class Known(Batches):
        def __init__(self) -> None:
            super().__init__(x, y)
            self.labels = y

    model = plain()
    model[0].register_forward_hook(lambda m, a, out: steps.append(1))
    with pytest.raises(DataError, match="a label is 9"):
        sosp.train(model, Known(), replace(SHORT, batch=4))
    assert len(steps) == 1


def test_outputs_and_labels_of_other_shapes() -> None:
    x, y = examples()
    with pytest.raises(DataError, match="do not match"):
        sosp.train(plain(), (x, y[:, None]), SHORT)


def test_networks_that_cannot_be_trained() -> None:
    with pytest.raises(ArgumentError, match="no parameter that could be trained"):
        sosp.train(plain().requires_grad_(False), examples(), SHORT)
    with pytest.raises(ArgumentError, match="no parameter that could be trained"):
        sosp.train(nn.Flatten(), examples(), SHORT)
    with pytest.raises(StructureError, match="not initialised"):
        sosp.train(nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), examples(), SHORT)
    for wrong in ({}, None, "resnet56", {"a": 3}, {1: plain()}, [plain()]):
        with pytest.raises(ArgumentError, match="a module, or a dict"):
            sosp.train(wrong, examples(), SHORT)


def test_teachers() -> None:
    with pytest.raises(ArgumentError, match="distill > 0"):
        sosp.train(plain(), examples(), SHORT, teacher=plain())
    with pytest.raises(ArgumentError, match="a teacher"):
        sosp.train(plain(), examples(), replace(SHORT, distill=0.5))
    other = nn.Sequential(nn.Flatten(), nn.Linear(12, 1))
    with pytest.raises(ArgumentError, match=r"teacher gives outputs of shape \(8, 1\) and the network \(8, 4\)"):
        sosp.train(plain(), examples(), replace(SHORT, distill=0.5), teacher=other)


@pytest.mark.parametrize("seed", [-1, 1.5, None, "0", True, {"a": 1}, {"a": 1, "b": -1}, {"a": 1, "b": 2, "c": 3}])
def test_seeds(seed: Any) -> None:
    with pytest.raises(ArgumentError, match="seed"):
        sosp.train({"a": plain(), "b": plain()}, examples(), SHORT, seed=seed)


@pytest.mark.parametrize("every", [-1, math.nan, "10", None, True])
def test_how_often_to_save(every: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="save_every"):
        sosp.train(plain(), examples(), SHORT, folder=tmp_path, save_every=every)
    assert list(tmp_path.iterdir()) == []


def test_speeds() -> None:
    with pytest.raises(ArgumentError, match="Did you mean 'bf16'"):
        Speed(precision="bf1")
    with pytest.raises(ArgumentError, match="graph=True needs a CUDA device"):
        sosp.train(plain(), examples(), SHORT, device="cpu", speed=Speed(graph=True))


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_limits(limit: Any) -> None:
    for data in (examples(), [examples()]):
        with pytest.raises(ArgumentError, match="limit"):
            sosp.evaluate(plain(), data, limit=limit)


def test_what_cannot_be_evaluated() -> None:
    for data in (None, 3, torch.zeros(3), "cifar10"):
        with pytest.raises(DataError, match="batches of them"):
            sosp.evaluate(plain(), data)


def test_a_batch_norm_and_a_single_example() -> None:
    with pytest.raises(TrainingError, match="does not leave a single example"):
        sosp.train(normed(), examples(), replace(SHORT, batch=7))


# --- on a GPU -------------------------------------------------------------------------------------------

# float32 sums in another order, through batch norms, for nine steps.
CLOSE = {"rtol": 2e-3, "atol": 2e-4}
EXACT_ON_GPU = Speed("float32", channels_last=False, graph=False)


def assert_close_weights(mine: nn.Module, theirs: nn.Module) -> None:
    a, b = weights(mine), weights(theirs)
    assert a.keys() == b.keys()
    for n in a:
        torch.testing.assert_close(a[n].cpu(), b[n].cpu(), msg=lambda m, n=n: f"{n}: {m}", **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "normed", "frozen", "tied", "counting"])
def test_a_graph_trains_as_a_cpu_does(name: str) -> None:
    """Two graphs: full batches and the last one."""
    s = replace(SHORT, ema=0.7, smoothing=0.1, warmup=0.5)
    model, data = NETS[name](), (examples(), examples(9, 2))
    wanted = sosp.train(model, data, s)
    for speed in (EXACT_ON_GPU, replace(EXACT_ON_GPU, graph=True), Speed("float32")):
        found = sosp.train(model, data, s, device="cuda", speed=speed)
        assert next(found.model.parameters()).is_cuda
        assert_close_weights(found.model, wanted.model)
        assert_close_weights(found.average, wanted.average)
        assert [e.loss for e in found.history] == pytest.approx([e.loss for e in wanted.history], rel=1e-3)
        assert [e.accuracy for e in found.history] == pytest.approx([e.accuracy for e in wanted.history], abs=0.05)
        assert [e.test.loss for e in found.history] == pytest.approx([e.test.loss for e in wanted.history], rel=1e-3)


@pytest.mark.gpu
def test_a_graph_of_a_resident_dataset_and_a_teacher() -> None:
    images = torch.randint(0, 256, (N, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    train = Resident.of(images, torch.arange(N) % CLASSES, pad=1, flip=True)
    s = replace(SHORT, distill=0.5, nesterov=True, shape="cosine")
    wanted = sosp.train(normed(), train, s, teacher=plain())
    found = sosp.train(normed(), train, s, teacher=plain(), device="cuda", speed=Speed("float32"))
    assert_close_weights(found.model, wanted.model)


@pytest.mark.gpu
def test_several_networks_in_one_graph() -> None:
    models = {"a": normed(), "b": fixed(Tied), "c": plain(), "d": normed()}
    seeds = {"a": 0, "b": 5, "c": 0, "d": 5}
    wanted = sosp.train(models, examples(), SHORT, seed=seeds)
    found = sosp.train(models, examples(), SHORT, seed=seeds, device="cuda", speed=Speed("float32"))
    for name in models:
        assert_close_weights(found[name].model, wanted[name].model)
        assert [e.loss for e in found[name].history] == pytest.approx([e.loss for e in wanted[name].history], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_bfloat16_and_channels_last_on_a_gpu(graph: bool) -> None:
    """All that is on by default."""
    wanted = sosp.train(normed(), examples(), SHORT)
    found = sosp.train(normed(), examples(), SHORT, device="cuda", speed=Speed(graph=graph))
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    assert found.history[-1].loss == pytest.approx(wanted.history[-1].loss, rel=0.1)


@pytest.mark.gpu
def test_dropout_in_a_graph_draws_anew_each_step_and_the_same_again() -> None:
    s = replace(SHORT, rate=0.0, epochs=4, batch=N, shape="constant")
    first = sosp.train(dropping(), examples(), s, device="cuda", speed=Speed("float32"))
    again = sosp.train(dropping(), examples(), s, device="cuda", speed=Speed("float32"))
    losses = [e.loss for e in first.history]
    assert len(set(losses)) == len(losses)  # nothing is learned: only the noise differs
    assert losses == [e.loss for e in again.history]


@pytest.mark.gpu
def test_a_network_that_no_graph_can_hold_trains_op_by_op() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x.flatten(1))
            return x * 2 if float(x.detach().sum()) > 0 else x

    wanted = sosp.train(fixed(Deciding), examples(), SHORT)
    with pytest.warns(SlowTrainingWarning, match="op by op"):
        found = sosp.train(fixed(Deciding), examples(), SHORT, device="cuda", speed=Speed("float32"))
    assert_close_weights(found.model, wanted.model)


@pytest.mark.gpu
def test_on_a_gpu_training_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0)
    speed, s = Speed("float32"), replace(SHORT, ema=0.7)
    whole = sosp.train(normed(), examples(), s, device="cuda", speed=speed)

    def stop(done: int, total: int, moment: Any) -> None:
        if done == 5:
            raise KeyError

    with pytest.raises(KeyError):
        sosp.train(normed(), examples(), s, device="cuda", speed=speed, folder=tmp_path, save_every=0, on_step=stop)
    found = sosp.train(normed(), examples(), s, device="cuda", speed=speed, folder=tmp_path)
    assert found.resumed == 1
    assert_close_weights(found.model, whole.model)
    assert_close_weights(found.average, whole.average)
    assert [e.loss for e in found.history] == pytest.approx([e.loss for e in whole.history], rel=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_nonsense_is_refused_too(tmp_path: Path) -> None:
    s = replace(SHORT, rate=1e30, milestones=())
    with pytest.raises(TrainingError, match=r"at step 2 \(epoch 1\), with rate 1e\+30"):
        sosp.train(plain(), examples(), s, device="cuda", folder=tmp_path, speed=Speed("float32"))
    x, y = examples()
    y[3] = 9
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    for data in ((x, y), loader, Resident.of(x, y)):
        with pytest.raises(DataError, match="a label is 9"):
            sosp.train(plain(), data, SHORT, device="cuda")
        with pytest.raises(DataError, match="a label is 9"):
            sosp.evaluate(plain(), data, device="cuda")
    assert float(torch.ones(1, device="cuda") + 1) == 2  # nothing has stopped the device


@pytest.mark.gpu
def test_on_a_gpu_random_numbers_and_flags_stay() -> None:
    model = odd("dropping").cuda()
    torch.cuda.manual_seed(1)  # after the network, which is drawn with a seed of its own
    before = torch.cuda.get_rng_state()
    with untouched(model):
        sosp.train(model, examples(), SHORT)
        sosp.evaluate(model, examples())
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_network() -> None:
    found = sosp.train(normed(), examples(), SHORT, device="cuda", speed=replace(EXACT_ON_GPU, compile=True))
    assert_close_weights(found.model, sosp.train(normed(), examples(), SHORT).model)
