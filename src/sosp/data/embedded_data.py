"""Data that needs no download: the handwritten digits that come with scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor

from sosp.data.batch_source import Dataset
from sosp.data.resident_images import Resident
from sosp.errors import SospError, check_whole_number

TEST = 50  # images of each digit


def digits(*, shift: int = 0) -> Dataset:
    """1797 images of 8 x 8 grey levels: 50 of each digit for the test, the other 1297 for training.

    The test images stand at even distances among those of their digit: the same ones with every version of every
    library. Inputs have mean 0 and standard deviation 1 over the training set; with ``shift`` they move by up to so
    many pixels in training.
    """
    check_whole_number("shift", shift, least=0)
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise SospError(
            "the digits come with scikit-learn, which is not installed: pip install 'sosp[demo]'"
        ) from missing
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = x.float().view(-1, 1, 8, 8) / 16
    test = _select_test_images(y)
    train = ~test
    mean, std = [images[train].mean().item()], [images[train].std().item()]
    return Dataset(
        name="digits",
        train=Resident.of(images[train], y[train], mean=mean, std=std, pad=shift),
        test=Resident.of(images[test], y[test], mean=mean, std=std),
        classes=tuple("0123456789"),
        shape=(1, 8, 8),
    )


def _select_test_images(labels: Tensor) -> Tensor:
    """(N,) bool: ``TEST`` images of each class, evenly spread over its own."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        own = (labels == label).nonzero().squeeze(1)
        chosen[own[torch.arange(TEST) * len(own) // TEST]] = True
    return chosen
