"""Between a model and what is stored of it: its tensors once each, and a copy of the original made into it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.borrowed_model import refuse_uninitialised
from sosp.core.layers import GateHook, InputHook, find_layer_type
from sosp.errors import ArgumentError, CheckpointError, suggest_name
from sosp.graph.mask import ZeroWeights
from sosp.graph.recipe import Recipe, Shape, apply_recipe, collect_shapes, compute_new_shape
from sosp.surgery.checkpoint.model_record import DTYPES, INDEX, LAYOUTS, Saved, StoredTensor

# Nobody makes a network that much wider; a buffer that is not in the file may not grow by what the file says.
GROWTH = 64


def unwrap_model(model: Any) -> nn.Module:
    """The model itself: what torch.compile wraps goes by its own name. Refuse what has no numbers."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{model!r:.80} is a {type(model).__name__}; give a torch.nn.Module.")
    inside = model._modules.get("_orig_mod")
    model = model if inside is None else inside
    refuse_uninitialised(model)
    for name, x in collect_tensors(model).items():
        if x.is_meta:
            raise ArgumentError(f"{name!r} is on the meta device and has no values; give a model on a real device.")
    return model


def collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, in the state dict or not, under every name it has."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def find_transient_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Those that are not in the state dict."""
    state = model.state_dict(keep_vars=True)
    kept = {id(x) for x in state.values()}
    return {name: x for name, x in collect_tensors(model).items() if name not in state and id(x) not in kept}


# --- from a model


def refuse_hooks(model: nn.Module) -> None:
    """A checkpoint holds tensors and recipes; a mask that acts by hooks, or a part that was shrunk, would be lost."""
    for name, module in model.named_modules():
        if name and vars(module).get("sosp_recipes"):
            part = f"sosp.save(path, model.get_submodule({name!r}))"
            raise CheckpointError(f"only its part {name!r} was shrunk. Save that part: {part}.")
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(isinstance(hook, GateHook | InputHook | ZeroWeights) for hook in hooks):
            raise CheckpointError(
                "the model is masked, which a checkpoint cannot store. Shrink it with sosp.shrink; or save the model "
                "that was masked with mask=..., and mask it again after loading: sosp.inspect(path).mask."
            )


def read_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor, itself; refuse what safetensors cannot hold."""
    state = model.state_dict(keep_vars=True)
    for name, x in state.items():
        if not isinstance(x, Tensor):
            raise CheckpointError(f"{name!r} in the state dict is a {type(x).__name__}; only tensors can be saved.")
        if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or format_dtype(x) not in DTYPES:
            what = f"{type(x).__name__} ({x.layout}, {x.dtype})"
            raise CheckpointError(f"{name!r} is a {what}; only plain tensors of {', '.join(DTYPES)} can be saved.")
        if name.startswith(INDEX):
            raise CheckpointError(f"the name {name!r} is reserved by sosp; give the module another name.")
    return state


def format_dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def find_aliases(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the first name of the same tensor, for all but the first."""
    first: dict[object, str] = {}
    found = {name: first.setdefault(identify_memory(x), name) for name, x in state.items()}
    return {name: other for name, other in found.items() if name != other}


def identify_memory(x: Tensor) -> object:
    """Equal for tensors that are one; empty ones have no memory to tell them apart by."""
    return (x.device, x.data_ptr(), x.shape, x.stride(), x.dtype) if x.numel() else id(x)


def describe_tensor(x: Tensor) -> StoredTensor:
    """How a tensor is described. Only its strides tell the layouts of a 1 x 1 kernel apart."""
    fitting = (
        name
        for name, (layout, dims) in LAYOUTS.items()
        if dims in (None, x.dim()) and torch.empty(x.shape, device="meta", memory_format=layout).stride() == x.stride()
    )
    return StoredTensor(format_dtype(x), tuple(x.shape), next(fitting, "strided"))


def separate_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers on the CPU, each in memory of its own, as safetensors wants them."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in state.items():
        x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
        where = x.untyped_storage().data_ptr()
        found[name] = x.clone() if where in seen else x
        seen.add(where)
    return found


# --- into a model


def check_model(saved: Saved, model: nn.Module) -> None:
    """It is the network that was shrunk, before that: by the name of its class, all names, shapes and ties."""
    if getattr(model, "sosp_recipes", ()):
        raise ArgumentError("the model is already shrunk; give the original network, from before shrinking.")
    if saved.qualname not in {c.__qualname__ for c in type(model).__mro__}:
        raise CheckpointError(
            f"holds a {saved.module}.{saved.qualname}, but the model is a {type(model).__module__}."
            f"{type(model).__qualname__}. Give an instance of that class (or of a subclass), as before shrinking."
        )
    found = collect_shapes(model)
    _refuse_some("the model does not have {} of the network that was saved.", saved.original.keys() - found.keys())
    _refuse_some("the model has {}, which the network that was saved does not have.", found.keys() - saved.original)
    other = [f"{n!r} is {found[n]}, not {shape}" for n, shape in saved.original.items() if found[n] != shape]
    if other:
        raise CheckpointError(
            f"the model has other shapes than the network that was saved had before shrinking: {_some(other)}."
        )
    _check_ties(saved, model.state_dict(keep_vars=True))


def _check_ties(saved: Saved, places: Mapping[str, Tensor]) -> None:
    """What is one tensor in the file is one in the model, and the other way round."""
    for name, first in saved.aliases.items():
        if identify_memory(places[name]) != identify_memory(places[first]):
            raise CheckpointError(
                f"{name!r} and {first!r} are one tensor in the file and two in the model; tie them before loading."
            )
    owner: dict[int, str] = {}
    for name in (*saved.tensors, *saved.aliases):
        other = owner.setdefault(id(places[name]), name)
        if saved.aliases.get(name, name) != saved.aliases.get(other, other):
            raise CheckpointError(f"{other!r} and {name!r} are two tensors in the file and one in the model.")


def _refuse_some(sentence: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        raise CheckpointError(sentence.format(_some([repr(n) for n in names])))


def _some(words: list[str]) -> str:
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def rebuild_model(saved: Saved, tensors: Mapping[str, Tensor], twin: nn.Module) -> None:
    """Make a copy of the original into the saved model: its tensors, then its modules."""
    start = {name: tuple(x.shape) for name, x in collect_tensors(twin).items()}
    _fill(saved, tensors, twin.state_dict(keep_vars=True))
    for name, x in find_transient_tensors(twin).items():
        if name in saved.transient and x.is_floating_point():
            x.data = x.data.to(DTYPES[saved.transient[name]])
    for recipe in saved.recipes:
        _apply_recipe(twin, recipe, start)
    state = twin.state_dict()
    names = saved.tensors.keys() | saved.aliases.keys()
    _refuse_some("it holds no {}, which the model needs.", state.keys() - names)
    _refuse_some("the model has no place for {}.", names - state.keys())
    state.update({name: tensors[saved.aliases.get(name, name)] for name in names})
    twin.load_state_dict(state)  # for modules that do more on loading than take their tensors


def _fill(saved: Saved, tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    """Put the stored tensors, of whatever shape and type, into the parameters and buffers that are there."""
    made: dict[str, Tensor] = {}
    for name in (*saved.tensors, *saved.aliases):
        place, first = places[name], saved.aliases.get(name, name)
        if first not in made:
            made[first] = _set_memory_layout(tensors[first], saved.tensors[first].layout, place.device)
        if place.requires_grad and not (made[first].is_floating_point() or made[first].is_complex()):
            place.requires_grad_(False)
        place.data = made[first]


def _set_memory_layout(x: Tensor, layout: str, device: torch.device) -> Tensor:
    if LAYOUTS[layout][0] == torch.contiguous_format:
        return x.to(device)
    # Not x.contiguous(memory_format=...): to that, a 1 x 1 kernel lies in every way already.
    return torch.empty(x.shape, dtype=x.dtype, device=device, memory_format=LAYOUTS[layout][0]).copy_(x)


def _apply_recipe(twin: nn.Module, recipe: Recipe, start: Mapping[str, Shape]) -> None:
    """Apply a recipe; the tensors from the file are as it leaves them, only what is not in the file is cut."""
    _check_modules(twin, recipe, max(map(prod, start.values()), default=0))
    cut, left = {*recipe.slices, *recipe.grouped}, find_transient_tensors(twin)
    _refuse_some("the model does not have {}, which a recipe cuts.", cut - start.keys())
    for name in cut & left.keys():
        if prod(compute_new_shape(tuple(left[name].shape), recipe, name)) > GROWTH * prod(start[name]):
            raise CheckpointError(f"a recipe makes {name!r} more than {GROWTH} times larger.")
    slices = {name: axes for name, axes in recipe.slices.items() if name in left}
    grouped = {name: pair for name, pair in recipe.grouped.items() if name in left}
    apply_recipe(twin, replace(recipe, slices=slices, grouped=grouped))


def _check_modules(twin: nn.Module, recipe: Recipe, widest: int) -> None:
    """Every module is there; only numbers that are sizes of it are set; nothing is made of an invented width."""
    modules = dict(twin.named_modules(remove_duplicate=False))
    steps = [f"{name}.{step}" for name, bypass in recipe.bypassed.items() for step in bypass.steps]
    for name in (*recipe.sizes, *recipe.scatters, *recipe.emptied, *recipe.passed, *recipe.bypassed, *steps):
        if name not in modules or (name == "" and name in recipe.bypassed):
            raise CheckpointError(
                f"the model has no layer {name!r}, which a recipe changes.{suggest_name(name, modules)}"
            )
    for name, sizes in recipe.sizes.items():
        for key in sizes:
            if key.startswith("_") or type(vars(modules[name]).get(key)) is not int:
                raise CheckpointError(f"a recipe sets {key!r} of {name!r}, which is not a size of that layer.")
    for name in recipe.emptied:
        if find_layer_type(modules[name]) is None:
            raise CheckpointError(f"a recipe takes all channels of {name!r}, which is not a layer with channels.")
    for name, placing in recipe.scatters.items():
        if placing is not None and placing.given > widest:
            raise CheckpointError(f"a recipe gives {name!r} {placing.given} channels, more than anything in the model.")
