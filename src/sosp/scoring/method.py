"""Define scoring methods: the function, its options, its labels, and its requirements on the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sosp.core.batches import Chunk
from sosp.core.losses import IGNORE_INDEX, LossLike, find_class_axis, find_logits
from sosp.errors import ArgumentError, DataError, StructureError
from sosp.graph.records import Structures
from sosp.scoring.passes import Problem, Terms

FEW = 3  # layers named in a message


@dataclass(frozen=True)
class Options:
    """Options of a criterion that the user gives to ``sosp.score``."""

    classes: int | None = None  # labels sampled per example instead of all outputs (SOSP-I)
    generator: torch.Generator | None = None  # source of randomness


@dataclass(frozen=True)
class Values:
    """Ranking that is not a derivative of the loss, and the number of examples it was computed from."""

    values: Tensor  # (S,)
    examples: int = 0


@dataclass(frozen=True)
class Method:
    """Scoring method, as its paper defines it."""

    run: Callable[[Problem, Options], Terms | Values | Tensor]
    about: str  # one line
    source: str  # who to cite
    kinds: tuple[str, ...] = ("filters", "blocks")  # kinds of structures it takes
    needs: tuple[str, ...] = ()  # keys of NEEDS
    scope: str = "global"  # how its paper ranks: "global", all structures together, or "layer", each layer separately
    objective: str = "individual"  # what ``select`` minimises by default
    data: bool = True  # False: it reads only the weights
    samples: bool = False  # it can sample labels: accepts classes=
    labels: bool = True  # False: it does not read labels, so the data may have none


@dataclass(frozen=True)
class Need:
    """Requirement that a network or its structures must meet."""

    what: str
    advice: str  # {names}: list of the layers concerned; {method}: name of the method
    lacking: Callable[[nn.Module, Structures], list[str] | None]  # layers that do not meet it; None if it is met


def _without_scale(model: nn.Module, structures: Structures) -> list[str] | None:
    """Return the layers that have no norm of their own, or one without a scale."""
    lacking = [
        layer.name
        for layer in structures.layers
        if not layer.norms or any(getattr(model.get_submodule(n), "weight", None) is None for n in layer.norms)
    ]
    return lacking or None


def _without_shared_gate(model: nn.Module, structures: Structures) -> list[str] | None:
    """Return the layers that share a channel with another layer but not the gate of that channel."""
    if structures.flow is None:
        return [layer.name for layer in structures.layers]
    groups, _ = structures.flow.coupled()
    gates: dict[int, int] = {}
    split: dict[str, None] = {}
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        cuts = structures.flow.graph.calls.get(layer.name)
        if cuts and len(cuts[0].out) == layer.channels:
            for group, gate in zip(groups[cuts[0].out].tolist(), ids.tolist(), strict=True):
                if gates.setdefault(group, gate) != gate:
                    split[layer.name] = None
    return list(split) or None


NEEDS: dict[str, Need] = {
    "norms": Need(
        "a batch norm with a scale after every layer, used by that layer only",
        "Exclude those layers with exclude=[{names}]",
        _without_scale,
    ),
    "coupled": Need(
        "channels that are coupled across layers to be one structure",
        "Find the structures with sosp.find_structures(model, example, groups='coupled')",
        _without_shared_gate,
    ),
    "training": Need(
        "to be learned while the network trains",
        "Train with it first: sosp.learned.{method}(model, data, ...)",
        lambda model, structures: [],
    ),
    "rotation": Need(
        "a basis of its own, in which it removes directions instead of structures",
        "Build the smaller network with sosp.eigendamage(model, data, ratio=...)",
        lambda model, structures: [],
    ),
}


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


def refuse_scoring(problem: Problem, options: Options) -> Tensor:
    """Stand for methods that train, search or rotate: their need "training" or "rotation" refuses before this runs."""
    raise AssertionError("a method that ranks no structures was asked to score")


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
        return self.loss == "cross_entropy" and self.seen and not self.counts


def add_pseudo_labels(model: nn.Module, chunk: Chunk, loss: LossLike) -> Chunk:
    """Return the same examples; if they have no targets, the predictions of ``model`` are their targets."""
    if chunk.targets is not None or chunk.keyed:
        return chunk
    if callable(loss):
        raise DataError(
            "the data has no targets, and they cannot be predicted for a loss function of your own. Give targets."
        )
    with torch.no_grad():
        logits = find_logits(chunk.run(model))
    return replace(chunk, targets=logits if loss == "mse" else logits.argmax(find_class_axis(logits)))
