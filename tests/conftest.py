"""What every test run shares: one thread, tests marked `gpu` skipped without CUDA, repeatable hypothesis runs."""

import os

import pytest
import torch
from hypothesis import settings

try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:  # built for another torch: declare the two ops that it wants to see, which no test runs
    TORCHVISION = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        TORCHVISION.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

settings.register_profile("sosp", deadline=None, derandomize=True)
settings.load_profile("sosp")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors: a second thread costs up to 40 times what it saves on a busy machine, and rounds differently.

    Also in processes that tests start, whose results are compared bit for bit.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
