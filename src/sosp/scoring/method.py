"""What a method of scoring is: what it computes, which structures it takes, what a network must have for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from sosp.errors import ArgumentError, StructureError
from sosp.graph.records import Structures
from sosp.scoring.method_options import Options
from sosp.scoring.passes import Problem, Terms

FEW = 3  # layers named in a message


@dataclass(frozen=True)
class Values:
    """A ranking that is no derivative of the loss, and the examples it came from."""

    values: Tensor  # (S,)
    examples: int = 0


@dataclass(frozen=True)
class Method:
    """One way to score structures, as its paper does it."""

    run: Callable[[Problem, Options], Terms | Values | Tensor]
    about: str  # one line
    source: str  # who to cite
    kinds: tuple[str, ...] = ("filters", "blocks")  # of structures
    needs: tuple[str, ...] = ()  # of NEEDS
    scope: str = "global"  # how its paper ranks: all structures together, or every layer by itself
    objective: str = "individual"  # what selecting minimises, unless told otherwise
    data: bool = True  # False: it looks at the weights alone
    samples: bool = False  # it may sample labels, classes=
    labels: bool = True  # False: it does not look at those of the data, which may do without


@dataclass(frozen=True)
class Need:
    """Something a network or its structures must have."""

    what: str
    advice: str  # with {names} for the layers concerned, as a list, and {method}
    lacking: Callable[[nn.Module, Structures], list[str] | None]  # the layers that do without, None if all is well


def _without_scale(model: nn.Module, structures: Structures) -> list[str] | None:
    """The layers without a norm of their own, or with one that has no scale."""
    lacking = [
        layer.name
        for layer in structures.layers
        if not layer.norms or any(getattr(model.get_submodule(n), "weight", None) is None for n in layer.norms)
    ]
    return lacking or None


def _without_shared_gate(model: nn.Module, structures: Structures) -> list[str] | None:
    """The layers that have a channel in common with another one, without sharing its gate."""
    if structures.flow is None:
        return [layer.name for layer in structures.layers]
    together, _ = structures.flow.coupled()
    gates: dict[int, int] = {}
    torn: dict[str, None] = {}
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        cuts = structures.flow.graph.calls.get(layer.name)
        if cuts and len(cuts[0].out) == layer.channels:
            for place, gate in zip(together[cuts[0].out].tolist(), ids.tolist(), strict=True):
                if gates.setdefault(place, gate) != gate:
                    torn[layer.name] = None
    return list(torn) or None


NEEDS: dict[str, Need] = {
    "norms": Need(
        "a batch norm with a scale of its own behind every layer",
        "Keep those layers out, exclude=[{names}]",
        _without_scale,
    ),
    "coupled": Need(
        "channels that flow together to be one structure",
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
        "It makes the smaller network itself: sosp.eigendamage(model, data, ratio=...)",
        lambda model, structures: [],
    ),
}


def check_requirements(name: str, methods: Mapping[str, Method], model: nn.Module, structures: Structures) -> None:
    """Say by name what this network or these structures lack for a method, and which methods would do."""
    method, kind = methods[name], structures.kind
    if kind not in method.kinds:
        raise ArgumentError(
            f"method={name!r} does not take kind={kind!r} ({len(structures):,} structures), only "
            f"{' and '.join(map(repr, method.kinds))}. {_others(name, methods, model, structures)}"
        )
    for need in (NEEDS[n] for n in method.needs):
        lacking = need.lacking(model, structures)
        if lacking is not None:
            concerned = f": {_join_names(lacking)} {'do' if len(lacking) > 1 else 'does'} without" if lacking else ""
            raise StructureError(
                f"method={name!r} needs {need.what}{concerned}. "
                f"{need.advice.format(names=_join_names(lacking, ', ...'), method=name)}. "
                f"{_others(name, methods, model, structures)}"
            )


def _others(name: str, methods: Mapping[str, Method], model: nn.Module, structures: Structures) -> str:
    """The methods that would work here."""
    fit = [other for other, m in methods.items() if other != name and _suits(m, model, structures)]
    return f"These work here: {', '.join(map(repr, fit))}."


def _suits(method: Method, model: nn.Module, structures: Structures) -> bool:
    return structures.kind in method.kinds and all(NEEDS[n].lacking(model, structures) is None for n in method.needs)


def _join_names(names: Iterable[str], more: str = "") -> str:
    """``'a', 'b', 'c' and 4 more``."""
    names = list(names)
    rest = len(names) - FEW
    shown = ", ".join(map(repr, names[:FEW]))
    return shown if rest <= 0 else shown + (more or f" and {rest} more")
