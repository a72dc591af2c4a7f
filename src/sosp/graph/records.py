"""The records that cross the library's borders: layers, structures, saliencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sosp.errors import check_choice
from sosp.graph.flow import Flow

INPUT, OUTPUT = "<input>", "<output>"  # the two ends of the wiring
OBJECTIVES = ("individual", "structure", "order", "joint", "signed")
SCOPES = ("global", "layer")


@dataclass(frozen=True)
class Layer:
    """A layer whose output channels can be removed, and what one of them costs."""

    name: str  # path of the module; of the parameter for kind="weights"
    channels: int
    axis: int  # of the channels in its output: 1 for convolutions, -1 for linear layers
    norms: tuple[str, ...]  # the normalisations that are its own: they see its output and nothing else does
    kernel: float  # edge of the kernel, 1 for linear layers
    params: float  # parameters going into one channel
    macs: float  # multiply-accumulates of one channel for one example
    depthwise: bool = False


@dataclass(frozen=True, eq=False)
class Structures:
    """What can be removed: S structures, each one or several channels sharing a gate."""

    kind: str
    gate: str
    layers: tuple[Layer, ...]
    ids: tuple[Tensor, ...]  # per layer (channels,): the structure of each channel, -1 for none
    wiring: Mapping[str, tuple[str, ...]]  # layer -> nearest layers upstream, with INPUT and OUTPUT at the ends
    footprint: int = 0  # bytes of activations per example, for choosing how many run at once
    flow: Flow | None = None  # how the channels flow, for exact counts; None where that is not known
    outputs: int = 0  # numbers per example in the network's output; 0 where that is not known
    # Of whole channels of streams: the layers in which each branch ends that something goes around.
    branches: tuple[tuple[str, ...], ...] | None = None
    count: int = field(init=False)
    plain: bool = field(init=False)  # one structure per channel, numbered in order

    def __post_init__(self) -> None:
        together = torch.cat(self.ids) if self.ids else torch.zeros(0, dtype=torch.long)
        object.__setattr__(self, "plain", torch.equal(together, torch.arange(len(together))))
        object.__setattr__(self, "count", 1 + max((int(i.max()) for i in self.ids if i.numel()), default=-1))

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"Structures({self.count} {self.kind} in {len(self.layers)} layers, gate={self.gate!r})"

    def owner(self) -> Tensor:
        """(S,) the layer of each structure (the first one, for a group over several)."""
        owner = torch.full((self.count,), len(self.layers))
        for i in reversed(range(len(self.layers))):
            owner[self.ids[i][self.ids[i] >= 0]] = i
        return owner

    def sizes(self, what: str) -> Tensor:
        """Return what every structure weighs, (S,).

        Args:
            what: ``"params"`` or ``"macs"``, summed over the channels of a structure, or ``"kernel"``, their mean.
        """
        total = torch.zeros(self.count, dtype=torch.float64)
        channels = torch.zeros(self.count, dtype=torch.float64)
        for layer, ids in zip(self.layers, self.ids, strict=True):
            ids = ids[ids >= 0]
            total.index_add_(0, ids, torch.full(ids.shape, getattr(layer, what), dtype=torch.float64))
            channels.index_add_(0, ids, torch.ones(ids.shape, dtype=torch.float64))
        return total / channels if what == "kernel" else total

    def channels_of(self, chosen: Tensor) -> dict[str, Tensor]:
        """Return layer -> the channels of structures, sorted.

        Args:
            chosen: Numbers of the structures.
        """
        picked = torch.zeros(self.count + 1, dtype=torch.bool)
        picked[chosen.cpu()] = True
        picked[-1] = False  # where ids is -1
        found = {layer.name: picked[ids].nonzero().flatten() for layer, ids in zip(self.layers, self.ids, strict=True)}
        return {name: channels for name, channels in found.items() if len(channels)}

    def expand_to_channels(self, values: Tensor, otherwise: float = 1.0) -> list[Tensor]:
        """One (..., channels) tensor per layer from (..., S): every channel takes its structure's value."""
        if not self.plain:
            none = values.new_full((*values.shape[:-1], 1), otherwise)
            index = torch.cat(self.ids).to(values.device) % (self.count + 1)  # -1 picks the one at the end
            values = torch.cat([values, none], -1).index_select(-1, index)
        return list(values.split([layer.channels for layer in self.layers], -1))


@dataclass(frozen=True, eq=False)
class Saliency:
    """What removing each structure costs, to second order."""

    structures: Structures
    method: str
    first: Tensor | None  # (S,)   theta_s . grad L
    second: Tensor | None = None  # (S,)   theta_s . H theta_struc; theta_s . H theta_s for "sosp-i-diagonal"
    pairs: Tensor | None = None  # (S, S) theta_s . H theta_s'
    values: Tensor | None = None  # (S,)   a ranking that is no derivative of the loss ("random")
    objective: str = "individual"
    examples: int = 0
    scope: str = "global"  # how the method's paper ranks: all structures together, or every layer by itself
    targets: str = ""  # what the outputs were compared with, such as "own logits (cross-entropy, T = 2)"
    loss: str = ""  # the name of the loss, of the first output; "" for a loss of the user's own and for none

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("scope", self.scope, SCOPES)

    def with_objective(self, objective: str) -> Saliency:
        """Return the same derivatives, ranked by another objective.

        Args:
            objective: ``"individual"``, ``"structure"``, ``"order"``, ``"joint"`` or ``"signed"``, see ``scores``.
        """
        return replace(self, objective=objective)

    def to(self, device: torch.device | str) -> Saliency:
        """The same saliency with its tensors on another device."""
        names = ("first", "second", "pairs", "values")
        moved = {n: t.to(device) for n in names if (t := getattr(self, n)) is not None}
        return replace(self, **moved)

    @property
    def own(self) -> Tensor | None:
        """(S,) the second-order term of each structure by itself."""
        return self.second if self.pairs is None else self.pairs.diagonal()

    @property
    def scores(self) -> Tensor:
        """(S,) what removing a structure alone costs: Eq. 6 for SOSP-H, Q_ss of Eq. 4 for SOSP-I.

        ``|theta_s . g| + 1/2 |theta_s . (H theta)|``; the objectives "structure" and "joint" take the absolute value
        of the sum, ``|theta_s . g - 1/2 theta_s . (H theta)|``, and "signed" its change, ``-theta_s . g + ...``.
        """
        if self.values is not None:
            return self.values
        assert self.first is not None
        if self.objective == "signed":
            return -self.first if self.own is None else 0.5 * self.own - self.first
        if self.own is None:
            return self.first.abs()
        if self.objective in ("structure", "joint"):
            return (self.first - 0.5 * self.own).abs()
        return self.first.abs() + 0.5 * self.own.abs()

    def __repr__(self) -> str:
        shape = "pairs" if self.pairs is not None else "second" if self.second is not None else "first"
        return f"Saliency({self.method!r}, {self.structures.count} structures, up to {shape}, {self.examples} examples)"
