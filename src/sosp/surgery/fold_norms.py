"""Batch norms folded into the convolutions before them: the same network for inference, with less to do."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sosp.core.batches import call_model
from sosp.graph.forward_code import list_tensors
from sosp.graph.recipe import replace_module

CLOSE = 1e-3  # of the largest output, in single precision; a wrong fold is off by much more


@torch.no_grad()
def fold_norms(model: nn.Module, example: Any) -> nn.Module:
    """A copy in eval mode; the model itself where something else than its norm reads a convolution's output."""
    twin = copy.deepcopy(model).eval()
    pairs, outputs = _pairs(twin, example)
    for layer, norm in pairs:
        both: Any = (twin.get_submodule(layer), twin.get_submodule(norm))
        replace_module(twin, layer, fuse_conv_bn_eval(*both))
        replace_module(twin, norm, nn.Identity())
    return twin if _same(call_model(twin, example), outputs) else model


def _pairs(model: nn.Module, example: Any) -> tuple[list[tuple[str, str]], Any]:
    """Convolutions and the norms that are given their output, where each is called once; and the model's outputs."""
    given: dict[int, tuple[str, Tensor]] = {}  # the tensors stay alive, so that no other gets the same number
    called: Counter[str] = Counter()
    found = []

    def after(name: str, y: Tensor) -> None:
        called[name] += 1
        given[id(y)] = (name, y)

    def before(name: str, x: Tensor) -> None:
        called[name] += 1
        if id(x) in given:
            found.append((given[id(x)][0], name))

    hooks = []
    for name, m in model.named_modules():
        if type(m) is nn.Conv2d and "scatter" not in m._modules:
            hooks.append(m.register_forward_hook(lambda m, args, y, name=name: after(name, y)))
        elif type(m) is nn.BatchNorm2d and m.running_var is not None:
            hooks.append(m.register_forward_pre_hook(lambda m, args, name=name: before(name, args[0])))
    outputs = call_model(model, example)
    for hook in hooks:
        hook.remove()
    return [(layer, norm) for layer, norm in found if called[layer] == called[norm] == 1], outputs


def _same(mine: Any, theirs: Any) -> bool:
    pairs = zip(list_tensors(mine), list_tensors(theirs), strict=True)
    return all(bool((a - b).abs().max() <= CLOSE * b.abs().max()) for a, b in pairs)
