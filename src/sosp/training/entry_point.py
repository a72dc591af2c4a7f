"""Start a training: check the arguments, then run the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.core.batches import is_source
from sosp.core.borrowed_model import find_device, refuse_uninitialised
from sosp.errors import ArgumentError, check_whole_number
from sosp.training.callback import Companion
from sosp.training.learner import Learner, PaddedNetwork
from sosp.training.loop import CheckpointOptions, OnEpoch, OnStep, TrainingCallbacks, TrainingJob
from sosp.training.randomness import use_seed
from sosp.training.schedule import Schedule, resolve_schedule
from sosp.training.speed import Speed, enable_cudnn_benchmark
from sosp.training.user_data import move_to_device, split_train_test

EXAMPLES = 4  # used to trace a network before it is padded

Pad = Callable[
    [nn.Module, Any], PaddedNetwork | None
]  # (network, example) -> the same with wider layers, or None if it would not train faster


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
    pad: Pad | None = None,
) -> Any:
    """Train a copy of each network as ``sosp.train`` does; ``pad`` widens the layers of those that then train faster.

    The other arguments, the result and the exceptions are those of ``sosp.train``.
    """
    schedule = resolve_schedule(schedule)
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    _check(models, schedule, teacher)
    where = torch.device(device) if device is not None else find_device(next(iter(models.values())))
    fast = (speed or Speed()).on(where)
    saving = CheckpointOptions(Path(folder) if folder is not None else None, save_every)
    seeds = _seeds(seed, models)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        enable_cudnn_benchmark(),
        use_seed(next(iter(seeds.values())), where),
    ):
        padded = {} if pad is None else _pad_networks(pad, models, data, fast, companion)
        learners = {n: Learner(m, schedule, fast, where, teacher, companion, padded.get(n)) for n, m in models.items()}
        found = TrainingJob(learners, data, schedule, seeds, saving, TrainingCallbacks(on_epoch, on_step)).run()
    return found if isinstance(model, Mapping) else found[""]


def _check(models: Mapping[str, Any], schedule: Schedule, teacher: nn.Module | None) -> None:
    if not models or not all(isinstance(n, str) and isinstance(m, nn.Module) for n, m in models.items()):
        raise ArgumentError("train takes a module, or a dict from names to modules.")
    for m in models.values():
        refuse_uninitialised(m)
        if not any(p.requires_grad for p in m.parameters()):
            raise ArgumentError("the network has no parameter that could be trained (requires_grad is False for all).")
    if bool(schedule.distill) != (teacher is not None):
        raise ArgumentError("distillation needs both: a teacher, and distill > 0 in the schedule.")


def _seeds(seed: int | Mapping[str, int], models: Mapping[str, nn.Module]) -> dict[str, int]:
    if isinstance(seed, Mapping) and seed.keys() != models.keys():
        raise ArgumentError(f"seed has values for {list(seed)}, but the networks are {list(models)}.")
    return {n: check_whole_number("seed", seed[n] if isinstance(seed, Mapping) else seed, least=0) for n in models}


def _pad_networks(
    pad: Pad, models: Mapping[str, nn.Module], data: Any, speed: Speed, companion: Companion | None
) -> dict[str, PaddedNetwork]:
    """Pad the networks that then train faster.

    No network is padded if there is a companion, which knows the network as given, or a loader, which is read once.
    """
    source: Any = split_train_test(data)[0] if speed.pad_widths and companion is None else None
    if not is_source(source):
        return {}
    example = next(iter(source.ordered(batch=EXAMPLES, limit=EXAMPLES)))[0]
    found = {n: pad(m, move_to_device(example, find_device(m))) for n, m in models.items()}
    return {n: padded for n, padded in found.items() if padded is not None}
