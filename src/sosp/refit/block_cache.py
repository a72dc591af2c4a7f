"""Keep what parts of a network gave: a pass need not compute again what is in front of the layers it is for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from math import nan
from typing import Any

from torch import Tensor, nn

from sosp.core.layers import find_layer_type, scatter_output
from sosp.refit.comparison_points import ChannelTracker
from sosp.refit.hooks import OutputListener, is_layer_or_norm

BYTES = 2**30  # kept at most
LONG_CHAIN = 5  # with so many layers side by side, a module gives away what each of them gave, like a block

Forward = Callable[..., Any]


class BlockCache:
    """Of every part of the inputs, the outputs of modules that ended before the layers that still change.

    A module does not run if only such modules read its output. NaN stands in its place, so that a read that the tracker
    has not seen does not go unnoticed. ``skips`` is then set to False: all modules run whose outputs are not kept.
    """

    def __init__(self, model: nn.Module, tracker: ChannelTracker) -> None:
        modules = dict(model.named_modules())
        observed = [n for n, m in modules.items() if n in tracker.stateful or _has_foreign_hooks(m)]
        self.tracker, self.skips = tracker, True
        layers = {n for n, m in modules.items() if is_layer_or_norm(m)}  # what is inside of them is a part of them
        whole = [n for n in tracker.intervals if n and layers.isdisjoint(_list_outer(n)[1:])]
        whole = [n for n in whole if not any(_inside(name, n) for name in observed)]
        pure = {n for n in whole if n not in tracker.mutating}
        # In the order in which they end. Of a container that writes into what it is given, the modules inside.
        self.skippable = {n: modules[n] for n in whole if n in pure or not modules[n]._modules}
        self.blocks = {n for n in pure if _is_block(modules[n]) or _count_layers(modules[_parent(n)]) >= LONG_CHAIN}
        self.plans: dict[int, tuple[list[str], set[str]]] = {}
        self.kept: dict[tuple[str, int], Tensor] = {}
        self.absent: dict[tuple[str, int], Tensor] = {}  # NaN in the shape of an output

    @contextmanager
    def reuse_blocks(self, layer: int, part: int, listener: OutputListener) -> Iterator[None]:
        """For a pass over this part in which layers from that number on change."""
        done, wanted = self._plan(layer)
        known, skipped = self._choose(done, self._list_kept(part), part)
        still = known | skipped
        with ExitStack() as stack:
            for name in done:
                if name in known:
                    forward = self._make_constant(name, listener, self.kept[name, part].clone)
                elif name in skipped:
                    forward = self._make_constant(name, listener, self._make_absent(name, part, still))
                elif still.isdisjoint(_list_outer(name)):
                    forward = self._make_recorder(name, part, name in wanted)
                else:
                    continue
                stack.enter_context(_replace_forward(self.skippable[name], forward))
            yield
        needed, _ = self._choose(done, self._list_kept(part), part)
        for name in self._list_kept(part) - needed:
            self.kept.pop((name, part))

    def _plan(self, layer: int) -> tuple[list[str], set[str]]:
        """Modules that ended, and whose outputs are to be kept."""
        if layer not in self.plans:
            done = [n for n in self.skippable if self.tracker.intervals[n].end <= layer]
            self.plans[layer] = done, self._choose(done, self.blocks)[0]
        return self.plans[layer]

    def _list_kept(self, part: int) -> set[str]:
        return {name for name, number in self.kept if number == part}

    def _choose(self, done: Sequence[str], keep: Collection[str], part: int | None = None) -> tuple[set[str], set[str]]:
        """Of modules whose outputs can be kept those that must be, and modules that need not run then."""
        known: set[str] = set()
        skipped: set[str] = set()
        for name in reversed(done):  # a module before those inside of it, which do not matter if it does not run
            if not (known | skipped).isdisjoint(_list_outer(name)):
                continue
            possible = self.skips and (part is None or (name, part) in self.absent)
            if possible and self._is_unread(name, known | skipped):
                skipped.add(name)
            elif name in keep:
                known.add(name)
        return known, skipped

    def _is_unread(self, name: str, behind: set[str]) -> bool:
        """Only modules ``behind`` it read its output or what is made of it, and what it is given if it writes there."""
        if name not in self.tracker.outputs:
            return False
        written = self.tracker.taken[name] if name in self.tracker.mutating else []
        values, seen = [self.tracker.outputs[name], *written], set[int]()
        while values:
            value = values.pop()
            for module, made in () if id(value) in seen else value.readers:
                if not (behind | {name}).isdisjoint(_list_outer(module)):
                    continue
                if not made:
                    return False
                values.extend(made)
            seen.add(id(value))
        return True

    def _make_absent(self, name: str, part: int, behind: set[str]) -> Callable[[], Tensor]:
        """NaN, in memory of its own if an op of the network's reads it and may write into it."""
        absent, readers = self.absent[name, part], self.tracker.outputs[name].readers
        alone = all(not behind.isdisjoint(_list_outer(module)) for module, _ in readers)
        return (lambda: absent) if alone else absent.contiguous

    def _make_constant(self, name: str, listener: OutputListener, give: Callable[[], Tensor]) -> Forward:
        """Without computing anything."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            listener.sums += self.tracker.intervals[name].sums
            return give()

        return forward

    def _make_recorder(self, name: str, part: int, keep: bool) -> Forward:
        compute = self.skippable[name].forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = compute(*args, **kwargs)
            if isinstance(output, Tensor) and output.is_floating_point():
                self.absent[name, part] = output.new_full((), nan).expand(output.shape)
                if keep and sum(x.nbytes for x in self.kept.values()) + output.nbytes <= BYTES:
                    self.kept[name, part] = output.clone()  # it may be written into
            return output

        return forward


@contextmanager
def _replace_forward(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Another forward, with the module's hooks (a scatter, which comes behind it)."""
    own = module.__dict__
    old = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        own.update({} if old is None else {"forward": old})


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Somebody is told when it runs."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(hook is not scatter_output for hook in hooks)


def _is_block(module: nn.Module) -> bool:
    """It holds layers."""
    return find_layer_type(module) is None and any(find_layer_type(m) is not None for m in module.modules())


def _count_layers(module: nn.Module) -> int:
    return sum(find_layer_type(m) is not None for m in module.children())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


@cache
def _list_outer(name: str) -> tuple[str, ...]:
    """A module, the one that it is inside of, and so on; without the whole network."""
    return (name, *_list_outer(_parent(name))) if name else ()


def _inside(name: str, module: str) -> bool:
    """Or the module itself."""
    return not module or f"{name}.".startswith(f"{module}.")
