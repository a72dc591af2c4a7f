"""Re-estimate batch-norm statistics from data without training: pruning shifts them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core import distributed
from sosp.core.batches import is_pair, is_source
from sosp.core.borrowed_model import find_device, preserve_random_state
from sosp.data.batch_source import make_generator
from sosp.errors import DataError, check_whole_number
from sosp.training.epoch_batches import RankBatch, iterate_in_order, select_rank_rows
from sosp.training.out_of_memory import compute_outputs
from sosp.training.randomness import iterate_with_generator
from sosp.training.sync_norms import explain_small_batch, sync_batch_norms
from sosp.training.user_data import PairSource, count_examples, move_to_device, resolve_source, split_batch

Norm = nn.modules.batchnorm._BatchNorm


def recalibrate(
    model: nn.Module, data: Any, *, examples: int | None = 2000, batch: int = 125, seed: int = 0
) -> nn.Module:
    """Return a copy of a network whose batch-norm statistics are re-estimated; nothing is trained.

    The statistics are averages over batches of their means and unbiased variances, weighted by batch size. All other
    modules run in eval mode.

    Args:
        model: The network. It is not changed.
        data: A dataset of ``sosp.data`` (its training part is used), a source, a pair of tensors or arrays, or a
            Dataset of torch or of Hugging Face, from which ``examples`` are drawn; or batches, which are all used.
            Labels are not read.
        examples: Number of examples to draw; None takes all.
        batch: Examples per batch.
        seed: Seed of the draw.

    Returns:
        The copy.

    Raises:
        DataError: If the data is empty or does not fit the network.
    """
    copied = copy.deepcopy(model)
    norms = [m for m in copied.modules() if isinstance(m, Norm) and m.running_mean is not None]
    if not norms:
        return copied
    modes = {m: m.training for m in copied.modules()}
    factors = {m: m.momentum for m in norms}
    with torch.no_grad(), preserve_random_state():
        copied.eval()
        for m in norms:
            m.reset_running_stats()  # NaN would stay NaN in an average
        source = PairSource(*_add_dummy_labels(data[0])) if is_pair(data) else resolve_source(data, "train", model)
        _run(copied, norms, _batches(source, examples, batch, seed))
    for m in norms:
        m.momentum = factors[m]
    for module, mode in modes.items():
        module.training = mode
    return copied


def _run(model: nn.Module, norms: list[Any], batches: Iterator[RankBatch]) -> None:
    device, seen = find_device(model), 0
    for found in batches:
        seen += found.rows
        for m in norms:
            m.training, m.momentum = True, found.rows / seen
        with sync_batch_norms(found.copies == 1), explain_small_batch():
            compute_outputs(model, move_to_device(found.inputs, device), found.rows)
    if not seen:
        raise DataError("there is nothing to take statistics from: the data is empty.")


def _batches(data: Any, examples: int | None, batch: int, seed: int) -> Iterator[RankBatch]:
    if not is_source(data):
        for inputs, _ in map(split_batch, iterate_with_generator(data, make_generator(seed, 0))):
            yield select_rank_rows(*_add_dummy_labels(inputs))
        return
    wanted = len(data) if examples is None else min(check_whole_number("examples", examples), len(data))
    yield from iterate_in_order(
        data.subset(wanted, seed), _choose_batch_size(wanted, check_whole_number("batch", batch))
    )


def _add_dummy_labels(inputs: Any) -> tuple[Any, Tensor]:
    """Add labels that are not used."""
    return inputs, torch.zeros(count_examples(inputs), dtype=torch.int64)


def _choose_batch_size(total: int, batch: int) -> int:
    """Return a batch size that gives batches of about equal size: small ones have noisy variances, one example none."""
    size = -(-total // -(-total // batch))
    while total % size == 1 and size < total:
        size += 1
    return max(size, distributed.count_ranks())
