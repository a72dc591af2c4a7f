"""Networks of this library, of torchvision and of timm."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from sosp import nets
from sosp.core.optional_packages import import_package
from sosp.nets.by_name.network_source import ROWS, InputShape, NetworkSource, check_network_name

IMAGENET: InputShape = (3, 224, 224)
INPUTS: dict[str, InputShape] = {  # of sosp's networks that are not for CIFAR, and of torchvision's that are larger
    "resnet18": IMAGENET,
    "resnet50": IMAGENET,
    "mobilenet_v2": IMAGENET,
    "digits_resnet": (1, 8, 8),
    "inception_v3": (3, 299, 299),
}


def _class_argument(classes: int | None) -> dict[str, int]:
    return {} if classes is None else {"num_classes": classes}


def _sosp(name: str, classes: int | None, width: nets.Width) -> nn.Module:
    check_network_name("sosp", name, nets.NETS)
    return nets.make(name, classes=classes, width=width)


def _torchvision(name: str, classes: int | None, width: nets.Width) -> nn.Module:
    models = import_package("torchvision").models
    check_network_name("torchvision", name, models.list_models(module=models))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Inception's about how its weights start
        return models.get_model(name, weights=None, **_class_argument(classes))


def _timm(name: str, classes: int | None, width: nets.Width) -> nn.Module:
    timm = import_package("timm")
    check_network_name(
        "timm", name.partition(".")[0], timm.list_models()
    )  # resnet50.a1_in1k: the weights go unnamed here
    return timm.create_model(name, pretrained=False, **_class_argument(classes))


def _timm_inputs(name: str, model: nn.Module) -> Tensor:
    described: Any = getattr(model, "pretrained_cfg", None) or {}
    return torch.zeros(ROWS, *described.get("input_size", IMAGENET))


SOSP = NetworkSource(_sosp, lambda name, model: torch.zeros(ROWS, *INPUTS.get(name, (3, 32, 32))))
TORCHVISION = NetworkSource(_torchvision, lambda name, model: torch.zeros(ROWS, *INPUTS.get(name, IMAGENET)))
TIMM = NetworkSource(_timm, _timm_inputs)
