"""Compute a Saliency from a model and data: ``score``."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core import distributed
from sosp.core.batches import Chunk, distribute_examples, iterate_chunks, open_data
from sosp.core.borrowed_model import borrow_model, find_device
from sosp.core.layers import find_width
from sosp.core.loss_names import AUTO, LOSS_TITLES, LossLike, name_loss, resolve_loss
from sosp.core.losses import IGNORE_INDEX, predict_targets, read_returned_loss
from sosp.core.opened_data import count_expected_examples
from sosp.core.outputs import find_logits, find_output_tensors, infer_loss
from sosp.errors import ArgumentError, DataError, LossError, StructureError, check_choice, is_number
from sosp.graph.records import OBJECTIVES, Saliency, Structures
from sosp.graph.structures import find_structures
from sosp.scoring.label_certainty import FewEffectiveExamplesWarning, LabelCertainty
from sosp.scoring.methods import METHODS, NEEDS, Method
from sosp.scoring.own_targets import LOOK, OwnTargets, choose_own_targets, take_look
from sosp.scoring.passes import Options, Problem, Terms, Values, count_library_frames

ZERO_TOLERANCE = 1e-200  # sosp-obs damps a matrix of zeros with at least 1e-300
FEW = 3  # layers named in a message
TARGETS = ("labels", "own")


def score(
    model: nn.Module,
    data: Any,
    *,
    method: str = "sosp-h",
    loss: LossLike = AUTO,
    structures: Structures | None = None,
    examples: int | None = 1000,
    generator: torch.Generator | None = None,
    objective: str | None = None,
    classes: int | None = None,
    targets: str = "labels",
    temperature: float | str = AUTO,
) -> Saliency:
    """Return the estimated loss change when each structure is removed.

    The model is run in eval mode and left exactly as it was. With several processes started by torchrun, each process
    scores its share of the examples and all get the same saliency. Give all of them the same data.

    Args:
        model: The network to score.
        data: A DataLoader or another iterable of (inputs, targets), a tuple of two tensors, a Dataset of torch or of
            Hugging Face, or dict batches for which the model returns its own loss. Several inputs are a tuple,
            ((x1, x2), targets). Numpy arrays may stand in place of tensors. Methods that read only weights do not read
            it: it may be None if ``structures`` is given. Methods that read no labels ("sosp-obs", "obd", "hrank")
            also take inputs alone: a tensor, batches, dicts without labels, or a list of images of one shape.
        method: A name in ``sosp.METHODS``.
        loss: ``"auto"`` for the loss that fits the outputs and targets: cross-entropy for whole numbers, probabilities
            and what is called logits; squared error for other numbers, hidden states and samples. Or
            ``"cross_entropy"``, ``"bce"`` (independent logits), ``"mse"`` (half the squared distance), the same as a
            loss of torch (``nn.CrossEntropyLoss(weight=w)``, ``F.cross_entropy``), or a function of (outputs, targets)
            that returns one loss per example or their mean. The mean is slower: the function is called for every
            example. Losses of several positions (pixels, tokens) are means over the positions of an example, and
            weights of classes are factors.
        structures: From ``find_structures``. By default filters gated at their features, coupled if the method needs
            it.
        examples: Number of examples to score with; None for all.
        generator: Source of randomness: which examples are drawn from tensors or a Dataset, and sampled labels.
        objective: How ``Saliency.scores`` and ``select`` combine the terms. By default the method's own objective,
            "signed" for "ccp" and "individual" for all others.
        classes: For SOSP-I with many outputs: this many random cotangents per example (unbiased) instead of one for
            every output.
        targets: ``"labels"`` of the data, or ``"own"``: the network's own outputs, for SOSP-I, SOSP-H, "exact" and
            "sosp-obs". Then the data needs no labels, and a saliency is the change of all outputs together: of logits
            their divergence at a temperature, of numbers half of their squared change in units of their variance (with
            ``loss="mse"`` as it is). A network that has memorised its training labels is scored more reliably by its
            own outputs. Positions that an ``attention_mask`` leaves out do not count.
        temperature: What logits are divided by for ``targets="own"``. ``"auto"``: the smallest of 1, 2, 4 and 8 at
            which more than a quarter of the examples is effective, ``(sum r)^2 > N / 4 sum r^2`` with
            ``r = 1 - sum p^2``, judged by 64 of them.

    Returns:
        The saliency, in the precision of the model or in single precision if the model has less. Its ``targets`` name
        what was compared, such as "own logits (cross-entropy, T = 2)".

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
    loss = loss if loss == AUTO else resolve_loss(loss)
    chosen = METHODS[method]
    own = _check_targets(targets, temperature, method, loss)
    if classes is not None and not chosen.samples:
        those = ", ".join(repr(name) for name, m in METHODS.items() if m.samples)
        raise ArgumentError(f"classes= is only for {those}; method={method!r} does not sample labels. Leave it out.")
    with borrow_model(model):  # also restores the random state: reading a shuffled loader draws random numbers
        if structures is not None:
            check_structures(model, structures, method)
        reads = chosen.data or structures is None
        alone = own or not (chosen.labels and chosen.data)  # what reads no labels need not be given any
        data = open_data(data, model) if reads else None
        chunks = _chunks(data, examples, generator, alone, model) if reads else iter(())
        compared = None
        if own:
            look, chunks = take_look(chunks, LOOK if AUTO in (loss, temperature) else 2)
            compared = choose_own_targets(model, look, name_loss(loss) or AUTO, temperature)
        elif loss == AUTO and reads:
            look, chunks = take_look(chunks, 2)
            loss = infer_label_loss(model, look[0])
        labels = LabelCheck(loss)
        chunks = labels.record_targets(chunks)
        if not chosen.labels and not own:
            chunks = (add_pseudo_labels(model, chunk, loss) for chunk in chunks)
        if structures is None:
            head = next(chunks)
            chunks = itertools.chain([head], chunks)
            groups = "coupled" if "coupled" in chosen.needs else "independent"
            structures = find_structures(model, head.rows(0, min(2, head.size)).inputs, groups=groups)
            check_structures(model, structures, method)
        mine = distribute_examples(chunks, distributed.get_rank(), distributed.count_ranks())
        expected = count_expected_examples(data, examples, distributed.count_ranks())
        certainty = LabelCertainty(name) if chosen.labels and not own and (name := name_loss(loss)) else None
        problem = Problem(model, structures, loss, mine, expected, compared, certainty)
        found = chosen.run(problem, Options(classes, generator))
        noise = certainty.explain_noise(find_device(model), chosen.own) if certainty and chosen.data else None
    saliency = _saliency(found, structures, method, next(model.parameters()).dtype, objective)
    saliency = _name_targets(saliency, chosen, compared, loss)
    if noise is not None:
        warnings.warn(noise, FewEffectiveExamplesWarning, stacklevel=count_library_frames())
    if labels.are_ignored and not own:
        _refuse_zeros(saliency)
    return saliency


def _check_targets(targets: str, temperature: float | str, method: str, loss: LossLike) -> bool:
    """Return whether the network's own outputs are the targets; raise ArgumentError if the method cannot use them."""
    check_choice("targets", targets, TARGETS)
    if targets == "labels":
        return False
    if not METHODS[method].own:
        those = ", ".join(repr(name) for name, m in METHODS.items() if m.own)
        raise ArgumentError(f"targets='own' has no slope, which method={method!r} needs. These take it: {those}.")
    if loss != AUTO and name_loss(loss) is None:
        raise ArgumentError(
            "targets='own' compares outputs by a known loss. Leave loss out, or give 'cross_entropy', 'bce' or 'mse'."
        )
    if temperature != AUTO and (not is_number(temperature) or not 0 < temperature < math.inf):
        raise ArgumentError(f"temperature={temperature!r} must be a positive number, or 'auto'.")
    return True


def _name_targets(saliency: Saliency, method: Method, own: OwnTargets | None, loss: LossLike) -> Saliency:
    """Return the saliency with the names of what was compared and of the loss."""
    if own is not None:
        return replace(saliency, targets=f"own {own.summary}", loss=own.outputs[0].loss)
    if not method.labels or not method.data:
        return saliency
    name = name_loss(loss)
    title = LOSS_TITLES[name] if name else "your own loss"
    return replace(saliency, targets=f"labels ({title})", loss=name or "")


def _refuse_zeros(saliency: Saliency) -> None:
    """Raise LossError if every saliency is zero because all labels are ignored."""
    terms = (saliency.first, saliency.second, saliency.pairs, saliency.values)
    if not any(bool((t.abs() > ZERO_TOLERANCE).any()) for t in terms if t is not None):
        raise LossError(
            f"every label of the {saliency.examples:,} examples is {IGNORE_INDEX}, which cross-entropy ignores: there "
            f"is no loss, and every saliency of method={saliency.method!r} is zero. Give labels."
        )


def _chunks(
    data: Any, examples: int | None, generator: torch.Generator | None, alone: bool, model: nn.Module
) -> Iterator[Chunk]:
    """Yield the chunks of the data; raise DataError if there are none."""
    chunks = iter(iterate_chunks(data, examples, generator, alone=alone, model=model))
    head = next(chunks, None)
    if head is None or head.size == 0:
        raise DataError("the data is empty: it contains no examples to score with. Is the loader's dataset empty?")
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
                f"objective={objective!r} combines derivatives of the loss, and method={method!r} has its own "
                "ranking. Leave objective out."
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


def check_requirements(name: str, methods: Mapping[str, Method], model: nn.Module, structures: Structures) -> None:
    """Raise an error that names what the network or the structures lack for a method, and the methods that work.

    Raises:
        ArgumentError: The method does not take structures of this kind.
        StructureError: The network or the structures do not meet a need of the method.
    """
    method, kind = methods[name], structures.kind
    if kind not in method.kinds:
        raise ArgumentError(
            f"method={name!r} does not take kind={kind!r} ({len(structures):,} structures), only "
            f"{' and '.join(map(repr, method.kinds))}. {_others(name, methods, model, structures)}"
        )
    for need in (NEEDS[n] for n in method.needs):
        lacking = need.lacking(model, structures)
        if lacking is not None:
            concerned = f" (not met by {_join_names(lacking)})" if lacking else ""
            raise StructureError(
                f"method={name!r} needs {need.what}{concerned}. "
                f"{need.advice.format(names=_join_names(lacking, ', ...'), method=name)}. "
                f"{_others(name, methods, model, structures)}"
            )


def _others(name: str, methods: Mapping[str, Method], model: nn.Module, structures: Structures) -> str:
    """Return a sentence that lists the methods that work here."""
    fit = [other for other, m in methods.items() if other != name and _suits(m, model, structures)]
    return f"These work here: {', '.join(map(repr, fit))}."


def _suits(method: Method, model: nn.Module, structures: Structures) -> bool:
    return structures.kind in method.kinds and all(NEEDS[n].lacking(model, structures) is None for n in method.needs)


def _join_names(names: Iterable[str], more: str = "") -> str:
    """Return ``'a', 'b', 'c' and 4 more``."""
    names = list(names)
    rest = len(names) - FEW
    shown = ", ".join(map(repr, names[:FEW]))
    return shown if rest <= 0 else shown + (more or f" and {rest} more")


# Labels: whether any counts, and predictions in place of missing ones -------------------------------------------------


class LabelCheck:
    """Record of whether any label of the data is not ignored."""

    def __init__(self, loss: LossLike) -> None:
        self.loss = loss
        self.seen = self.counts = False

    def record_targets(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the same chunks and record their targets."""
        for chunk in chunks:
            if isinstance(chunk.targets, Tensor):
                self.seen = True
                self.counts = self.counts or bool((chunk.targets != IGNORE_INDEX).any())
            yield chunk

    @property
    def are_ignored(self) -> bool:
        """Return whether there were labels and cross-entropy ignores all of them."""
        return name_loss(self.loss) == "cross_entropy" and self.seen and not self.counts


@torch.no_grad()
def infer_label_loss(model: nn.Module, chunk: Chunk) -> str:
    """Return the loss that fits the outputs for these examples and their targets; cross-entropy for whole numbers."""
    targets = chunk.targets
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        return "cross_entropy"
    outputs = chunk.run(model)
    if chunk.keyed and read_returned_loss(outputs) is not None:
        return "cross_entropy"
    logits = find_logits(outputs)
    fits = targets is None or (isinstance(targets, Tensor) and targets.shape == logits.shape)
    name = next(name for name, x in find_output_tensors(outputs, chunk.size).items() if x is logits)
    return infer_loss(name, logits, chunk, targets) if fits else "cross_entropy"


def add_pseudo_labels(model: nn.Module, chunk: Chunk, loss: LossLike) -> Chunk:
    """Return the same examples; if they have no targets, the predictions of ``model`` are their targets."""
    if chunk.targets is not None:
        return chunk
    name = name_loss(loss)
    if name is None and chunk.keyed:
        return chunk
    if name is None:
        raise DataError(
            "the data has no targets, and they cannot be predicted for a loss function of your own. Give targets."
        )
    with torch.no_grad():
        logits = find_logits(chunk.run(model))
    return replace(chunk, targets=predict_targets(name, logits))
