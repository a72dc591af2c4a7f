"""Begin a training: look at what was given, then run the loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.core.batches import is_source
from sosp.core.borrow import home, refuse_uninitialised
from sosp.errors import ArgumentError, whole_number
from sosp.surgery.pad_widths import Room, with_room
from sosp.training.callback import Companion
from sosp.training.learner import Learner
from sosp.training.loop import Job, OnEpoch, OnStep, Saving, Told
from sosp.training.randomness import chance
from sosp.training.schedule import Schedule, schedule_of
from sosp.training.speed import Speed, fastest_kernels
from sosp.training.user_data import both, moved

LOOK = 4  # examples that a network is followed with


def train(
    model: nn.Module | Mapping[str, nn.Module],
    data: Any,
    schedule: Schedule | str = "cifar",
    *,
    folder: str | Path | None = None,
    seed: int | Mapping[str, int] = 0,
    device: torch.device | str | None = None,
    speed: Speed | None = None,
    teacher: nn.Module | None = None,
    companion: Companion | None = None,
    on_epoch: OnEpoch | None = None,
    on_step: OnStep | None = None,
    save_every: float = 600.0,
) -> Any:
    """A trained copy of ``model``, as ``Trained``; the model itself is left as it was.

    ``data``: a dataset of ``sosp.data``, a pair of tensors (inputs, labels), a loader, or (training data, test data) of
    any of these. ``schedule``: a ``Schedule`` or the name of one. Several networks, ``{"a": model, "b": other}``, are
    trained side by side, each as it would be alone (but for the random numbers of dropout, which they draw in turn),
    and give a dict of results; ``seed`` may then be a dict as well.

    ``folder``: checkpoints go there after every epoch (large ones at most twice a minute) and every ``save_every``
    seconds, and training goes on from the newest one, on a CPU bit for bit as if it had never stopped. Ctrl-C saves
    first. ``on_epoch(name, epoch)`` and ``on_step(done, all, moment)`` are told how it goes. ``teacher``: the network
    whose outputs ``schedule.distill`` compares with. ``companion``: takes part in the training, with terms of the loss,
    parameters and steps of its own (``sosp.training.Companion``).
    """
    schedule = schedule_of(schedule)
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    _check(models, schedule, teacher)
    where = torch.device(device) if device is not None else home(next(iter(models.values())))
    fast = (speed or Speed()).on(where)
    saving = Saving(Path(folder) if folder is not None else None, save_every)
    seeds = _seeds(seed, models)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        fastest_kernels(),
        chance(next(iter(seeds.values())), where),
    ):
        rooms = _rooms(models, data, fast, companion)
        learners = {n: Learner(m, schedule, fast, where, teacher, companion, rooms.get(n)) for n, m in models.items()}
        found = Job(learners, data, schedule, seeds, saving, Told(on_epoch, on_step)).run()
    return found if isinstance(model, Mapping) else found[""]


def _check(models: Mapping[str, Any], schedule: Schedule, teacher: nn.Module | None) -> None:
    if not models or not all(isinstance(n, str) and isinstance(m, nn.Module) for n, m in models.items()):
        raise ArgumentError("train takes a module, or a dict of names and modules.")
    for m in models.values():
        refuse_uninitialised(m)
        if not any(p.requires_grad for p in m.parameters()):
            raise ArgumentError("the network has no parameter that could be trained (requires_grad is False for all).")
    if bool(schedule.distill) != (teacher is not None):
        raise ArgumentError("distillation needs both: a teacher, and distill > 0 in the schedule.")


def _seeds(seed: int | Mapping[str, int], models: Mapping[str, nn.Module]) -> dict[str, int]:
    if isinstance(seed, Mapping) and seed.keys() != models.keys():
        raise ArgumentError(f"seed has numbers for {list(seed)}, and the networks are {list(models)}.")
    return {n: whole_number("seed", seed[n] if isinstance(seed, Mapping) else seed, least=0) for n in models}


def _rooms(models: Mapping[str, nn.Module], data: Any, speed: Speed, companion: Companion | None) -> dict[str, Room]:
    """Room for the networks that gain by it. A companion knows the network as it is; a loader is not read twice."""
    source: Any = both(data)[0] if speed.room and companion is None else None
    if not is_source(source):
        return {}
    example = next(iter(source.ordered(batch=LOOK, limit=LOOK)))[0]
    found = {n: with_room(m, moved(example, home(m))) for n, m in models.items()}
    return {n: room for n, room in found.items() if room is not None}
