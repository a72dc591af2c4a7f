"""Datasets, numpy arrays, several inputs and lists of images give what the same tensors give."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import sosp
from networks import Case, case
from sosp.core.batches import iterate_chunks
from sosp.core.data_forms import BATCH
from sosp.errors import DataError

ROUNDING = {"rtol": 1e-12, "atol": 1e-12}  # ten examples of size 1, added in another order


class Items(Dataset[Any]):
    """Single examples by number, each made by a function."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        if i >= self.count:
            raise IndexError(i)
        return self.make(i)


class Plain:
    """The same without torch's class."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Stream(IterableDataset[Any]):
    """Single examples, or batches, one after the other."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Columns:
    """What the library looks at in a dataset of Hugging Face."""

    column_names = ("input", "label", "text")

    def __init__(self, count: int, make: Callable[[int], Any], format: str | None = None) -> None:
        self.count, self.make, self.format = count, make, format

    def with_format(self, format: str) -> Any:
        return Columns(self.count, self.make, format)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = {**self.make(i), "text": "a word"}
        return row if self.format == "torch" else {k: np.asarray(x).tolist() for k, x in row.items()}

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.count))


def pieces(c: Case) -> list[tuple[Tensor, Tensor]]:
    return list(zip(c.inputs.split([4, 6]), c.targets.split([4, 6]), strict=True))


def items(c: Case) -> Items:
    return Items(len(c.targets), lambda i: (c.inputs[i], int(c.targets[i])))


# Tests' networks are in double precision: arrays in single precision are cast to what the network computes in.
FORMS: dict[str, Callable[[Case], Any]] = {
    "TensorDataset": lambda c: TensorDataset(c.inputs, c.targets),
    "a dataset": items,
    "a dataset of arrays": lambda c: Items(10, lambda i: (c.inputs[i].numpy(), c.targets[i].numpy())),
    "a part of a dataset": lambda c: Subset(items(c), range(10)),
    "an object with indices": lambda c: Plain(items(c)),
    "an iterable dataset": lambda c: Stream(items(c)),
    "an iterable dataset of batches": lambda c: Stream(pieces(c)),
    "arrays": lambda c: (c.inputs.numpy(), c.targets.numpy()),
    "arrays in a list": lambda c: [c.inputs.numpy(), c.targets.numpy()],
    "an array that cannot be written": lambda c: (np.broadcast_to(c.inputs.numpy(), (10, 5)), c.targets.numpy()),
    "an array and a tensor": lambda c: (c.inputs.numpy(), c.targets),
    "arrays by name": lambda c: ({"input": c.inputs.numpy()}, c.targets.numpy()),
    "batches of arrays": lambda c: [(x.numpy(), y.numpy()) for x, y in pieces(c)],
    "a generator of arrays": lambda c: ((x.numpy(), y.numpy()) for x, y in pieces(c)),
    "a loader of arrays": lambda c: DataLoader(pieces(c), batch_size=None, collate_fn=lambda b: [t.numpy() for t in b]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_what_tensors_give(form: str) -> None:
    c = case("mlp")
    wanted = sosp.score(c.model, (c.inputs, c.targets)).scores
    assert torch.allclose(sosp.score(c.model, FORMS[form](c)).scores, wanted, **ROUNDING)
    pruned = sosp.prune(c.model, FORMS[form](c), ratio=0.5)
    assert pruned.mask == sosp.prune(c.model, (c.inputs, c.targets), ratio=0.5).mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:.*inputs.*")
def test_repair_takes_every_form(form: str) -> None:
    c = case("mlp")
    pruned = sosp.prune(c.model, FORMS[form](c), ratio=0.5, repair=True)
    wanted = sosp.repair(sosp.prune(c.model, (c.inputs, c.targets), ratio=0.5).model, c.model, c.inputs)
    for a, b in zip(pruned.model.parameters(), wanted.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


class Named(nn.Module):
    """Takes its input by name, and returns a loss only if there are labels."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.body(input)
        return SimpleNamespace(logits=logits, loss=None if labels is None else nn.CrossEntropyLoss()(logits, labels))


DICTS: dict[str, Callable[[Case], Any]] = {
    "Hugging Face": lambda c: Columns(10, lambda i: {"input": c.inputs[i], "label": c.targets[i]}),
    "a dataset of dicts": lambda c: Items(10, lambda i: {"input": c.inputs[i], "labels": c.targets[i]}),
    "a dict of arrays": lambda c: {"input": c.inputs.numpy(), "labels": c.targets.numpy()},
    "dicts of arrays": lambda c: [{"input": x.numpy(), "labels": y.numpy()} for x, y in pieces(c)],
}


@pytest.mark.parametrize("form", DICTS)
@pytest.mark.filterwarnings("ignore:.*inputs.*")
def test_examples_may_be_dicts(form: str) -> None:
    c = case("mlp")
    wanted = sosp.prune(c.model, (c.inputs, c.targets), ratio=0.5, repair=True)
    found = sosp.prune(Named(c.model), DICTS[form](c), ratio=0.5, repair=True)
    assert torch.allclose(found.saliency.scores, wanted.saliency.scores, **ROUNDING)
    assert found.repaired is not None
    assert found.repaired.examples == 10


def test_the_parts_of_hugging_face_are_named() -> None:
    class Parts(dict[str, Any]):
        column_names = with_format = None

    with pytest.raises(DataError, match=r"Parts with the parts \['train', 'test'\]; give one"):
        sosp.score(nn.Linear(2, 2), Parts(train=1, test=2))


# --- in which order, and how many


def numbers(data: Any, examples: int | None = None, **options: Any) -> list[int]:
    return [int(i) for chunk in iterate_chunks(data, examples, None, **options) for i in chunk.inputs]


def test_a_dataset_is_read_in_order_in_batches_of_one_size() -> None:
    data = Items(2 * BATCH + 3, lambda i: (i, 0))
    assert [c.size for c in iterate_chunks(data, None, None)] == [BATCH, BATCH, 3]
    assert numbers(data) == numbers(Stream(data)) == list(range(2 * BATCH + 3))


def test_a_subset_of_a_dataset_is_the_one_of_a_pair_of_tensors() -> None:
    """Datasets are often sorted by class, as folders of images are."""
    x = torch.arange(300)
    wanted = numbers((x, x), 40)
    data = Items(300, lambda i: (i, 0))
    assert numbers(data, 40) == numbers(TensorDataset(x, x), 40) == wanted != list(range(40))
    (chunk,) = iterate_chunks(data, 40, None)
    assert [chunk.where(i) for i in range(40)] == [f"example {k}" for k in wanted]


def test_no_more_of_an_iterable_dataset_is_read_than_needed() -> None:
    assert numbers(Stream((i, 0) for i in range(BATCH + 5)), BATCH + 2) == list(range(BATCH + 2))
    assert numbers(Stream((i, 0) for i in range(10**9)), 7) == list(range(7))


def test_an_iterable_dataset_is_read_once_by_prune() -> None:
    c, read = case("mlp"), []

    class Counted(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            read.append(1)
            return zip(c.inputs, c.targets, strict=True)

    sosp.prune(c.model, Counted(), ratio=0.5)
    assert read == [1]


@pytest.mark.parametrize("make", [lambda i: (torch.ones(i + 1), 0), lambda i: (object(), 0)])
def test_examples_that_cannot_be_stacked_say_so(make: Any) -> None:
    with pytest.raises(DataError, match=r"examples of the Items cannot be stacked.*collate_fn"):
        sosp.score(nn.Linear(2, 2), Items(3, make))


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(DataError, match=r"array of type object.*array of numbers"):
        sosp.score(nn.Linear(2, 2), (np.array([None, 1]), np.array([0, 1])))


def test_arrays_are_cast_to_the_precision_of_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    x = np.random.default_rng(0).normal(size=(40, 5))  # double
    assert sosp.prune(model, (x, np.arange(40) % 3), ratio=0.5).mask.chosen
    assert sosp.prune(model, Items(40, lambda i: (x[i], i % 3)), ratio=0.5).mask.chosen


# --- inputs alone


ALONE: dict[str, Callable[[Tensor], Any]] = {
    "an array": lambda x: x.numpy(),
    "a dataset": lambda x: Items(len(x), lambda i: x[i]),
    "TensorDataset": TensorDataset,
    "an iterable dataset": lambda x: Stream(list(x)),
    "batches of arrays": lambda x: [x[:25].numpy(), x[25:].numpy()],
}


@pytest.mark.parametrize("form", ALONE)
def test_inputs_without_labels(form: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(200, 5)
    how: dict[str, Any] = {"method": "sosp-obs", "repair": True, "scoring": sosp.Scoring(examples=None)}
    wanted, found = (sosp.prune(model, data, ratio=0.5, **how) for data in (x, ALONE[form](x)))
    assert torch.allclose(found.saliency.scores, wanted.saliency.scores, rtol=1e-4)  # single precision
    assert sosp.score(model, ALONE[form](x), method="magnitude-l1").scores.shape == (8,)
    assert found.repaired is not None
    assert found.repaired.examples == 200


@pytest.mark.parametrize("method", ["sosp-obs", "obd", "magnitude-l1"])
def test_dicts_without_labels(method: str) -> None:
    torch.manual_seed(0)
    model, x = Named(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))), torch.randn(200, 5)
    wanted = sosp.score(model.body, x, method=method).scores
    for data in ({"input": x}, [{"input": x[:40]}, {"input": x[40:]}], Items(200, lambda i: {"input": x[i]})):
        found = sosp.score(model, data, method=method).scores
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)  # single precision
        how: dict[str, Any] = {"method": method, "repair": True, "scoring": sosp.Scoring(examples=None)}
        repaired = sosp.prune(model, data, ratio=0.5, **how).repaired
        assert repaired is not None
        assert repaired.examples == 200


class TwoInputs(nn.Module):
    """Needs two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return self.head((self.left(left) + scale * self.right(right)).relu())


def test_several_inputs() -> None:
    torch.manual_seed(0)
    model, a, b, y = TwoInputs(), torch.randn(200, 5), torch.randn(200, 4), torch.arange(200) % 3
    wanted = sosp.score(model, ((a, b), y)).scores
    for data in ((a, b, y), TensorDataset(a, b, y), [(a[:50], b[:50], y[:50]), ((a[50:], b[50:]), y[50:])]):
        assert torch.allclose(sosp.score(model, data).scores, wanted, rtol=1e-4)
    small = sosp.prune(model, ((a, b), y), ratio=0.5).model
    wanted = sosp.repair(small, model, ((a, b), y)).model.head.weight
    for data in ((a, b), [(a[:50], b[:50]), (a[50:], b[50:])], TensorDataset(a, b), (a.numpy(), b.numpy())):
        assert torch.equal(sosp.repair(small, model, data).model.head.weight, wanted)
        assert sosp.prune(model, data, ratio=0.5, method="sosp-obs", repair=True).mask.chosen == 4


def test_a_list_of_images() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(60, 3, 6, 6), torch.arange(60) % 3
    wanted = sosp.score(model, (x, y)).scores
    for data in ((list(x), y), (list(x.numpy()), y.numpy()), [(list(x[:20]), y[:20]), (list(x[20:]), y[20:])]):
        assert torch.allclose(sosp.score(model, data).scores, wanted, rtol=1e-4)
    small = sosp.prune(model, (x, y), ratio=0.5).model
    wanted = sosp.repair(small, model, x).model[4].weight
    for data in (list(x), list(x.numpy())):
        assert torch.equal(sosp.repair(small, model, data).model[4].weight, wanted)


def test_a_list_of_batches_of_rows_is_no_list_of_images() -> None:
    batches = [torch.randn(3, 6, 6), torch.randn(3, 6, 6)]
    for model in (nn.Linear(6, 2), nn.Conv2d(4, 2, 1), None):
        assert [c.size for c in iterate_chunks(batches, None, None, alone=True, model=model)] == [3, 3]


def test_the_callers_data_stays_as_it_is() -> None:
    c = case("mlp")
    x, y = c.inputs.numpy().copy(), c.targets.numpy()
    data = [(x, y)]
    sosp.score(c.model, data)
    assert data[0][0] is x
    assert np.array_equal(x, c.inputs.numpy())


# --- dict batches whose columns are not the model's arguments, and lists of numbers


def image_columns(c: Case) -> list[dict[str, Any]]:
    return [{"image": c.inputs[i : i + 5], "label": c.targets[i : i + 5], "id": ["a"] * 5} for i in (0, 5)]


@pytest.mark.parametrize("targets", ["labels", "own"])
def test_columns_of_an_image_dataset(targets: str) -> None:
    c = case("conv-bn")
    found, wanted = (sosp.score(c.model, data, targets=targets) for data in (image_columns(c), (c.inputs, c.targets)))
    assert torch.allclose(found.scores, wanted.scores, **ROUNDING)


class Words(nn.Module):
    """A classifier of tokens that takes three arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.hidden, self.head = nn.Embedding(9, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> dict[str, Tensor]:
        assert labels is not None
        return {"logits": self.head(torch.tanh(self.hidden(self.words(input_ids).mean(1))))}


IDS, LABELS = torch.arange(40).view(8, 5) % 9, torch.arange(8) % 3
TOKENISED: dict[str, Any] = {
    "columns of lists": {"input_ids": IDS.tolist(), "labels": LABELS.tolist()},
    "examples": [{"input_ids": x.tolist(), "label": int(y), "text": "a"} for x, y in zip(IDS, LABELS, strict=True)],
    "columns that the model does not take": [{"input_ids": IDS, "label": LABELS, "length": LABELS}],
}


@pytest.mark.parametrize("form", TOKENISED)
def test_tokenised_texts(form: str) -> None:
    model = Words().double()
    wanted = sosp.score(model, [{"input_ids": IDS, "labels": LABELS}])
    assert torch.allclose(sosp.score(model, TOKENISED[form]).scores, wanted.scores, **ROUNDING)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"input_ids": [[1, 2], [3]], "labels": [0, 1]}, "'input_ids' have different lengths .1 to 2.*padding=True"),
        ({"a": IDS, "b": IDS}, r"columns \['a', 'b'\], and the model takes .*'input_ids'"),
    ],
)
def test_columns_that_do_not_fit(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        sosp.score(Words(), data)


def test_images_of_different_sizes() -> None:
    c = case("conv-bn")
    images = [torch.randn(2, 4, 4), torch.randn(2, 5, 4)]
    with pytest.raises(DataError, match="different sizes, 4 x 4 and 5 x 4"):
        sosp.score(c.model, images, method="sosp-i", targets="own")
