"""The network of these tests, trained."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.quarters import Net, pictures


@pytest.fixture(scope="session")
def trained() -> dict[str, Tensor]:
    """The state after a few steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net().train()
        x, y = pictures()
        optimiser = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(40):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model.state_dict()


@pytest.fixture
def model(trained: dict[str, Tensor]) -> Net:
    net = Net()
    net.load_state_dict(trained)
    return net.eval()
