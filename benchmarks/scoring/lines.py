"""The lines of the table: what is run and timed in each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import NETWORKS, images, network

SAMPLED = 10  # labels per example for SOSP-I where the network has too many outputs for all of them
SEED = 0

# What is measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much data a network is timed on."""

    examples: int
    batch: int  # of the plain gradient pass
    each: int  # examples for methods that go one by one; their time is scaled up to `examples`

    def overridden(self, examples: int | None, batch: int | None) -> Sizes:
        """The command line's numbers where it gives any; nothing larger than the data."""
        N = examples or self.examples
        return Sizes(N, min(batch or self.batch, N), min(self.each, N))


SIZES: dict[tuple[str, str], Sizes] = {
    ("resnet56", "cuda"): Sizes(1000, 1000, 50),
    ("vgg16", "cuda"): Sizes(1000, 1000, 50),
    ("resnet50", "cuda"): Sizes(250, 125, 50),
    ("resnet56", "cpu"): Sizes(200, 100, 10),
    ("vgg16", "cpu"): Sizes(200, 100, 10),
    ("resnet50", "cpu"): Sizes(8, 8, 2),
}
BIG = Sizes(1000, 125, 50)


@dataclass(frozen=True)
class Setup:
    """A network with the data to score it on."""

    name: str
    model: nn.Module
    x: Tensor  # (N, 3, pixels, pixels)
    y: Tensor  # (N,)
    sizes: Sizes
    features: sosp.Structures  # gated after the batch norm
    weights: sosp.Structures  # the same filters, gated before it
    classes: int | None  # sampled labels for SOSP-I; None takes every output

    def head(self, count: int) -> Setup:
        """The same on the first ``count`` examples only."""
        sizes = self.sizes.overridden(count, min(self.sizes.batch, count))
        return replace(self, x=self.x[:count], y=self.y[:count], sizes=sizes)


@dataclass(frozen=True)
class Row:
    """One line of the table: ``prepare`` is not timed; ``run`` counts ``scale`` times, ``finish`` once."""

    label: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    finish: Callable[[Any], Any] = lambda result: None
    scale: float = 1.0
    at_once: int = 0  # examples in one forward pass, for comparing memory at equal batch


class NotMeasuredError(Exception):
    """A line of the table that says why it has no numbers."""


def make_setup(name: str, sizes: Sizes, args: argparse.Namespace, *, all_classes: bool = False) -> Setup:
    """The network and its data on the device, in the asked memory format."""
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = network(name, SEED).to(args.device, memory_format=layout)
    x, y = images(name, sizes.examples, torch.Generator().manual_seed(SEED + 2))
    x, y = x.to(args.device).contiguous(memory_format=layout), y.to(args.device)
    find = partial(sosp.find_structures, model, x[:1], exclude=sosp.downsampling(model))
    features, weights = find(gate="features"), find(gate="weights")
    assert len(features) == NETWORKS[name].structures
    sampled = None if all_classes or NETWORKS[name].classes <= 100 else SAMPLED
    return Setup(name, model, x, y, sizes, features, weights, sampled)


# The lines of the table -------------------------------------------------------------------------------------


def gradient_pass(setup: Setup, *, train: bool) -> None:
    """The gradient of the mean cross-entropy in all parameters, batch by batch."""
    setup.model.train(train)
    for x, y in zip(setup.x.split(setup.sizes.batch), setup.y.split(setup.sizes.batch), strict=True):
        loss = F.cross_entropy(setup.model(x), y, reduction="sum") / len(setup.x)
        loss.backward()


def plain(setup: Setup, *, train: bool) -> Row:
    label = f"plain gradient, {'train' if train else 'eval'} mode"
    return Row(label, lambda _: gradient_pass(setup, train=train), at_once=setup.sizes.batch)


def scored(setup: Setup, method: str, *, gate: str = "features", label: str | None = None) -> Row:
    structures = setup.features if gate == "features" else setup.weights
    run = partial(_score, setup, method, structures)
    return Row(label or method, lambda _: run(), at_once=setup.sizes.batch)


def _score(setup: Setup, method: str, found: sosp.Structures, classes: int | None = None) -> sosp.Saliency:
    data, N = (setup.x, setup.y), len(setup.x)
    return sosp.score(setup.model, data, method=method, structures=found, examples=N, classes=classes)


def gauss_newton(setup: Setup, *, diagonal: bool) -> Row:
    _refuse_slow(setup)
    method = "sosp-i-diagonal" if diagonal else "sosp-i"
    label = method if diagonal else f"{method}, all of Q"
    run = partial(_score, setup, method, setup.features, setup.classes)
    return Row(label + _sampling(setup), lambda _: run(), at_once=setup.sizes.batch)


def baseline(setup: Setup, *, method: str) -> Row:
    """A criterion of the literature; those that need coupled channels get them."""
    found = setup.features
    if "coupled" in sosp.METHODS[method].needs:
        keep = sosp.downsampling(setup.model)
        found = sosp.find_structures(setup.model, setup.x[:1], groups="coupled", exclude=keep)
    run = partial(_score, setup, method, found)
    return Row(method, lambda _: run(), at_once=setup.sizes.batch)


def selection(setup: Setup) -> Row:
    """Half of the structures by the pairs of SOSP-I; the scoring itself is not timed here."""
    _refuse_slow(setup)
    device = setup.x.device

    @cache
    def saliency() -> sosp.Saliency:  # waits in host memory, so that Q is not in the other lines' peaks
        return _score(setup, "sosp-i", setup.features, setup.classes).to("cpu")

    return Row(
        "greedy selection of half, after sosp-i",
        run=lambda s: sosp.select(s, ratio=0.5),
        prepare=lambda: saliency().to(device),
        at_once=setup.sizes.batch,
    )


def _refuse_slow(setup: Setup) -> None:
    if setup.name == "resnet50" and setup.x.device.type == "cpu":
        raise NotMeasuredError("skipped: too slow on a CPU")


def _sampling(setup: Setup) -> str:
    D = NETWORKS[setup.name].classes
    return "" if setup.classes is None else f" ({setup.classes} sampled classes of {D})"


def _torch_pruning() -> Any:
    try:
        import torch_pruning
    except ImportError as error:
        missing = error.name or "torch_pruning"
        why = "not installed" if missing == "torch_pruning" else f"needs {missing}, which is not installed"
        raise NotMeasuredError(why) from error
    return torch_pruning


def _groups(setup: Setup) -> list[Any]:
    """Torch-Pruning's counterpart of our structures, found beforehand like ours."""
    graph = _torch_pruning().DependencyGraph().build_dependency(setup.model, setup.x[:1])
    return list(graph.get_all_groups(ignored_layers=[setup.model.fc]))


def group_taylor(setup: Setup) -> Row:
    """One gradient pass in eval mode, then the score of every group."""
    importance = _torch_pruning().importance.GroupTaylorImportance()
    groups = _groups(setup)

    def run(_: None) -> list[Tensor]:
        gradient_pass(setup, train=False)
        return [importance(g) for g in groups]

    return Row("Torch-Pruning GroupTaylorImportance", run, at_once=setup.sizes.batch)


def group_hessian(setup: Setup) -> Row:
    """As its docstring shows it: one forward pass, then a backward pass per example through its graph."""
    importance = _torch_pruning().importance.GroupHessianImportance()
    groups, n, N = _groups(setup), setup.sizes.each, len(setup.x)

    def run(_: None) -> None:
        importance.zero_grad()
        losses = F.cross_entropy(setup.model(setup.x[:n]), setup.y[:n], reduction="none")
        for loss in losses:
            setup.model.zero_grad()
            loss.backward(retain_graph=True)
            importance.accumulate_grad(setup.model)

    label = "Torch-Pruning GroupHessianImportance"
    label += f" (x{N / n:g} from {n} examples)" if n < N else ""
    return Row(label, run, finish=lambda _: [importance(g) for g in groups], scale=N / n, at_once=n)


OURS = ("sosp-h", "sosp-i", "sosp-i-diagonal", "first-order", "exact", "random")
BASELINES = [m for m, method in sosp.METHODS.items() if m not in OURS and "training" not in method.needs]

METHODS: dict[str, Callable[[Setup], Row]] = {
    "plain": partial(plain, train=True),
    "plain-eval": partial(plain, train=False),
    "first-order": partial(scored, method="first-order"),
    "sosp-h": partial(scored, method="sosp-h", label="sosp-h, gate features"),
    "sosp-h-weights": partial(scored, method="sosp-h", gate="weights", label="sosp-h, gate weights"),
    "sosp-i-diagonal": partial(gauss_newton, diagonal=True),
    "sosp-i": partial(gauss_newton, diagonal=False),
    "select": selection,
    **{method: partial(baseline, method=method) for method in BASELINES},
    "tp-taylor": group_taylor,
    "tp-hessian": group_hessian,
}
