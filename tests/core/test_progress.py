"""Where a bar is shown, and what it counts to."""

import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import sosp
from sosp.core.progress import is_progress_wanted, track_progress


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Show every bar at once; what the bars count to."""
    shown: list[Any] = []
    monkeypatch.setattr("sosp.core.progress.is_progress_wanted", lambda: True)
    monkeypatch.setattr("sosp.core.progress.BAR_DELAY", -1.0)
    monkeypatch.setattr("rich.progress.Progress.start", lambda bar: shown.append(bar.tasks[0].total))
    monkeypatch.setattr("rich.progress.Progress.stop", lambda bar: None)
    return shown


class Stream(IterableDataset[Any]):
    """Examples without a length."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return zip(self.x, self.y, strict=True)


def parts(x: Tensor, y: Tensor) -> list[Any]:
    return list(zip(x.split(30), y.split(30), strict=True))


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], int | None]] = {
    "tensors": (lambda x, y: (x, y), 64),
    "arrays": (lambda x, y: (x.numpy(), y.numpy()), 64),
    "a dataset": (TensorDataset, 64),
    "a part of a dataset": (lambda x, y: Subset(TensorDataset(x, y), range(40)), 40),
    "a loader": (lambda x, y: DataLoader(TensorDataset(x, y), batch_size=30), 64),
    "a shuffling loader": (lambda x, y: DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True), 64),
    "without the last batch": (lambda x, y: DataLoader(TensorDataset(x, y), batch_size=30, drop_last=True), 60),
    "a sampler": (lambda x, y: DataLoader(TensorDataset(x, y), 30, sampler=RandomSampler(x, num_samples=50)), 50),
    "a list of batches": (parts, 64),
    "batches of arrays": (lambda x, y: [(a.numpy(), b.numpy()) for a, b in parts(x, y)], 64),
    "a batch sampler": (
        lambda x, y: DataLoader(TensorDataset(x, y), batch_sampler=BatchSampler(SequentialSampler(x), 30, False)),
        None,
    ),
    "a generator": (lambda x, y: iter(parts(x, y)), None),
    "an iterable dataset": (Stream, None),
    "a loader of a stream": (lambda x, y: DataLoader(Stream(x, y), batch_size=30), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_bar_counts_to_the_examples_there_are(form: str, totals: list[Any]) -> None:
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(64, 3), torch.arange(64) % 2
    make, total = FORMS[form]
    prune = partial(sosp.prune, scoring=sosp.Scoring(examples=None))
    for run in (sosp.score, *(partial(run, ratio=0.5) for run in (prune, sosp.eigendamage))):
        totals.clear()
        run(model, make(x, y))
        assert totals[0] == total
    totals.clear()
    sosp.score(model, make(x, y), examples=20)
    assert totals == [None if total is None else 20]


def test_a_bar_of_inputs_alone(totals: list[Any]) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(64, 3)
    for data in (x, x.numpy(), [x[:30], x[30:]], TensorDataset(x), np.asarray(x)):
        totals.clear()
        sosp.score(model, data, method="sosp-obs")
        assert totals[0] == 64


# --- where it is shown


def make_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Pretend that a package is installed and loaded."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_a_bar_is_for_terminals_and_notebooks(
    terminal: bool, kernel: bool, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("SOSP_PROGRESS", "0" if silent else "1")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if kernel:
        make_module(monkeypatch, "ipykernel")
    assert is_progress_wanted() == ((terminal or kernel) and not silent)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOSP_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sosp.core.progress.BAR_DELAY", -1.0)


@pytest.mark.usefixtures("impatient")
def test_a_terminal_shows_counts_and_the_time_left_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(track_progress("abc", "letters", 3)) == ["a", "b", "c"]
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "letters" in drawn
    assert "3/3" in drawn
    assert "0:00:00" in drawn
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("widgets", [False, True])
def test_a_notebook_shows_it_as_a_widget(widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    class Output:
        """A widget that is written into."""

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

        def clear_output(self, wait: bool = False) -> None: ...

        def close(self) -> None: ...

    make_module(monkeypatch, "ipykernel")
    make_module(monkeypatch, "IPython")
    make_module(monkeypatch, "IPython.display", display=lambda x: drawn.append(getattr(x, "text", "")))
    if widgets:
        make_module(monkeypatch, "ipywidgets", Output=Output)
    assert list(track_progress("abc", "letters", 3)) == ["a", "b", "c"]
    assert any("letters" in text and "0/3" in text for text in drawn) == widgets
