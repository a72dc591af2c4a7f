"""Compute a Saliency from a model and data: the table of methods and ``score``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core import distributed
from sosp.core.batches import Chunk, distribute_examples, iterate_chunks
from sosp.core.borrowed_model import borrow_model, find_device
from sosp.core.layers import find_width
from sosp.core.losses import IGNORE_INDEX, LossLike
from sosp.core.losses import check_loss as check_loss
from sosp.errors import ArgumentError, DataError, LossError, check_choice
from sosp.graph.records import OBJECTIVES, Saliency, Structures
from sosp.graph.structures import find_structures
from sosp.scoring.criteria import (
    ccp,
    fisher,
    fpgm,
    hrank,
    magnitude,
    obd,
    obs,
    slimming,
    snip,
    sosp,
    taylor,
)
from sosp.scoring.method import (
    LabelCheck,
    Method,
    Options,
    Values,
    add_pseudo_labels,
    check_requirements,
    refuse_scoring,
)
from sosp.scoring.passes import Problem, Terms

SOSP = (
    "Nonnenmacher et al., SOSP: Efficiently Capturing Global Correlations by Second-Order Structured Pruning, ICLR 2022"
)
MOLCHANOV = "Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019"
LIU_2021 = "Liu et al., Group Fisher Pruning for Practical Network Compression, ICML 2021"
LI = "Han et al., NeurIPS 2015; Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017"
WANG = "Wang et al., EigenDamage: Structured Pruning in the Kronecker-Factored Eigenbasis, ICML 2019"
ALL = ("filters", "blocks", "weights")
FILTERS = ("filters",)
ZERO_TOLERANCE = 1e-200  # sosp-obs damps a matrix of zeros with at least 1e-300

METHODS: dict[str, Method] = {
    "sosp-h": Method(sosp.sosp_h, "first order, and the exact Hessian times the sum of all structures", SOSP, ALL),
    "sosp-i": Method(sosp.sosp_i, "first order, and Gauss-Newton terms of all pairs of structures", SOSP, samples=True),
    "sosp-i-diagonal": Method(sosp.sosp_i_diagonal, "sosp-i without correlations", SOSP, samples=True),
    "first-order": Method(sosp.first_order, "gradient of the loss in each structure", SOSP, ALL),
    "exact": Method(sosp.exact, "first order, and all pairs with the exact Hessian", SOSP),
    "random": Method(sosp.random, "one uniform random number per structure", SOSP, ALL),
    "magnitude-l1": Method(magnitude.l1, "sum of a filter's absolute weights", LI, ALL, scope="layer", data=False),
    "magnitude-l2": Method(magnitude.l2, "Euclidean norm of a filter", LI, ALL, scope="layer", data=False),
    "slimming": Method(
        slimming.slimming,
        "scale of a channel's batch norm",
        "Liu et al., Learning Efficient Convolutional Networks through Network Slimming, ICCV 2017",
        needs=("norms",),
        data=False,
    ),
    "taylor": Method(taylor.taylor, "squared gradient in a filter's weights, mean over minibatches", MOLCHANOV),
    "taylor-bn": Method(
        taylor.taylor_bn, "squared gradient in the batch norm, mean over minibatches", MOLCHANOV, needs=("norms",)
    ),
    "fisher": Method(
        fisher.fisher,
        "squared gradient in each structure, mean over examples",
        "Theis et al., Faster gaze prediction with dense networks and Fisher pruning, 2018",
    ),
    "group-fisher": Method(
        fisher.group_fisher, "fisher of coupled channels, divided by their memory", LIU_2021, FILTERS, ("coupled",)
    ),
    "group-fisher-macs": Method(
        fisher.group_fisher_macs, "fisher of coupled channels, divided by their MACs", LIU_2021, FILTERS, ("coupled",)
    ),
    "obd": Method(
        obd.obd,
        "Fisher information of a filter's weights with their correlations, from Kronecker factors",
        WANG,
        samples=True,
        labels=False,
    ),
    "obd-diagonal": Method(
        obd.obd_diagonal, "Fisher information of a filter's weights, diagonal", WANG, samples=True, labels=False
    ),
    "eigendamage": Method(
        refuse_scoring,
        "directions of a layer's Kronecker factors (sosp.eigendamage)",
        WANG,
        FILTERS,
        ("rotation",),
    ),
    "sosp-obs": Method(
        obs.sosp_obs,
        "Gauss-Newton pairs, after the remaining structures have compensated for a removal",
        "Hassibi and Stork, Second order derivatives for network pruning: Optimal Brain Surgeon, NeurIPS 1992; "
        "with the pairs of SOSP-I",
        samples=True,
        labels=False,
    ),
    "fpgm": Method(
        fpgm.fpgm,
        "distance to the other filters of the layer",
        "He et al., Filter Pruning via Geometric Median, CVPR 2019",
        FILTERS,
        scope="layer",
        data=False,
    ),
    "hrank": Method(
        hrank.hrank,
        "mean rank of the feature maps",
        "Lin et al., HRank: Filter Pruning using High-Rank Feature Map, CVPR 2020",
        FILTERS,
        scope="layer",
        labels=False,
    ),
    "ccp": Method(
        ccp.ccp,
        "first order and pairs within a layer, as one quadratic programme",
        "Peng et al., Collaborative Channel Pruning for Deep Networks, ICML 2019",
        FILTERS,
        scope="layer",
        objective="signed",
    ),
    "snip": Method(
        snip.snip,
        "absolute gradient in a structure's weights, meant for untrained networks",
        "Lee et al., ICLR 2019; van Amersfoort et al., Single Shot Structured Pruning Before Training, 2020",
        ALL,
    ),
    "variational": Method(
        refuse_scoring,
        "mean of a channel's scale, a learned Gaussian (sosp.learned.variational)",
        "Zhao et al., Variational Convolutional Neural Network Pruning, CVPR 2019",
        needs=("training",),
    ),
    "gal": Method(
        refuse_scoring,
        "soft mask, learned against a discriminator (sosp.learned.gal)",
        "Lin et al., Towards Optimal Structured CNN Pruning via Generative Adversarial Learning, CVPR 2019",
        needs=("training",),
    ),
    "amc": Method(
        refuse_scoring,
        "norm of a filter, with a searched share per layer (sosp.learned.amc)",
        "He et al., AMC: AutoML for Model Compression and Acceleration on Mobile Devices, ECCV 2018",
        FILTERS,
        needs=("training",),
        scope="layer",
    ),
}


def score(
    model: nn.Module,
    data: Any,
    *,
    method: str = "sosp-h",
    loss: LossLike = "cross_entropy",
    structures: Structures | None = None,
    examples: int | None = 1000,
    generator: torch.Generator | None = None,
    objective: str | None = None,
    classes: int | None = None,
) -> Saliency:
    """Return the estimated loss change when each structure is removed.

    The model is run in eval mode and left exactly as it was. With several processes started by torchrun, each process
    scores its share of the examples and all get the same saliency. Give all of them the same data.

    Args:
        model: The network to score.
        data: A DataLoader or another iterable of (inputs, targets), a tuple of two tensors, or dict batches for which
            the model returns its own loss. Methods that read only weights do not read it: it may be None if
            ``structures`` is given. Methods that read no labels ("sosp-obs", "obd", "hrank") also take a tensor or
            batches of inputs.
        method: A name in ``sosp.METHODS``.
        loss: ``"cross_entropy"``, ``"mse"`` or a function of (outputs, targets) that returns one loss per example.
        structures: From ``find_structures``. By default filters gated at their features, coupled if the method needs
            it.
        examples: Number of examples to score with; None for all.
        generator: Source of randomness: which examples are drawn from a tuple of tensors, and sampled labels.
        objective: How ``Saliency.scores`` and ``select`` combine the terms. By default the method's own objective,
            "signed" for "ccp" and "individual" for all others.
        classes: For SOSP-I with many outputs: sample this many labels per example (unbiased) instead of using every
            output.

    Returns:
        The saliency, in the precision of the model or in single precision if the model has less.

    Raises:
        ArgumentError: An argument has an invalid value, or the structures belong to another model.
        StructureError: The network or the structures do not meet a need of the method.
        DataError: The data is empty or cannot be read as examples.
        LossError: The loss is not finite, or is not one loss per example.
        DifferentiationError: The loss cannot be differentiated in the structures.
    """
    check_choice("method", method, METHODS)
    if objective is not None:
        check_choice("objective", objective, OBJECTIVES)
    check_loss(loss)
    chosen = METHODS[method]
    if classes is not None and not chosen.samples:
        those = ", ".join(repr(name) for name, m in METHODS.items() if m.samples)
        raise ArgumentError(f"classes= is only for {those}; method={method!r} does not sample labels. Leave it out.")
    with borrow_model(model):  # also restores the random state: reading a shuffled loader draws random numbers
        if structures is not None:
            check_structures(model, structures, method)
        reads = chosen.data or structures is None
        chunks = _chunks(data, examples, generator, chosen, find_device(model)) if reads else iter(())
        labels = LabelCheck(loss)
        chunks = labels.record_targets(chunks)
        if not chosen.labels:
            chunks = (add_pseudo_labels(model, chunk, loss) for chunk in chunks)
        if structures is None:
            head = next(chunks)
            chunks = itertools.chain([head], chunks)
            groups = "coupled" if "coupled" in chosen.needs else "independent"
            structures = find_structures(model, head.rows(0, min(2, head.size)).inputs, groups=groups)
            check_structures(model, structures, method)
        mine = distribute_examples(chunks, distributed.get_rank(), distributed.count_ranks())
        found = chosen.run(Problem(model, structures, loss, mine, examples), Options(classes, generator))
    saliency = _saliency(found, structures, method, next(model.parameters()).dtype, objective)
    if labels.are_ignored:
        _refuse_zeros(saliency)
    return saliency


def _refuse_zeros(saliency: Saliency) -> None:
    """Raise LossError if every saliency is zero because all labels are ignored."""
    terms = (saliency.first, saliency.second, saliency.pairs, saliency.values)
    if not any(bool((t.abs() > ZERO_TOLERANCE).any()) for t in terms if t is not None):
        raise LossError(
            f"every label of the {saliency.examples:,} examples is {IGNORE_INDEX}, which cross-entropy ignores: there "
            f"is no loss at all, and every saliency of method={saliency.method!r} is zero. Give labels."
        )


def _chunks(
    data: Any, examples: int | None, generator: torch.Generator | None, method: Method, device: torch.device
) -> Iterator[Chunk]:
    """Yield the chunks of the data; raise DataError if there are none."""
    chunks = iter(iterate_chunks(data, examples, generator, alone=not method.labels, device=device))
    head = next(chunks, None)
    if head is None or head.size == 0:
        raise DataError("the data is empty: there is not one example to score with. Is the loader's dataset empty?")
    return itertools.chain([head], chunks)


def _saliency(
    found: Terms | Values | Tensor, structures: Structures, method: str, dtype: torch.dtype, objective: str | None
) -> Saliency:
    """Return the result of a method as a record, in the higher of the model's precision and single precision."""
    scope, own = METHODS[method].scope, METHODS[method].objective
    if isinstance(found, Tensor):
        found = Values(found)
    if isinstance(found, Values):
        if objective not in (None, "individual"):
            raise ArgumentError(
                f"objective={objective!r} combines derivatives of the loss, and method={method!r} gives a ranking of "
                "its own. Leave objective out."
            )
        return Saliency(structures, method, None, None, None, found.values, own, found.examples, scope)
    kind = torch.promote_types(dtype, torch.float32)
    first, second, pairs = (None if t is None else t.to(kind) for t in (found.first, found.second, found.pairs))
    return Saliency(structures, method, first, second, pairs, None, objective or own, found.examples, scope)


def check_structures(model: nn.Module, structures: Structures, method: str) -> None:
    """Raise an error unless the structures belong to the model and the method can score them.

    Raises:
        ArgumentError: The structures belong to another model, or are of a kind that the method does not take.
        StructureError: The network or the structures do not meet a need of the method.
    """
    _check_model(model, structures)
    check_requirements(method, METHODS, model, structures)


def _check_model(model: nn.Module, structures: Structures) -> None:
    """Raise ArgumentError unless the structures were found in this model or in one with the same layers and widths."""
    names = dict(model.named_parameters() if structures.kind == "weights" else model.named_modules())
    again = "Find them again: structures=sosp.find_structures(model, example)."
    for layer in structures.layers:
        for name in (layer.name, *layer.norms):
            if name not in names:
                raise ArgumentError(f"the structures name {name!r}, which this model does not have. {again}")
        width = find_width(model, layer.name, structures.kind)
        if width != layer.channels:
            raise ArgumentError(
                f"the structures have {layer.channels} channels in {layer.name!r}, this model {width}. {again}"
            )


__all__ = ["METHODS", "Method", "check_structures", "score"]
