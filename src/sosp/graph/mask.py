"""What is removed, and the network with it removed: the feature maps of a mask are zero, in train and eval mode."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from sosp.core.borrowed_model import check_network
from sosp.core.layers import GateHook, align_values, find_width, hook_output, install_gates
from sosp.errors import ArgumentError, StructureError, suggest_name
from sosp.graph.records import Layer, Structures
from sosp.graph.structures import find_structures


@dataclass(frozen=True, eq=False)
class Mask:
    """The channels to remove, layer by layer; what it means does not depend on how it was chosen.

    A removed channel's feature map is zero after the layer's own normalisation (a batch norm that sees its output
    and nothing else), or right at the layer's output where it has none. Where it reaches further norms of single
    channels (through a concatenation, an add of removed channels only, a depthwise convolution without bias) it is
    zero behind them as well: their shift goes with it. For kind "weights", single weights are zero.
    """

    kind: str  # "filters" or "weights"
    layers: tuple[Layer, ...]
    removed: dict[str, Tensor]  # layer (or parameter) name -> sorted indices; layers that lose nothing are left out
    structures: int  # how many structures there were to choose from
    chosen: int  # how many of them are removed
    norms: dict[str, Tensor] = field(default_factory=dict)  # norms further on that see nothing but zeros: channels

    @classmethod
    def from_removed(
        cls, model: nn.Module, removed: Mapping[str, Iterable[int] | Tensor], example: Any, *, kind: str = "filters"
    ) -> Mask:
        """Make a mask by hand.

        Args:
            model: The network.
            removed: Layer -> channels, ``{"layer1.0.conv1": [0, 3]}``, or a tensor that is true for removed ones.
            example: Inputs for one forward pass.
            kind: What is removed, ``"filters"`` or ``"weights"``.

        Raises:
            StructureError: If a layer or a channel does not exist or cannot be removed.
        """
        check_network(model)
        if not isinstance(removed, Mapping):
            raise ArgumentError(
                f"removed={removed!r:.80} must give layers their channels: {{'layer1.0.conv1': [0, 3]}}."
            )
        found = find_structures(model, example, kind=kind)
        layers = {layer.name: layer for layer in found.layers}
        clean = {name: _indices(layers, name, channels) for name, channels in removed.items()}
        clean = {name: clean[name] for name in layers if name in clean and len(clean[name])}
        kind = "weights" if kind == "weights" else "filters"
        return cls(kind, found.layers, clean, len(found), sum(map(len, clean.values())), _norms(found, clean))

    @classmethod
    def from_structures(cls, structures: Structures, chosen: Tensor, removed: dict[str, Tensor] | None = None) -> Mask:
        """Make the mask that removes structures.

        Args:
            structures: All structures of the network.
            chosen: Numbers of those to remove.
            removed: Layer -> channels, if more goes than the channels of these structures.
        """
        kind = "weights" if structures.kind == "weights" else "filters"
        removed = structures.channels_of(chosen) if removed is None else removed
        return cls(kind, structures.layers, removed, len(structures), len(chosen), _norms(structures, removed))

    def shuffled(self, generator: torch.Generator, structures: Structures | None = None) -> Mask:
        """As many channels of every layer, but other ones, drawn at random (App. A.12): the same architecture.

        Every layer is drawn by itself, so that channels that went together no longer do. ``structures``, those that
        the mask was chosen from, tell which norms further on go with the channels: needed where there are any.
        """
        if structures is None and self.norms:
            raise ArgumentError(
                f"removed channels reach {next(iter(self.norms))!r}, a later norm, which the shuffled ones would "
                "reach at other positions. Give the structures that the mask was chosen from: "
                "mask.shuffled(generator, structures)."
            )
        widths = {layer.name: layer.channels for layer in self.layers}
        order = {n: torch.randperm(widths[n], generator=generator, device=generator.device) for n in self.removed}
        removed = {n: order[n][: len(gone)].sort().values.to(gone.device) for n, gone in self.removed.items()}
        return replace(self, removed=removed, norms={} if structures is None else _norms(structures, removed))

    @property
    def own_norms(self) -> dict[str, tuple[str, ...]]:
        """Layer -> the norms at whose output its removed channels are zero; none where it is its own."""
        return {layer.name: layer.norms for layer in self.layers}

    @property
    def ratio(self) -> float:
        """The share of structures removed."""
        return self.chosen / self.structures if self.structures else 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        mine, theirs = self.removed, other.removed
        return (
            self.kind == other.kind
            and mine.keys() == theirs.keys()
            and all(torch.equal(mine[n], theirs[n]) for n in mine)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Mask({self.chosen} of {self.structures} structures removed, {self.ratio:.1%})"

    def __str__(self) -> str:
        """A line per layer: how many channels it had and loses."""
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [repr(self)]
        for layer in self.layers:
            gone = len(self.removed.get(layer.name, ()))
            lines.append(f"  {layer.name:<{width}}  {gone:>6} of {layer.channels:>6}  {gone / layer.channels:6.1%}")
        return "\n".join(lines)


def _norms(structures: Structures, removed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norms further on, and the channels in which they see nothing but zeros."""
    if structures.flow is None or structures.kind == "weights":
        return {}
    return structures.flow.dead_norms(removed, {layer.name: layer.norms for layer in structures.layers})


def _indices(layers: Mapping[str, Layer], name: str, channels: Iterable[int] | Tensor) -> Tensor:
    if name not in layers:
        raise StructureError(
            f"the mask names {name!r}, which is not a prunable layer of the model (or is its output layer)."
            + suggest_name(name, layers)
        )
    size = layers[name].channels
    if not isinstance(channels, Iterable):
        raise StructureError(f"the mask gives {channels!r} for {name!r}; give a list of channels, [{channels!r}].")
    flags = torch.as_tensor(channels) if hasattr(channels, "dtype") else None  # numpy's as well
    if flags is not None and flags.dtype == torch.bool:
        if flags.shape != (size,):
            raise StructureError(
                f"the mask gives flags of shape {tuple(flags.shape)} for {name!r}; give one for each of its {size} "
                "channels, true for those to remove, or a list of channels."
            )
        return flags.nonzero().flatten().cpu()
    channels = list(channels)
    for c in channels:
        if isinstance(c, bool) or not isinstance(c, SupportsIndex) or not 0 <= index(c) < size:
            raise StructureError(f"the mask names channel {c} of {name!r}, which has channels 0 to {size - 1}.")
    if len(set(map(int, channels))) < len(channels):
        twice = next(int(c) for c in channels if channels.count(c) > 1)
        raise StructureError(f"the mask names channel {twice} of {name!r} twice.")
    return torch.tensor(sorted(map(int, channels)), dtype=torch.long)


def check_mask(model: nn.Module, mask: Mask) -> None:
    """Refuse a mask that was made for another model."""
    check_network(model)
    if not isinstance(mask, Mask):
        raise ArgumentError(f"the mask is a {type(mask).__name__}; take one from sosp.select or Mask.from_removed.")
    known = dict(model.named_parameters() if mask.kind == "weights" else model.named_modules())
    norms = [n for layer in mask.layers if layer.name in mask.removed for n in layer.norms] + [*mask.norms]
    for name in (*mask.removed, *norms):
        if name not in known:
            raise StructureError(f"the mask names {name!r}, which this model does not have.{suggest_name(name, known)}")
    layers = {layer.name: layer for layer in mask.layers}
    for name, channels in mask.removed.items():
        if name not in layers:
            raise StructureError(f"the mask removes channels of {name!r}, which is not among its layers.")
        _check_width(model, layers[name], mask.kind)
        if len(channels) and not 0 <= int(channels.min()) <= int(channels.max()) < layers[name].channels:
            raise StructureError(
                f"the mask names channels {int(channels.min())} to {int(channels.max())} of {name!r}, which has "
                f"channels 0 to {layers[name].channels - 1}."
            )


def masked(model: nn.Module, mask: Mask) -> nn.Module:
    """Return a copy of a network in which the feature maps of removed channels are zero; it evaluates and trains.

    Args:
        model: The network. It is not changed.
        mask: The channels to remove, from ``sosp.select`` or ``Mask.from_removed``.

    Returns:
        A network of the same class, as large as ``model``; ``sosp.shrink`` makes it smaller.

    Raises:
        StructureError: If the mask names a layer or a channel that the network does not have.
    """
    check_mask(model, mask)
    layers = [layer for layer in mask.layers if layer.name in mask.removed]
    twin = copy.deepcopy(model)
    if mask.kind == "weights":
        return _with_zero_weights(twin, mask)
    install_gates(twin, layers, "features", ZeroChannels([(layer.axis, mask.removed[layer.name]) for layer in layers]))
    for name, channels in mask.norms.items():
        hook_output(twin.get_submodule(name), GateHook(ZeroChannels([(1, channels)]), 0))
    return twin


def _check_width(model: nn.Module, layer: Layer, kind: str) -> None:
    found = find_width(model, layer.name, kind)
    if found != layer.channels:
        what = "weights" if kind == "weights" else "channels"
        raise StructureError(
            f"the mask was made for a {layer.name!r} with {layer.channels} {what}; this one has {found}."
        )


class ZeroChannels:
    """Force the removed channels of layer i's output to zero. (A class, so that masked models copy and pickle.)"""

    def __init__(self, gone: list[tuple[int, Tensor]]) -> None:
        self.gone = gone

    def __call__(self, i: int, output: Tensor) -> Tensor:
        axis, channels = self.gone[i]
        gone = torch.zeros(output.shape[axis], dtype=torch.bool, device=output.device)
        gone[channels.to(output.device)] = True
        return output.masked_fill(align_values(gone, output.dim(), axis), 0)


class ZeroWeights:
    """Before every forward: the removed weights of this module are zero again, whatever the optimiser did."""

    def __init__(self, key: str, gone: Tensor) -> None:
        self.key, self.gone = key, gone

    def __call__(self, module: nn.Module, args: Any) -> None:
        weight = getattr(module, self.key)
        with torch.no_grad():
            weight.view(-1)[self.gone.to(weight.device)] = 0


def _with_zero_weights(twin: nn.Module, mask: Mask) -> nn.Module:
    for name, gone in mask.removed.items():
        path, _, key = name.rpartition(".")
        module = twin.get_submodule(path)
        zero = ZeroWeights(key, gone)
        zero(module, ())
        module.register_forward_pre_hook(zero)
    return twin
