"""Watch a forward pass: the network's own ops, and its modules as they are entered and left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sosp.flow.ops import name_of
from sosp.layers import is_norm, layer_type

SUMS = frozenset({"add", "__add__", "__iadd__", "__radd__"})


def known(module: nn.Module) -> bool:
    """A layer or a norm of single channels."""
    return layer_type(module) is not None or is_norm(module)


class Watch(TorchFunctionMode):
    """Told of every op outside of layers and norms, whose own ops are none of the network's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.inside: list[str] = [""]
        self.resting = 0  # so many layers and norms are at work

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call it."""
        return func(*args, **kwargs)

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        """A module begins."""

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """A module is done, and its channels are in their places."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if self.resting else self.op(func, args, kwargs or {})

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch while the model runs."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._before(name)).remove)
                stack.callback(module.register_forward_hook(self._behind(name)).remove)
            stack.enter_context(self)
            yield

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.inside.append(name)
            self.resting += known(module)
            self.enter(name, module, args)

        return hook

    def _behind(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.leave(name, module, args, output)
            self.inside.pop()
            self.resting -= known(module)

        return hook


class Enough(BaseException):
    """All that was wanted of a pass is there. (No Exception: the user's code may catch those.)"""


Take = Callable[[Tensor], None]


class Listener(Watch):
    """Take some inputs, outputs and sums of a forward pass, and end it when all are there."""

    def __init__(self, model: nn.Module, inputs: dict[str, Take], outputs: dict[str, Take], sums: dict[int, Take]):
        super().__init__(model)
        self.inputs, self.outputs, self.sums = dict(inputs), dict(outputs), dict(sums)
        self.count = 0  # sums so far

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if name_of(func) in SUMS and isinstance(result, Tensor):
            self.take(self.sums, self.count, result)
            self.count += 1
        return result

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        if name in self.inputs:
            self.take(self.inputs, name, args[0])

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name in self.outputs:
            self.take(self.outputs, name, output)

    def take(self, wanted: dict[Any, Take], key: Any, found: Tensor) -> None:
        """The first of that name; what is wanted of it is copied, for it may be written into."""
        if key in wanted:
            self.resting += 1
            wanted.pop(key)(found)
            self.resting -= 1
        if not self.inputs and not self.outputs and not self.sums:
            raise Enough


def listen(listener: Listener, run: Callable[[nn.Module], Any]) -> None:
    """Run the network as far as needed."""
    with listener.hooked():
        try:
            run(listener.model)
        except Enough:
            pass
