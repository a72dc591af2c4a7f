"""Replace layers by bottleneck blocks: remove directions of the Kronecker-factored eigenbasis, where they matter alone.

Wang et al. 2019, "EigenDamage: Structured Pruning in the Kronecker-Factored Eigenbasis"; their code is
github.com/alecwangcq/EigenDamage-Pytorch. As there: rows and columns of all rotated weights are ranked together, at
most 95 % of either go from one layer, the output layer stays, a layer whose block would not be smaller stays, and all
three factors train on. Unlike there, a bias stays as it is on the block's last layer: as a constant channel of the
input, which is what their code makes of it, it would be padded with zeros at the border.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from sosp.baselines.eigenbasis_costs import RemovedDirections, RotatedLayer, choose_directions, rotate_weight
from sosp.core import distributed
from sosp.core.batches import Chunk, distribute_examples, iterate_chunks, open_data
from sosp.core.borrowed_model import borrow_model
from sosp.core.loss_names import LossLike, resolve_loss
from sosp.core.opened_data import count_expected_examples
from sosp.errors import CheckpointError, DataError, StructureError, SurgeryError, check_choice
from sosp.graph.plan import Cost, compute_whole_cost, count
from sosp.graph.recipe import replace_module
from sosp.graph.records import Structures
from sosp.graph.structures import Exclude, find_structures
from sosp.scoring.kronecker_factors import FISHERS, estimate_kronecker_factors, explain_refusal
from sosp.scoring.passes import Problem
from sosp.selection.greedy_order import check_share
from sosp.surgery.checkpoint import inspect, load
from sosp.surgery.shrink import measure_difference

REPLACE = ("smaller", "all")
KERNEL = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
ROWS = 8  # of the first batch serve as the example
# Of the largest output: three factors are rounded instead of one weight.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}


class EigenbasisBottleneck(nn.Module):
    """A layer as three: a projection of its input, the layer itself between fewer channels, and one of its output."""

    def __init__(self, layer: Any, into: int, out: int) -> None:
        """In place of ``layer``, with so many directions of its input and its output; the numbers are still to come."""
        super().__init__()
        c_out, c_in = layer.weight.shape[:2]
        kernel = {key: getattr(layer, key) for key in KERNEL if hasattr(layer, key)}
        one = {"kernel_size": 1} if kernel else {}
        self.into = _build_like(layer, c_in, into, one)
        self.core = _build_like(layer, into, out, kernel)
        self.out = _build_like(layer, out, c_out, {**one, "bias": layer.bias is not None})
        self.train(layer.training)
        self.core.register_forward_hook(_do_nothing)

    def forward(self, input: Tensor) -> Tensor:
        return self.out(self.core(self.into(input)))


def _do_nothing(*_: Any) -> None:
    """A hook for torch to see: its encoder layers run past modules, with their weights, unless one has a hook."""


def _build_like(layer: Any, into: int, out: int, options: Mapping[str, Any]) -> Any:
    """A layer of the same type between other widths."""
    options = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype, **options}
    return skip_init(type(layer), into, out, **options).requires_grad_(layer.weight.requires_grad)


@dataclass(frozen=True, eq=False)
class Eigendamaged:
    """A network with bottleneck blocks, and how it came about."""

    model: nn.Module
    removed: Mapping[str, RemovedDirections]  # layer, now a Bottleneck -> what it lost
    kept: Mapping[str, str]  # layer that stayed as it was -> why
    directions: int  # of all layers that were ranked, inputs and outputs
    cost_before: Cost | None  # None where the channels of the network cannot be followed
    cost_after: Cost | None

    def __repr__(self) -> str:
        costs = f", {self.cost_before!r} -> {self.cost_after!r}" if self.cost_after else ""
        return f"Eigendamaged({len(self.removed)} bottlenecks, {self.lost} directions removed{costs})"

    @property
    def lost(self) -> int:
        """Directions that are gone."""
        return sum(len(r.columns) + len(r.rows) for r in self.removed.values())


@dataclass(frozen=True, eq=False)
class Eigenbases:
    """A network's layers in their eigenbases: what the data is needed for, done once for any ratio."""

    model: nn.Module
    example: Any
    structures: Structures
    rotated: Mapping[str, RotatedLayer]
    untreated: Mapping[str, str]  # layer that cannot be a bottleneck -> why

    def without(self, ratio: float, cap: float, replace: str) -> Eigendamaged:
        """``ratio`` of all directions removed; the arguments are those of ``eigendamage``."""
        removed, kept = choose_directions(self.rotated, ratio, cap), dict(self.untreated)
        parts = {name: self.rotated[name].without(gone) for name, gone in removed.items()}
        for name, part in list(parts.items()):
            if replace == "smaller" and part.size >= _weight(self.model, name).numel():
                kept[name] = "its bottleneck would not be smaller"
                del parts[name], removed[name]
        small = insert_bottlenecks(self.model, parts, self.example)
        before = None if self.structures.flow is None else compute_whole_cost(self.structures.flow)
        directions = sum(len(part.columns) + len(part.rows) for part in self.rotated.values())
        return Eigendamaged(small, removed, kept, directions, before, before and _cost(small, self.example))


def eigendamage(
    model: nn.Module,
    data: Any,
    *,
    ratio: float,
    loss: LossLike = "cross_entropy",
    examples: int | None = 1000,
    fisher: str = "sampled",
    exclude: Exclude = (),
    cap: float = 0.95,
    replace: str = "smaller",
    generator: torch.Generator | None = None,
) -> Eigendamaged:
    """Replace layers by three-layer blocks in the eigenbasis of their Kronecker factors (Wang et al. 2019).

    A direction is an eigenvector of a layer's Kronecker factors, one per input and one per output channel. The
    directions whose removal costs least are removed, over all layers.

    Args:
        model: The network. It is not changed.
        data: Labelled data, as ``sosp.score`` takes it.
        ratio: Share of all directions to remove.
        loss: The loss, as ``sosp.score`` takes it.
        examples: Number of examples to read; None reads all.
        fisher: Where labels come from: ``"sampled"`` draws them from the network (as in the paper), ``"exact"`` takes
            every output, ``"empirical"`` those of the data.
        exclude: Layers to leave as they are.
        cap: Largest share of directions to remove from either side of a layer.
        replace: ``"smaller"`` replaces only layers whose block has fewer parameters (as in the paper), ``"all"`` all.
        generator: Source of the random labels.

    Returns:
        An ``Eigendamaged`` with the network and its cost.

    Raises:
        ArgumentError: If an argument has a wrong value.
        StructureError: If no layer can be replaced.
        DataError: If the data is empty or does not fit the network.
    """
    check_choice("replace", replace, REPLACE)
    check_share("ratio", ratio)
    check_share("cap", cap)
    found = find_eigenbases(
        model, data, loss=loss, examples=examples, fisher=fisher, exclude=exclude, generator=generator
    )
    return found.without(ratio, cap, replace)


def find_eigenbases(
    model: nn.Module,
    data: Any,
    *,
    loss: LossLike,
    examples: int | None,
    fisher: str,
    exclude: Exclude,
    generator: torch.Generator | None,
) -> Eigenbases:
    """The first half of ``eigendamage``, and the slow one; the model must stay as it is while this is used."""
    loss = resolve_loss(loss)
    check_choice("fisher", fisher, FISHERS)
    with borrow_model(model):
        data = open_data(data, model)
        head, chunks = _first(model, data, examples, generator)
        example = head.rows(0, min(ROWS, head.size)).inputs
        structures, kept = _split_supported(model, find_structures(model, example, gate="weights", exclude=exclude))
        expected = count_expected_examples(data, examples, distributed.count_ranks())
        factors = estimate_kronecker_factors(
            Problem(model, structures, loss, chunks, expected), "channels", fisher, generator
        )
    rotated = {name: rotate_weight(_weight(model, name), factor) for name, factor in factors.items()}
    return Eigenbases(model, example, structures, rotated, kept)


def rebuild_bottlenecks(path: str | Path, model: nn.Module) -> nn.Module:
    """The network with bottlenecks that ``sosp.save`` wrote, from ``model`` as it was given to ``eigendamage``.

    The file is that of any network; which layers are bottlenecks, and how wide, is read off the shapes in it.
    """
    shapes = {name: stored.shape for name, stored in inspect(path).tensors.items()}
    small, own = _copy(model), model.state_dict()
    for name, layer in model.named_modules():
        core = shapes.get(f"{name}.core.weight")
        if core is None or f"{name}.core.weight" in own:
            continue
        if _explain_unsupported(model, layer) or not _fits(core, _weight(model, name).shape):
            raise CheckpointError(
                f"{path}: {name!r} is a bottleneck in the file, but the model's {layer} does not fit it."
            )
        replace_module(small, name, EigenbasisBottleneck(layer, into=core[1], out=core[0]))
    return load(path, small)


# The network ----------------------------------------------------------------------------------------------------------


def insert_bottlenecks(model: nn.Module, parts: Mapping[str, RotatedLayer], example: Any) -> nn.Module:
    """A copy with these layers as bottlenecks; refused if it does not do what the same layers, kept whole, do."""
    small, whole = _copy(model), _copy(model)
    for name, part in parts.items():
        layer: Any = model.get_submodule(name)
        block = EigenbasisBottleneck(layer, into=part.core.shape[1], out=part.core.shape[0])
        _fill(block, part, layer.bias)
        replace_module(small, name, block)
        _weight(whole, name).data.copy_(part.weight())
    try:
        found = measure_difference(small, whole, example, "eval")
    except Exception as error:
        raise SurgeryError(
            f"the network does not run with bottlenecks in place of layers: {type(error).__name__}: {error}. Exclude "
            "the layers whose weights or sizes its code reads: exclude=[...]."
        ) from error
    dtype = next(p.dtype for p in small.parameters())
    if not found <= TOLERANCES.get(dtype, 0.1):
        raise SurgeryError(
            f"with bottlenecks in place of layers, the outputs of the network differ by {found:.1e} of the largest "
            "output. Exclude the layers whose weights its code reads, exclude=[...], or give a network in double "
            "precision."
        )
    return small


@torch.no_grad()
def _fill(block: EigenbasisBottleneck, part: RotatedLayer, bias: Tensor | None) -> None:
    """A projection is a matrix; as a convolution, one with a single tap."""
    block.into.weight.copy_(part.into.T.reshape(block.into.weight.shape))
    block.core.weight.copy_(part.core)
    block.out.weight.copy_(part.out.reshape(block.out.weight.shape))
    if bias is not None:
        block.out.bias.copy_(bias)


def _copy(model: nn.Module) -> nn.Module:
    """As a network in its own right: what it may have been shrunk from is no way back to it any more."""
    twin = copy.deepcopy(model)
    for key in ("sosp_recipes", "sosp_shapes"):
        vars(twin).pop(key, None)
    return twin


def _split_supported(model: nn.Module, structures: Structures) -> tuple[Structures, dict[str, str]]:
    """The layers that can be bottlenecks; and the others, and why."""
    why = {layer.name: _explain_unsupported(model, model.get_submodule(layer.name)) for layer in structures.layers}
    kept = {name: reason for name, reason in why.items() if reason}
    pairs = [(x, ids) for x, ids in zip(structures.layers, structures.ids, strict=True) if x.name not in kept]
    if not pairs:
        listed = "; ".join(f"{name!r} {reason}" for name, reason in list(kept.items())[:3])
        raise StructureError(f"no layer of the network can be a bottleneck: {listed}.")
    layers, ids = zip(*pairs, strict=True)
    return dataclasses.replace(structures, layers=layers, ids=ids), kept


def check_replaceable_layers(model: nn.Module, structures: Structures) -> None:
    """Refuse a network in which nothing could become a bottleneck."""
    _split_supported(model, structures)


def _explain_unsupported(model: nn.Module, layer: nn.Module) -> str | None:
    why = explain_refusal(layer, grouped=False)
    if why is not None:
        return why
    weight = layer._parameters.get("weight")
    if weight is None:
        return "computes its weight from other parameters"
    if sum(p is weight for m in model.modules() for p in m._parameters.values()) > 1:
        return "shares its weight with another layer"
    return None


def _weight(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(f"{name}.weight")


def _fits(core: tuple[int, ...], shape: torch.Size) -> bool:
    """As narrow or narrower, over the same taps."""
    return len(core) == len(shape) and core[2:] == shape[2:] and 1 <= core[0] <= shape[0] and 1 <= core[1] <= shape[1]


def _first(
    model: nn.Module, data: Any, examples: int | None, generator: torch.Generator | None
) -> tuple[Chunk, Iterator[Chunk]]:
    """The first examples, and this process's share of all."""
    chunks = iter(iterate_chunks(data, examples, generator, model=model))
    head = next(chunks, None)
    if head is None or head.size == 0:
        raise DataError("the data is empty: it contains no examples to score with. Is the loader's dataset empty?")
    return head, distribute_examples(itertools.chain([head], chunks), distributed.get_rank(), distributed.count_ranks())


def _cost(model: nn.Module, example: Any) -> Cost | None:
    try:
        return count(model, example)
    except StructureError:
        return None
