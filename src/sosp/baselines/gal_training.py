"""Generative adversarial learning: soft masks fade out while the outputs stay those of the network as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from sosp.baselines.arguments import (
    check_number,
    count_epoch_examples,
    prepare_schedule,
    prepare_structures,
    take_example,
)
from sosp.baselines.fista import Fista
from sosp.baselines.fold_gates import fold_factors, refuse_unfoldable
from sosp.baselines.learned_result import Learned
from sosp.baselines.perceptron import build_perceptron
from sosp.core import distributed
from sosp.core.batches import call_model
from sosp.core.borrowed_model import borrow_model
from sosp.core.layers import align_values, install_gates
from sosp.core.outputs import find_logits
from sosp.errors import check_whole_number
from sosp.graph.mask import Mask
from sosp.graph.records import Saliency, Structures
from sosp.training import Companion, Schedule, train
from sosp.training.loop import OnEpoch

WIDTHS = (128, 256, 128)  # of the discriminator


def gal(
    model: nn.Module,
    data: Any,
    schedule: Schedule | str = "cifar",
    *,
    structures: Structures | None = None,
    strength: float = 0.01,
    closeness: float = 1.0,
    every: int = 200,
    folder: str | Path | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    on_epoch: OnEpoch | None = None,
) -> Learned:
    """Learn a soft mask for the structures of a trained ``model``, and its weights along; labels play no part.

    Lin et al., Towards Optimal Structured CNN Pruning via Generative Adversarial Learning, CVPR 2019
    (github.com/ShaohuiLin/GAL). Every structure is scaled by a number, one at first, and the network minimises
    ``closeness * mse(outputs, those of model) + BCE(D(outputs), 1) + strength * |mask|_1``, the last by a proximal step
    (FISTA) on every ``every``-th batch. The discriminator D tells the two networks' outputs apart:
    ``BCE(D(theirs), 1) + BCE(D(mine), 0) + BCE(D(mine), 1)``, whose last term keeps it from being too sure.

    A structure's value is its number in the mask; ``mask`` has those that are zero. In the network that is returned the
    numbers are part of its weights, so that removing the zeros changes nothing. The rest is as for ``sosp.train``.
    """
    schedule = prepare_schedule("gal", schedule)
    example = take_example(model, data)
    found = prepare_structures("gal", model, example, structures)
    refuse_unfoldable(model, found)
    with borrow_model(model), torch.no_grad():
        outputs = find_logits(call_model(model, example)).flatten(1).shape[1]
    companion = AdversarialMask(found, outputs, strength=strength, closeness=closeness, every=every, seed=seed)
    trained = train(
        model, data, schedule, folder=folder, seed=seed, device=device, companion=companion, on_epoch=on_epoch
    )
    values = trained.companion.settle(trained.model)
    saliency = Saliency(found, "gal", None, values=values, examples=count_epoch_examples(data, schedule))
    gone = Mask.from_structures(found, (values == 0).nonzero().flatten())
    return Learned(trained.model, saliency, gone, trained.history)


class AdversarialMask(Companion):
    """Scales the structures of a network by a soft mask, and trains it to be taken for what it was."""

    replaces = True

    def __init__(
        self,
        structures: Structures,
        outputs: int,
        *,
        strength: float = 0.01,
        closeness: float = 1.0,
        every: int = 200,
        seed: int = 0,
    ) -> None:
        # Every network gets a copy of this, and the channel flow is large.
        self.structures, self.outputs, self.seed = replace(structures, flow=None), outputs, seed
        self.strength, self.closeness = check_number("strength", strength), check_number("closeness", closeness)
        self.every = check_whole_number("every", every)

    def begin(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        some = next(model.parameters())
        self.baseline = copy.deepcopy(model).eval().requires_grad_(False)
        self.discriminator = build_perceptron((self.outputs, *WIDTHS, 1), torch.Generator().manual_seed(self.seed)).to(
            some
        )
        self.mask = torch.ones(len(self.structures), dtype=some.dtype, device=some.device, requires_grad=True)
        self.fista = Fista(self.mask, self.strength, self.every)
        # Where each channel finds its number, on the device before a CUDA graph is captured; the last one is for none.
        self.places = torch.cat(self.structures.ids).to(some.device) % (len(self.structures) + 1)
        self.widths = [layer.channels for layer in self.structures.layers]
        gates = install_gates(model, self.structures.layers, self.structures.gate, self.scaled)
        self.handles = [model.register_forward_pre_hook(self._spread), *gates]
        return dict(self.discriminator.named_parameters())

    def _spread(self, model: nn.Module, args: Any) -> None:
        self.numbers = torch.cat([self.mask, self.mask.new_ones(1)])[self.places].split(self.widths)

    def scaled(self, i: int, output: Tensor) -> Tensor:
        return output * align_values(self.numbers[i].to(output.dtype), output.dim(), self.structures.layers[i].axis)

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, labels: Tensor) -> Tensor:
        mine = find_logits(outputs).flatten(1)
        with torch.no_grad():
            theirs = find_logits(call_model(self.baseline, inputs)).flatten(1)
        return self.closeness * F.mse_loss(mine, theirs) + self.deceived(mine) + self.told_apart(theirs, mine.detach())

    def deceived(self, mine: Tensor) -> Tensor:
        """What the network pays where it is found out; the discriminator does not learn from it."""
        fixed = {n: p.detach() for n, p in self.discriminator.named_parameters()}
        return _label_loss(functional_call(self.discriminator, fixed, (mine,)), 1.0)

    def told_apart(self, theirs: Tensor, mine: Tensor) -> Tensor:
        """What the discriminator pays where it is wrong, or too sure; the network does not learn from it."""
        guess = self.discriminator(mine)
        return _label_loss(self.discriminator(theirs), 1.0) + _label_loss(guess, 0.0) + _label_loss(guess, 1.0)

    def after(self, model: nn.Module, rate: float | Tensor) -> None:
        slope = self.mask.grad
        assert slope is not None
        distributed.sum_tensors(slope)
        self.fista.step(slope, rate)
        self.mask.grad = None
        self.numbers = ()  # with their graph, which a step that is captured afterwards would stumble over

    def tensors(self) -> dict[str, Tensor]:
        return self.fista.tensors()

    def settle(self, model: nn.Module) -> Tensor:
        """The mask, which becomes part of the weights."""
        for handle in self.handles:
            handle.remove()
        fold_factors(model, self.structures, self.mask.detach())
        return self.mask.detach()


def _label_loss(logits: Tensor, label: float) -> Tensor:
    """The mean cross-entropy of calling them that."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))
