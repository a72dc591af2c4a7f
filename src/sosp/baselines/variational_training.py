"""Variational pruning: the scales of the batch norms are Gaussians that are learned; those held at zero go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sosp.baselines.arguments import (
    check_number,
    count_epoch_examples,
    prepare_schedule,
    prepare_structures,
    take_example,
)
from sosp.baselines.learned_result import Learned, find_structure_maxima
from sosp.core.layers import GateHook, align_values, hook_output
from sosp.errors import check_whole_number
from sosp.graph.mask import Mask
from sosp.graph.records import Saliency, Structures
from sosp.training import Companion, Schedule, train
from sosp.training.loop import OnEpoch

MEAN, DEVIATION = 0.02, 0.01  # a channel whose scale has less of both goes
SMALLEST = 1e-2  # scale to begin with: the shift is divided by it


def variational(
    model: nn.Module,
    data: Any,
    schedule: Schedule | str = "cifar",
    *,
    structures: Structures | None = None,
    strength: float = 1.0,
    prior: float | None = None,
    warmup: int = 0,
    spread: float = 0.1,
    folder: str | Path | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    on_epoch: OnEpoch | None = None,
) -> Learned:
    """Train ``model`` with Gaussian scales in its batch norms, and rank its channels by them.

    Zhao et al., Variational Convolutional Neural Network Pruning, CVPR 2019. A batch norm becomes
    ``gamma * (normalised + beta)`` with ``gamma ~ N(mu, sigma^2)``, drawn for every batch; the loss is the
    cross-entropy plus ``strength / N`` times the divergence of these from a prior around zero, for N training examples.
    A structure's value is ``sqrt(mu^2 + sigma^2)``; ``mask`` has those with ``|mu| < 0.02`` and ``sigma < 0.01``. The
    network that is returned has plain batch norms with ``gamma = mu``.

    ``prior``: its deviation; without it the prior is as wide as each posterior, and the divergence
    ``mu^2 / (2 sigma^2)``. ``warmup``: steps in which the divergence rises to its weight. ``spread``: sigma at the
    start, as a share of the scale. The rest is as for ``sosp.train``.
    """
    schedule = prepare_schedule("variational", schedule)
    found = prepare_structures("variational", model, take_example(model, data), structures, needs=("norms",))
    examples = count_epoch_examples(data, schedule)
    norms = [name for layer in found.layers for name in layer.norms]
    weight = check_number("strength", strength) / examples
    companion = GaussianScales(norms, weight, prior=prior, warmup=warmup, spread=spread)
    trained = train(
        model, data, schedule, folder=folder, seed=seed, device=device, companion=companion, on_epoch=on_epoch
    )
    scales: GaussianScales = trained.companion
    scales.settle()
    saliency = Saliency(found, "variational", None, values=scales.sizes(found), examples=examples)
    gone = Mask.from_structures(found, scales.vanished(found).nonzero().flatten())
    return Learned(trained.model, saliency, gone, trained.history)


def compute_divergence(mean: Tensor, deviation: Tensor, prior: float | None = None) -> Tensor:
    """``KL(N(mean, deviation^2) || N(0, prior^2))``, number by number; without a prior, of one as wide as itself."""
    if prior is None:
        return (mean / deviation).square() / 2
    return (prior / deviation).log() + (deviation.square() + mean.square()) / (2 * prior**2) - 0.5


class GaussianScales(Companion):
    """Draws the scales of some batch norms for every batch, and adds ``weight`` times their divergence to the loss.

    Their own scales rest at one meanwhile; ``settle`` gives them the means. The deviation is learned as the logarithm
    of its ratio to the one it began with, so that a decay of the weights takes it there and not to one.
    """

    def __init__(
        self, norms: Sequence[str], weight: float, *, prior: float | None = None, warmup: int = 0, spread: float = 0.1
    ) -> None:
        self.names, self.weight = tuple(norms), check_number("weight", weight)
        self.prior = None if prior is None else check_number("prior", prior, least=1e-6)
        self.warmup = check_whole_number("warmup", warmup, least=0)
        self.spread = check_number("spread", spread, least=1e-6)

    def begin(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        self.norms: list[Any] = [model.get_submodule(name) for name in self.names]
        scale = torch.cat([m.weight.detach() for m in self.norms])
        scale = torch.where(scale < 0, -1.0, 1.0) * scale.abs().clamp_min(SMALLEST)
        self.widths = [len(m.weight) for m in self.norms]
        self.mean, self.log = nn.Parameter(scale), nn.Parameter(torch.zeros_like(scale))
        self.start = self.spread * scale.abs()
        self.count = torch.zeros_like(scale[:1])
        self.learned = [m.weight.requires_grad for m in self.norms]
        self._rest(scale)
        hooks = [hook_output(m, GateHook(self.scaled, i)) for i, m in enumerate(self.norms)]
        self.handles = [model.register_forward_pre_hook(self._draw), *hooks]
        return {"mean": self.mean, "log": self.log}

    @torch.no_grad()
    def _rest(self, scale: Tensor) -> None:
        """``scale * x + bias`` as ``scale * (1 * x + bias / scale)``."""
        for m, own in zip(self.norms, scale.detach().split(self.widths), strict=True):
            m.weight.requires_grad_(False).fill_(1)
            m.bias.div_(own)

    @property
    def deviation(self) -> Tensor:
        return self.start * self.log.exp()

    def _draw(self, model: nn.Module, args: Any) -> None:
        """New scales for a forward pass; their means in eval mode."""
        noise = self.deviation * torch.randn_like(self.mean) if model.training else 0.0
        self.drawn = (self.mean + noise).split(self.widths)

    def scaled(self, i: int, output: Tensor) -> Tensor:
        return output * align_values(self.drawn[i].to(output.dtype), output.dim(), 1)

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, labels: Tensor) -> Tensor:
        share = ((self.count + 1) / self.warmup).clamp_max(1).squeeze() if self.warmup else 1.0
        return share * self.weight * compute_divergence(self.mean, self.deviation, self.prior).sum()

    def after(self, model: nn.Module, rate: float | Tensor) -> None:
        self.count += 1
        self.drawn = ()  # with its graph, which a step that is captured afterwards would stumble over

    def tensors(self) -> dict[str, Tensor]:
        return {"count": self.count}

    @torch.no_grad()
    def settle(self) -> None:
        """Plain batch norms again."""
        for handle in self.handles:
            handle.remove()
        for m, own, learned in zip(self.norms, self.mean.split(self.widths), self.learned, strict=True):
            m.weight.copy_(own).requires_grad_(learned)
            m.bias.mul_(own)

    def sizes(self, structures: Structures) -> Tensor:
        """(S,) ``sqrt(mu^2 + sigma^2)``, of the largest scale in a structure."""
        return find_structure_maxima(
            structures, self._by_layer(structures, torch.hypot(self.mean, self.deviation).detach())
        )

    def vanished(self, structures: Structures) -> Tensor:
        """(S,) whether all scales of a structure are near zero, for sure."""
        stays = (self.mean.abs() >= MEAN) | (self.deviation >= DEVIATION)
        return find_structure_maxima(structures, self._by_layer(structures, stays.float())) == 0

    def _by_layer(self, structures: Structures, values: Tensor) -> list[Tensor]:
        """(channels,) of every layer: the largest of its norms, of which it has one for every call."""
        of = dict(zip(self.names, values.split(self.widths), strict=True))
        return [torch.stack([of[name] for name in layer.norms]).amax(0) for layer in structures.layers]
