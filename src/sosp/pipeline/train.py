"""Train networks, pruned ones too: training that knows how to pad the widths of pruned layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:  # who prunes need not train
    from sosp.training import Companion, Epoch, Moment, Schedule, Speed


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
    on_epoch: Callable[[str, Epoch], None] | None = None,
    on_step: Callable[[int, int, Moment], None] | None = None,
    save_every: float = 600.0,
) -> Any:
    """Train a copy of a network, or of several side by side; pruned layers are padded meanwhile (``Speed.pad_widths``).

    Several networks are trained as each would be alone, except that they draw the random numbers of dropout in turn.
    On a CPU, a training that continues from a checkpoint gives the same bits as one that never stopped.

    Args:
        model: The network, or several by name, ``{"a": model, "b": other}``. It is not changed.
        data: A dataset of ``sosp.data``, a pair of tensors or arrays (inputs, labels), a Dataset of torch or of
            Hugging Face, a loader, or (training data, test data) of any of these.
        schedule: A ``sosp.Schedule`` or the name of one in ``sosp.SCHEDULES``.
        folder: Where checkpoints are written, after every epoch (large ones at most twice a minute), every
            ``save_every`` seconds and on Ctrl-C. Training continues from the newest one.
        seed: Seed of all random numbers; for several networks it may be a dict.
        device: Where the network is trained; by default where it is.
        speed: Precision, memory layout, CUDA graphs, compilation; by default what suits the device.
        teacher: The network whose outputs ``schedule.distill`` compares with.
        companion: A callback with its own loss terms, parameters and steps, see ``sosp.training.Companion``.
        on_epoch: Called with the network's name and the ``Epoch`` after every epoch.
        on_step: Called with the steps done, all steps and the ``Moment`` during an epoch.
        save_every: Seconds between checkpoints within an epoch.

    Returns:
        A ``sosp.Trained``, or a dict of them if ``model`` is a dict.

    Raises:
        ArgumentError: If an argument has a wrong value, or no parameter can be trained.
        DataError: If the data is empty or does not fit the network.
        TrainingError: If the loss becomes infinite or NaN.
    """
    from sosp import training
    from sosp.surgery.pad_widths import pad_model

    return training.train(
        model,
        data,
        schedule,
        folder=folder,
        seed=seed,
        device=device,
        speed=speed,
        teacher=teacher,
        companion=companion,
        on_epoch=on_epoch,
        on_step=on_step,
        save_every=save_every,
        pad=pad_model,
    )
