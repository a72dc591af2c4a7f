"""Keep what blocks of a network gave: a pass need not compute again what is in front of the layers it is for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from sosp.core.layers import find_layer_type, scatter_output
from sosp.refit.comparison_points import ChannelTracker
from sosp.refit.hooks import OutputListener, is_layer_or_norm

BYTES = 2**30  # kept at most

HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Forward = Callable[..., Any]


class BlockCache:
    """Of every part of the inputs, the outputs of modules that ended before the layers that still change."""

    def __init__(self, model: nn.Module, tracker: ChannelTracker) -> None:
        modules = dict(model.named_modules())
        observed = [n for n, m in modules.items() if n in tracker.stateful or _has_foreign_hooks(m)]
        skippable = {
            n: m
            for n, m in modules.items()
            if n in tracker.intervals and not any(_inside(name, n) for name in observed)
        }
        pure = {n: m for n, m in skippable.items() if n not in tracker.mutating}
        self.intervals, self.skippable = tracker.intervals, skippable
        self.blocks = [n for n, m in pure.items() if n and _is_block(m)]
        # What is written inside of a chain stays inside.
        self.chains = [_list_chain_modules(n, m, skippable) for n, m in pure.items() if type(m) is nn.Sequential]
        self.kept: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reuse_blocks(self, layer: int, part: int, listener: OutputListener) -> Iterator[None]:
        """For a pass over this part in which layers from that number on change."""
        done = [n for n in self.blocks if self.intervals[n].end <= layer]
        done = [n for n in done if _parent(n) not in done]
        skipped = self._find_skipped(part, done)
        with ExitStack() as stack:
            for name in skipped:
                stack.enter_context(
                    _replace_forward(self.skippable[name], self._make_skip(name, listener, None), hooks=False)
                )
            for name in [n for n in done if n not in skipped]:
                known = self.kept.get((name, part))
                give = self._make_recorder(name, part) if known is None else self._make_skip(name, listener, known)
                stack.enter_context(_replace_forward(self.skippable[name], give, hooks=True))
            yield
        self._discard_unneeded(part, done)

    def _find_skipped(self, part: int, done: Sequence[str]) -> set[str]:
        """Modules of a chain in front of one that is kept."""
        found: set[str] = set()
        for chain in self.chains:
            ends = [k for k, n in enumerate(chain) if n in done and (n, part) in self.kept]
            found.update(chain[: ends[-1]] if ends else ())
        return found

    def _discard_unneeded(self, part: int, done: Sequence[str]) -> None:
        skipped = self._find_skipped(part, done)
        for name in self.blocks:
            if name not in done or name in skipped:
                self.kept.pop((name, part), None)

    def _make_skip(self, name: str, listener: OutputListener, known: Tensor | None) -> Forward:
        """Without computing anything."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            listener.sums += self.intervals[name].sums
            return args[0] if known is None else known.clone()  # of the former nobody sees what it is

        return forward

    def _make_recorder(self, name: str, part: int) -> Forward:
        compute = self.skippable[name].forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = compute(*args, **kwargs)
            used = sum(x.nbytes for x in self.kept.values())
            if isinstance(output, Tensor) and used + output.nbytes <= BYTES:
                self.kept[name, part] = output.clone()  # it may be written into
            return output

        return forward


@contextmanager
def _replace_forward(module: nn.Module, forward: Forward, *, hooks: bool) -> Iterator[None]:
    """Another forward, with the module's hooks (a scatter, which comes behind it) or without."""
    own = module.__dict__
    new = {"forward": forward, **({} if hooks else {key: OrderedDict() for key in HOOKS})}
    old = {key: own[key] for key in new if key in own}
    own.update(new)
    try:
        yield
    finally:
        del own["forward"]
        own.update(old)


def _list_chain_modules(name: str, chain: nn.Sequential, skippable: dict[str, nn.Module]) -> list[str]:
    """The modules of a chain, if all of them are called once."""
    names = [f"{name}.{child}".lstrip(".") for child in chain._modules]
    return names if all(n in skippable for n in names) else []


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Somebody is told when it runs."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(hook is not scatter_output for hook in hooks)


def _is_block(module: nn.Module) -> bool:
    return not is_layer_or_norm(module) and any(find_layer_type(m) is not None for m in module.modules())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _inside(name: str, module: str) -> bool:
    """Or the module itself."""
    return not module or f"{name}.".startswith(f"{module}.")
