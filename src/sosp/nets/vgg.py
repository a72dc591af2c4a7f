"""VGG-19 (Simonyan & Zisserman 2015) for 32 x 32 images: with batch norms, and one linear layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sosp.errors import check_whole_number
from sosp.nets.widths import StreamWidth, Width, scale_channels

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # width, convolutions; a max-pool between two stages


class CifarVGG(nn.Module):
    """3x3 convolutions without bias, each with batch norm and ReLU, the mean over the image, a linear layer.

    Layers and start are EigenDamage's (Wang et al. 2019): Kaiming-normal weights over their inputs, a bias of zero.
    The numbers within ``features`` are those of torchvision's vgg19_bn.
    """

    def __init__(self, *, classes: int, width: Width) -> None:
        super().__init__()
        check_whole_number("classes", classes)
        widths = scale_channels(_streams(), width, head="classifier")
        into = 3
        layers: list[nn.Module] = []
        for _, convolutions in STAGES:
            layers += [nn.MaxPool2d(2)] if layers else []
            for _ in range(convolutions):
                out = widths[f"features.{len(layers)}"]
                layers += [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
                into = out
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(into, classes)
        self.apply(_initialize_weights)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        return self.classifier(x.flatten(1))


def _streams() -> list[StreamWidth]:
    found: list[StreamWidth] = []
    number = 0
    for channels, convolutions in STAGES:
        found += [StreamWidth(channels, (f"features.{number + 3 * n}",)) for n in range(convolutions)]
        number += 3 * convolutions + 1
    return found


def _initialize_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def vgg19(*, classes: int = 10, width: Width = 1.0) -> nn.Module:
    """20,035,018 parameters, 398.1 M MACs."""
    return CifarVGG(classes=classes, width=width)
