"""What removal means, by probing: removed feature maps are zero, and a norm adds no shift to what is zero with them.

(a) A removed channel is zero after its own normalisation, or at its layer's output where it has none.
(b) A BatchNorm or InstanceNorm that runs once per forward pass gives zero for every channel of its input that is
    always zero because of the removal: its shift does not survive alone.

Which channels are always zero is found by running the whole network with noise in place of every layer's output. A
dense layer is live in every channel that was not removed, even if all its inputs are zero; a filter that sees one
channel only and has no bias passes a zero on.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Channels = Mapping[str, Iterable[int]]  # layer -> removed channels
Norms = Mapping[str, str | Iterable[str] | None]  # layer -> its own norm or norms
Zeros = dict[str, Tensor]  # module -> (channels,) bool

CONVS = (nn.modules.conv._ConvNd,)
NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NOISES = 4  # runs: all positive, all negative, then of mixed signs


def removed(model: nn.Module, example: Any, channels: Channels, norms: Norms) -> nn.Module:
    """A copy of ``model`` without these channels: rules (a) and (b), by forward hooks."""
    copy = deepcopy(model)
    for name, gone in _settle(model, example, channels, norms)[0].items():
        if gone.any():
            module = copy.get_submodule(name)
            module.register_forward_hook(_zeroing(_axis(module), gone.nonzero().flatten()))
    return copy


def zero_inputs(model: nn.Module, example: Any, channels: Channels, norms: Norms) -> Zeros:
    """For every layer and norm: the channels of its input that are always zero because of the removal.

    (Of a layer's own norm, those that are removed behind it: it has no use for them.)
    """
    zero, inputs = _settle(model, example, channels, norms)
    return {n: z | zero[n] if n in zero and n not in channels else z for n, z in inputs.items()}


def _zeroing(axis: int, gone: Tensor) -> Any:
    return lambda module, args, output: output.index_fill(axis, gone.to(output.device), 0)


# --- which outputs are zero


def _settle(model: nn.Module, example: Any, channels: Channels, norms: Norms) -> tuple[Zeros, Zeros]:
    """Rule (a), then rule (b) until nothing changes: per module, the zeros of its output and those of its input."""
    given = _by_mask(model, channels, norms)
    before, calls = _probe(model, example, {})
    zero = given
    while True:
        inputs = _because(_probe(model, example, zero)[0], before)
        both = dict(given)
        for name, z in inputs.items():
            if isinstance(model.get_submodule(name), NORMS) and calls[name] == 1:
                both[name] = both[name] | z if name in both else z
        if _equal(both, zero):
            return zero, inputs
        zero = both


def _by_mask(model: nn.Module, channels: Channels, norms: Norms) -> Zeros:
    """Rule (a)."""
    zero: Zeros = {}
    for layer, gone in channels.items():
        own = norms.get(layer) or layer
        for name in [own] if isinstance(own, str) else own:
            z = zero.setdefault(name, torch.zeros(_width(model.get_submodule(layer)), dtype=torch.bool))
            z[list(gone)] = True
    return zero


def _because(after: Zeros, before: Zeros) -> Zeros:
    """Zero after the removal, and not without it (a padded channel, a parameter that is zero)."""
    return {name: z & ~before[name] if name in before else z for name, z in after.items()}


def _equal(a: Zeros, b: Zeros) -> bool:
    a, b = ({n: z for n, z in zeros.items() if z.any()} for zeros in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- probing


@torch.no_grad()
def _probe(model: nn.Module, example: Any, zero: Zeros) -> tuple[Zeros, dict[str, int]]:
    """Every module's input channels that are zero in every run, and how often it is called in one run at most.

    The outputs named in ``zero`` are zero, those of all other layers and norms are noise.
    """
    always: Zeros = {}
    calls: dict[str, int] = {}
    generator = torch.Generator().manual_seed(0)
    for training in (False, True):
        copy = deepcopy(model).train(training)
        for number in range(NOISES):
            seen: dict[str, list[Tensor]] = {}
            with _noise(copy, zero, number, generator, seen), torch.random.fork_rng(devices=[]):
                _run(copy, example)
            for name, zeros in seen.items():
                everywhere = torch.stack(zeros).all(0)
                always[name] = always[name] & everywhere if name in always else everywhere
                calls[name] = max(calls.get(name, 0), len(zeros))
    return always, calls


@contextmanager
def _noise(
    model: nn.Module, zero: Zeros, number: int, generator: torch.Generator, seen: dict[str, list[Tensor]]
) -> Iterator[None]:
    """Hooks that write down which input channels are zero and put noise in the output's place."""

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            silent = _zero_channels(args[0], _axis(module))
            seen.setdefault(name, []).append(silent)
            gone = zero.get(name, torch.zeros(output.shape[_axis(module)], dtype=torch.bool))
            if _passes_zeros(module):
                gone = gone | silent.repeat_interleave(len(gone) // len(silent))
            noise = _values(output, number, generator) if _is_known(module) else output
            return noise.index_fill(_axis(module), gone.nonzero().flatten(), 0)

        return hook

    handles = [m.register_forward_hook(hook_for(n)) for n, m in model.named_modules() if n in zero or _is_known(m)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _values(like: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Sizes in [0.1, 1.1]: positive in the first run, negative in the second, then of either sign."""
    size = 0.1 + torch.rand(like.shape, generator=generator, dtype=torch.float64)
    if number > 0:
        negative = torch.rand(like.shape, generator=generator) < (1.0 if number == 1 else 0.5)
        size = torch.where(negative, -size, size)
    return size.to(like)


def _zero_channels(x: Tensor, axis: int) -> Tensor:
    return (x == 0).movedim(axis, 0).reshape(x.shape[axis], -1).all(1)


def _run(model: nn.Module, example: Any) -> Any:
    inputs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, example)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs) if isinstance(inputs, Tensor) else model(*inputs)


# --- kinds of modules


def _is_known(module: nn.Module) -> bool:
    return isinstance(module, (*CONVS, nn.Linear, *NORMS))


def _axis(module: nn.Module) -> int:
    """Of the channels, counted from the end where a batch dimension may be missing."""
    if isinstance(module, nn.Linear):
        return -1
    return -1 - len(module.kernel_size) if isinstance(module, CONVS) else 1


def _width(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _passes_zeros(module: nn.Module) -> bool:
    """One input channel per filter, and no bias: depthwise, also with several filters per channel."""
    return isinstance(module, CONVS) and module.groups == module.in_channels > 1 and module.bias is None
