"""Your own network, your own data, your own training loop: sosp only comes in between.

python examples/own_loop.py              a few seconds on one CPU core; downloads nothing
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosp


class Net(nn.Module):
    """A residual block with an add, as plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(20, 48), nn.ReLU())
        self.inner = nn.Sequential(nn.Linear(48, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 48))
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.inner(x)))


def train(model: nn.Module, loader: DataLoader, epochs: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model.eval()(x).argmax(1) == y).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(3000, 20)
    y = 2 * (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > x[:, 3]).long()  # four classes
    loader = DataLoader(TensorDataset(x[:2000], y[:2000]), batch_size=100, shuffle=True)

    model = Net()
    train(model, loader, epochs=20)

    pruned = sosp.prune(model, loader, params=0.4)  # the loader as it is
    print(pruned, pruned.mask, sep="\n")
    small = pruned.model
    before = accuracy(small, x[2000:], y[2000:])

    train(small, loader, epochs=5)  # an ordinary module: the same loop
    after = accuracy(small, x[2000:], y[2000:])
    print(f"trained {accuracy(model, x[2000:], y[2000:]):.1%}, pruned {before:.1%}, fine-tuned {after:.1%}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
