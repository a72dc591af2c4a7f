"""Every form that data comes in, and that how it is cut into batches changes nothing."""

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sosp
from networks import SCORED_EXAMPLES, Case, case
from oracles import dense, gauss_newton
from oracles.theta import thetas
from sosp.core.batches import (
    PAIR,
    Chunk,
    distribute_examples,
    find_batch_size,
    iterate_chunks,
    resize_chunks,
    take_examples,
)
from sosp.core.opened_data import open_data_once
from sosp.errors import DataError
from sosp.training.user_data import PairSource

METHODS = ("sosp-h", "sosp-i", "sosp-i-diagonal", "first-order", "exact")  # those that differentiate the loss
# Ten examples summed in another order: relative errors of a few times 1e-16, and numbers of size 1.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def scores(model: nn.Module, data: Any, method: str = "sosp-h", **options: Any) -> Tensor:
    saliency = sosp.score(model, data, method=method, **options)
    return torch.cat([x.flatten() for x in (saliency.first, saliency.second, saliency.pairs) if x is not None])


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, **ROUNDING)


def expected(c: Case) -> Tensor:
    """Both terms of SOSP-H from dense derivatives."""
    vectors = thetas(c.model, c.norms, "features")
    return torch.cat(
        [term(c.model, vectors, c.inputs, c.targets, "cross_entropy") for term in (dense.first, dense.second)]
    )


# --- forms


class Stream(IterableDataset):
    """A dataset without a length."""

    def __init__(self, c: Case) -> None:
        self.c = c

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.c.inputs, self.c.targets, strict=True)


def pieces(c: Case, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(c.inputs.split(list(sizes)), c.targets.split(list(sizes)), strict=True))


FORMS: dict[str, Any] = {
    "a pair of tensors": lambda c: (c.inputs, c.targets),
    "a pair as a list": lambda c: [c.inputs, c.targets],
    "a loader": lambda c: DataLoader(TensorDataset(c.inputs, c.targets), batch_size=4),
    "a loader of a stream": lambda c: DataLoader(Stream(c), batch_size=3),
    "a list of batches": lambda c: pieces(c, 4, 6),
    "a tuple of batches": lambda c: tuple(pieces(c, 4, 6)),
    "lists in place of tuples": lambda c: [list(batch) for batch in pieces(c, 4, 6)],
    "a generator": lambda c: (batch for batch in pieces(c, 4, 6)),
    "an iterator": lambda c: iter(pieces(c, 1, 9)),
    "the inputs in a tuple": lambda c: ((c.inputs,), c.targets),
    "the inputs in a list": lambda c: [([x], y) for x, y in pieces(c, 4, 6)],
    "the inputs by name": lambda c: [({"input": x}, y) for x, y in pieces(c, 4, 6)],
    "the inputs by name, whole": lambda c: ({"input": c.inputs}, c.targets),
    "the inputs in a class like a dict": lambda c: (UserDict({"input": c.inputs}), c.targets),
    "an empty batch between": lambda c: [*pieces(c, 0, 4, 0, 6), (c.inputs[:0], c.targets[:0])],
    "labels of 32 bits": lambda c: (c.inputs, c.targets.int()),
    "labels of 8 bits": lambda c: (c.inputs, c.targets.byte()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_dense_answer(form: str) -> None:
    c = case("mlp")
    assert torch.allclose(scores(c.model, FORMS[form](c)), expected(c), rtol=1e-9, atol=1e-11)


class TwoInputs(nn.Module):
    """Takes two tensors and a flag."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, left: Tensor, right: Tensor, *, flip: bool = False) -> Tensor:
        return self.body(right - left if flip else left - right)


@pytest.mark.parametrize("method", METHODS)
def test_several_inputs(method: str) -> None:
    c = case("softplus")
    wanted = scores(c.model, (c.inputs, c.targets), method)
    halves = (1.5 * c.inputs, 0.5 * c.inputs)
    model = TwoInputs(c.model)
    assert close(scores(model, (halves, c.targets), method), wanted)
    named = {"right": halves[0], "left": halves[1], "flip": True}
    assert close(scores(model, (named, c.targets), method), wanted)
    assert close(scores(model, [({**named}, c.targets)], method), wanted)


# --- dict batches, Hugging Face style


@dataclass
class Output:
    """What such models return."""

    loss: Tensor | None
    logits: Tensor


class Faced(nn.Module):
    """Takes keyword arguments with the labels among them, and returns its own loss, a mean."""

    def __init__(self, body: nn.Module, as_dict: bool = False) -> None:
        super().__init__()
        self.body, self.as_dict = body, as_dict

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.body(pixels)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if self.as_dict else Output(loss, logits)


@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_dict_batches_take_the_models_own_loss(method: str, as_dict: bool) -> None:
    c = case("softplus")
    batches = [{"pixels": x, "labels": y} for x, y in pieces(c, 3, 7)]
    found = scores(Faced(c.model, as_dict), batches, method)
    assert close(found, scores(c.model, (c.inputs, c.targets), method))


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_by_name_serves_where_the_model_returns_none(method: str) -> None:
    c = case("softplus")
    wanted = scores(c.model, (c.inputs, c.targets), method)
    assert close(scores(Faced(c.model), ({"pixels": c.inputs}, c.targets), method), wanted)


def test_one_dict_is_one_batch() -> None:
    c = case("softplus")
    saliency = sosp.score(Faced(c.model), {"pixels": c.inputs, "labels": c.targets}, examples=4)
    assert saliency.examples == 4
    assert close(saliency.scores, sosp.score(c.model, [(c.inputs[:4], c.targets[:4])]).scores)


def test_ones_own_loss_goes_before_the_models() -> None:
    c = case("softplus")
    batches = [{"pixels": x, "labels": y} for x, y in pieces(c, 3, 7)]
    found = scores(Faced(c.model), batches, loss=lambda out, y: 3 * F.cross_entropy(out.logits, y, reduction="none"))
    assert close(found, 3 * scores(c.model, (c.inputs, c.targets)))


# --- how the data is cut, and in which order it comes, does not matter


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["softplus", "conv-bn"])
def test_batches_and_order_do_not_matter(name: str, method: str) -> None:
    c = case(name)
    wanted = scores(c.model, [(c.inputs, c.targets)], method)
    cuts = [pieces(c, 4, 1, 5), pieces(c, 8, 2), pieces(c, *[1] * SCORED_EXAMPLES), pieces(c, 4, 1, 5)[::-1]]
    for batches in [*cuts, [(c.inputs.flip(0), c.targets.flip(0))]]:
        assert close(scores(c.model, batches, method), wanted)


@pytest.mark.parametrize("method", METHODS)
def test_small_chunks_do_not_matter(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large networks are run a few examples at a time: four is the least on a CPU."""
    c = case("softplus")
    wanted = scores(c.model, (c.inputs, c.targets), method)
    monkeypatch.setattr("sosp.scoring.passes.CPU_CHUNK", 1)
    assert close(scores(c.model, pieces(c, 1, 7, 2), method), wanted)


def test_gauss_newton_over_unequal_batches_is_the_dense_one() -> None:
    c = case("softplus")
    found = sosp.score(c.model, pieces(c, 4, 1, 5), method="sosp-i").pairs
    vectors = thetas(c.model, c.norms, "features")
    assert found is not None
    assert close(found, gauss_newton.pairs(c.model, vectors, c.inputs, c.targets, "cross_entropy"))


# --- how many examples


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9, 10, 11, None])
def test_examples_are_counted_exactly(count: int | None) -> None:
    c = case("softplus")
    saliency = sosp.score(c.model, pieces(c, 4, 1, 5), examples=count)
    n = min(count or SCORED_EXAMPLES, SCORED_EXAMPLES)
    assert saliency.examples == n
    assert close(saliency.scores, sosp.score(c.model, [(c.inputs[:n], c.targets[:n])]).scores)


def test_no_batch_is_read_that_is_not_needed() -> None:
    c = case("softplus")
    taken: list[int] = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for i, batch in enumerate(pieces(c, 4, 1, 5)):
            taken.append(i)
            yield batch

    assert sosp.score(c.model, batches(), examples=5).examples == 5
    assert taken == [0, 1]


def subset(examples: int, seed: int | None = None, total: int = 40) -> list[int]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    chunks = iterate_chunks((torch.arange(total), torch.arange(total)), examples, generator)
    return [int(i) for chunk in chunks for i in chunk.inputs]


@pytest.mark.parametrize("kind", ["a pair", "a tensor", "a dataset", "a source", "a list", "a dict"])
def test_what_is_skipped_is_what_was_drawn_first(kind: str) -> None:
    """40 examples, 15 drawn, then 20 more, then the 5 that are left."""
    x = torch.arange(40.0)[:, None]
    data: Any = {
        "a pair": (x, x[:, 0].long()),
        "a tensor": x,
        "a dataset": Numbers(),
        "a source": PairSource(x, x[:, 0].long()),
        "a list": [(part, part[:, 0].long()) for part in x.split(7)],
        "a dict": {"x": x, "labels": x[:, 0].long()},
    }[kind]

    def read(examples: int, skip: int) -> list[int]:
        generator = torch.Generator().manual_seed(3)
        chunks = iterate_chunks(data, examples, generator, alone=True, skip=skip)
        inputs = [chunk.inputs["x"] if chunk.keyed else chunk.inputs for chunk in chunks]
        return [int(i) for part in inputs for i in part]

    parts = [read(15, 0), read(20, 15), read(20, 35), read(20, 40)]
    assert [len(part) for part in parts] == [15, 20, 5, 0]
    assert sorted(i for part in parts for i in part) == list(range(40))


class Numbers(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Example i is the number i."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([float(i)]), i


def test_a_subset_of_a_pair_is_random_but_repeatable() -> None:
    assert subset(7) == subset(7)
    assert subset(7, seed=1) == subset(7, seed=1)
    assert subset(7, seed=1) != subset(7, seed=2)
    assert subset(7) not in (list(range(7)), list(range(33, 40)))
    assert len(set(subset(39))) == 39
    assert subset(40) == subset(50) == list(range(40))


def test_a_subset_of_a_pair_covers_the_data_evenly() -> None:
    """Of 40 examples 10 are drawn, 400 times: each comes 100 times, give or take 5 sigma = 5 sqrt(75) = 44."""
    drawn = torch.tensor([i for seed in range(400) for i in subset(10, seed)]).bincount(minlength=40)
    assert drawn.min() > 56
    assert drawn.max() < 144


def test_inputs_and_targets_of_a_subset_belong_together() -> None:
    x, y = torch.randn(600, 3), torch.randn(600, 2)
    chunks = list(iterate_chunks(({"a": x, "flag": True}, torch.cat([x, y], 1)), 550, None))
    assert [c.size for c in chunks] == [PAIR, PAIR, 550 - 2 * PAIR]
    assert all(torch.equal(c.inputs["a"], c.targets[:, :3]) for c in chunks)
    assert all(c.inputs["flag"] is True for c in chunks)


# --- rebatch: the same examples in other chunks

sizes = st.lists(st.integers(1, 9), min_size=0, max_size=8)


def numbered(counts: list[int], width: int = 1) -> list[Chunk]:
    """Chunks whose inputs are the numbers of the examples, and whose targets say where each one came from."""
    found: list[Chunk] = []
    for batch, n in enumerate(counts):
        start = sum(counts[:batch])
        place = torch.tensor([[batch, i] for i in range(n)]).view(n, 2)
        found.append(Chunk(torch.arange(start, start + n)[:, None].expand(n, width), place, ((batch, 0, n),)))
    return found


def check_bookkeeping(chunks: list[Chunk], total: int) -> None:
    """Every example once, in order, and each knows its batch and its place there."""
    seen = [int(i) for chunk in chunks for i in chunk.inputs[:, 0]]
    assert seen == list(range(total))
    for chunk in chunks:
        assert chunk.size == len(chunk.inputs) == len(chunk.targets)
        for row, (batch, place) in enumerate(chunk.targets.tolist()):
            assert chunk.where(row) == f"example {place} of batch {batch}"


@given(counts=sizes, size=st.integers(1, 12))
def test_rebatch_keeps_every_example_and_its_place(counts: list[int], size: int) -> None:
    chunks = list(resize_chunks(numbered(counts), size))
    check_bookkeeping(chunks, sum(counts))
    assert [c.size for c in chunks[:-1]] == [size] * (len(chunks) - 1)  # all full but the last


@given(counts=sizes, size=st.integers(1, 12), changes=st.lists(st.booleans(), min_size=8, max_size=8))
def test_rebatch_joins_only_what_fits_together(counts: list[int], size: int, changes: list[bool]) -> None:
    chunks = [numbered(counts, width=2 if changes[i] else 1)[i] for i in range(len(counts))]
    found = list(resize_chunks(chunks, size))
    check_bookkeeping(found, sum(counts))
    assert all(c.size <= size for c in found)


@given(counts=sizes, size=st.integers(1, 12))
def test_rebatch_never_joins_dicts(counts: list[int], size: int) -> None:
    chunks = [Chunk({"x": c.inputs}, None, c.origin, keyed=True) for c in numbered(counts)]
    found = list(resize_chunks(chunks, size))
    assert [int(i) for c in found for i in c.inputs["x"][:, 0]] == list(range(sum(counts)))
    assert all(c.keyed and len(c.origin) == 1 and c.size <= size for c in found)


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=5), cut=st.tuples(st.integers(0, 30), st.integers(0, 30))
)
def test_rows_keep_their_place(counts: list[int], cut: tuple[int, int]) -> None:
    (joined,) = resize_chunks(numbered(counts), 1000)
    start, stop = sorted(min(c, joined.size) for c in cut)
    part = joined.rows(start, stop)
    assert part.inputs[:, 0].tolist() == list(range(start, stop))
    assert [part.where(i) for i in range(part.size)] == [joined.where(i) for i in range(start, stop)]


def test_chunks_of_unlike_types_stay_apart() -> None:
    a, b = numbered([2, 2])
    c = Chunk(b.inputs.double(), b.targets, b.origin)
    assert [x.inputs.dtype for x in resize_chunks([a, c], 10)] == [torch.int64, torch.float64]


def test_an_example_of_a_pair_is_named_by_its_row() -> None:
    chunks = list(iterate_chunks((torch.arange(600), torch.arange(600)), 300, None))
    assert all(c.where(i) == f"example {int(c.inputs[i])}" for c in chunks for i in range(c.size))
    assert {c.source for c in chunks} == {"the data"}


# --- without targets: a list is a list of batches, however many


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("form", [list, iter, lambda batches: DataLoader(batches, batch_size=None)])
def test_batches_of_inputs_are_batches_however_many(form: Any, count: int) -> None:
    batches = [torch.randn(8, 3, 4, 4) + k for k in range(count)]
    found = list(iterate_chunks(form(batches), None, None, alone=True))
    assert [chunk.targets for chunk in found] == [None] * count
    assert [chunk.origin for chunk in found] == [((k, 0, 8),) for k in range(count)]
    assert all(torch.equal(chunk.inputs, x) for chunk, x in zip(found, batches, strict=True))


@pytest.mark.parametrize("other", [(5, 3, 4, 4), (8, 3, 6, 6), (8, 1, 4, 4)], ids=str)
def test_two_batches_of_inputs_need_not_be_of_one_size(other: tuple[int, ...]) -> None:
    chunks = list(iterate_chunks([torch.zeros(8, 3, 4, 4), torch.zeros(other)], None, None, alone=True))
    assert [chunk.size for chunk in chunks] == [8, other[0]]


PAIRS: dict[str, Any] = {
    "a tuple of two alike": lambda x: (x, x.flip(0)),
    "a list with labels": lambda x: [x, torch.arange(8)],
    "a list with numbers of another shape": lambda x: [x, torch.zeros(8)],
    "a list with several inputs": lambda x: [(x, x), torch.zeros(8, 3, 4, 4)],
}


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("alone", [False, True])
def test_what_can_only_be_a_pair_is_one(form: str, alone: bool) -> None:
    data = PAIRS[form](torch.randn(8, 3, 4, 4))
    (chunk,) = iterate_chunks(data, None, None, alone=alone)
    assert chunk.size == 8
    assert torch.equal(chunk.targets, data[1])


def test_two_batches_without_targets_are_refused_where_targets_are_needed() -> None:
    c = case("mlp")
    with pytest.raises(DataError, match=r"batch 0 is a Tensor of inputs without labels.*two tensors as a tuple"):
        sosp.score(c.model, [c.inputs, c.inputs])


def test_an_autoencoder_is_scored_and_repaired_with_both_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    x, everything = torch.randn(80, 6), sosp.Scoring(examples=None)
    two, one = (
        sosp.prune(model, data, ratio=0.5, method="sosp-obs", repair=True, loss="mse", scoring=everything)
        for data in ([*x.split(40)], x)
    )
    assert two.saliency.examples == 80
    assert two.repaired is not None
    assert two.repaired.examples == 80
    assert two.mask == one.mask


# --- tensors whose first axes differ


def zeros(*lengths: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(n, 2) for n in lengths)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [((), None), ((4,), 4), ((4, 9), 4), ((9, 4, 4), 4), ((4, 9, 9, 1), 9), ((1, 1, 6), 1), ((7, 5, 3), 7)],
)
def test_the_batch_size_is_the_first_axis_that_most_tensors_share(lengths: tuple[int, ...], size: int | None) -> None:
    assert find_batch_size(zeros(*lengths)) == size


def test_a_tensor_with_another_first_axis_stays_whole() -> None:
    assert [len(x) for x in take_examples(zeros(588, 3, 3), 2)] == [588, 2, 2]


def patches(examples: int) -> dict[str, Tensor]:
    """Five patches of an image for each text."""
    return {
        "patches": torch.zeros(5 * examples, 2),
        "tokens": torch.zeros(examples, 4),
        "labels": torch.zeros(examples, dtype=torch.long),
    }


def test_a_batch_whose_rows_are_not_its_examples_is_never_cut() -> None:
    batch = patches(12)
    (chunk,) = iterate_chunks([batch], 3, None)
    assert not chunk.divisible
    assert chunk.size == 12
    assert [len(c.inputs["tokens"]) for c in resize_chunks([chunk, chunk], 5)] == [12, 12]
    assert [c.size for c in distribute_examples([chunk, chunk, chunk], 1, 2)] == [12]
    example, _ = open_data_once([batch], torch.device("cpu"), keep=False)
    assert [len(example.inputs[key]) for key in batch] == [60, 12, 12]


def test_targets_tell_the_batch_size_where_inputs_do_not() -> None:
    (chunk,) = iterate_chunks([(zeros(60, 12), torch.zeros(12))], None, None)
    assert chunk.size == 12
    chunks = list(iterate_chunks((zeros(60, 12), torch.zeros(12)), 5, None))
    assert [[len(x) for x in c.inputs] for c in chunks] == [[60, 5]]


def test_one_row_for_all_examples_does_not_stop_a_batch_from_being_cut() -> None:
    (chunk,) = iterate_chunks([{"x": torch.zeros(9, 2), "y": torch.zeros(9), "places": torch.zeros(1, 2)}], None, None)
    assert [c.size for c in resize_chunks([chunk], 4)] == [4, 4, 1]
