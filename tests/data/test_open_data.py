"""Pruning, training, repair and evaluation take the same data, and a loader is opened once."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import sosp
from sosp.core.batches import iterate_chunks
from sosp.core.opened_data import open_data_once

ONE_EPOCH = replace(sosp.SCHEDULES["digits"], epochs=1, milestones=())


class Images(nn.Module):
    """Takes a tensor, or pixels and labels by name as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 10)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.norm(self.conv(pixels)).relu().mean((2, 3)))
        if labels is None:
            return logits
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits, labels))


class Tokens(nn.Module):
    """A language model: its own loss compares every position with the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(12, 11)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.up(self.embed(input_ids)).relu())
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Columns:
    """What the library looks at in a dataset of Hugging Face."""

    column_names = ("pixels", "label")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def with_format(self, format: str) -> "Columns":
        assert format == "torch"
        return self

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"pixels": self.x[i], "label": self.y[i]}


def images() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(24, 1, 8, 8, generator=g), torch.randint(0, 10, (24,), generator=g)


def in_form(form: str) -> Any:
    """The same 24 examples, as one of the things that users call data."""
    x, y = images()
    if form == "dataset":
        return sosp.data.digits()
    if form == "source":
        return sosp.data.digits().train
    return {
        "pair": (x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=8),
        "batches": [(x[:8], y[:8]), (x[8:], y[8:])],
        "arrays": (x.numpy(), y.numpy()),
        "batches of arrays": [(x[:8].numpy(), y[:8].numpy()), (x[8:].numpy(), y[8:].numpy())],
        "tensor dataset": TensorDataset(x, y),
        "torch dataset": Subset(TensorDataset(x, y), range(24)),
        "hugging face": Columns(x, y),
        "dict": {"pixels": x, "labels": y},
        "dicts": [{"pixels": x[i : i + 8], "labels": y[i : i + 8]} for i in (0, 8, 16)],
    }[form]


NEW = ["arrays", "batches of arrays", "tensor dataset", "torch dataset", "hugging face"]
FORMS = ["pair", "loader", "batches", "dict", "dicts", "source", "dataset", *NEW]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:.*inputs.*")
def test_every_step_takes_every_form_of_data(form: str) -> None:
    torch.manual_seed(0)
    model, data = Images().eval(), in_form(form)
    pruned = sosp.prune(model, data, ratio=0.5, repair=True)
    assert pruned.repaired is not None
    assert sosp.score(model, data).scores.shape == (6,)
    assert sosp.evaluate(pruned.model, data).examples >= 24
    again = sosp.recalibrate(pruned.model, data)
    assert not torch.equal(again.norm.running_mean, pruned.model.norm.running_mean)
    tuned = sosp.train(pruned.model, data, ONE_EPOCH)
    assert len(tuned.history) == 1
    assert not torch.equal(tuned.model.conv.weight, pruned.model.conv.weight)


@pytest.mark.parametrize("form", ["loader", "batches", "dicts", *NEW])
def test_the_form_of_data_changes_no_number(form: str) -> None:
    torch.manual_seed(0)
    model = Images().eval()
    for metric in ("top1", "top5", "loss"):
        pair, other = (getattr(sosp.evaluate(model, in_form(f)), metric) for f in ("pair", form))
        assert other == pytest.approx(pair, rel=1e-6)  # sums in another order, single precision


def test_training_reads_a_dataset_in_the_order_of_tensors() -> None:
    torch.manual_seed(0)
    model, (x, y) = Images(), images()
    wanted, found = (
        sosp.train(model, data, ONE_EPOCH).model for data in ((x, y), Subset(TensorDataset(x, y), range(24)))
    )
    assert torch.equal(found.conv.weight, wanted.conv.weight)
    both = sosp.train(model, ((x.numpy(), y.numpy()), (x.numpy(), y.numpy())), ONE_EPOCH)
    assert torch.equal(both.model.conv.weight, wanted.conv.weight)
    assert both.history[-1].test is not None


def test_an_iterable_dataset_is_evaluated() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return zip(*images(), strict=True)

    model = Images().eval()
    assert sosp.evaluate(model, Stream()).loss == pytest.approx(sosp.evaluate(model, images()).loss, rel=1e-6)
    assert sosp.recalibrate(model, Stream()).norm.running_mean.any()


def test_a_language_model_is_evaluated_on_the_next_token() -> None:
    torch.manual_seed(0)
    model, ids = Tokens(), torch.randint(0, 11, (6, 9))
    found = sosp.evaluate(model, [{"input_ids": ids, "labels": ids}])
    logits = model(ids)["logits"][:, :-1]
    assert found.top1 == pytest.approx((logits.argmax(-1) == ids[:, 1:]).double().mean().item(), rel=1e-9)
    assert found.loss == pytest.approx(model(ids, ids)["loss"].item(), rel=1e-6)


def test_training_minimises_the_models_own_loss() -> None:
    torch.manual_seed(0)
    model, ids = Tokens(), torch.randint(0, 11, (8, 9))
    schedule = replace(ONE_EPOCH, rate=0.1, momentum=0.0, decay=0.0, nesterov=False)
    tuned = sosp.train(model, [{"input_ids": ids, "labels": ids}], schedule).model
    (slope,) = torch.autograd.grad(model(ids, ids)["loss"], [model.head.bias])
    rate = schedule.rate_at(0, 0.0)
    torch.testing.assert_close(tuned.head.bias, model.head.bias - rate * slope, rtol=1e-5, atol=1e-7)


# --- opened once ------------------------------------------------------------------------------------------


class Counted:
    """A shuffling loader that counts how often it is opened and how many batches it gives."""

    def __init__(self) -> None:
        self.opened = self.given = 0
        self.x, self.y = images()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.opened += 1
        for rows in torch.randperm(24).split(6):
            self.given += 1
            noise = torch.rand(())  # an augmentation, drawn batch by batch
            yield self.x[rows] + noise, self.y[rows]


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.filterwarnings("ignore:.*inputs.*")
def test_prune_opens_a_loader_once(repair: bool) -> None:
    torch.manual_seed(0)
    loader = Counted()
    sosp.prune(Images().eval(), loader, ratio=0.5, repair=repair)
    assert (loader.opened, loader.given) == (1, 4)


def test_what_is_read_in_two_goes_is_what_the_loader_gives_in_one() -> None:
    torch.manual_seed(3)
    whole = [x.clone() for x, _ in Counted()]
    torch.manual_seed(3)
    _, data = open_data_once(Counted(), torch.device("cpu"), keep=True)
    torch.rand(5)  # something else draws random numbers meanwhile
    for _ in range(2):
        chunks = list(iterate_chunks(data, None, None))
        assert all(torch.equal(a, c.inputs) for a, c in zip(whole, chunks, strict=True))


def test_without_keep_the_batches_are_given_once() -> None:
    example, data = open_data_once(Counted(), torch.device("cpu"), keep=False)
    assert example.inputs.shape == (6, 1, 8, 8)
    assert sum(c.size for c in iterate_chunks(data, None, None)) == 24
    assert list(data) == []
