"""Interrupted at any moment, by whatever: training goes on where it was, and ends with the very same bits."""

import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import sosp
import sosp.core.safetensors_files
from helpers import training_worker
from helpers.training_worker import (
    KILLED,
    KILLS,
    NETS,
    SHORT,
    HaltedError,
    dropping,
    examples,
    normed,
    outcome,
    plain,
    same,
    story,
    weights,
)
from sosp import Schedule
from sosp.core.safetensors_files import read_safetensors, write_safetensors
from sosp.errors import CheckpointError, TrainingError
from sosp.training import CheckpointWarning, checkpoints, loop

STEPS = 3 * SHORT.epochs  # 22 examples in batches of 8
SCHEDULE = replace(SHORT, ema=0.8)


@pytest.fixture(autouse=True)
def told_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_INTERVAL", 0)


def stop_at(step: int, act: Callable[[], None] | None = None) -> Callable[..., None]:
    def stop(done: int, total: int, moment: Any) -> None:
        if done >= step:
            if act is None:
                raise HaltedError
            act()

    return stop


def data() -> Any:
    return examples(), examples(9, 2)


def run(
    model: Any, folder: Path | None = None, schedule: Schedule = SCHEDULE, given: Any = None, **options: Any
) -> Any:
    return sosp.train(model, data() if given is None else given, schedule, folder=folder, **options)


def assert_same_outcome(mine: sosp.Trained, theirs: sosp.Trained) -> None:
    a, b = outcome(mine), outcome(theirs)
    assert a["story"] == b["story"]
    assert same(a["weights"], b["weights"])
    assert (a["average"] is None) == (b["average"] is None)
    assert a["average"] is None or same(a["average"], b["average"])


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def checkpoint(step: int) -> str:
    return f"checkpoint-{step:08d}.safetensors"


# --- killed ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_twenty_times_at_random_moments(tmp_path: Path) -> None:
    """``kill -9``: two networks side by side, one with dropout, a shuffling loader, moving averages."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, training_worker.__file__, "kills", str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found = torch.load(tmp_path / "kills.pt", weights_only=False)
    assert found["status"] == 0, ran.stderr
    assert len(found["steps"]) == KILLS
    assert len(set(found["steps"])) > 4, "the kills came too early or too late to prove anything"
    calm, killed = (torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in ("calm", "killed"))
    for network in calm:
        assert same(killed[network]["weights"], calm[network]["weights"])
        assert same(killed[network]["average"], calm[network]["average"])
        assert killed[network]["story"] == calm[network]["story"]
    assert names(tmp_path / "killed") == names(tmp_path / "calm") == [checkpoint(95), checkpoint(96)]
    for name in names(tmp_path / "calm"):
        assert same(read_safetensors(tmp_path / "killed" / name)[1], read_safetensors(tmp_path / "calm" / name)[1])
    assert KILLED.epochs * 16 == 96


# --- stopped at every step ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_stopped_after_every_single_step(name: str, tmp_path: Path) -> None:
    whole = run(NETS[name]())
    for step in range(2, STEPS + 1):
        with pytest.raises(HaltedError):  # before the step is saved: so each run saves one more
            run(NETS[name](), tmp_path, save_every=0, on_step=stop_at(step))
        assert names(tmp_path)[-1] == checkpoint(step - 1)
        assert len(names(tmp_path)) == min(step - 1, 2)
    assert_same_outcome(run(NETS[name](), tmp_path, save_every=0), whole)
    assert names(tmp_path) == [checkpoint(STEPS - 1), checkpoint(STEPS)]


def test_stopped_at_every_epoch_by_the_caller(tmp_path: Path) -> None:
    def stop(name: str, epoch: Any) -> None:
        seen.append(epoch.number)
        raise HaltedError

    whole, seen = run(normed()), []
    with pytest.raises(HaltedError):
        run(normed(), tmp_path, save_every=math.inf, on_epoch=stop)
    assert names(tmp_path) == []
    with pytest.raises(HaltedError):
        run(normed(), tmp_path, save_every=0, on_epoch=stop)
    assert names(tmp_path) == [checkpoint(1), checkpoint(2)]
    told: list[int] = []
    found = run(normed(), tmp_path, on_epoch=lambda name, epoch: told.append(epoch.number))
    assert_same_outcome(found, whole)
    assert (seen, told, found.resumed) == ([1, 1], [1, 2, 3], 0)


@pytest.mark.parametrize(
    ("large", "apart", "saved"), [(2**26, 1e9, [1, 2, 3]), (0, 0.0, [1, 2, 3]), (0, 1e9, [3])], ids=str
)
def test_large_checkpoints_after_short_epochs_are_apart(
    large: int, apart: float, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last epoch is always saved: who trained to the end does not train again."""
    monkeypatch.setattr(loop, "LARGE", large)
    monkeypatch.setattr(loop, "SAVE_INTERVAL", apart)
    found, keep = [], checkpoints.save_checkpoint
    monkeypatch.setattr(checkpoints, "save_checkpoint", lambda *given: found.append(given[3].epoch) or keep(*given))
    whole = run(normed(), tmp_path)
    assert found == saved
    again = run(normed(), tmp_path)
    assert_same_outcome(again, whole)
    assert again.resumed == 3


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(plain(), save_every=0)
    assert names(tmp_path) == []


def test_epochs_alone_leave_the_last_two(tmp_path: Path) -> None:
    run(plain(), tmp_path / "deep" / "er")
    assert names(tmp_path / "deep" / "er") == [checkpoint(6), checkpoint(9)]


def test_what_is_finished_is_only_read(tmp_path: Path) -> None:
    whole = run(normed(), tmp_path)
    before = {n: (tmp_path / n).read_bytes() for n in names(tmp_path)}
    found = run(normed(), str(tmp_path), on_step=stop_at(0))
    assert_same_outcome(found, whole)
    assert found.resumed == SCHEDULE.epochs
    assert {n: (tmp_path / n).read_bytes() for n in names(tmp_path)} == before
    assert not found.model.training
    assert found.history == whole.history  # the clock too: it is remembered


def test_the_time_before_an_interruption_counts(tmp_path: Path) -> None:
    def slowly(done: int, total: int, moment: Any) -> None:
        time.sleep(0.3) if done == 1 else interrupt()

    with pytest.raises(KeyboardInterrupt):
        run(plain(), tmp_path, on_step=slowly)
    epoch = run(plain(), tmp_path).history[0]
    assert 0.3 < epoch.seconds < 3
    assert epoch.images_per_second == pytest.approx(22 / epoch.seconds)


def test_networks_are_found_by_name_whatever_their_order(tmp_path: Path) -> None:
    models = {"a/b": plain(), "a": normed(), "a/b/model": dropping()}
    seeds = {"a/b": 1, "a": 2, "a/b/model": 1}
    whole = run(models, seed=seeds)
    with pytest.raises(HaltedError):
        run(models, tmp_path, seed=seeds, save_every=0, on_step=stop_at(5))
    turned = dict(reversed(models.items()))
    found = run(turned, tmp_path, seed=seeds)
    for name in ("a", "a/b"):
        assert_same_outcome(found[name], whole[name])  # dropout draws in another order now


def test_nesterov_and_a_teacher_go_on_too(tmp_path: Path) -> None:
    schedule = replace(SHORT, nesterov=True, distill=0.5, warmup=0.7, smoothing=0.1, shape="cosine")
    whole = run(dropping(), schedule=schedule, teacher=normed())
    for step in (3, 4, 8):
        with pytest.raises(HaltedError):
            run(dropping(), tmp_path, schedule, teacher=normed(), save_every=0, on_step=stop_at(step))
    assert_same_outcome(run(dropping(), tmp_path, schedule, teacher=normed()), whole)


# --- the user's own loaders -----------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Draws from everything there is."""

    def __init__(self) -> None:
        self.x, self.y = examples()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        noise = random.random() + float(np.random.rand()) + torch.rand(())  # noqa: NPY002
        return self.x[i] + 0.1 * noise, self.y[i]


def loaders() -> dict[str, Any]:
    dataset = TensorDataset(*examples())
    given = torch.Generator().manual_seed(7)
    return {
        "shuffled": DataLoader(dataset, batch_size=8, shuffle=True),
        "own generator": DataLoader(dataset, batch_size=8, shuffle=True, generator=given),
        "own sampler": DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset, generator=given)),
        "noisy": DataLoader(Noisy(), batch_size=8, shuffle=True),
        "list": [(x, y) for x, y in DataLoader(dataset, batch_size=8)],
    }


@pytest.mark.parametrize("kind", loaders())
def test_a_users_loader_goes_on_with_the_same_batches(kind: str, tmp_path: Path) -> None:
    whole = run(dropping(), given=loaders()[kind])
    for step in (2, 5, 6):
        torch.manual_seed(step)
        random.seed(step)
        with pytest.raises(HaltedError):
            run(dropping(), tmp_path, given=loaders()[kind], save_every=0, on_step=stop_at(step))
    assert_same_outcome(run(dropping(), tmp_path, given=loaders()[kind]), whole)


def test_a_loader_leaves_everybodys_random_numbers_alone() -> None:
    g = torch.Generator().manual_seed(7)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, generator=g)
    before = g.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
    first = run(plain(), given=loader)
    after = g.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]
    assert np.array_equal(before[3], after[3])
    assert_same_outcome(run(plain(), given=loader), first)
    assert not same(weights(run(plain(), given=loader, seed=1).model), weights(first.model))


# --- signals --------------------------------------------------------------------------------------------


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [1, 3, 4, 9])  # 3 and 9 end an epoch
@pytest.mark.parametrize(("act", "raised"), [(interrupt, KeyboardInterrupt), (terminate, SystemExit)])
def test_a_signal_saves_first(step: int, act: Any, raised: Any, tmp_path: Path) -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    whole = run(normed())
    with pytest.raises(raised) as caught:
        run(normed(), tmp_path, on_step=stop_at(step, act))
    if raised is SystemExit:
        assert caught.value.code == 143
    assert names(tmp_path)[-1] == checkpoint(step)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert_same_outcome(run(normed(), tmp_path), whole)


def test_a_signal_in_the_last_moment_is_not_lost(tmp_path: Path) -> None:
    def at_the_end(name: str, epoch: Any) -> None:
        if epoch.number == SCHEDULE.epochs:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        run(normed(), tmp_path, on_epoch=at_the_end)
    found = run(normed(), tmp_path)
    assert found.resumed == SCHEDULE.epochs
    assert_same_outcome(found, run(normed()))


def test_a_signal_at_the_end_of_an_epoch_does_not_start_another(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(normed(), tmp_path, on_epoch=lambda name, epoch: interrupt())
    assert names(tmp_path) == [checkpoint(3)]
    assert run(normed(), tmp_path).resumed == 1


def test_a_second_signal_is_obeyed_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(normed(), tmp_path, on_step=stop_at(2, lambda: (interrupt(), interrupt())))
    assert names(tmp_path) == []


def test_without_a_folder_a_signal_just_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(normed(), on_step=stop_at(2, interrupt))


def test_the_workers_of_a_loader_hear_ctrl_c_too(tmp_path: Path) -> None:
    """They end at once, and the loader fails before the step that would have heard it."""
    batches = loaders()["list"]

    class Broken(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield batches[0]
            interrupt()
            raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    with pytest.raises(KeyboardInterrupt):
        run(normed(), tmp_path, given=Broken(batches))
    assert names(tmp_path) == [checkpoint(1)]
    assert_same_outcome(run(normed(), tmp_path, given=batches), run(normed(), given=batches))


def test_a_loader_that_fails_by_itself_is_heard(tmp_path: Path) -> None:
    class Broken(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        run(normed(), tmp_path, given=Broken([1, 2]))


def test_in_a_thread_signals_are_left_to_others() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(plain())))
    thread.start()
    thread.join()
    assert_same_outcome(found[0], run(plain()))


# --- damage ---------------------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    write_safetensors(path, '{"something":"else"}', {"x": torch.zeros(3)})


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


DAMAGE = [truncated, flipped, emptied, foreign, cut_in_the_header]


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A folder with checkpoints 4 and 5."""
    with pytest.raises(HaltedError):
        run(dropping(), tmp_path, save_every=0, on_step=stop_at(6))
    assert names(tmp_path) == [checkpoint(4), checkpoint(5)]
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(damage: Any, half: Path) -> None:
    damage(half / checkpoint(5))
    content = (half / checkpoint(5)).read_bytes()
    steps: list[int] = []
    with pytest.warns(CheckpointWarning, match=checkpoint(5)) as heard:
        found = run(dropping(), half, on_step=lambda done, total, moment: steps.append(done))
    assert len(heard) == 1
    assert steps == [5, 6, 7, 8, 9]
    assert_same_outcome(found, run(dropping()))
    aside = f"{checkpoint(5)}.damaged"
    assert names(half) == [aside, checkpoint(6), checkpoint(9)] or names(half) == [checkpoint(6), checkpoint(9), aside]
    assert (half / aside).read_bytes() == content


@pytest.mark.parametrize("damage", DAMAGE)
def test_two_damaged_checkpoints_are_a_new_start(damage: Any, half: Path) -> None:
    for step in (4, 5):
        damage(half / checkpoint(step))
    with pytest.warns(CheckpointWarning) as heard, pytest.raises(HaltedError):
        run(dropping(), half, save_every=0, on_step=stop_at(3))
    assert [w.category for w in heard] == [CheckpointWarning] * 2
    assert [n for n in names(half) if not n.endswith("damaged")] == [checkpoint(1), checkpoint(2)]
    assert_same_outcome(run(dropping(), half), run(dropping()))  # and from there on as ever


def test_what_killed_writers_left_is_cleared_away(half: Path) -> None:
    rubbish = [f".{checkpoint(7)}.0123456789abcdef.tmp", ".tmpAb12Cd", ".tmpXXXXXX"]
    (half / rubbish[0]).write_bytes((half / checkpoint(5)).read_bytes()[:500])
    (half / rubbish[1]).write_bytes((half / checkpoint(5)).read_bytes()[:300])
    (half / rubbish[2]).write_bytes(b"")
    theirs = {
        ".tmpNotes1": b"somebody's notes",
        ".tmpNotes2": b"x",
        ".tmp": b"",
        "notes.tmp": b"x",
        f"{checkpoint(3)}.bak": b"y",
    }
    for name, content in theirs.items():
        (half / name).write_bytes(content)
    run(dropping(), half)
    assert set(names(half)) == {checkpoint(6), checkpoint(9), *theirs}


# --- another training -----------------------------------------------------------------------------------


def changed(**fields: Any) -> dict[str, Any]:
    return {"schedule": replace(SCHEDULE, **fields)}


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (dropping, changed(rate=0.2), "rate was 0.1 and is 0.2"),
        (dropping, changed(epochs=4), "epochs was 3 and is 4"),
        (dropping, changed(milestones=(0.5,)), "milestones"),
        (dropping, changed(ema=0.5), "ema was 0.8 and is 0.5"),
        (dropping, changed(batch=4), "batch was 8 and is 4"),
        (dropping, {"seed": 1}, "seed was 0 and is 1"),
        (dropping, {"given": examples(23)}, "there were 22 training examples and now there are 23"),
        (normed, {}, "another network: '0.bias' is in only one of the two"),
        (lambda: torch.nn.Sequential(*list(dropping())[:4], torch.nn.Linear(9, 5)), {}, "'4.weight' had shape"),
        (lambda: {"a": dropping()}, {}, r"holds the networks \[''\], but this training has \['a'\]"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(model: Any, options: Any, said: str, half: Path) -> None:
    before = {n: (half / n).read_bytes() for n in names(half)}
    with pytest.raises(CheckpointError, match=said):
        run(model(), half, **options)
    assert {n: (half / n).read_bytes() for n in names(half)} == before


# --- folders and disks ----------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing/here")):
        with pytest.raises(CheckpointError, match="cannot be written there") as caught:
            run(plain(), folder, on_step=stop_at(0))
        assert str(folder) in str(caught.value)
        assert "folder=None" in str(caught.value)
    assert (tmp_path / "file").read_text() == "hello"


@pytest.mark.parametrize("place", ["save_file", "os.fsync", "os.replace"])
def test_a_full_disk_is_a_warning(place: str, half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {n: (half / n).read_bytes() for n in names(half)}
    monkeypatch.setattr(f"sosp.core.safetensors_files.{place}", full)
    with pytest.warns(CheckpointWarning, match="No space left on device") as heard:
        found = run(dropping(), half)
    assert len(heard) == 2  # after epochs 2 and 3
    assert all(str(half) in str(w.message) and "Training continues" in str(w.message) for w in heard)
    assert {n: (half / n).read_bytes() for n in names(half)} == before
    monkeypatch.undo()
    assert_same_outcome(found, run(dropping()))
    assert_same_outcome(run(dropping(), half), found)


# --- no number any more ---------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_it(tmp_path: Path) -> None:
    schedule = replace(SHORT, rate=1e30, milestones=())
    with pytest.raises(TrainingError) as caught:
        run(plain(), tmp_path, schedule, save_every=0)
    said = str(caught.value)
    assert "at step 2 (epoch 1)" in said
    assert "rate 1e+30" in said
    assert f"last good checkpoint is {tmp_path / checkpoint(1)}" in said
    with pytest.raises(TrainingError, match=r"of 'b' is not finite at step 2 .* no checkpoint"):
        run({"b": plain()}, None, schedule)


@pytest.mark.parametrize("bad", [1, 4, 9])
def test_the_step_and_its_rate_are_right(bad: int, tmp_path: Path) -> None:
    """Batches in order; the loss is no number in one of them only."""
    x, y = examples()
    batches = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    seen = []

    class Poisoned(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for a, b in batches:
                seen.append(1)
                yield (a * torch.nan if len(seen) == bad else a), b

    schedule = replace(SHORT, warmup=2.0)
    rate = schedule.rate_at((bad - 1) // 3, (bad - 1) % 3 / 3)
    with pytest.raises(TrainingError) as caught:
        run(plain(), tmp_path, schedule, given=Poisoned(batches), save_every=0)
    said = str(caught.value)
    assert f"at step {bad} (epoch {(bad + 2) // 3}), with learning rate {rate:g}." in said
    assert (checkpoint(bad - 1) in said) == (bad > 1)
    assert names(tmp_path)[-1:] == ([checkpoint(bad - 1)] if bad > 1 else [])


@pytest.mark.parametrize("loader", [False, True])
def test_inputs_that_are_no_numbers_are_not_blamed_on_the_rate(loader: bool) -> None:
    x, y = examples(24)
    x[17] = torch.nan
    parts = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    with pytest.raises(TrainingError, match=r"at step \d .*: check the data, not the learning rate") as caught:
        run(plain(), None, replace(SHORT, batch=8), given=parts if loader else (x, y))
    assert "Lower the learning rate" not in str(caught.value)
    with pytest.raises(TrainingError, match="Lower the learning rate"):
        run(plain(), None, replace(SHORT, rate=1e30, milestones=()))


def test_weights_that_overflow_in_an_epochs_last_step_are_no_result(tmp_path: Path) -> None:
    """The loss was still a number, so only the weights show it."""
    x, y = examples(8)
    schedule = Schedule(epochs=1, batch=8, rate=3e38, decay=0, momentum=0, shape="constant")
    for folder in (None, tmp_path):
        with pytest.raises(TrainingError, match=r"the weights are not finite at step 1 .*learning rate 3e\+38"):
            run(plain(), folder, schedule, given=(x * 1e4, y))
    assert names(tmp_path) == []


# --- what is in a checkpoint ----------------------------------------------------------------------------


def test_a_checkpoint_says_what_it_is(half: Path) -> None:
    text, tensors = read_safetensors(half / checkpoint(5))
    found = json.loads(text)
    assert (found["place"]["epoch"], found["place"]["batch"]) == (1, 2)
    assert found["training"]["schedule"]["rate"] == SCHEDULE.rate
    assert found["training"]["seeds"] == {"": 0}
    assert [e["number"] for e in found["history"][""]] == [1]
    assert {n.split("/")[1] for n in tensors} >= {"model", "average", "momentum", "cpu", "count"}
    assert story(run(dropping()))[0][:2] == (1, found["history"][""][0]["loss"])
