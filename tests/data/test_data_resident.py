"""Resident images: epochs that depend on seed and number alone, crops and flips against plain loops, ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sosp
from sosp.data import Resident
from sosp.data.batch_source import make_generator
from sosp.data.resident_images import draw_augmentation
from sosp.errors import ArgumentError, DataError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
N, BATCH = 37, 8  # five batches, the last of 5


def pictures(count: int = N, shape: tuple[int, int, int] = (3, 6, 10), kind: torch.dtype = torch.uint8) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, *shape), generator=random).to(kind)


def resident(**options: Any) -> Resident:
    """The labels are the numbers of the images."""
    options = {"mean": MEAN, "std": STD, "pad": 2, "flip": True, **options}
    return Resident.of(pictures(), torch.arange(N), **options)


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(p, q) for x, y in zip(a, b, strict=True) for p, q in zip(x, y, strict=True)
    )


# --- the oracle: one image after the other, in numpy ----------------------------------------------------


def by_hand(image: np.ndarray, top: int, left: int, mirrored: int, pad: int) -> np.ndarray:
    """Pad, crop, mirror and normalise a single image (C, H, W)."""
    channels, height, width = image.shape
    canvas = np.zeros((channels, height + 2 * pad, width + 2 * pad), image.dtype)
    canvas[:, pad : pad + height, pad : pad + width] = image
    result = np.empty(image.shape, np.float32)
    unit = np.float32(255 if image.dtype == np.uint8 else 1)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                value = canvas[c, top + y, left + (width - 1 - x if mirrored else x)]
                result[c, y, x] = (np.float32(value) / unit - np.float32(MEAN[c])) / np.float32(STD[c])
    return result


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("pad", "flip"), [(2, True), (4, False), (0, True), (0, False)])
def test_crops_and_flips_equal_plain_loops(kind: torch.dtype, pad: int, flip: bool) -> None:
    images = pictures(kind=kind)
    source = Resident.of(images, torch.arange(N), mean=MEAN, std=STD, pad=pad, flip=flip)
    draws = draw_augmentation(N, pad=pad, flip=flip, random=make_generator(3, 7))
    row = 0
    for x, y in source.epoch(7, batch=BATCH, seed=3):
        for i in range(len(y)):
            order, top, left, mirrored = (int(t[row]) for t in (draws.order, draws.top, draws.left, draws.mirrored))
            assert y[i] == order
            assert np.array_equal(x[i].numpy(), by_hand(images[order].numpy(), top, left, mirrored, pad))
            row += 1
    assert row == N


def test_chance_is_fair() -> None:
    draws = draw_augmentation(10_000, pad=4, flip=True, random=make_generator(0, 0))
    # 10,000 in 9 classes: 1111 expected, standard deviation 31; five of them.
    for place in (draws.top, draws.left):
        assert all(abs(count - 1111) < 157 for count in place.bincount(minlength=9).tolist())
        assert place.max() == 8
    assert abs(int(draws.mirrored.sum()) - 5000) < 250
    assert abs(np.corrcoef(draws.top, draws.left)[0, 1]) < 0.05


# --- order ----------------------------------------------------------------------------------------------


def test_an_epoch_is_the_same_again_and_others_differ() -> None:
    source = resident()
    first = list(source.epoch(0, batch=BATCH, seed=0))
    assert same(first, list(resident().epoch(0, batch=BATCH, seed=0)))
    assert not same(first, list(source.epoch(1, batch=BATCH, seed=0)))
    assert not same(first, list(source.epoch(0, batch=BATCH, seed=1)))
    assert not same(list(source.epoch(1, batch=BATCH, seed=0)), list(source.epoch(0, batch=BATCH, seed=1)))


def test_nothing_of_the_global_random_state_is_used_or_changed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = list(resident().epoch(0, batch=BATCH, seed=0))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(first, list(resident().epoch(0, batch=BATCH, seed=0)))


def test_every_image_once() -> None:
    labels = torch.cat([y for _, y in resident().epoch(5, batch=BATCH, seed=2)])
    assert labels.sort().values.tolist() == list(range(N))
    assert labels.tolist() != list(range(N))


def test_the_last_batch_is_small_or_dropped() -> None:
    source = resident()
    sizes = [len(y) for _, y in source.epoch(0, batch=BATCH, seed=0)]
    assert sizes == [8, 8, 8, 8, 5]
    assert source.steps(BATCH) == len(sizes)
    kept = list(source.epoch(0, batch=BATCH, seed=0, drop_last=True))
    assert same(kept, list(source.epoch(0, batch=BATCH, seed=0))[:4])
    assert source.steps(BATCH, drop_last=True) == 4


@pytest.mark.parametrize("start", range(6))
def test_resuming_gives_the_same_batches(start: int) -> None:
    whole = list(resident().epoch(3, batch=BATCH, seed=1))
    assert same(whole[start:], list(resident().epoch(3, batch=BATCH, seed=1, start=start)))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["epoch", "ordered"])
def test_ranks_share_every_batch(ranks: int, kind: str) -> None:
    source = resident()

    def batches(**share: int) -> list[tuple[Tensor, Tensor]]:
        if kind == "ordered":
            return list(source.ordered(batch=BATCH, limit=33, **share))
        return list(source.epoch(1, batch=BATCH, seed=0, **share))

    parts = [batches(rank=rank, ranks=ranks) for rank in range(ranks)]
    for k, (x, y) in enumerate(batches()):
        for rank in range(ranks):
            assert torch.equal(parts[rank][k][0], x[rank::ranks])
            assert torch.equal(parts[rank][k][1], y[rank::ranks])
    assert {len(part) for part in parts} == {len(batches())}


def test_ordered_is_in_order_and_plain() -> None:
    source, images = resident(), pictures()
    found = list(source.ordered(batch=BATCH))
    assert torch.cat([y for _, y in found]).tolist() == list(range(N))
    wanted = np.stack([by_hand(image, 2, 2, 0, 2) for image in images.numpy()])
    assert np.array_equal(torch.cat([x for x, _ in found]).numpy(), wanted)
    assert [len(y) for _, y in source.ordered(batch=BATCH, limit=10)] == [8, 2]
    assert sum(len(y) for _, y in source.ordered(batch=BATCH, limit=1000)) == N


# --- plans ----------------------------------------------------------------------------------------------


def test_a_plan_gives_any_batch_and_fills_given_tensors() -> None:
    source = resident()
    plan = source.plan(2, batch=BATCH, seed=4)
    batches = list(source.epoch(2, batch=BATCH, seed=4))
    assert len(plan) == 5
    for k in (3, 0, 4):
        assert same([plan.batch(k)], [batches[k]])
        assert same([source.prepare(plan.rows(k).clone())], [batches[k]])
    out = torch.zeros(8, 3, 6, 10), torch.zeros(8, dtype=torch.int64)
    assert plan.batch(1, out=out)[0] is out[0]
    assert same([out], [batches[1]])
    with pytest.raises(ArgumentError, match=r"out has shape \(8, 3, 6, 10\), batch 4 has \(5, 3, 6, 10\)"):
        plan.batch(4, out=out)
    with pytest.raises(ArgumentError, match="no batch 5: the epoch has 5"):
        plan.batch(5)


# --- subsets, layouts, scoring --------------------------------------------------------------------------


def test_subsets_are_random_sorted_and_repeatable() -> None:
    source = resident()
    some = source.subset(9, seed=0)
    assert len(some) == 9
    assert some.labels.tolist() == sorted(set(some.labels.tolist()))
    assert some.labels.tolist() == source.subset(9, seed=0).labels.tolist() != source.subset(9, seed=1).labels.tolist()
    rows = some.labels
    assert torch.equal(next(some.ordered(batch=9))[0], next(source.ordered(batch=N))[0][rows])
    assert len(source.subset(N, seed=0)) == N
    with pytest.raises(ArgumentError, match="count=38 images cannot be drawn from 37"):
        source.subset(38, seed=0)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: torch.cat([x, x], 3)[..., :10],
    ],
)
def test_memory_layout_does_not_matter(layout: Callable[[Tensor], Tensor]) -> None:
    for options in ({"pad": 2, "flip": True}, {}):
        plain = Resident.of(pictures(), torch.arange(N), **options)
        other = Resident.of(layout(pictures()), torch.arange(N, dtype=torch.int32), **options)
        assert same(list(plain.epoch(0, batch=BATCH, seed=0)), list(other.epoch(0, batch=BATCH, seed=0)))


def test_what_was_given_is_not_changed() -> None:
    images = pictures(kind=torch.float32)
    source = Resident.of(images, torch.arange(N), mean=MEAN, std=STD)
    list(source.epoch(0, batch=BATCH, seed=0))
    list(source.ordered(batch=BATCH))
    assert torch.equal(images, pictures(kind=torch.float32))


def test_a_network_can_be_scored_on_a_source() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(128, N))
    source = resident()
    saliency = sosp.score(model, source.ordered(batch=BATCH), method="sosp-h")
    whole = sosp.score(model, next(source.ordered(batch=N)), method="sosp-h")
    torch.testing.assert_close(saliency.scores, whole.scores)


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "batch=0 must be a whole number, at least 1"),
        ({"batch": -3}, "batch=-3 must"),
        ({"batch": 2.5}, "batch=2.5 must"),
        ({"start": 6}, "start=6 is beyond the end of the epoch, which has 5 batches"),
        ({"start": -1}, "start=-1 must"),
        ({"rank": 2, "ranks": 2}, "rank=2 does not exist among ranks=2"),
        ({"ranks": 0}, "ranks=0 must"),
        ({"ranks": 9}, "batch=8 is the total over all ranks"),
        ({"batch": 38, "drop_last": True}, "batch=38 with drop_last drops all 37 images"),
        ({"seed": -1}, "seed=-1 must"),
        ({"number": -1}, "number=-1 must"),
    ],
)
def test_bad_arguments_of_an_epoch_are_refused_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resident().epoch(**{"number": 0, "batch": BATCH, "seed": 0, **given})


@pytest.mark.parametrize("given", [{"batch": 0}, {"limit": 0}, {"rank": 1}])
def test_bad_arguments_of_ordered_are_refused_at_once(given: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(given))):
        resident().ordered(**{"batch": 8, **given})


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 3, 4, 4)), torch.zeros(2), "must be tensors, not ndarray and Tensor"),
        (torch.zeros(2, 4), torch.zeros(2).long(), r"shape \(2, 4\); give \(images, channels, height, width\)"),
        (torch.zeros(0, 3, 4, 4), torch.zeros(0).long(), "not empty"),
        (torch.zeros(2, 3, 4, 4).int(), torch.zeros(2).long(), "images are torch.int32"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(3).long(), r"labels have shape \(3,\) for 2 images"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2), "labels are torch.float32"),
        (torch.zeros(2, 3, 4, 4), torch.tensor([0, -1]), "labels go down to -1; the first class is 0"),
    ],
)
def test_bad_tensors_are_refused(images: Any, labels: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Resident.of(images, labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,), "std": (0.5,)}, "1 values, but the images have 3 channels"),
        ({"mean": (0.5,)}, "the same number of values"),
        ({"std": (1, 1, 0)}, "above 0"),
        ({"mean": (0, 0, float("nan"))}, "finite"),
        ({"pad": -1}, "pad=-1 must"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resident(**options)


# --- on a GPU -------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_batches_on_a_gpu_are_the_same_bits() -> None:
    for kind in (torch.uint8, torch.float32):
        source = Resident.of(
            pictures(2000, (3, 32, 32), kind), torch.arange(2000), mean=MEAN, std=STD, pad=4, flip=True
        )
        there = source.to("cuda")
        here = list(source.epoch(1, batch=128, seed=0))
        assert same(here, [(x.cpu(), y.cpu()) for x, y in there.epoch(1, batch=128, seed=0)])
        assert same(here, [(x.cpu(), y.cpu()) for x, y in source.epoch(1, batch=128, seed=0, device="cuda")])
        assert next(there.ordered(batch=8))[0].is_cuda
        assert same(list(source.ordered(batch=512)), [(x.cpu(), y.cpu()) for x, y in there.ordered(batch=512)])


@pytest.mark.gpu
def test_a_cuda_graph_can_hold_the_preparation() -> None:
    source = Resident.of(pictures(512, (3, 32, 32)), torch.arange(512), mean=MEAN, std=STD, pad=4, flip=True).to("cuda")
    plan = source.plan(0, batch=64, seed=0)
    rows = plan.rows(0).clone()
    source.prepare(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, y = source.prepare(rows)
    for k in range(len(plan)):
        rows.copy_(plan.rows(k))
        graph.replay()
        assert same([(x, y)], [plan.batch(k)])
