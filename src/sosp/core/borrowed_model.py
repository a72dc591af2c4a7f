"""Borrow the user's model: eval mode and frozen parameters inside, everything as it was outside."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from sosp.errors import ArgumentError, DifferentiationError, StructureError


@contextmanager
def borrow_model(model: nn.Module) -> Iterator[None]:
    """Evaluate ``model`` with its parameters frozen; undo every trace of it, also after an exception.

    Examples are scored one by one, so a normalisation must not mix them: the model runs in eval mode (running
    statistics) whatever mode it is in, and a batch norm that keeps no running statistics is refused. Backward hooks
    rest meanwhile: the derivatives are ours, and a hook that changes gradients would make them wrong ones.
    """
    check_network(model)
    refuse_uninitialised(model)
    refuse_batch_statistics(model)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # Flash and memory-efficient attention have neither forward-mode nor double-backward rules.
        stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        stack.enter_context(disable_mha_fastpath())
        stack.enter_context(preserve_random_state())
        stack.enter_context(_preserve_attributes(model))
        stack.enter_context(_preserve_buffers(model))
        stack.enter_context(_preserve_requires_grad(model))
        for m in model.modules():
            m.training = False
            if m._backward_hooks or m._backward_pre_hooks:
                m._backward_hooks, m._backward_pre_hooks = OrderedDict(), OrderedDict()
        for p in model.parameters():
            p.requires_grad_(False)
        yield


def find_device(model: nn.Module) -> torch.device:
    """Where a network is."""
    return next((x.device for x in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """What a forward pass keeps on its modules, and the numbers in their buffers, are given back."""
    with _preserve_attributes(model), _preserve_buffers(model):
        yield


@contextmanager
def disable_mha_fastpath() -> Iterator[None]:
    """Torch's own transformer would run fused, past the layers with gates inside, or on packed sentences."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def _preserve_attributes(model: nn.Module) -> Iterator[None]:
    """What a forward pass keeps on its modules (a counter, its last features) would outlive it, graph and all."""
    attributes = [(m, dict(vars(m))) for m in model.modules()]
    modes = [(m, m.training) for m, _ in attributes]
    # Buffers, hooks and whatever else a module keeps in a dictionary or a list.
    containers = [c for _, before in attributes for c in before.values() if isinstance(c, (dict, list))]
    kept: list[Any] = [(c, dict(c) if isinstance(c, dict) else list(c)) for c in containers]
    try:
        yield
    finally:
        for m, before in attributes:
            restore(vars(m), before)
        for container, contents in kept:
            restore(container, contents)
        for m, mode in modes:
            m.training = mode


@contextmanager
def _preserve_buffers(model: nn.Module) -> Iterator[None]:
    """The same numbers in the buffers."""
    kinds = group_tensors([b for m in model.modules() for b in m._buffers.values() if b is not None])
    copies = [flatten_tensors(kind) for kind in kinds]
    try:
        yield
    finally:
        for kind, kept in zip(kinds, copies, strict=True):
            if not torch.equal(flatten_tensors(kind), kept):
                write_flat(kind, kept)


@contextmanager
def _preserve_requires_grad(model: nn.Module) -> Iterator[None]:
    """Which parameters ask for a gradient."""
    wishes = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        for p, wanted in wishes:
            p.requires_grad_(wanted)


def restore(now: Any, before: Any) -> None:
    """Give a dictionary or a list its old entries back, and their order; leave it alone if it has them.

    The user's own kind may refuse to be changed (a frozen dictionary), or do more than that when it is.
    """
    if _has_entries(now, before):
        return
    if isinstance(now, list):
        list.__setitem__(now, slice(None), before)
        return
    kind = OrderedDict if isinstance(now, OrderedDict) else dict  # it keeps its order by itself
    kind.clear(now)
    for key, value in before.items():
        kind.__setitem__(now, key, value)


def _has_entries(now: Any, before: Any) -> bool:
    """The very same entries, in the same order."""
    if len(now) != len(before):
        return False
    if isinstance(now, list):
        return all(a is b for a, b in zip(now, before, strict=True))
    return all(a is b and now[a] is before[b] for a, b in zip(now, before, strict=True))


def group_tensors(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors by type and device: there may be hundreds of tiny ones, and one operation serves a kind."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in tensors:
        if not x.is_meta:
            kinds.setdefault((x.dtype, x.device), []).append(x)
    return list(kinds.values())


def flatten_tensors(tensors: list[Tensor]) -> Tensor:
    """A copy of all, end to end."""
    return torch.cat([x.detach().reshape(-1) for x in tensors])


@torch.no_grad()
def write_flat(tensors: list[Tensor], flat: Tensor) -> None:
    """The inverse of ``flat``."""
    for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(part.view(x.shape))


def check_network(model: object) -> None:
    """Refuse what is no network: nothing, a class of networks, a function, what torch.compile made."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ArgumentError(f"the model is the class {model.__name__}; give an instance of it, {model.__name__}(...).")
    if not isinstance(model, nn.Module):
        refuse_record(model)
        raise ArgumentError(f"the model {model!r:.80} is a {type(model).__name__}; give a torch.nn.Module.")
    if "_orig_mod" in model._modules:
        raise ArgumentError(
            "the model was compiled with torch.compile, which hides its layers. Give the original module "
            "(model._orig_mod), and compile the smaller network."
        )


def refuse_record(model: object) -> None:
    """Refuse a record that holds a network, such as what ``sosp.prune`` returns, and say where it is."""
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), nn.Module):
        raise ArgumentError(f"the model is a {type(model).__name__} record; give its network: .model")


def refuse_uninitialised(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise StructureError("a scripted or traced module hides its layers: give the module that it was made from.")
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(x):
            raise StructureError(
                f"{name!r} is not initialised yet (a lazy layer). Run one batch through the model first."
            )


def refuse_batch_statistics(model: nn.Module) -> None:
    for name, m in model.named_modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None:
            raise DifferentiationError(
                f"{name!r} is a batch norm without running statistics (track_running_stats=False): the loss of one "
                "example then depends on the others in its batch, so there is no saliency per example. Give it "
                "running statistics (track_running_stats=True and a pass over data in train mode), or use a "
                "GroupNorm."
            )
