"""A small residual network, and images that it learns in a few steps: which quarter is bright."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, EXAMPLES = 4, 64


class Net(nn.Module):
    """Two residual blocks, the second behind a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_bn = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.a1, self.a1_bn = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.a2, self.a2_bn = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.b1, self.b1_bn = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b2, self.b2_bn = nn.Conv2d(8, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.skip, self.skip_bn = nn.Conv2d(6, 10, 1, stride=2, bias=False), nn.BatchNorm2d(10)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_bn(self.stem(x)))
        x = F.relu(x + self.a2_bn(self.a2(F.relu(self.a1_bn(self.a1(x))))))
        y = self.b2_bn(self.b2(F.relu(self.b1_bn(self.b1(x)))))
        return self.head(F.relu(y + self.skip_bn(self.skip(x))).mean((2, 3)))


def pictures() -> tuple[Tensor, Tensor]:
    """A bright quarter, and noise: which quarter it is can be learned in a few steps."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (EXAMPLES,), generator=g)
    x = 0.5 * torch.randn(EXAMPLES, 1, 6, 6, generator=g)
    for i, label in enumerate(y.tolist()):
        row, column = 3 * (label // 2), 3 * (label % 2)
        x[i, 0, row : row + 3, column : column + 3] += 1
    return x, y
