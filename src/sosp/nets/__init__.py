"""The paper's networks: a table of names, and ``make``.

``classes`` is the number of outputs. ``width`` multiplies the width of every layer (not the inputs, not the classes),
or of those it names: ``{"layer1": 2.0, "conv1": 1.5}``, a layer, a container or a pattern each. Layers that are added
up have one width, the largest factor asked of any of them. Weights are drawn from torch's global generator.
"""

from collections.abc import Callable

from torch import nn

from sosp.errors import check_choice
from sosp.nets.cifar import (
    digits_resnet,
    plainnet20,
    resnet20,
    resnet32,
    resnet32x4,
    resnet44,
    resnet56,
    resnet110,
)
from sosp.nets.densenet import densenet40
from sosp.nets.imagenet import resnet18, resnet50
from sosp.nets.mobilenet import mobilenet_v2
from sosp.nets.vgg import vgg19
from sosp.nets.widths import Width

NETS: dict[str, Callable[..., nn.Module]] = {
    "vgg19": vgg19,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet44": resnet44,
    "resnet56": resnet56,
    "resnet110": resnet110,
    "resnet32x4": resnet32x4,
    "plainnet20": plainnet20,
    "densenet40": densenet40,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "digits_resnet": digits_resnet,
}


def make(name: str, *, classes: int | None = None, width: Width = 1.0) -> nn.Module:
    """The network of that name, in train mode, with fresh weights; as many classes as its dataset has by default."""
    check_choice("name", name, NETS)
    return NETS[name](width=width) if classes is None else NETS[name](classes=classes, width=width)


__all__ = [
    "NETS", "make", "Width",
    "vgg19",
    "resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "resnet32x4", "plainnet20",
    "densenet40",
    "resnet18", "resnet50", "mobilenet_v2",
    "digits_resnet",
]  # fmt: skip
