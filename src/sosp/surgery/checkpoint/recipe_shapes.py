"""Follow the shapes of a network through recipes, without touching a tensor."""

from __future__ import annotations

from torch import Tensor, nn

from sosp.errors import CheckpointError
from sosp.graph.recipe import Recipe
from sosp.surgery.checkpoint.model_record import Saved, Shape


def collect_shapes(model: nn.Module) -> dict[str, Shape]:
    """The shape of every tensor in the state dict."""
    return {name: tuple(x.shape) for name, x in model.state_dict().items() if isinstance(x, Tensor)}


def check_shapes(saved: Saved) -> None:
    """The recipes make the saved shapes of the original ones."""
    names: dict[str, list[str]] = {name: [name] for name in saved.tensors}
    for name, first in saved.aliases.items():
        if first not in names or name in names:
            raise CheckpointError(f"it says that {name!r} is {first!r} under another name, which it is not.")
        names[first].append(name)
    for name, stored in saved.tensors.items():
        for known in names[name]:
            if known not in saved.original:
                raise CheckpointError(
                    f"the model has {known!r}, which it did not have before it was shrunk. "
                    "Add it to the original network before shrinking."
                )
        shape = saved.original[name]
        for recipe in saved.recipes:
            for known in names[name]:
                shape = compute_new_shape(shape, recipe, known)
        if shape != stored.shape:
            raise CheckpointError(
                f"{name!r} is {stored.shape}, but shrinking made it {shape}: it was changed afterwards. "
                "Make the change to the original network before shrinking, or keep the state dict yourself."
            )


def compute_new_shape(shape: Shape, recipe: Recipe, name: str) -> Shape:
    """The shape that a recipe leaves of a tensor of that name."""
    if name in recipe.grouped:
        rows, columns = recipe.grouped[name]
        _check_index(name, shape, 0, rows)
        _check_index(name, shape, 1, columns)
        shape = (len(rows), columns.shape[1], *shape[2:])
    for axis, index in recipe.slices.get(name, {}).items():
        _check_index(name, shape, axis, index)
        shape = (*shape[:axis], len(index), *shape[axis + 1 :])
    return shape


def _check_index(name: str, shape: Shape, axis: int, index: Tensor) -> None:
    if axis >= len(shape) or (index.numel() and not 0 <= int(index.min()) <= int(index.max()) < shape[axis]):
        raise CheckpointError(
            f"a recipe takes elements of {name!r} along axis {axis} that its shape {shape} does not have."
        )
