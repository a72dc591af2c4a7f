"""What a row of the table says, and how it becomes a network with an example, deterministic and in float64."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

EXAMPLES = 4
SCORED_EXAMPLES = 10

Removal = dict[str, list[int]]  # layer -> channels
Inputs = Callable[[torch.Generator], Any]


@dataclass(frozen=True)
class Recipe:
    """A network, what goes in, and what an exact surgery can do with it.

    ``layers``: every prunable layer in order of execution, ``name>norm`` with its own normalisation if it has one
    (``name>norm,norm`` if every call has another).
    ``fixed``: those of them whose weight cannot lose rows (it is computed, shared, used outside its module, or of a
    depthwise filter whose input others need);
    all others must lose exactly the rows of a mask on them, if need be with zeros scattered back behind them.
    ``narrows``: (consumer, what is removed): the consumer's weight must lose every input that is then always zero.
    The removal is a dict, or a string of layers that all lose channel 1.
    ``frees``: (layer, what is removed): the layer loses rows because nothing reads them any more.
    ``by``: the channels that a layer can lose together, where one alone is not enough (channel 1 otherwise).
    ``whole``: layers that may lose every channel without cutting the network in two.
    """

    build: Callable[[], nn.Module]
    inputs: Inputs | tuple[int, ...]  # the shape of one example, or a function that makes what model(...) takes
    layers: str
    narrows: Sequence[tuple[str, str | Removal]] = ()
    frees: Sequence[tuple[str, str | Removal]] = ()
    by: Mapping[str, list[int]] = field(default_factory=dict)
    fixed: str = ""
    whole: str = ""
    exclude: str = ""  # names that find_structures must be told to leave out
    classes: int = 0  # of the labels, where scores are compared with oracles; such a network ends in ``head``
    seed: int | None = None  # of all numbers; by default the name decides


@dataclass(frozen=True)
class Case:
    """A recipe carried out; the fields of the same name mean the same, in full."""

    name: str
    model: nn.Module  # float64, eval mode
    example: Any  # a tensor, a tuple of arguments or a dict of keyword arguments
    layers: dict[str, tuple[str, ...]]  # prunable layer -> its own norms
    shrinks: frozenset[str] = frozenset()
    narrows: tuple[tuple[str, Removal], ...] = ()
    frees: tuple[tuple[str, Removal], ...] = ()
    by: dict[str, list[int]] = field(default_factory=dict)  # for every layer
    whole: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    targets: Tensor | None = None  # (N,) class labels
    output: str = "head"  # the output layer, which is not pruned

    @property
    def inputs(self) -> Any:
        """The example, as data to score with: (N, ...) float64."""
        return self.example

    @property
    def norms(self) -> dict[str, str | None]:
        """Prunable layer -> its own norm."""
        return {layer: next(iter(norms), None) for layer, norms in self.layers.items()}


def carry_out(name: str, recipe: Recipe) -> Case:
    """Equal numbers on every call, whatever the global random state."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) if recipe.seed is None else recipe.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = recipe.build().double().eval()
    randomise(model, generator)
    examples = SCORED_EXAMPLES if recipe.classes else EXAMPLES
    inputs = floats(recipe.inputs, examples=examples) if isinstance(recipe.inputs, tuple) else recipe.inputs
    example = inputs(generator)
    labels = torch.randperm(examples, generator=generator) % recipe.classes if recipe.classes else None
    pairs = [layer.partition(">") for layer in recipe.layers.split()]
    layers = {layer: tuple(filter(None, norm.split(","))) for layer, _, norm in pairs}
    return Case(
        name,
        model,
        example,
        layers,
        frozenset(layers) - set(recipe.fixed.split()),
        tuple((consumer, removal_of(given)) for consumer, given in recipe.narrows),
        tuple((layer, removal_of(given)) for layer, given in recipe.frees),
        {layer: recipe.by.get(layer, [1]) for layer in layers},
        tuple(recipe.whole.split()),
        tuple(recipe.exclude.split()),
        labels,
    )


def removal_of(given: str | Removal) -> Removal:
    return {layer: [1] for layer in given.split()} if isinstance(given, str) else given


# --- numbers


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """He-scaled weights; everything with one dimension away from its default of 0 or 1."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        key = name.rpartition(".")[2]
        if key in ("weight", "running_var") and tensor.dim() == 1:
            tensor.copy_(1 + away(tensor, generator))
        elif key == "running_mean" or (isinstance(tensor, nn.Parameter) and tensor.dim() == 1):
            tensor.copy_(away(tensor, generator))
        elif isinstance(tensor, nn.Parameter) and tensor.dim() > 1:
            scale = (2 * tensor.shape[0] / tensor.numel()) ** 0.5
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


def away(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [0.2, 0.6], of either sign."""
    size = 0.2 + 0.4 * torch.rand(like.shape, generator=generator, dtype=like.dtype)
    return torch.where(torch.rand(like.shape, generator=generator) < 0.5, -size, size)


def floats(*shapes: tuple[int, ...], examples: int = EXAMPLES) -> Inputs:
    """One float tensor per shape (of one example); several make a tuple of arguments."""

    def make(generator: torch.Generator) -> Any:
        made = [torch.randn(examples, *s, generator=generator, dtype=torch.float64) for s in shapes]
        return made[0] if len(made) == 1 else tuple(made)

    return make


def tokens(length: int, words: int) -> Inputs:
    return lambda generator: torch.randint(words, (EXAMPLES, length), generator=generator)


# --- running


def run(model: nn.Module, example: Any) -> Any:
    """The model's output on a copy of the example."""
    inputs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, example)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs) if isinstance(inputs, Tensor) else model(*inputs)


def tensors(output: Any) -> list[Tensor]:
    """Every tensor in an output, also inside dataclasses."""
    leaves = tree_leaves(output)
    inside = [tensors(list(vars(leaf).values())) for leaf in leaves if is_dataclass(leaf)]
    return [x for x in leaves if isinstance(x, Tensor)] + [x for found in inside for x in found]


def cast(example: Any, dtype: torch.dtype) -> Any:
    """The same example with its floats in another precision."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, example)
