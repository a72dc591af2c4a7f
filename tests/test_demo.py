"""The demo: repeatable, leaves the random state alone, and ends in the table it promises."""

import io
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import sosp
from sosp import demo

SETTINGS = demo.Settings()
BRIEF = demo.Schedule(epochs=1, rate=0.05)
SMALL = demo.Settings(methods=("sosp-h", "random"), ratios=(0.3,), examples=50, training=BRIEF, tuning=BRIEF)


def quick_network(seed: int) -> torch.nn.Module:
    model = demo.new_network(seed)
    demo.train(model, demo.digits(0)[0], replace(BRIEF, seed=seed))
    return model


def test_digits_are_split_once() -> None:
    (x, y), (x_test, y_test) = demo.digits(0)
    assert (x.shape, y.shape) == ((1347, 1, 8, 8), (1347,))
    assert (x_test.shape, y_test.shape) == ((450, 1, 8, 8), (450,))
    assert set(y_test.tolist()) == set(range(10))
    assert torch.equal(x, demo.digits(0)[0][0])


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(sosp.errors.SospError, match=r"sosp\[demo\]"):
        demo.digits(0)


def test_training_is_repeatable_and_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = quick_network(3), quick_network(3), quick_network(4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_the_trained_network_reaches_97_percent() -> None:
    train_set, test_set = demo.digits(SETTINGS.seed)
    model = demo.new_network(SETTINGS.seed)
    demo.train(model, train_set, SETTINGS.training)
    assert demo.accuracy(model, test_set) >= 0.97


def test_the_whole_job_on_a_small_scale() -> None:
    printed = io.StringIO()
    unpruned, *rows = demo.run(Console(file=printed, width=120), SMALL)
    assert (unpruned.method, unpruned.ratio, unpruned.removed) == ("unpruned", 0.0, 0)
    assert [(row.method, row.ratio) for row in rows] == [("sosp-h", 0.3), ("random", 0.3)]
    # 16 (stem) + 2 x 16 + 2 x 32 + 2 x 32 = 176 filters; the 32 of the skip's convolution stay.
    assert [row.removed for row in rows] == [round(0.3 * 176)] * 2
    assert all(0 <= row.shrunk <= 1 and 0 <= row.tuned <= 1 and row.seconds >= 0 for row in rows)
    assert all(row.parameters < 0.8 * unpruned.parameters for row in rows)
    assert all(row.method in printed.getvalue() for row in [unpruned, *rows])
