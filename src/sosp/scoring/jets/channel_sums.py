"""Sums over everything but the channels, at the speed of memory."""

from torch import Tensor


def sum_per_channel(x: Tensor, axis: int, each: bool) -> Tensor:
    """(C,), or (N, C) with ``each`` example by itself.

    As a product with a vector of ones: on the layouts that occur this reads the memory once, at full speed, where
    ``x.sum(dims)`` takes up to four times as long on a CPU.
    """
    channels = x.shape[axis]
    last = axis == x.dim() - 1
    if not last and x.dim() > 2 and x.stride(axis) == 1 and not x.is_contiguous():  # channels_last
        x, last = x.movedim(axis, -1), True
    if last:
        if not each:
            rows = x.reshape(-1, channels)
            return rows.new_ones(rows.shape[0]) @ rows
        rows = x.reshape(x.shape[0], -1, channels)
        return rows[:, 0] if rows.shape[1] == 1 else rows.sum(1)
    if axis != 1:
        x = x.movedim(axis, 1)
    rows = x.reshape(x.shape[0] * channels, -1)
    each_channel = (rows @ rows.new_ones(rows.shape[1])).view(-1, channels)
    return each_channel if each else each_channel.sum(0)
