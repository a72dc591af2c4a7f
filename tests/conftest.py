"""What every test run shares: tests marked `gpu` are skipped without CUDA, hypothesis runs are repeatable."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("sosp", deadline=None, derandomize=True)
settings.load_profile("sosp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
